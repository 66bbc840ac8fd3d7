# SPDX-License-Identifier: Apache-2.0
"""Callbacks that save and restore by ``CheckpointManager`` inside the loops of other libraries."""
