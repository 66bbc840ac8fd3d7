# SPDX-License-Identifier: Apache-2.0
"""Verbs about Slurm: its nodes, and jobs that are handed in to it."""
