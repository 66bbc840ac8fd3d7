# SPDX-License-Identifier: Apache-2.0
"""The arguments that every plain kernel takes."""

from typing import Any

from megascale_kernels.memory.workspace import Workspace


def channel_arguments(workspace: Workspace, slot: int, stamp: int) -> tuple[Any, ...]:
    """What every plain kernel takes to build its `Channel`, in the order of its parameters."""
    return (
        workspace.memory, workspace.peers, workspace.status, workspace.board, workspace.trace_words,
        workspace.layout.flags(slot), workspace.layout.channels, slot, workspace.rank, workspace.world_size, stamp,
        int(workspace.deadline_s * 1e6),
    )  # fmt: skip
