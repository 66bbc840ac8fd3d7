# SPDX-License-Identifier: Apache-2.0
"""What a process and those below it get done, from the kernel's own counters: real processes, read once or twice."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from megascale_agents.ranks.work_meter import WorkMeter, command_of, describe

from megascale_ops.schema.work import MOST_COMMAND, ProcessWork

# Each prints when it is ready, works at the next line of its stdin, and prints when it is done; its parent only waits.
CHILD = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=0, stdout=1)
child.wait()
"""
WORKS = """
import os, sys
out = open("{path}", "ab", buffering=0)
print("ready", flush=True)
sys.stdin.readline()
{work}
print("done", flush=True)
sys.stdin.readline()
"""
BURN = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
WRITE = "out.write(b'x' * 3_000_000)"


@pytest.fixture
def tree() -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    """Start a process that waits for a child which works when it is told to; what it writes lies on a disk."""
    started: list[subprocess.Popen[str]] = []
    folder = tempfile.TemporaryDirectory(dir="/var/tmp")

    def start(work: str) -> "subprocess.Popen[str]":
        script = WORKS.format(path=Path(folder.name) / "out.bin", work=work)
        parent = subprocess.Popen(
            [sys.executable, "-c", CHILD, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(parent)
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        return parent

    yield start
    for parent in started:
        parent.stdin.close()  # type: ignore[union-attr]  # a pipe
        parent.stdout.close()  # type: ignore[union-attr]  # a pipe
        parent.wait(30)
    folder.cleanup()


def _measure(parent: "subprocess.Popen[str]", moved_s: float) -> ProcessWork:
    meter = WorkMeter()
    meter.begin(parent.pid, time.monotonic(), moved_s)
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write("go\n")
    parent.stdin.flush()
    assert parent.stdout.readline() == "done\n"
    work = meter.end(time.monotonic(), moved_s, is_running=False)
    assert work is not None
    return work


def test_the_work_of_a_child_is_the_ranks(tree: Callable[[str], "subprocess.Popen[str]"]) -> None:
    """CPU time of the child, not of the parent that waits; the child is told by its command line."""
    moved_s = time.monotonic() - 1.0
    work = _measure(tree(BURN), moved_s)

    assert work.child_cpu_s >= 0.25
    assert work.own_cpu_s < 0.1
    assert [child.is_new for child in work.children] == [True]
    assert work.children[0].command.startswith(Path(sys.executable).name)
    assert "s of CPU in children" in describe(work)


def test_bytes_that_a_child_writes_and_files_that_grow_are_counted(
    tree: Callable[[str], "subprocess.Popen[str]"],
) -> None:
    """Three million bytes to a file that it holds open: written, and grown by as much."""
    work = _measure(tree(WRITE), time.monotonic())

    assert 3_000_000 <= work.io_bytes < 3_500_000
    assert work.grown_bytes == 3_000_000


def test_who_only_waits_does_nothing(tree: Callable[[str], "subprocess.Popen[str]"]) -> None:
    """The negative control; a child that is older than the rank's last movement is not new."""
    parent = tree("pass")
    time_after_start = time.monotonic() + 1.0
    work = _measure(parent, time_after_start)

    assert work.child_cpu_s <= 0.05
    assert work.io_bytes < 10_000
    assert work.grown_bytes == 0
    assert not any(child.is_new for child in work.children)


def test_bytes_over_tcp_are_counted_by_the_kernel() -> None:
    """Acknowledged and received, of connections that both looks know."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        meter = WorkMeter()
        meter.begin(os.getpid(), 1.0, 0.0)

        client.sendall(b"x" * 50_000)
        taken = 0
        while taken < 50_000:
            taken += len(accepted.recv(65_536))
        work = meter.end(2.0, 0.0, is_running=False)
        client.close()
        accepted.close()

    assert work is not None
    assert work.socket_bytes >= 50_000


def test_what_was_counted_before_the_rank_moved_is_no_work_of_this_silence() -> None:
    """Its training must not be taken for it: counters are read anew after each movement, and when they are old."""
    meter = WorkMeter()
    meter.begin(os.getpid(), 100.0, 50.0)
    for now_s, moved_s, over_s in ((104.0, 50.0, 4.1), (110.0, 109.0, 0.1), (400.0, 109.0, 0.1)):
        meter.begin(os.getpid(), now_s, moved_s)
        work = meter.end(now_s + 0.1, moved_s, is_running=False)

        assert work is not None
        assert work.over_s == pytest.approx(over_s)


def test_a_command_is_cut_and_a_process_that_is_gone_has_none() -> None:
    """Sixty characters, the program without its folder."""
    script = "import sys; print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script, "x" * 200], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"1\n"  # before that it may still be a copy of this process
        told = command_of(child.pid, "S")
        child.communicate(timeout=30)

    assert len(told) == MOST_COMMAND
    assert told.startswith(Path(sys.executable).name)
    assert command_of(child.pid, "S") == "?"
