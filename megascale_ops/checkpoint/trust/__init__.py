# SPDX-License-Identifier: Apache-2.0
"""Whether what is saved can be trusted: replicas that agree, weights that move."""
