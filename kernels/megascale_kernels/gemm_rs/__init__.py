# SPDX-License-Identifier: Apache-2.0
"""A product overlapped with the reduce-scatter of its result: kernels and launchers."""
