# SPDX-License-Identifier: Apache-2.0
"""From a compiled kernel to the driver: parameters laid out once, a launch that writes addresses and nothing else."""
