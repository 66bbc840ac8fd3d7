# SPDX-License-Identifier: Apache-2.0
"""What a runner tells of a rank that has ended: what its boards show last, and the trail in its box."""

import struct
from pathlib import Path

import pytest

from megascale_ops.runner.ranks.local_workers import LocalWorkers, Place
from megascale_ops.schema.messages import RankExit
from megascale_ops.schema.tiles import TileWait
from tests.fakes.boards import FakeBoard
from tests.fakes.boxes import box

PID = 101  # content of the fake box of rank 1


def put_board(folder: Path, pid: int) -> None:
    """Leave a board on which rank 1 waits for the job's rank 6."""
    board = FakeBoard("gemm_rs", 12, rank=1)
    board.host(pid, 0)
    board.introduce(77, (4, 1, 6, 7))
    board.tile(0, 5)
    board.wait(0, 5, peer=2, channel=0)
    words = struct.pack(f"<{len(board.words)}I", *(word & 0xFFFFFFFF for word in board.words))
    (folder / "1.0.board").write_bytes(words)


@pytest.mark.parametrize(
    ("code", "board_pid", "waits"),
    [
        (-15, PID, (TileWait(6, 5, 1),)),
        (1, PID, (TileWait(6, 5, 1),)),
        (0, PID, None),  # it ended in order
        (1, PID + 1, None),  # left by the rank of the round before
    ],
)
def test_an_exit_tells_for_whose_tile_a_rank_waited(
    tmp_path: Path, code: int, board_pid: int, waits: tuple[TileWait, ...] | None
) -> None:
    """Of a rank that failed or was stopped, by its own boards."""
    box(tmp_path, 1, world=8)
    put_board(tmp_path, board_pid)
    local_workers = LocalWorkers(Place("j", "n", "id", 1, str(tmp_path), "/run", "/run/checkpoints", 5.0))

    told, _ = local_workers._with_box(RankExit(1, 1, PID, code, 0.0))

    assert [fact.waits for fact in told.tiles] == ([] if waits is None else [waits])


@pytest.mark.parametrize(("code", "path"), [(-15, "aAAA"), (1, "aAAA"), (0, None)])
def test_an_exit_tells_through_which_phases_and_steps_a_rank_went(tmp_path: Path, code: int, path: str | None) -> None:
    """Of a rank that failed or was stopped; one that ended in order has nothing to explain."""
    box(tmp_path, 1, steps=4)
    local_workers = LocalWorkers(Place("j", "n", "id", 1, str(tmp_path), "/run", "/run/checkpoints", 5.0))

    told, _ = local_workers._with_box(RankExit(1, 1, PID, code, 0.0))

    assert (told.trail.path if told.trail is not None else None) == path
