# SPDX-License-Identifier: Apache-2.0
"""The state of a rank's process: running, asleep in which system call, stopped, and what its children do.

This needs no answer of the process: the kernel shows it of processes that are stopped, hold the GIL or wait for a disk
that hangs. One sample proves little, since a rank that reads its data is in state D now and then. So several are taken
and only what all of them agree on is reported; D counts only when the process never ran in between.

Nothing is read here that waits for the process's memory map (``cmdline``, ``maps``): in state D that may never answer.
Source: proc_pid_stat(5), proc_pid_syscall(5), proc_pid_wchan(5).
"""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megascale_agents.collectors import process
from megascale_agents.evidence import syscalls

# 4 looks within 0.15 s: a slow but working disk ends a read of 1 MB in 10 ms.
_LOOKS = 4
_PAUSE_S = 0.05
_MOST_CHILDREN = 64  # a rank has 2 to 16 data loader workers; each may have children of its own
_FROZEN_AT = ("do_freezer_trap", "__refrigerator")  # a frozen cgroup shows as sleep

_WORDS = {"R": "running", "S": "sleeping", "D": "uninterruptible", "T": "stopped", "t": "held by a debugger"}


class Child(NamedTuple):
    """A process that the rank started, or one of its children's."""

    pid: int
    name: str
    state: str
    runs: int  # how often it was put on a CPU; -1 unknown


class Look(NamedTuple):
    """One look at a process; ``syscall`` "" and ``wchan`` "" where not readable or running."""

    state: str
    syscall: str = ""
    target: str = ""  # what the call's handle is open on
    wchan: str = ""
    runs: int = -1
    children: tuple[Child, ...] = ()


class ProcessLook(NamedTuple):
    """What all looks agree on."""

    text: str
    marks: tuple[str, ...] = ()
    syscall: str = ""
    runs: bool = False  # its main thread was in state R in at least half of two looks or more

    @property
    def is_asleep(self) -> bool:
        """Whether the main thread slept in every look."""
        return "in_syscall" in self.marks or "uninterruptible" in self.marks

    @property
    def is_at_file(self) -> bool:
        """Whether it sleeps in a call that reads or writes a file."""
        return "in_storage" in self.marks


async def read_state(pid: int, start_ticks: int, busy: float, deadline_s: float) -> ProcessLook:
    """Look several times, as often as the deadline allows, and sum up."""
    looks = [read(pid, start_ticks)]
    while looks[-1].state and len(looks) < _LOOKS and len(looks) * _PAUSE_S <= deadline_s:
        await asyncio.sleep(_PAUSE_S)
        looks.append(read(pid, start_ticks))
    return sum_up(looks, busy)


def read(pid: int, start_ticks: int) -> Look:
    """Look once."""
    stat = process.read_once(pid)
    if stat.start_ticks != start_ticks or not stat.state:
        return Look("")
    syscall, handle = parse_syscall(_text(f"/proc/{pid}/syscall"))
    target = ""
    if handle >= 0:
        with contextlib.suppress(OSError):
            target = str(Path(f"/proc/{pid}/fd/{handle}").readlink())
    wchan = _text(f"/proc/{pid}/wchan")
    # The threads of a process count one by one; the first is the main thread.
    runs = parse_runs(_text(f"/proc/{pid}/task/{pid}/schedstat"))
    return Look(stat.state, syscall, target, "" if wchan == "0" else wchan, runs, _children(pid))


def parse_syscall(text: str) -> tuple[str, int]:
    """Read /proc/PID/syscall: the call's name, and its handle or -1. ("", -1) when running or not readable."""
    fields = text.split()
    try:
        number = int(fields[0])
        first = int(fields[1], 16)
    except (ValueError, IndexError):
        return "", -1
    if number < 0:  # blocked, but not in a system call: a page fault
        return "", -1
    name = syscalls.name_of(number) or f"system call {number}"
    return name, first if name in syscalls.ON_HANDLES and first < 1 << 31 else -1


def parse_runs(text: str) -> int:
    """Read /proc/PID/schedstat: how often it was put on a CPU; -1 when not readable."""
    fields = text.split()
    return int(fields[2]) if len(fields) > 2 and fields[2].isdigit() else -1


def sum_up(looks: Sequence[Look], busy: float) -> ProcessLook:
    """Return what all samples agree on.

    Args:
        looks: One or more, oldest first.
        busy: Share of one core that the process used lately.
    """
    last = looks[-1]
    if not last.state:
        return ProcessLook("process is gone", ("gone",))
    states = {look.state for look in looks}
    calls = {(look.syscall, look.target) for look in looks}
    syscall, target = calls.pop() if len(calls) == 1 else ("", "")
    marks = []
    if states == {"T"} or all(look.wchan in _FROZEN_AT for look in looks):
        marks.append("stopped")
    elif states == {"D"} and _never_ran([look.runs for look in looks]):
        marks.append("uninterruptible")
    if "stopped" not in marks and states <= {"S", "D"}:
        marks.append("in_syscall")
        if syscalls.is_storage(syscall, target):
            marks.append("in_storage")
    halted = _halted(looks)
    if halted:
        marks.append("worker_stopped")
    where = f", in {syscall}" if syscall else ""
    where += f" on {target}" if target else ""
    where += f" (wchan {last.wchan})" if last.wchan else ""
    lines = [f"state {last.state} ({_WORDS.get(last.state, 'unknown')}), {busy:.0%} of a core{where}"]
    lines += [f"child {child.pid} {child.name}: state {child.state}" for child in halted]
    others = len(last.children) - len(halted)
    lines += [f"{others} other children"] if others else []
    running = sum(look.state == "R" for look in looks)
    return ProcessLook("\n".join(lines), tuple(marks), syscall, runs=len(looks) > 1 and 2 * running >= len(looks))


def _halted(looks: Sequence[Look]) -> list[Child]:
    """Return the children that were stopped, or in state D without ever running, in every look."""
    found = []
    for child in looks[-1].children:
        same = [known for look in looks for known in look.children if known.pid == child.pid]
        stopped = all(known.state == "T" for known in same)
        stuck = all(known.state == "D" for known in same) and _never_ran([known.runs for known in same])
        if len(same) == len(looks) and (stopped or stuck):
            found.append(child)
    return found


def _never_ran(runs: Sequence[int]) -> bool:
    """Return whether a process slept one sleep through all looks (two at least, or nothing is proven)."""
    return len(runs) > 1 and len(set(runs)) == 1


def _children(pid: int) -> tuple[Child, ...]:
    """Return the process's children and theirs, by whatever thread they were started."""
    found: list[Child] = []
    for child in process.below(pid, _MOST_CHILDREN):
        state = process.read_once(child).state
        if state:
            runs = parse_runs(_text(f"/proc/{child}/schedstat"))
            found.append(Child(child, _text(f"/proc/{child}/comm"), state, runs))
    return tuple(found)


def _text(path: str) -> str:
    """Return the text of a file of /proc, "" when it can't be read."""
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
