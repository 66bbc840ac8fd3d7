# SPDX-License-Identifier: Apache-2.0
"""One rank as a process: its death is seen, its stop is certain, its stray children are found."""

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale_ops.runner.processes import (
    RankPopen,
    handles,
    kill_for_certain,
    marked_processes,
    start_ticks,
)
from megascale_ops.runner.ranks.leftovers import end_children
from megascale_ops.runner.ranks.worker import Worker
from megascale_ops.schema import environment
from tests.processes.launch import PATIENCE_S, until

pytestmark = pytest.mark.processes


@pytest.fixture
def run_id() -> Iterator[str]:
    """A mark of this test's own; whatever carries it is killed at the end."""
    mark = uuid.uuid4().hex
    yield mark
    kill_for_certain(lambda: marked_processes(mark))


def start(run_id: str, code: str, **env: str) -> RankPopen:
    """Start a Python that runs ``code``, and wait until it has begun."""
    told = {**os.environ, environment.RUN_ID: run_id, **env}
    proc = RankPopen(
        [sys.executable, "-c", f"print('ready', flush=True)\n{code}"],
        env=told,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert proc.stdout is not None
    assert proc.stdout.readline() == b"ready\n"
    proc.stdout.close()
    return proc


@pytest.mark.parametrize(("code", "expected"), [("", 0), ("raise SystemExit(3)", 3), ("import os; os.abort()", -6)])
def test_the_return_code_is_what_subprocess_says(run_id: str, code: str, expected: int) -> None:
    """Seen early or late, an exit code and a signal read the same."""
    proc = start(run_id, code)

    assert proc.wait(PATIENCE_S) == expected
    assert proc.reap(PATIENCE_S)
    assert proc.returncode == expected
    assert proc.ended_mono_s > 0


def test_a_main_thread_that_ends_first_is_no_success(run_id: str) -> None:
    """The kernel shows flag and code of the main thread, 0, while another one still runs and then fails."""
    code = (
        "import ctypes, os, threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.5), os._exit(3))).start()\n"
        "ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0)"
    )
    proc = start(run_id, code)

    assert proc.wait(PATIENCE_S) == 3
    assert proc.reap(PATIENCE_S)
    assert proc.returncode == 3


def test_a_kill_is_seen_while_the_memory_is_still_being_freed(run_id: str) -> None:
    """The death of a process with touched memory is reported before ``waitpid`` would."""
    proc = start(run_id, "import time; b = bytearray(b'x') * (1 << 30); time.sleep(100)")
    until(lambda: rss_bytes(proc.pid) > 1 << 30, "the memory to be touched")

    os.kill(proc.pid, signal.SIGKILL)

    assert proc.wait(PATIENCE_S) == -9
    assert proc.reap(PATIENCE_S)


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_a_frozen_rank_is_stopped_at_once(run_id: str) -> None:
    """A SIGTERM would wait for ever: a stopped process gets SIGKILL."""
    proc = start(run_id, "import time; time.sleep(100)")
    worker = Worker(proc, 0, 0, ("", ""), grace_s=60.0)
    os.kill(proc.pid, signal.SIGSTOP)
    until(proc.is_stopped, "the process to stop")

    worker.close(signal.SIGTERM)

    assert proc.wait(PATIENCE_S) == -9
    assert proc.reap(PATIENCE_S)
    assert worker.stopped_by_us


def ignores(pid: int, number: int) -> bool:
    """Say whether a process ignores a signal."""
    (mask,) = re.findall(r"^SigIgn:\s+(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_rank_that_ignores_sigterm_is_killed_after_its_grace(run_id: str) -> None:
    """No rank can refuse to stop."""
    proc = start(run_id, "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(100)")
    until(lambda: ignores(proc.pid, signal.SIGTERM), "the signal to be ignored")
    worker = Worker(proc, 0, 0, ("", ""), grace_s=0.5)

    worker.close(signal.SIGTERM)

    assert proc.wait(PATIENCE_S) == -9
    assert proc.reap(PATIENCE_S)


# A handler that exits with 7 when it is done; the main thread sleeps, or is blocked where Python can't run the handler.
HANDLER = "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(1.5), sys.exit(7)))\n"
BLOCKED = HANDLER + (
    "import ctypes, threading; lock = ctypes.create_string_buffer(64); c = ctypes.CDLL(None)\n"
    "c.pthread_mutex_lock(lock); c.pthread_mutex_lock(lock)"
)


def test_a_handler_that_works_keeps_its_grace(run_id: str) -> None:
    """However soon blocked ranks are given up: a handler that runs, asleep or not, is no blocked one."""
    proc = start(run_id, f"{HANDLER}time.sleep(100)")
    until(lambda: handles(proc.pid, signal.SIGTERM), "the handler")
    worker = Worker(proc, 0, 0, ("", ""), grace_s=60.0, stuck_s=0.5)

    worker.close(signal.SIGTERM)

    assert proc.wait(PATIENCE_S) == 7
    assert proc.reap(PATIENCE_S)


def test_a_rank_whose_handler_cannot_run_does_not_hold_up_a_restart(
    run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocked in native code it will not react: it is killed long before its grace is over, and that is said."""
    proc = start(run_id, BLOCKED)
    until(lambda: proc.place() is not None and handles(proc.pid, signal.SIGTERM), "the rank to be blocked")
    worker = Worker(proc, 0, 3, ("", ""), grace_s=600.0, stuck_s=0.5)

    worker.close(signal.SIGTERM)

    assert proc.wait(PATIENCE_S) == -9
    assert proc.reap(PATIENCE_S)
    assert f"rank 3 (process {proc.pid}) had not moved in its system call for 0.5 s since SIGTERM" in caplog.text


def test_a_run_that_is_ended_gives_even_a_blocked_rank_its_grace(run_id: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its peers leave, too, and may set it free; that the grace was used up is said."""
    proc = start(run_id, BLOCKED)
    until(lambda: proc.place() is not None and handles(proc.pid, signal.SIGTERM), "the rank to be blocked")
    worker = Worker(proc, 0, 3, ("", ""), grace_s=1.5, stuck_s=0.1, is_ending=lambda: True)

    worker.close(signal.SIGTERM)
    worker.close(signal.SIGKILL)  # torch's engine, after its own deadline

    assert proc.wait(PATIENCE_S) == -9
    assert proc.reap(PATIENCE_S)
    assert "had not ended 1.5 s after SIGTERM (--stop-grace sets this time), and was killed" in caplog.text


def test_a_death_is_seen_while_another_rank_sits_out_its_grace(run_id: str) -> None:
    """A rank that dies during a stop is noted then, not when the stop is over: the first death names the cause."""
    slow, quick = (start(run_id, f"{HANDLER}time.sleep(100)") for _ in range(2))
    until(lambda: handles(slow.pid, signal.SIGTERM) and handles(quick.pid, signal.SIGTERM), "the handlers")
    for proc in (slow, quick):
        Worker(proc, 0, 0, ("", ""), grace_s=60.0).close(signal.SIGTERM)

    os.kill(quick.pid, signal.SIGKILL)
    until(lambda: vars(quick).get("ended_mono_s"), "the death to be noted, though nobody asks for it")

    assert slow.wait(PATIENCE_S) == 7
    assert 0.0 < quick.ended_mono_s < slow.ended_mono_s
    for proc in (slow, quick):
        assert proc.reap(PATIENCE_S)


def test_what_outlives_its_grace_is_named_and_ended(run_id: str, caplog: pytest.LogCaptureFixture) -> None:
    """A child that the ranks have left is told of, given its time, and ended; one that ends in time is left alone."""
    mark = {**os.environ, environment.RUN_ID: run_id}
    for_ever = subprocess.Popen(["sleep", "1000"], env=mark, start_new_session=True)
    soon = subprocess.Popen(["sh", "-c", "read line; exit 5"], env=mark, stdin=subprocess.PIPE, start_new_session=True)
    until(
        lambda: {for_ever.pid, soon.pid} <= {*marked_processes(run_id)}, "their marks: while they begin they have none"
    )
    assert soon.stdin is not None
    tell = soon.stdin

    def is_hurried() -> bool:
        """Nobody is; but once they have been told of, one of them has its line."""
        if caplog.records and not tell.closed:
            tell.write(b"line\n")
            tell.close()
        return False

    end_children(lambda: marked_processes(run_id), 4.5, is_hurried)

    assert soon.wait(PATIENCE_S) == 5
    assert for_ever.wait(PATIENCE_S) == -15
    given, ended = (record.getMessage() for record in caplog.records)
    assert "is given 4.5 s" in given
    assert f"{soon.pid} (sh -c read line; exit 5)" in given
    assert f"was ended: {for_ever.pid} (sleep 1000)" in ended


def test_a_signal_ends_the_wait_for_what_the_ranks_have_left(run_id: str) -> None:
    """Who asks for the end does not wait for an upload that may take for ever."""
    mark = {**os.environ, environment.RUN_ID: run_id}
    for_ever = subprocess.Popen(["sleep", "1000"], env=mark, start_new_session=True)
    until(lambda: marked_processes(run_id) == [for_ever.pid], "its mark to be seen: while it begins it has none")

    end_children(lambda: marked_processes(run_id), float("inf"), lambda: True)

    assert for_ever.wait(PATIENCE_S) < 0


def commands(run_id: str) -> list[bytes]:
    """Return the command lines of all that carries a mark."""
    return [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in marked_processes(run_id)]


def test_marks_find_children_that_left_their_session_and_spare_younger_rounds(run_id: str) -> None:
    """A sweep before round 2 takes what round 1 left, and nothing of round 2."""
    code = "import subprocess, time; subprocess.Popen(['setsid', 'sleep', '100']); time.sleep(100)"
    old = start(run_id, code, **{environment.ROUND: "1"})
    new = start(run_id, "import time; time.sleep(100)", **{environment.ROUND: "2"})
    until(lambda: commands(run_id).count(b"sleep\x00100\x00") == 1, "the child to run: in an exec it has no mark")
    assert len(commands(run_id)) == 3

    killed = kill_for_certain(lambda: marked_processes(run_id, before_round=2))

    assert killed == 2
    assert old.wait(PATIENCE_S) == -9
    assert new.poll() is None
    assert old.reap(PATIENCE_S)
    new.kill()
    assert new.reap(PATIENCE_S)


def test_marks_are_found_behind_a_title_that_was_written_over_the_environment(run_id: str) -> None:
    """As setproctitle does: NULs stand where the first variables were, and the mark behind them still counts."""
    code = """
import ctypes, pathlib, time
begin = int(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47])
ctypes.memset(begin, 0, 16)
print("written over", flush=True)
time.sleep(100)
"""
    mark = {"FIRST_OF_ALL_VARIABLES": "for a title", environment.RUN_ID: run_id}
    titled = subprocess.Popen([sys.executable, "-c", code], env=mark, stdout=subprocess.PIPE)
    assert titled.stdout is not None
    assert titled.stdout.readline() == b"written over\n"

    found = marked_processes(run_id)

    titled.kill()
    titled.communicate(timeout=PATIENCE_S)
    assert found == [titled.pid]


def test_marks_are_found_in_the_midst_of_an_exec(run_id: str, tmp_path: Path) -> None:
    """One becomes another program 300 times, and for a moment of each the kernel shows no environment of it."""
    script = tmp_path / "chain.sh"
    script.write_text('[ "$1" = 0 ] && exec sleep 100\nexec sh "$0" $(($1 - 1))\n')
    chain = subprocess.Popen(["sh", str(script), "300"], env={**os.environ, environment.RUN_ID: run_id})
    until(lambda: marked_processes(run_id), "the mark to be seen: before its first exec it has none")
    missed = 0

    while not Path(f"/proc/{chain.pid}/cmdline").read_bytes().startswith(b"sleep"):
        missed += chain.pid not in marked_processes(run_id)

    chain.kill()
    chain.wait(PATIENCE_S)
    assert missed == 0


def test_pid_and_ticks_tell_a_reused_pid_apart() -> None:
    """A process that is not there has no ticks."""
    gone = subprocess.Popen(["true"])
    gone.wait()

    assert start_ticks(os.getpid()) > 0
    assert start_ticks(gone.pid) == 0


def test_who_was_seen_dead_stays_dead_while_another_thread_fetches_the_status(run_id: str) -> None:
    """``Popen`` knows nothing then, and what is fetched is no longer in /proc: the code that was seen still holds."""
    proc = start(run_id, "raise SystemExit(3)")

    with proc._waitpid_lock:  # as the other thread holds it
        until(lambda: proc.poll() is not None, "the death to be seen")
        os.waitpid(proc.pid, 0)
        code = proc.poll()
        proc.returncode = 3  # as the other thread leaves it

    assert code == 3
    assert proc.ended_mono_s > 0.0
