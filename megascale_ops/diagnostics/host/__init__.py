# SPDX-License-Identifier: Apache-2.0
"""Checks of the host: processors, memory, disks, clock, limits, the kernel's log."""
