# SPDX-License-Identifier: Apache-2.0
"""What a state is before it is stored: what its entries give, which tensors can be, and what ranks hold apart."""
