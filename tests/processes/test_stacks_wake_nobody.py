# SPDX-License-Identifier: Apache-2.0
"""A rank sleeps in one call of C, which any signal's handler would end: it is asked for its stacks and sleeps on.

No torch, so no worker server: the stacks come by the signal, or by py-spy where no thread may take that.
"""

import asyncio
import fcntl
import functools
import os
import signal
from pathlib import Path

import pytest
from megascale_agents.evidence import stacks
from megascale_agents.ownership.processes import Held
from megascale_agents.ownership.rights import myself

from tests.processes.launch import until
from tests.processes.ranks import Rank, Ranks

pytestmark = pytest.mark.processes

# Long enough for 18 questions, of 0.1 s each, on a machine seven times slower.
NAP_S = 15
# The kernel answers 0 when the nap lasted, -1 when a handler ended it. PyDLL keeps the interpreter's lock meanwhile.
NAPS = """
import ctypes, fcntl, os, sys
OPENED
library = ctypes.LIBRARY(None, use_errno=True)
class Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("parts", ctypes.c_long)]
open("up-" + os.environ["RANK"], "w").close()
fcntl.flock(os.open("bedtime", os.O_RDONLY), fcntl.LOCK_SH)
def naps():
    print("naps now", file=sys.stderr, flush=True)
    answer = CALL
    print("slept" if answer == 0 else os.strerror(ctypes.get_errno()), flush=True)
naps()
"""
CALLS = {
    "nanosleep": "library.nanosleep(ctypes.byref(Time(NAP_S, 0)), None)",
    "poll": "library.poll(None, 0, NAP_S * 1000)",
    "select": "library.select(0, None, None, None, ctypes.byref(Time(NAP_S, 0)))",
}
OPENED = "from megascale_ops.recorder import recorder; recorder.step(0)"


@pytest.fixture
def start(tmp_path: Path) -> Ranks:
    """Ranks without a runner."""
    return Ranks(tmp_path)


def is_in(pid: int, numbers: set[str]) -> bool:
    """Say whether a process's main thread is in one of these system calls."""
    return Path(f"/proc/{pid}/syscall").read_text().split()[0] in numbers


class Bedtime:
    """Keeps ranks awake until all of them are up: one takes longer to start than another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = os.open(folder / "bedtime", os.O_RDWR | os.O_CREAT)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def until_up(self, *ranks: Rank) -> None:
        """Wait until they are."""
        until(lambda: all((self._folder / f"up-{rank.rank}").exists() for rank in ranks), "the ranks to be up")

    def comes(self, *ranks: Rank) -> None:
        """Let them nap, and wait until they do: only there do their main threads sleep in one of these calls."""
        self.until_up(*ranks)
        os.close(self._lock)
        numbers = {"35", "230", "7", "271", "23", "270"}  # nanosleep, poll and select as x86-64 and glibc have them
        for rank in ranks:
            until(functools.partial(is_in, rank.process.pid, numbers), "a rank to nap")


@pytest.fixture
def bedtime(tmp_path: Path) -> Bedtime:
    """For the ranks of a test."""
    return Bedtime(tmp_path)


def script(call: str, library: str = "CDLL", opened: str = OPENED, nap_s: int = NAP_S) -> str:
    """Return a script that naps."""
    told = {"CALL": CALLS[call], "LIBRARY": library, "OPENED": opened, "NAP_S": str(nap_s)}
    return functools.reduce(lambda text, word: text.replace(word, told[word]), told, NAPS)


def asked(rank: Rank) -> stacks.Stacks:
    """Ask a rank for its stacks, as an agent does."""
    handle = os.pidfd_open(rank.process.pid)
    try:
        held = Held(rank.process.pid, handle)
        target = stacks.Target(rank.rank, rank.process.pid, str(rank.box_dir), held, myself(), "S")
        return asyncio.run(stacks.dump(target, 3.0))
    finally:
        os.close(handle)


def test_a_rank_that_sleeps_in_c_tells_its_stacks_and_sleeps_on(
    start: Ranks, bedtime: Bedtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the interpreter's lock held and without, asked three times. The control: the same signal to the process."""
    monkeypatch.setattr("megascale_agents.evidence.py_spy.program", lambda: "")
    ways = [(call, library) for call in CALLS for library in ("CDLL", "PyDLL")]
    ranks = [start(script(*way), number) for number, way in enumerate(ways)]
    control = start(script("nanosleep"), len(ranks))
    try:
        bedtime.comes(*ranks, control)

        control.process.send_signal(signal.SIGUSR1)
        told = [asked(rank) for rank in ranks for _ in range(3)]
        ends = [rank.end() for rank in (*ranks, control)]
    finally:
        start.close()

    assert all(one.ok and one.frames[0].startswith("naps (") for one in told), told
    assert [(code, out) for code, out, _ in ends[:-1]] == [(0, "slept\n")] * len(ranks), ends
    assert ends[-1][:2] == (0, "Interrupted system call\n")


def test_where_a_signal_would_wake_a_rank_it_is_looked_at_from_outside(
    start: Ranks, bedtime: Bedtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before torch is imported no thread of the recorder can take the signal: py-spy reads them, or nothing does."""
    rank = start(script("nanosleep", opened="", nap_s=10))
    try:
        bedtime.comes(rank)

        by_py_spy = asked(rank)
        monkeypatch.setattr("megascale_agents.evidence.py_spy.program", lambda: "")
        by_nobody = asked(rank)
        code, out, _ = rank.end()
    finally:
        start.close()

    assert by_py_spy.ok or "py-spy:" in by_py_spy.text, by_py_spy  # a container may forbid it to look
    assert not by_nobody.ok
    assert "a signal could wake the script" in by_nobody.text
    assert (code, out) == (0, "slept\n")


def test_a_script_that_takes_the_signal_for_itself_is_never_sent_it(
    start: Ranks, bedtime: Bedtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handler would save and leave; the kernel can't tell it from ours, which is asked in the first test."""
    monkeypatch.setattr("megascale_agents.evidence.py_spy.program", lambda: "")
    taken = f"{OPENED}; import signal; signal.signal(signal.SIGUSR1, lambda *_: print('saves'))"
    rank = start(script("nanosleep", opened=taken, nap_s=8))
    try:
        bedtime.until_up(rank)
        until(lambda: not (rank.box_dir / "0.stacks").exists(), "the recorder to see it")
        bedtime.comes(rank)

        told = asked(rank)
        code, out, _ = rank.end()
    finally:
        start.close()

    assert not told.ok
    assert "no faulthandler is registered" in told.text
    assert (code, out) == (0, "slept\n")
