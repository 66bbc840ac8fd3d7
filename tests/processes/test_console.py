# SPDX-License-Identifier: Apache-2.0
"""What ranks print reaches each reader, and a reader that does not read holds nothing up."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.launch import PATIENCE_S, Launch, until

pytestmark = pytest.mark.processes

# A console as a run has one: it follows the files that it is given, until its stdin ends. "hurry" first: no wait.
CONSOLE = """
import logging, sys
from megascale_ops.runner.output.console import Console
from megascale_ops.runner.output.log_tail import Source
hurry, *paths = sys.argv[1:]
logging.basicConfig(stream=sys.stderr, format="runner: %(message)s")
console = Console(lambda: hurry == "hurry")
console.follow([Source(path, False, f"[{rank}] " if len(paths) > 1 else "") for rank, path in enumerate(paths)])
for line in sys.stdin:
    logging.warning("%s", line.strip())
console.stop()
"""


class Shown:
    """A console in a process of its own."""

    def __init__(self, *arguments: str, stdout: int, stderr: int, **env: str) -> None:
        told = {**os.environ, "PYTHONUTF8": "1", **env}
        self.proc = subprocess.Popen(
            [sys.executable, "-c", CONSOLE, *arguments], stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, env=told
        )

    def log(self, line: str) -> None:
        """Have the runner say something."""
        assert self.proc.stdin is not None
        self.proc.stdin.write(line.encode() + b"\n")
        self.proc.stdin.flush()

    def end(self) -> tuple[bytes, bytes]:
        """End it, and return what arrived."""
        return self.proc.communicate(timeout=PATIENCE_S)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe that is read only when the test does so."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def read(descriptor: int, wanted: bytes) -> bytes:
    """Read until ``wanted`` has come; fail when it does not."""
    found, end_s = b"", time.monotonic() + PATIENCE_S
    while wanted not in found:
        assert time.monotonic() < end_s, found
        if select.select([descriptor], [], [], 0.1)[0]:
            found += os.read(descriptor, 1 << 16)
    return found


def test_forty_megabytes_arrive_in_whole(tmp_path: Path) -> None:
    """However fast it was written, no byte is missing and the last line is there."""
    log = tmp_path / "stdout.log"
    log.write_bytes(b"".join(b"line %d %s\n" % (number, b"x" * 190) for number in range(200_000)) + b"the last line")

    shown, said = Shown("wait", str(log), stdout=subprocess.PIPE, stderr=subprocess.PIPE).end()

    assert shown == log.read_bytes()
    assert said == b""


def test_a_pipe_that_nobody_reads_holds_nothing_up(tmp_path: Path, pipe: tuple[int, int]) -> None:
    """Neither what ranks print nor what the runner says waits for it, and the end comes."""
    log = tmp_path / "stdout.log"
    log.write_bytes(b"x" * 99 + b"\n" * 10_000 + b"y" * 1_000_000)
    console = Shown("hurry", str(log), stdout=pipe[1], stderr=pipe[1])
    for _ in range(2_000):
        console.log("z" * 100)

    console.end()

    assert console.proc.returncode == 0


def test_what_was_left_out_is_said_with_the_files_that_hold_it(tmp_path: Path, pipe: tuple[int, int]) -> None:
    """A reader of stderr learns what a pipe without a reader did not take."""
    log = tmp_path / "stdout.log"
    log.write_bytes(b"y" * 1_000_000)

    _, said = Shown("hurry", str(log), stdout=pipe[1], stderr=subprocess.PIPE).end()

    assert b"bytes of output were not taken and are left out here: all of it is in " + str(log).encode() in said


def test_a_reader_that_is_slow_is_waited_for(tmp_path: Path, pipe: tuple[int, int]) -> None:
    """As long as something is taken nothing is left out."""
    log = tmp_path / "stdout.log"
    log.write_bytes(b"x" * 99_999 + b"\n" + b"y" * 400_000)
    console = Shown("wait", str(log), stdout=pipe[1], stderr=subprocess.DEVNULL)
    assert console.proc.stdin is not None
    console.proc.stdin.close()

    taken = 0
    while taken < log.stat().st_size:
        time.sleep(0.1)
        taken += len(os.read(pipe[0], 1 << 16))

    assert console.proc.wait(PATIENCE_S) == 0


def test_what_the_terminal_has_no_sign_for_is_escaped(tmp_path: Path) -> None:
    """An encoding of ASCII costs no line; bytes that are no UTF-8 neither."""
    log = tmp_path / "stdout.log"
    log.write_bytes("grün\n".encode() + b"\xff\x00\n" + "…".encode())
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

    plain, _ = Shown("wait", str(log), **pipes).end()
    escaped, _ = Shown("wait", str(log), **pipes, PYTHONIOENCODING="ascii").end()

    assert plain == log.read_bytes()
    assert escaped == rb"gr\xfcn" + b"\n" + rb"\xff" + b"\x00\n" + rb"\u2026"


def test_a_reader_that_left_is_told_once(tmp_path: Path) -> None:
    """``| head -1``: the run goes on, stderr says where the rest is."""
    log = tmp_path / "stdout.log"
    log.write_bytes(b"x\n" * 500_000)
    ours, theirs = os.pipe()
    os.close(ours)
    console = Shown("wait", str(log), stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    assert console.proc.stderr is not None

    told = read(console.proc.stderr.fileno(), b"\n")
    _, more = console.end()

    assert told == b"runner: stdout is closed (Broken pipe): what goes there is only in the log files\n"
    assert more == b""
    assert console.proc.returncode == 0


def test_a_full_disk_under_stdout_is_told(tmp_path: Path) -> None:
    """What can't be written is left out with the reason, and the run ends."""
    log = tmp_path / "stdout.log"
    log.write_bytes(b"hello\n")
    with Path("/dev/full").open("wb") as full:
        _, said = Shown("hurry", str(log), stdout=full.fileno(), stderr=subprocess.PIPE).end()

    assert b"6 bytes of output were not taken (No space left on device)" in said


def test_a_prompt_is_shown_while_its_line_is_unfinished(tmp_path: Path) -> None:
    """A prompt does not wait for a newline; neither does a bar of another rank."""
    asks, draws = tmp_path / "0.log", tmp_path / "1.log"
    console = Shown("wait", str(asks), str(draws), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert console.proc.stdout is not None

    asks.write_bytes(b"hello\n(Pdb) ")
    prompt = read(console.proc.stdout.fileno(), b"(Pdb) ")
    draws.write_bytes(b"\r10%")
    bar = read(console.proc.stdout.fileno(), b"10%")

    assert prompt == b"[0] hello\n[0] (Pdb) "
    assert bar == b"\n\r[1] 10%"
    console.end()


def test_a_bar_is_drawn_on_the_terminals_last_line(tmp_path: Path) -> None:
    """Lines of another rank push it down instead of running into it."""
    draws, prints = tmp_path / "0.log", tmp_path / "1.log"
    ours, theirs = pty.openpty()
    console = Shown("wait", str(draws), str(prints), stdout=theirs, stderr=theirs)

    draws.write_bytes(b"\r10%")
    bar = read(ours, b"10%")
    prints.write_bytes(b"hello\n")
    line = read(ours, b"hello")

    assert bar == b"\r[0] 10%"
    assert line.startswith(b"\r\x1b[K[1] hello")
    console.end()
    os.close(theirs)
    os.close(ours)


def test_a_terminal_that_goes_away_ends_nothing(tmp_path: Path) -> None:
    """Under nohup the run goes on; its console neither fails nor spins."""
    log = tmp_path / "stdout.log"
    log.write_bytes(b"before\n")
    ours, theirs = pty.openpty()
    console = Shown("wait", str(log), stdout=theirs, stderr=theirs)
    read(ours, b"before")

    os.close(theirs)
    os.close(ours)
    with log.open("ab") as more:
        more.write(b"after\n")
    console.log("still here")
    console.end()

    assert console.proc.returncode == 0


def test_a_run_whose_output_nobody_reads_hears_sigterm(launch: Launch, pipe: tuple[int, int]) -> None:
    """Both streams go into a full pipe, a rank prints without end: the run still ends in order."""
    script = launch.tmp_path / "loud.py"
    script.write_text(
        "import time\nfor _ in range(20000): print('x' * 99)\nopen('done', 'w').close()\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-m", "megascale_ops.cli.main", "run", "--job=toy", "--", str(script)]
    run = subprocess.Popen(command, env=launch.env, stdout=pipe[1], stderr=pipe[1], cwd=launch.tmp_path)
    launch.procs.append(run)
    until((launch.tmp_path / "done").exists, "the rank to have printed")

    run.send_signal(signal.SIGTERM)

    assert launch.finish(run) == 128 + signal.SIGTERM
    launch.assert_nothing_left()
