# SPDX-License-Identifier: Apache-2.0
"""What a kernel left behind becomes an error that names the right rank, also for ranks that were stopped by another."""

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

import torch.distributed as dist  # noqa: E402 - after the skips
from megascale_kernels.device import layout  # noqa: E402
from megascale_kernels.errors import KernelError, RankMismatch, TileTimeout  # noqa: E402
from megascale_kernels.memory import faults  # noqa: E402
from megascale_kernels.memory.workspace import Workspace  # noqa: E402
from megascale_kernels.progress import board_format  # noqa: E402

EPOCH = 9
STAMP = EPOCH << board_format.SIGNATURE_BITS | 0x123
OTHER = EPOCH << board_format.SIGNATURE_BITS | 0x456
GEMM_RS = board_format.OPERATORS.index("gemm_rs")


class Boards:
    """Symmetric memory of which only the boards are read."""

    def __init__(self, boards: dict[int, torch.Tensor]) -> None:
        self.boards = boards

    def get_buffer(self, rank: int, *_: object) -> torch.Tensor:
        """A rank's board."""
        return self.boards.get(rank, torch.zeros(board_format.PROGRESS_WORDS, dtype=torch.int32))


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    """Rank 2 of four, as far as one process can be that."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = Workspace(max_rows=8, max_gather_cols=8, device="cpu")
    monkeypatch.setattr(made, "world_size", 4)
    monkeypatch.setattr(made, "rank", 2)
    monkeypatch.setattr(made, "handle", Boards({}))
    for rank in range(4):
        put_hello(made, rank, STAMP, n=64)
    yield made
    dist.destroy_process_group()


def put_hello(workspace: Workspace, rank: int, stamp: int, n: int) -> None:
    """What `signals.publish_launch` of a rank leaves in this rank's memory."""
    line = layout.HELLO.value + rank * board_format.LINE
    workspace.memory[line : line + 6] = torch.tensor([stamp, GEMM_RS, 16, n, 32, 0], dtype=torch.int32)


def fault(workspace: Workspace, code: int, peer: int, raised_by: int = 0) -> KernelError:
    """The error that a fault record becomes."""
    fields = dict.fromkeys(layout.FAULT_FIELDS, 0)
    fields |= {"code": code, "peer": peer, "operator": GEMM_RS, "epoch": EPOCH, "raised_by": raised_by, "needed": STAMP}
    workspace.status[: len(fields)] = torch.tensor(list(fields.values()), dtype=torch.int32)
    with pytest.raises(KernelError) as caught:
        workspace.check()
    return caught.value


def test_a_passed_deadline_names_the_peer(workspace: Workspace) -> None:
    """The rank waited for, in words and as a number."""
    error = fault(workspace, layout.EXPIRED.value, peer=3)

    assert isinstance(error, TileTimeout)
    assert (error.peer, error.operator, error.epoch) == (3, "gemm_rs", EPOCH)
    assert "rank 2, gemm_rs launch 9" in str(error)
    assert "for rank 3" in str(error)


def test_a_stopped_rank_names_whom_the_first_one_missed(workspace: Workspace) -> None:
    """Rank 0 gave up on rank 3, which its board shows; this rank, which waited for rank 1, names rank 3."""
    board = torch.zeros(board_format.PROGRESS_WORDS, dtype=torch.int32)
    line = board[board_format.LINE * 5 :]
    line[board_format.PROGRESS_FIELDS.index("state")] = board_format.GAVE_UP
    line[board_format.PROGRESS_FIELDS.index("peer")] = 3
    line[board_format.PROGRESS_FIELDS.index("needed")] = STAMP
    workspace.handle = Boards({0: board})

    error = fault(workspace, layout.ABORTED.value, peer=1, raised_by=1)

    assert isinstance(error, TileTimeout)
    assert error.peer == 3
    assert "rank 0 gave up first, waiting for rank 3 (this CTA waited for rank 1)" in str(error)


def test_a_stopped_rank_without_that_board_names_its_own_peer(workspace: Workspace) -> None:
    """A wait of an earlier launch on the board counts for nothing."""
    assert fault(workspace, layout.ABORTED.value, peer=1, raised_by=1).peer == 1


@pytest.mark.parametrize("code", [layout.MISMATCH, layout.ABORTED])
def test_a_mismatch_is_one_on_every_rank(workspace: Workspace, code: int) -> None:
    """Also on a rank that agrees with the one that stopped it, and differs from neither: the odd one is named."""
    put_hello(workspace, 1, OTHER, n=72)

    error = fault(workspace, getattr(code, "value", code), peer=1, raised_by=1)

    assert isinstance(error, RankMismatch)
    assert "rank 2 runs gemm_rs(M per rank 16, N 64, K 32" in str(error)
    assert "rank 1 runs gemm_rs(M per rank 16, N 72, K 32" in str(error)


BY_RANK_0 = layout.STRANGER.value + 1
LATE = [(layout.MISMATCH.value, 0), (layout.ABORTED.value, BY_RANK_0)]


@pytest.mark.parametrize(("code", "raised_by"), LATE, ids=["found", "stopped"])
def test_a_stranger_whose_kernel_begins_late_is_named(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, code: int, raised_by: int
) -> None:
    """Its copies came first; its hello comes while the error is being made."""
    put_hello(workspace, 1, STAMP - (2 << board_format.SIGNATURE_BITS), n=64)
    monkeypatch.setattr(faults.time, "sleep", lambda _: put_hello(workspace, 1, OTHER, n=72))

    error = fault(workspace, code, peer=1, raised_by=raised_by)

    assert isinstance(error, RankMismatch)
    assert "rank 1 runs gemm_rs(M per rank 16, N 72, K 32" in str(error)


@pytest.mark.parametrize(("code", "raised_by"), LATE, ids=["found", "stopped"])
def test_a_stranger_that_never_says_what_it_runs_is_named(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, code: int, raised_by: int
) -> None:
    """What it ran two launches ago is not what differs."""
    monkeypatch.setattr(faults, "HELLO_PATIENCE_S", 0.0)
    put_hello(workspace, 1, STAMP - (2 << board_format.SIGNATURE_BITS), n=64)

    error = fault(workspace, code, peer=1, raised_by=raised_by)

    assert isinstance(error, RankMismatch)
    assert "rank 1 runs something else and has not said what" in str(error)


def test_a_reset_forgets(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error is raised by every call until the ranks have reset the workspace together."""
    first = fault(workspace, layout.EXPIRED.value, peer=3)
    with pytest.raises(TileTimeout) as again:
        workspace.check(synchronize=False)
    monkeypatch.setattr(dist, "barrier", lambda _: None)

    workspace.reset()

    assert again.value is first
    workspace.check()


def test_a_fault_in_a_part_of_the_job_says_whose_numbers_it_tells(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The board and the flags know a rank by its place in the group: the message adds the job's own numbers."""
    monkeypatch.setattr(workspace.agreement, "note", "; ranks are counted within the group of the job's ranks 4, 5")

    error = fault(workspace, layout.EXPIRED.value, peer=1)

    assert isinstance(error, TileTimeout)
    assert (error.peer, "for rank 1" in str(error)) == (1, True)
    assert str(error).endswith("the job's ranks 4, 5")
