# SPDX-License-Identifier: Apache-2.0
"""A workspace on the host: what is refused when it is made, and who may use it."""

import copy
import os
import pickle
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

import torch.distributed as dist  # noqa: E402 - after the skips
from megascale_kernels.dispatch.serial import Board, Call  # noqa: E402
from megascale_kernels.errors import KernelError, Unsupported  # noqa: E402
from megascale_kernels.memory.symmetric_memory import layout_for  # noqa: E402
from megascale_kernels.memory.workspace import Workspace  # noqa: E402
from megascale_kernels.progress import board_format, read_board  # noqa: E402
from megascale_kernels.torch_api.layers import ColumnParallelLinear  # noqa: E402
from megascale_kernels.torch_api.operators import ag_gemm  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(**arguments: object) -> Workspace:
    """A small workspace on the CPU, but for what is given."""
    small = {"max_rows": 8, "max_gather_cols": 8, "max_scatter_cols": 8, "dtype": torch.float32, "device": "cpu"}
    return Workspace(**{**small, **arguments})  # type: ignore[arg-type]  # some are wrong on purpose


BAD = {
    "no rows": ({"max_rows": 0}, ValueError, "must be positive"),
    "negative columns": ({"max_scatter_cols": -1}, ValueError, "none negative"),
    "half a row": ({"max_rows": 8.5}, ValueError, "max_rows=8.5.*whole numbers"),
    "a word": ({"max_gather_cols": "8"}, ValueError, "whole numbers"),
    "more than there is": ({"max_rows": 1 << 60, "max_gather_cols": 1 << 60}, ValueError, "no machine"),
    "a deadline that never passes": ({"deadline_s": float("nan")}, ValueError, "deadline_s=nan"),
    "no deadline": ({"deadline_s": 0}, ValueError, "between 0 and 2000"),
    "integers": ({"dtype": torch.int8}, ValueError, "bfloat16 and float16"),
    "a short board": ({"progress": torch.zeros(8, dtype=torch.int32)}, ValueError, "a board is"),
    "no such device": ({"device": "cuda:63"}, Unsupported, "cuda:63.*torch sees .* CUDA devices"),
    "another device": ({"device": "meta"}, Unsupported, "run on cuda and on cpu"),
    "no member": ({"group": dist.GroupMember.NON_GROUP_MEMBER}, Unsupported, "not in the group"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_makes_no_sense_is_refused(case: str) -> None:
    """One sentence says which argument it is, before any memory is taken or any rank is waited for."""
    arguments, kind, message = BAD[case]

    with pytest.raises(kind, match=message):
        made(**arguments)


def test_a_board_may_have_two_dimensions() -> None:
    """A board that its maker laid out line by line is written as the words that it is."""
    board = torch.zeros(board_format.PROGRESS_WORDS // board_format.LINE, board_format.LINE, dtype=torch.int32)
    workspace = made(progress=board)

    ag_gemm(torch.ones(4, 8), torch.ones(8, 4), workspace)

    assert read_board(board.view(-1)).operator == "ag_gemm"


@pytest.mark.parametrize(("gathered", "scattered"), [(96, 0), (0, 96), (8, 96), (96, 8)])
def test_the_longer_rows_decide_how_much_is_shared(gathered: int, scattered: int) -> None:
    """The backward of one operator is the other, so that either must find room for the other's rows."""
    workspace = made(max_rows=128, max_gather_cols=gathered, max_scatter_cols=scattered)

    assert workspace.layout == layout_for(1, 128, 96, torch.float32.itemsize)
    assert workspace.layout != layout_for(1, 128, 8, torch.float32.itemsize)


@pytest.mark.parametrize("before", [0, (1 << 20) - 2, 1 << 20, 1 << 31])
def test_a_wait_on_the_cpu_is_told_however_many_launches_came_before(before: int) -> None:
    """A launch's number has twenty bits on the board, and a job of a day has more launches: its waits count too."""
    workspace = made()
    workspace.launches = before

    board = Board(workspace, Call("gemm_rs", 8, 4, 8), 1)
    board.wait(3)

    (role,) = read_board(workspace.board).roles
    assert (role.state, role.wait.peer if role.wait else None) == ("waiting", 3)


def test_copies_of_a_workspace_are_the_workspace() -> None:
    """The memory has one counter of launches, so there are no two workspaces over it."""
    workspace = made()

    assert copy.copy(workspace) is workspace
    assert copy.deepcopy(workspace) is workspace


def test_what_cannot_be_pickled_says_what_to_save_instead() -> None:
    """`torch.save(model)` and a spawned child get a sentence, not the type that pickle met within."""
    for holder in (made(), ColumnParallelLinear(8, 8, made())):
        with pytest.raises(TypeError, match=r"cannot be pickled.*save its state_dict\(\)"):
            pickle.dumps(holder)


def test_a_forked_child_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over its parent's connections it would take the parent's answers, and both would wait for ever."""
    workspace = made()
    parent, child = os.getpid(), os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)

    with pytest.raises(KernelError, match=f"process {parent} made this workspace, and this is process {child}"):
        ag_gemm(torch.ones(4, 8), torch.ones(8, 4), workspace)
