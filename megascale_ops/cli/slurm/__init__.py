# SPDX-License-Identifier: Apache-2.0
"""Verbs about the nodes of a Slurm cluster."""
