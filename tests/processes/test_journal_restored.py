# SPDX-License-Identifier: Apache-2.0
"""A controller that comes back with an older journal: the runner tells which round runs, and no name is given twice."""

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.processes.launch import PLAIN, acted_upon
from tests.processes.nodes import Cluster, Clusters

pytestmark = pytest.mark.processes


def _journal(cluster: Cluster) -> list[Path]:
    return sorted(cluster.controller.journal.parent.glob("ops.db*"))


def _kill_rank(cluster: Cluster, round_: int) -> None:
    os.kill(cluster["a"].rank_pids()[1], signal.SIGKILL)
    cluster.until_status("running", round_=round_)
    cluster.until_more_steps()


def test_a_restored_backup_hides_no_frozen_rank(clusters: Clusters) -> None:
    """A journal of round 1 while round 3 runs: ranks go on, a frozen one is restarted, numbers go on."""
    cluster = clusters("a", nnodes="1", nproc=2, script=PLAIN)
    backup = cluster.launch.tmp_path / "backup"
    backup.mkdir()
    cluster.start()
    cluster.until_more_steps()
    cluster.controller.kill()
    for path in _journal(cluster):
        shutil.copy(path, backup)
    cluster.controller.start()
    _kill_rank(cluster, 2)
    _kill_rank(cluster, 3)
    before = {one.id for one in acted_upon(cluster.incidents())}
    pids = cluster["a"].rank_pids()
    cluster.controller.kill()
    for path in _journal(cluster):
        path.unlink()
    for path in backup.iterdir():
        shutil.copy(path, cluster.controller.journal.parent)

    cluster.controller.start()
    cluster.until_status("running", round_=3)
    same = cluster["a"].rank_pids()
    os.kill(pids[1], signal.SIGSTOP)
    after = cluster.until_status("running", round_=4)
    incidents = acted_upon(cluster.incidents())
    kinds = [event.kind for event in cluster.events()]
    cluster.finish()

    assert before == {"toy-1", "toy-2"}
    assert same == pids
    assert after.round == 4
    assert [one.verdict.fault for one in incidents if one.verdict] == ["frozen"]
    assert not {one.id for one in incidents} & before
    assert "adopted" in kinds


def test_a_controller_killed_on_a_full_disk_goes_on(clusters: Clusters) -> None:
    """What it did in memory died with it: the next one, on the same full disk, still restarts what breaks."""
    cluster = clusters("a", nnodes="1", nproc=2, script=PLAIN)
    disk = cluster.launch.tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        cluster.controller.journal = disk / "ops.db"
        cluster.start()
        cluster.until_more_steps()
        with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        _kill_rank(cluster, 2)
        before = {one.id for one in acted_upon(cluster.incidents())}
        cluster.controller.kill()

        cluster.controller.start()
        cluster.until_status("running", round_=2)
        os.kill(cluster["a"].rank_pids()[1], signal.SIGSTOP)
        after = cluster.until_status("running", round_=3)
        incidents = acted_upon(cluster.incidents())
        cluster.finish()
        cluster.controller.kill()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)

    assert after.round == 3
    assert before == {"toy-1"}
    assert "frozen" in [one.verdict.fault for one in incidents if one.verdict]
    assert not {one.id for one in incidents} & before
