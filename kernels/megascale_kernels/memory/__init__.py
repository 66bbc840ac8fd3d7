# SPDX-License-Identifier: Apache-2.0
"""Memory that all ranks see: its layout and life, operands that lie in it, what goes wrong with it."""
