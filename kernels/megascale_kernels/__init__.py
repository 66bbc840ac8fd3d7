# SPDX-License-Identifier: Apache-2.0
"""Kernels that overlap communication with computation tile by tile; they import nothing of ours."""
