# SPDX-License-Identifier: Apache-2.0
"""A workspace shows its board to the supervisor that started the process, and to nobody where there is none."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

import torch.distributed as dist  # noqa: E402 - after the skips
from megascale_kernels.dispatch.serial import Board, Call  # noqa: E402
from megascale_kernels.memory.workspace import Workspace  # noqa: E402
from megascale_kernels.progress import board_format, read_board  # noqa: E402
from megascale_kernels.progress.publish import FOLDER_VARIABLE  # noqa: E402
from megascale_kernels.progress.view import process_started  # noqa: E402
from megascale_kernels.torch_api.operators import ag_gemm  # noqa: E402

from megascale_ops.blackbox import boards  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a supervisor looks."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


def made(**arguments: object) -> Workspace:
    """A small workspace on the CPU."""
    small = {"max_rows": 8, "max_gather_cols": 8, "max_scatter_cols": 8, "dtype": torch.float32, "device": "cpu"}
    return Workspace(**{**small, **arguments})  # type: ignore[arg-type]  # keywords of one call


def seen(folder: Path) -> list[boards.Board]:
    """What an agent finds of this process."""
    pid = os.getpid()
    return boards.of_process(folder, "0", pid, process_started(pid) or 0)


def test_a_board_is_there_before_the_first_launch_and_follows_it(folder: Path) -> None:
    """A rank that never launches is told by it: no launch is a fact as well."""
    workspace = made()
    (before,) = seen(folder)
    ag_gemm(torch.ones(4, 8), torch.eye(8), workspace)
    (after,) = seen(folder)

    assert (before.launch, before.members, before.group) == (0, (0,), workspace.agreement.number)
    assert (after.operator, after.launch, after.done) == ("ag_gemm", 1, 1)
    assert read_board(next(folder.iterdir())).members == (0,)


def test_each_workspace_has_its_own_board(folder: Path) -> None:
    """A model has several; ranks know which belong together by a number on which they agree."""
    both = made(), made()

    found = seen(folder)

    assert [board.group for board in found] == [one.agreement.number for one in both]
    assert len({board.group for board in found}) == 2


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_a_workspace_that_is_done_with_shows_nothing(folder: Path, how: str) -> None:
    """What it last waited for would accuse somebody for ever; closed twice it is closed."""
    workspace = made()
    assert seen(folder)

    if how == "closed":
        workspace.close()
        workspace.close()
    del workspace
    gc.collect()

    assert list(folder.iterdir()) == []


def test_a_board_that_is_shown_elsewhere_or_not_at_all_is_left_alone(folder: Path) -> None:
    """Progress that is off, and a board of the caller's own."""
    kept = made(progress=False), made(progress=torch.zeros(board_format.PROGRESS_WORDS, dtype=torch.int32))

    assert kept
    assert list(folder.iterdir()) == []


def test_without_a_supervisor_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: no variable, no file."""
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)

    kept = made()

    assert kept
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_nothing_costs_a_line_and_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Evidence is never worth a failed start."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "none"))

    workspace = made()
    out = ag_gemm(torch.ones(4, 8), torch.eye(8), workspace)

    assert out.shape == (4, 8)
    assert "is shown to nobody" in caplog.text


def test_after_a_reset_a_rank_that_launches_nothing_shows_no_launch(folder: Path) -> None:
    """Launches are counted anew then: an old number would look like one that is ahead."""
    workspace = made()
    ag_gemm(torch.ones(4, 8), torch.eye(8), workspace)

    workspace.reset()

    (board,) = seen(folder)
    assert (board.launch, board.roles, board.members) == (0, (), (0,))


def test_a_wait_in_vain_stays_on_the_board(folder: Path) -> None:
    """What was waited for is told after the deadline too; who waited for nobody gives nobody up."""
    workspace = made()
    board = Board(workspace, Call("gemm_rs", 8, 8, 8), 4)
    board.give_up()
    (before,) = seen(folder)
    board.wait(3)
    (waits,) = seen(folder)
    board.give_up()
    (gave_up,) = seen(folder)

    assert [one.waiting for one in (before, waits, gave_up)] == [{}, {3: 1}, {3: 1}]
    assert [one.roles[0].gave_up for one in (before, waits, gave_up)] == [False, False, True]
