# SPDX-License-Identifier: Apache-2.0
"""Attention over a sequence that is cut over ranks: K and V gathered by copy engines while the kernel multiplies."""
