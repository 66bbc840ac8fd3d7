# SPDX-License-Identifier: Apache-2.0
"""A runner's place in a job, and what killed runners leave in memory."""

import os
from pathlib import Path

import msgspec
import pytest

from megascale_ops.errors import UsageError
from megascale_ops.runner.ranks.leftovers import hold_place, sweep
from megascale_ops.schema.identity import RankProcess, RoundFile


def leave(root: Path, job: str, run_id: str = "gone", *, locked: bool = True) -> Path:
    """Leave what a killed runner leaves: its lock's file, its round file and a box."""
    folder = root / job
    folder.mkdir(parents=True)
    (folder / "0.box").touch()
    ranks = (RankProcess(rank=0, local_rank=0, pid=0, start_ticks=0),)
    content = RoundFile(1, job, "n", 3, 999_999_999, 1, str(root), ranks, run_id=run_id)
    (folder / "n.round.json").write_bytes(msgspec.json.encode(content))
    if locked:
        (root / f".run-{job}@n.lock").touch()
    return folder


def test_a_place_is_held_once(tmp_path: Path) -> None:
    """Of runners of one job on one node the second is refused, with the first one's process."""
    held = hold_place(tmp_path, "j", "n", others=False)

    with pytest.raises(UsageError, match=rf"job j already runs on n \(runner process {os.getpid()}\)"):
        hold_place(tmp_path, "j", "n", others=False)

    hold_place(tmp_path, "other", "n", others=False).release()
    held.release()
    hold_place(tmp_path, "j", "n", others=False).release()
    assert list(tmp_path.iterdir()) == []


def test_several_runners_of_one_machine_are_nodes_of_their_own(tmp_path: Path) -> None:
    """Where a job has room for several nodes, each runner takes the next free name."""
    held = [hold_place(tmp_path, "j", "n", others=True) for _ in range(3)]

    assert [one.node for one in held] == ["n", "n-2", "n-3"]
    held[1].release()
    held[1] = hold_place(tmp_path, "j", "n", others=True)
    assert held[1].node == "n-2"
    for one in held:
        one.release()


def test_any_later_start_sweeps_what_killed_runners_left(tmp_path: Path) -> None:
    """The name of a job carries the time, so it may never start again; its boxes go with the next start of any job."""
    left = leave(tmp_path, "train-20260131-142501")

    assert sweep(tmp_path) == 1

    assert not left.exists()
    assert list(tmp_path.iterdir()) == []


def test_what_may_still_be_used_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that lives, processes that carry a dead one's mark, and folders that have no lock at all."""
    living, orphans, foreign = (leave(tmp_path, job, run_id=job, locked=job != "f") for job in "lof")
    (tmp_path / ".run-l@n.lock").unlink()
    held = hold_place(tmp_path, "l", "n", others=False)
    monkeypatch.setattr(
        "megascale_ops.runner.ranks.leftovers.marked_processes", lambda mark: [1] if mark == "o" else []
    )

    assert sweep(tmp_path) == 0

    assert living.exists()
    assert orphans.exists()
    assert foreign.exists()
    held.release()
