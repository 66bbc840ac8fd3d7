# SPDX-License-Identifier: Apache-2.0
"""Choices for a job before it starts: spares, checkpoints, patience, checks of the hardware; see README.md."""
