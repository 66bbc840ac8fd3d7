# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are whole or not there, verified before they are loaded.

Importing this package does not import torch; saving and restoring do, inside their functions.
"""

from megascale_ops.checkpoint.latest import newest, verify
from megascale_ops.checkpoint.manager import CheckpointManager
from megascale_ops.checkpoint.manifest import CheckpointReport
from megascale_ops.checkpoint.notify import observers
from megascale_ops.checkpoint.state.per_rank import PerRank, RandomStates
from megascale_ops.checkpoint.tiers.settings import LocalTier

__all__ = [
    "CheckpointManager",
    "CheckpointReport",
    "LocalTier",
    "PerRank",
    "RandomStates",
    "newest",
    "observers",
    "verify",
]
