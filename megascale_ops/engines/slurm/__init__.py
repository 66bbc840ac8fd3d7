# SPDX-License-Identifier: Apache-2.0
"""Slurm, by its own commands."""
