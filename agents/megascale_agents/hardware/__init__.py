# SPDX-License-Identifier: Apache-2.0
"""What is wrong with this node's hardware: watches over counters and the kernel's log, and their findings."""
