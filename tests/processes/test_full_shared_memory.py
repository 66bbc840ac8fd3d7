# SPDX-License-Identifier: Apache-2.0
"""No room is left where black boxes live, in the middle of training: a small file system of our own, really full."""

import re
import shutil
import subprocess

import pytest

from tests.processes.launch import TOY, Launch
from tests.processes.warmed import stand_in

pytestmark = pytest.mark.processes

_MOUNT = """
mount -t tmpfs -o size=3m,mode=0700 tmpfs "$1" && shift && exec %s "$@"
"""


def can_mount() -> bool:
    """Say whether this machine lets us have a file system of our own."""
    if shutil.which("unshare") is None:
        return False
    asked = ["unshare", "-m", "sh", "-c", "mount -t tmpfs tmpfs /tmp"]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


def test_a_rank_that_dies_while_shared_memory_is_full_comes_back_without_its_box(launch: Launch) -> None:
    """The run goes on to its end, and says what it does without."""
    if not can_mount():
        pytest.skip("needs the right to mount in a namespace of our own")
    launch.box_root.mkdir(mode=0o700)
    log = launch.tmp_path / "run.log"
    with log.open("wb") as out:
        proc = subprocess.Popen(
            [
                *("unshare", "-m", "sh", "-c", _MOUNT % stand_in(), "sh", str(launch.box_root)),
                *("run", "--nproc-per-node=2", "--job=toy", "--"),
                *(str(TOY), "--steps=60", "--fault=boxes_full", "--at=20"),
            ],
            env=launch.env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    launch.procs.append(proc)

    assert launch.finish(proc) == 0, launch.output()

    said = launch.output()
    assert "in round 2" in said
    assert "is full: black boxes of ranks that are started now have no room" in said
    assert "no black box" in said  # the ranks' own word
    # The survivor may have printed its lost peer before it was stopped: torch does that.
    ours = [line for line in said.splitlines() if not re.search(r"\[rank\d\]:", line)]
    assert not [line for line in ours if "Traceback" in line]
