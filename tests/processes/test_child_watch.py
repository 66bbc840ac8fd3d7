# SPDX-License-Identifier: Apache-2.0
"""Processes that are no children here: when they end and how, whichever process reaps them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megascale_ops.blackbox.records import BoxIdentity
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.runner.processes import start_ticks
from megascale_ops.runner.wrapped.child_watch import ChildWatch, Death
from tests.processes.launch import until

pytestmark = pytest.mark.processes

# Starts two children that wait for a line, prints their pids, and fetches their statuses in the moment they end.
LAUNCHER = """
import subprocess, sys
code = "import sys; line = input(); import os, signal; os.kill(os.getpid(), 9) if line == 'die' else os._exit(7)"
children = [subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True) for _ in range(2)]
print(*(child.pid for child in children), flush=True)
for child, line in zip(children, ("die", "leave")):
    input()
    child.stdin.write(line + "\\n")
    child.stdin.close()
    child.wait()
input()
"""


def box(folder: Path, rank: int, pid: int) -> None:
    """Make the black box of a process."""
    BoxWriter.create(
        folder,
        BoxIdentity(
            job="j", node="n", rank=rank, local_rank=rank, world_size=2, pid=pid, start_ticks=start_ticks(pid), round=3
        ),
    )


def test_the_deaths_of_another_process_children_are_seen_in_their_order(tmp_path: Path) -> None:
    """By the moment of each, and with its status where it was seen; the one that lives is not among them."""
    folder = tmp_path / "boxes"
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        first, second = (int(word) for word in launcher.stdout.readline().split())
        for rank, pid in enumerate((first, second, os.getpid())):
            box(folder, rank, pid)
        watch = ChildWatch(folder, "n", 3)
        watch.start()
        until(lambda: len(watch.ranks()) == 3, "the boxes to be found")

        for number in (1, 2):
            launcher.stdin.write("next\n")
            launcher.stdin.flush()
            until(lambda number=number: len(watch.deaths()) == number, "the death to be seen")
        deaths: tuple[Death, ...] = watch.deaths()
        watch.stop()
        launcher.communicate("\n", timeout=60)

    assert [death.identity.rank for death in deaths] == [0, 1]
    # None where the launcher was quicker and the kernel keeps no status (before 6.15).
    assert deaths[0].code in (-9, None)
    assert deaths[1].code in (7, None)
    if tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (6, 15):
        assert [death.code for death in deaths] == [-9, 7]
