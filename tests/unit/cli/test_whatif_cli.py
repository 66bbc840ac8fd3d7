# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops whatif`` as a user meets it: a late rank, an even job, ranks together, and mistakes."""

import json
import shutil
from pathlib import Path

import pytest

from megascale_ops.cli.main import main
from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.journal.store import open_store
from megascale_ops.schema.identity import Mesh
from tests.fakes.boxes import box


@pytest.fixture(autouse=True)
def boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have a state root and a box root of its own; return where the boxes of job toy go."""
    monkeypatch.setattr("megascale_ops.cli.terminal.logs.configure", lambda *_: None)
    for name in ("MEGASCALE_CONTROLLER", "MEGASCALE_TOKEN", "MEGASCALE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("MEGASCALE_BOX_ROOT", str(tmp_path / "boxes"))
    return tmp_path / "boxes" / "toy"


def run(capsys: pytest.CaptureFixture[str], *line: str) -> tuple[int, str, str]:
    """Run one command line; return exit code, stdout and stderr."""
    code = main(["whatif", *line])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_late_rank_is_what_a_step_could_do_without(boxes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1 comes 6 of 100 ms after the others: without that a step takes 94, on 3 GPUs 4.3 hours a day."""
    for rank in range(3):
        box(boxes, rank, 3, late_ms=6.0 if rank == 1 else 0.0)

    code, out, err = run(capsys, "toy")

    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "job toy: 3 ranks, steps 1 to 29, 100 ms a step; replayed from the records 100 ms (off by 0.0%)",
        "  rank 1 as fast as its peers: 94 ms a step, 6.0 % less (4.3 rank hours a day)",
    ]


def test_ranks_are_asked_about_together(boxes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two late ranks hide each other: each by itself saves nothing, both together do; as JSON, too."""
    for rank in range(4):
        box(boxes, rank, 4, late_ms=6.0 if rank in (1, 2) else 0.0)

    _, alone, _ = run(capsys, "toy")
    _, both, _ = run(capsys, "toy", "--ranks", "1-2")
    _, told, _ = run(capsys, "toy", "--ranks", "1-2", "--json", "--last", "5")

    assert "no rank, stage or link by itself" in alone
    assert "ranks 1-2 as fast as its peers: 94 ms a step" in both
    found = json.loads(told)
    assert (found["first_step"], found["last_step"]) == (25, 29)
    assert found["lines"][0]["saved"] == pytest.approx(0.06, abs=1e-3)


def test_ranks_that_were_asked_about_are_answered(boxes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that save nothing are named; all of them, none of them and what is no list are refused in a sentence."""
    for rank in range(3):
        box(boxes, rank, 3)

    _, out, _ = run(capsys, "toy", "--ranks", "0,2")
    told = [run(capsys, "toy", f"--ranks={ranks}") for ranks in ("0-2", "", "auto", "9" * 5000)]

    assert (
        out.splitlines()[1]
        == "  ranks 0,2 as fast as its peers: no step would be shorter by more than the replay is off"
    )
    assert [code for code, _, _ in told] == [2] * 4
    assert "nobody is left whose speed they could have" in told[0][2]
    assert all("can't be read: give ranks such as 0,3-5" in err for _, _, err in told[1:])


def test_a_stage_is_compared_with_the_other_stages(boxes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both ranks of stage 1 come late: it is the stage that is told."""
    for rank in range(4):
        box(boxes, rank, 4, late_ms=6.0 if rank >= 2 else 0.0, mesh=Mesh(pp=rank // 2))

    _, out, _ = run(capsys, "toy")

    assert "stage 1 as fast as its peers: 94 ms a step" in out


def test_what_can_not_be_replayed_is_said(boxes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Too few steps; nothing that ends for all at once; no such name; a rank that is not there."""
    short, uneven = boxes.parent / "short", boxes.parent / "sends"
    for rank in range(2):
        box(boxes, rank)
        box(short, rank, job="short", steps=3)
        box(uneven, rank, job="sends", function="broadcast")

    told = [run(capsys, *line) for line in (["short"], ["sends"], ["nobody"], ["toy", "--ranks=7"], [])]

    assert [code for code, _, _ in told] == [2] * 5
    assert [out for _, out, _ in told] == [""] * 5
    assert "only 2 steps are recorded whole by all ranks, and a prediction needs three" in told[0][2]
    assert "recorded no collective that ends for all at once" in told[1][2]
    assert "unknown job 'nobody'" in told[2][2]
    assert "there is no black box of rank 7 here" in told[3][2]
    assert "whose black boxes? ranks of sends, short, toy live here" in told[4][2]


def test_steps_without_a_common_collective_are_said(boxes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks that name their collectives by other functions have nothing in common: a sentence, and no prediction."""
    for rank in range(2):
        box(boxes, rank, function=("all_reduce", "all_gather")[rank])

    code, out, err = run(capsys, "toy", "--last=4")

    assert (code, out) == (2, "")
    assert "of steps 26 to 29 only 0 have a collective that all its ranks recorded" in err
    assert "give a larger --last" in err


def test_a_replay_that_can_not_be_wrong_proves_nothing(boxes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks that receive from each other in every step: their waiting counts as work, and no error is stated.

    A broadcast of buffers, as data-parallel training has, is short, and no rank waits in it.
    """
    for rank in range(3):
        box(boxes, rank, 3, late_ms=6.0 if rank == 1 else 0.0, also="recv")
        box(boxes.parent / "buffers", rank, 3, job="buffers", also="broadcast")

    _, out, _ = run(capsys, "toy")
    _, buffers, _ = run(capsys, "buffers")
    _, told, _ = run(capsys, "toy", "--json")

    assert "(which proves nothing: ranks also wait for each other in sends and receives" in out
    assert "left out, since they do not end for all at once: 87 recv" in out
    assert json.loads(told)["error"] is None
    assert "(off by 0.0%)" in buffers


def test_what_was_left_out_is_said(boxes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A box that can't be read and a rank without one."""
    for rank in range(2):
        box(boxes, rank, 4)
    (boxes / "3.box").write_bytes(b"torn")

    code, out, _ = run(capsys, "toy")

    assert code == 0
    assert "note: no black box of ranks 2-3 here" in out
    assert "3.box" in out


def test_the_folder_of_a_run_alone_says_which_boxes(
    boxes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While its ranks live theirs, then those that its newest incident kept, with a word about it."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    store = open_store(f"sqlite:///{run_dir / 'journal.db'}")
    store.submit(Batch(job="toy", record=b"{}"))
    store.close()
    for rank in range(3):
        box(boxes, rank, 3, late_ms=6.0 if rank == 1 else 0.0)
        box(run_dir / "incidents" / "toy-1" / "vm", rank, 3, late_ms=6.0 if rank == 2 else 0.0)

    living = run(capsys, "--run-dir", str(run_dir))
    shutil.rmtree(boxes)
    over = run(capsys, "--run-dir", str(run_dir))

    assert (living[0], over[0]) == (0, 0)
    assert "rank 1 as fast as its peers" in living[1]
    assert "rank 2 as fast as its peers" in over[1]
    assert "these are the black boxes that were kept of its incident toy-1" in over[1]


def test_a_folder_that_is_no_runs_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence each: it is not there, it holds nothing of a run."""
    missing = run(capsys, "--run-dir", str(tmp_path / "none"))
    empty = run(capsys, "--run-dir", str(tmp_path))

    assert (missing[0], empty[0]) == (2, 2)
    assert f"there is no folder {tmp_path / 'none'}" in missing[2]
    assert f"no run has left anything in {tmp_path}" in empty[2]
