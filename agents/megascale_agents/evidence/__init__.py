# SPDX-License-Identifier: Apache-2.0
"""Evidence about a rank that stands still: stacks, collectives, process, GPU."""
