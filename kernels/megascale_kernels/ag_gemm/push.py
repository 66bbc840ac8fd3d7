# SPDX-License-Identifier: Apache-2.0
"""This rank's rows into every peer's gather buffer by copy engines, each piece announced."""

from typing import Any

from torch import Tensor

from megascale_kernels.ag_gemm.triton_kernel import AG_GEMM
from megascale_kernels.device.announce import announce_kernel
from megascale_kernels.device.primitives import rank_copy_data
from megascale_kernels.launching.ready import Copy
from megascale_kernels.memory.workspace import Workspace


def copies_of(workspace: Workspace, slot: int, m_shard: int, unit_rows: int, pitch: int, row_bytes: int) -> list[Copy]:
    """What `push_by_copy_engine` copies and announces, in numbers: the nearest reader first, unit after unit."""
    rank, world_size = workspace.rank, workspace.world_size
    return [
        (
            first * row_bytes,
            min(unit_rows, m_shard - first) * row_bytes,
            workspace.data_address((rank - step) % world_size, slot) + (rank * pitch + first) * row_bytes,
            workspace.flag_address((rank - step) % world_size, slot, unit),
        )
        for step in range(1, world_size)
        for unit, first in enumerate(range(0, m_shard, unit_rows))
    ]


def own_copy(workspace: Workspace, slot: int, m_shard: int, pitch: int, row_bytes: int) -> Copy:
    """This rank's rows into its own gather buffer, for who reads all rows there; nothing announces them."""
    place = workspace.data_address(workspace.rank, slot) + workspace.rank * pitch * row_bytes
    return 0, m_shard * row_bytes, place, 0


def push_by_copy_engine(
    x: Tensor,
    workspace: Workspace,
    slot: int,
    unit_rows: int,
    announce: int | tuple[Any, ...],
    pitch: int | None = None,
) -> None:
    """Copy this rank's rows to every peer on the copy stream, the nearest reader first, each unit announced.

    A write of the stream itself announces a copy soonest and needs no multiprocessor, but its value is the host's: it
    serves as long as the host knows the launch number. In a captured graph `announce_kernel` reads it on the device.

    Args:
        x: this rank's rows, [M / world_size, K].
        workspace: where they go.
        slot: the slot of this launch.
        unit_rows: rows per announcement.
        announce: the signature of the launch, when the host knows its number; else what `announce_kernel` takes
            (`channel_arguments`).
        pitch: rows from one shard to the next in the gather buffer; those of x by default.
    """
    m_shard, k_size = x.shape
    first_row = workspace.rank * (pitch or m_shard)
    with workspace.copying():
        for step in range(1, workspace.world_size):
            peer = (workspace.rank - step) % workspace.world_size
            for unit, first in enumerate(range(0, m_shard, unit_rows)):
                rows = x[first : first + unit_rows]
                rank_copy_data(workspace.peer(peer, slot, rows.shape, (first_row + first) * k_size), rows)
                if isinstance(announce, int):
                    workspace.announce(peer, slot, unit, announce)
                    continue
                last = step == workspace.world_size - 1 and first + unit_rows >= m_shard
                announce_kernel[(1,)](
                    *announce, peer, unit, LAST=last, OPERATOR=AG_GEMM, PROGRESS=workspace.progress, TRACE=False,
                    num_warps=1, enable_fp_fusion=True,
                )  # fmt: skip
