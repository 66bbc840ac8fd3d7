# SPDX-License-Identifier: Apache-2.0
"""How a process stands, from recorded looks at /proc and from real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from megascale_agents.collectors import process
from megascale_agents.evidence import process_state, syscalls
from megascale_agents.evidence.process_state import Child, Look

SLEEPING = Look("S", "futex", "", "futex_do_wait", 7)
# Fields of /proc/PID/syscall: number, six arguments, stack and instruction pointer.
WRITES = "1 0x3 0x7f0c 0x100000 0x0 0x0 0x0 0x7ffdaa34ae50 0x7feb3a2a3f16"
POLLS = "7 0x7fffe4000b70 0x1 0x1388 0x0 0x0 0x0 0x7ffdaa34ae50 0x7feb3a2a3f16"


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of a test; what still runs is killed."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for one in started:
        os.killpg(one.pid, signal.SIGKILL)
        one.wait()
        if one.stdout is not None:
            one.stdout.close()


def sleeps(look: Look) -> bool:
    """Whether a process is in the sleep that its script asked for."""
    return "nanosleep" in look.syscall


def start(children: list[subprocess.Popen[bytes]], script: str, is_there: Callable[[Look], bool]) -> tuple[int, int]:
    """Start a Python process, wait for its first line and until it is in what it does next; its pid and start."""
    one = subprocess.Popen([sys.executable, "-S", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    children.append(one)
    assert one.stdout is not None
    one.stdout.readline()
    ticks = process.read_once(one.pid).start_ticks
    deadline_s = time.monotonic() + 10.0
    while not is_there(process_state.read(one.pid, ticks)):
        assert time.monotonic() < deadline_s, "it never came to what it does next"
        os.sched_yield()
    return one.pid, ticks


@pytest.mark.skipif(syscalls.name_of(1) != "write", reason="the recorded numbers are those of x86-64")
def test_a_call_is_read_with_its_handle() -> None:
    """Where its first argument is one; a pointer is none."""
    assert process_state.parse_syscall(WRITES) == ("write", 3)
    assert process_state.parse_syscall(POLLS) == ("poll", -1)


@pytest.mark.parametrize("text", ["running", "", "-1 0x7ffd 0x7feb", "1", "? 0x1"])
def test_who_is_in_no_call_has_none(text: str) -> None:
    """Running, not permitted, a page fault, another kernel's format."""
    assert process_state.parse_syscall(text) == ("", -1)


def test_an_unknown_call_is_told_by_number() -> None:
    """A new kernel has new ones."""
    assert process_state.parse_syscall("9999 0x1 0x2") == ("system call 9999", -1)


@pytest.mark.parametrize(
    ("name", "target", "expected"),
    [
        ("write", "/mnt/checkpoints/a.pt", True),
        ("fsync", "/mnt/checkpoints/a.pt", True),
        ("read", "/dev/shm/batch", True),
        ("openat", "", True),
        ("read", "pipe:[123]", False),
        ("write", "socket:[123]", False),
        ("read", "/dev/pts/0", False),
        ("recvfrom", "socket:[1]", False),
        ("futex", "", False),
        ("flock", "/mnt/lock", False),
        ("", "", False),
    ],
)
def test_storage_is_told_from_sockets_pipes_and_terminals(name: str, target: str, *, expected: bool) -> None:
    """A rank that reads its debugger's terminal or a peer's socket waits for no disk."""
    assert syscalls.is_storage(name, target) is expected


def test_a_sleeper_is_told_with_its_call() -> None:
    """All looks agree."""
    seen = process_state.sum_up([SLEEPING] * 4, 0.02)

    assert seen.marks == ("in_syscall",)
    assert seen.text == "state S (sleeping), 2% of a core, in futex (wchan futex_do_wait)"
    assert seen.is_asleep
    assert not seen.is_at_file


def test_one_look_awake_is_no_sleep() -> None:
    """A rank that computes sleeps now and then."""
    seen = process_state.sum_up([SLEEPING, Look("R"), SLEEPING, SLEEPING], 0.8)

    assert seen.marks == ()
    assert not seen.is_asleep


def test_other_calls_in_between_name_no_call() -> None:
    """It sleeps, but not in one thing."""
    seen = process_state.sum_up([SLEEPING, SLEEPING._replace(syscall="write", target="/a")], 0.0)

    assert seen.marks == ("in_syscall",)
    assert seen.syscall == ""


def test_a_disk_that_hangs_is_told_from_one_that_is_slow() -> None:
    """State D in every look is nothing while the process runs in between."""
    stuck = [Look("D", "write", "/mnt/a", "io_schedule", 40)] * 4
    slow = [look._replace(runs=40 + number) for number, look in enumerate(stuck)]

    assert process_state.sum_up(stuck, 0.0).marks == ("uninterruptible", "in_syscall", "in_storage")
    assert "in write on /mnt/a (wchan io_schedule)" in process_state.sum_up(stuck, 0.0).text
    assert process_state.sum_up(slow, 0.0).marks == ("in_syscall", "in_storage")
    assert process_state.sum_up(stuck[:1], 0.0).marks == ("in_syscall", "in_storage")


def test_a_stopped_process_sleeps_in_nothing() -> None:
    """Its last call is not what it waits for."""
    assert process_state.sum_up([Look("T", "futex")] * 2, 0.0).marks == ("stopped",)
    assert process_state.sum_up([Look("S", wchan="do_freezer_trap")] * 2, 0.0).marks == ("stopped",)
    assert process_state.sum_up([Look("t")] * 2, 0.0).marks == ()


def test_a_process_that_goes_away_is_gone() -> None:
    """Also in the middle of the looks."""
    assert process_state.sum_up([SLEEPING, Look("")], 0.0) == process_state.ProcessLook("process is gone", ("gone",))


def test_only_children_that_stand_still_are_named() -> None:
    """Stopped, or in one sleep of state D; not one that was so once."""
    before = (Child(1, "w", "T", 5), Child(2, "w", "D", 5), Child(3, "w", "D", 5), Child(4, "w", "T", 5))
    after = (Child(1, "w", "T", 5), Child(2, "w", "D", 5), Child(3, "w", "D", 6), Child(4, "w", "S", 6))
    seen = process_state.sum_up([SLEEPING._replace(children=before), SLEEPING._replace(children=after)], 0.0)

    assert seen.marks == ("in_syscall", "worker_stopped")
    assert seen.text.splitlines()[1:] == ["child 1 w: state T", "child 2 w: state D", "2 other children"]


async def test_a_real_sleeper(children: list[subprocess.Popen[bytes]]) -> None:
    """As the kernel of this machine tells it."""
    seen = await process_state.read_state(
        *start(children, "import time; print(1, flush=True); time.sleep(600)", sleeps), 0.0, 1.0
    )

    assert seen.marks == ("in_syscall",)
    assert "nanosleep" in seen.text


async def test_a_real_loop(children: list[subprocess.Popen[bytes]]) -> None:
    """Nothing is said of it but that it runs."""
    seen = await process_state.read_state(
        *start(children, "print(1, flush=True)\nwhile True: pass", lambda look: look.state == "R"), 1.0, 1.0
    )

    assert seen.marks == ()
    assert seen.text.startswith("state R (running), 100% of a core")


async def test_a_real_writer_to_a_full_pipe(children: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """With the file that it writes to."""
    path = tmp_path / "full"
    os.mkfifo(path)
    script = f"""
import os
reader = os.open({str(path)!r}, os.O_RDONLY | os.O_NONBLOCK)
print(1, flush=True)
os.write(os.open({str(path)!r}, os.O_WRONLY), bytes(1 << 20))
"""
    seen = await process_state.read_state(*start(children, script, lambda look: look.target == str(path)), 0.0, 1.0)

    assert seen.marks == ("in_syscall", "in_storage")
    assert f"in write on {path}" in seen.text


async def test_a_stopped_grandchild_is_found(children: list[subprocess.Popen[bytes]]) -> None:
    """Workers may be children of a server that forks."""
    script = """
import subprocess, sys
inner = "import os, signal; print(1, flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
outer = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {inner!r}])"
subprocess.run([sys.executable, "-S", "-c", outer])
"""
    seen = await process_state.read_state(
        *start(children, script, lambda look: any(one.state == "T" for one in look.children)), 0.0, 1.0
    )

    assert "worker_stopped" in seen.marks
    assert "1 other children" in seen.text


async def test_another_process_under_the_same_pid_is_not_ours(children: list[subprocess.Popen[bytes]]) -> None:
    """Its start tells them apart."""
    pid, ticks = start(children, "import time; print(1, flush=True); time.sleep(600)", sleeps)

    assert (await process_state.read_state(pid, ticks - 1, 0.0, 1.0)).marks == ("gone",)


async def test_a_short_deadline_takes_fewer_looks(
    children: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at least."""
    looks: list[int] = []
    read = process_state.read
    pid, ticks = start(children, "import time; print(1, flush=True); time.sleep(600)", sleeps)
    monkeypatch.setattr(process_state, "read", lambda pid, ticks: looks.append(pid) or read(pid, ticks))

    await process_state.read_state(pid, ticks, 0.0, 0.03)

    assert len(looks) == 1
