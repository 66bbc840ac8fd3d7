# SPDX-License-Identifier: Apache-2.0
"""All-gather overlapped with the product that needs it: kernels, launchers, and the plain gather beside them."""
