# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the family of MoE schedules: each beside what its authors compare it with, in turn."""
