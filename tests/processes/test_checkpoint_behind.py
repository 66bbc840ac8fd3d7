# SPDX-License-Identifier: Apache-2.0
"""A training process saves in the background; its writer process dies, hangs, and runs out of disk.

One process plays all of it: a rank is two seconds of CPU time before its first tensor.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.checkpoint import newest
from tests.fakes.node import BOOTSTRAP
from tests.processes.small_disk import small_disk

pytestmark = pytest.mark.processes

SCRIPT = "tests.fixtures.checkpoint_behind"
ROOT = Path(__file__).parents[2]


class Played(NamedTuple):
    """What the process reported of each scenario, what it wrote to stderr, and its folder."""

    reports: dict[str, dict[str, Any]]
    stderr: str
    folder: Path


def recorded(folder: Path) -> dict[str, str]:
    """The environment of a rank under the recorder, whose box is in a folder."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MEGASCALE")}
    path = os.pathsep.join(filter(None, (str(BOOTSTRAP), os.environ.get("PYTHONPATH"))))
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MEGASCALE_BOX_DIR": str(folder / "boxes")}
    return env | rank | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """All scenarios, in turn."""
    folder = tmp_path_factory.mktemp("behind")
    for name in ("memory", "changed", "killed", "hangs"):
        (folder / name).mkdir()
    with small_disk(folder / "full") as is_small:
        if not is_small:
            (folder / "full").rmdir()
        done = subprocess.run(
            [sys.executable, "-m", SCRIPT, str(folder)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
            env=recorded(folder),
        )
    assert done.returncode == 0, done.stderr
    return Played(json.loads(done.stdout.splitlines()[-1]), done.stderr, folder)


def test_what_is_saved_is_the_state_at_the_call(played: Played) -> None:
    """Overwritten right after each call. A restore waits for it; the writer process is gone with ``close``."""
    report = played.reports["changed"]

    assert (report["step"], report["same"], report["writer ended"]) == (3, True, True)


def test_observers_hear_of_both_stages(played: Played) -> None:
    """A save that comes while one is in flight begins, and then waits for that one's seal."""
    stages = played.reports["changed"]["stages"]

    assert [stage for stage in stages if "save" in stage] == [
        f"{event} {step}" for step in (1, 2, 3) for event in ("save_begin", "save_end")
    ]
    assert [stage for stage in stages if "sealed" in stage] == ["sealed 1", "sealed 2", "sealed 3"]
    assert stages.index("save_begin 2") > stages.index("save_end 1")
    assert stages.index("sealed 1") < stages.index("save_end 2")


def test_a_writer_process_that_is_killed_costs_its_save_and_no_other(played: Played) -> None:
    """Told by ``wait``, counted, and the next save has a new process; nothing half is left."""
    report = played.reports["killed"]

    assert report["in flight"] == 1
    assert report["error"].startswith("the save of step 2 failed: the writer process ")
    assert report["error"].endswith(" was killed by signal 9")
    assert (report["step"], report["same"], report["failed"], report["sealed"]) == (4, True, 1, 4)
    assert report["left"] == ["step-00000001", "step-00000003", "step-00000004"]
    assert "the training goes on, and the next save tries again" in played.stderr
    assert "between two saves; the next one starts another" in played.stderr


def test_storage_that_hangs_stops_no_training_step(played: Played) -> None:
    """A hundred steps pass while the writer process stands still; the next save gives it up after its deadline."""
    report = played.reports["hangs"]

    assert (report["steps"], report["in flight"], report["waited"]) == (100, 1, True)
    assert (report["step"], report["same"], report["hung one ended"], report["failed"]) == (3, True, True, 1)
    assert "the save of step 2 failed: nothing was written for 1 s" in played.stderr
    assert "for the save of step 2, which was still in flight" in played.stderr


def test_a_full_disk_costs_the_save_that_does_not_fit(played: Played) -> None:
    """One sentence; its space is given back, so that a smaller one fits after it."""
    if "full" not in played.reports:
        pytest.skip("mounting a small file system needs root")

    report = played.reports["full"]
    assert report["error"] == "the save of step 2 failed: No space left on device"
    assert report["left"] == ["step-00000001", "step-00000003"]


def test_memory_holds_one_copy_of_the_state(played: Played) -> None:
    """Over five saves, in both processes together; the same buffer each time, given back at the end."""
    report = played.reports["memory"]

    assert len(report["buffers"]) == 1
    assert report["buffers"][0] <= report["state"] * 1.15
    assert report["state"] * 0.9 < report["grown"] < report["state"] * 1.4
    # 1.75: a page that the writer process maps between the two looks is counted whole and by half, and the buffer has a
    # tenth to spare; two copies would be 2
    assert report["shared"] <= report["state"] * 1.75
    assert report["writer"] < 60_000_000
    assert report["left"] < 1_000_000


def test_the_end_of_the_interpreter_waits_for_the_save_in_flight(played: Played) -> None:
    """Without ``close``: the checkpoint is sealed, and no process is left."""
    chosen = newest(played.folder / "exit").newest

    assert chosen is not None
    assert chosen.step == 2
    assert not Path(f"/proc/{played.reports['exit']['writer']}").exists()


def test_the_black_box_knows_of_the_last_save(played: Played) -> None:
    """Its stall, and that it was sealed when all else was done; of its writer process there is no box."""
    with BoxReader(played.folder / "boxes" / "0.box") as reader:
        saves = reader.saves()

    assert saves is not None
    assert (saves.step, saves.in_flight, saves.sealed_step, saves.failed) == (2, 0, 2, 0)
    assert saves.stall_s > 0
    assert saves.write_s > 0
    assert saves.sealed_wall_s > 0
    assert [path.name for path in (played.folder / "boxes").glob("*.box")] == ["0.box"]
