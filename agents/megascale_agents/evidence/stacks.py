# SPDX-License-Identifier: Apache-2.0
"""Where is a rank's Python code right now? Three ways, the gentlest first, each with a deadline.

1. Its worker server (``dump_traceback``): no signal, no ptrace; answers in 0.3 ms, but needs the GIL.
2. ``SIGUSR1`` to the faulthandler that the recorder registered: 0.6 ms, also under a held GIL. The stacks are appended
   to ``<box dir>/<rank>.stacks``. A process without a handler would die of the signal, so it is sent only to one that
   catches it *and* holds that very file open, and to a thread that it does not wake (``evidence/stack_signal``).
3. py-spy: the only one that sees into a stopped process, and the only one that sees native frames.

A stopped process answers neither of the first two. A server that answers a ping and not ``dump_traceback`` means that
native code holds the GIL; then py-spy comes first, since it is the native code that matters. Either is evidence.
"""

import asyncio
import contextlib
import os
import re
import signal
import time
from pathlib import Path
from typing import NamedTuple

from megascale_agents.evidence import (
    flight_recorder,
    frame_classes,
    loader_workers,
    py_spy,
    stack_signal,
    tracebacks,
)
from megascale_agents.evidence.flight_recorder import NoAnswerError, TooLateError
from megascale_agents.evidence.frame_classes import Frame
from megascale_agents.evidence.process_state import ProcessLook
from megascale_agents.ownership import files
from megascale_agents.ownership.processes import Held
from megascale_agents.ownership.rights import Owner
from megascale_ops.schema.messages import MARKS

_POLL_S = 0.01
# Faulthandler writes its text in one go within a millisecond: 30 ms without growth is the end.
_QUIET_S = 0.03
_MOST_BYTES = 1 << 20  # 100 threads of 100 frames
# 1 s: three thousand times what the server takes; beyond it, waiting longer only takes time from the other ways.
_SERVER_S = 1.0
_PING_S = 0.3
# Python's own ways to wait: a thread that sleeps there does not wait in a collective's C++.
_WAITS_IN_PYTHON = re.compile(
    r"(^|/)(threading|queue|selectors|subprocess|socket|ssl)\.py$|/(multiprocessing|asyncio|concurrent)/"
)


class Stacks(NamedTuple):
    """The stacks; ``text`` is the reason when ``ok`` is false."""

    ok: bool
    text: str
    frames: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    worker: str = ""  # of a rank that waits for its data loader: which process makes the batch, and where it stands


class Target(NamedTuple):
    """Whose stacks are wanted, and what is known of it without asking."""

    rank: int
    pid: int
    box_dir: str
    process: Held
    owner: Owner
    state: str  # the kernel's letter, "" when the process is gone
    stopped_s: float = 0.0
    standing: ProcessLook = ProcessLook("")
    waits: bool = False  # its process groups have unfinished collectives


class _Found(NamedTuple):
    """The answer of one way."""

    text: str
    frames: tuple[Frame, ...]
    owns_gil: bool | None = None  # None: this way can't read it


async def dump(target: Target, deadline_s: float) -> Stacks:
    """Get a rank's stacks in one of the three ways before the deadline."""
    if not target.state:
        return Stacks(ok=False, text="no answer: process is gone", marks=("gone",))
    end_s = time.monotonic() + deadline_s
    if target.state == "T":
        said = f"no answer: process is stopped (state T for {target.stopped_s:.1f} s)"
        try:
            # A process that is stopped already can't be paused, and need not be.
            spied = await _spy(target, deadline_s, "--nonblocking")
        except NoAnswerError:
            return Stacks(ok=False, text=said, marks=("no_answer", "stopped"))
        marks = {"stopped", frame_classes.place_of(spied.frames)}
        return Stacks(
            ok=True,
            text=f"{said}\n{spied.text}",
            frames=frame_classes.write(spied.frames),
            marks=_ordered(marks),
        )
    found = await _ask_all(target, end_s)
    left_s = end_s - time.monotonic()
    if "in_data_loader" not in found.marks or left_s <= 0:
        return found
    worker = await loader_workers.look(target.pid, left_s, target.owner)
    text = f"{found.text}\n\n{worker.text}" if worker.text else found.text
    return found._replace(text=text, worker=worker.where if target.process.is_same else "")


async def _ask_all(target: Target, end_s: float) -> Stacks:
    """Ask one way after the other; none takes more than its share of the time that is left."""
    reasons: list[str] = []
    late = held = False
    ways = [_by_server, _by_signal, _by_py_spy]
    while ways:
        way, *ways = ways
        share_s = (end_s - time.monotonic()) / (1 + len(ways))
        if share_s <= 0:
            late = True
            reasons.append("no answer: the deadline has passed")
            break
        try:
            found = await way(target, share_s)
        except NoAnswerError as error:
            reasons.append(str(error))
            late |= isinstance(error, TooLateError)
            if way is _by_server and isinstance(error, TooLateError) and await _lives(target):
                held, ways = True, [_by_native, _by_py_spy, _by_signal]
            continue
        # The ways that look from outside decide: a server may also be late on an overloaded machine.
        held = held and found.owns_gil is not False
        if not held and _is_unclear(target, found) and time.monotonic() < end_s:
            with contextlib.suppress(NoAnswerError):  # what was found already is kept
                found = await _by_native(target, end_s - time.monotonic())
        return _tell(target, found, held=held)
    marks = {"gil_held" if held else "", "no_answer" if late else ""}
    return Stacks(ok=False, text="; ".join(reasons), marks=_ordered(marks))


def _tell(target: Target, found: _Found, *, held: bool) -> Stacks:
    """Put the frames into words and marks."""
    place = frame_classes.place_of(found.frames)
    innermost = found.frames[0] if found.frames else Frame("", "", 0)
    waits = target.waits and target.standing.syscall == "futex"
    if not place and waits and innermost.function == "_engine_run_backward":
        place = "in_collective"  # DDP's own, which C++ waits for at the end of a backward pass
    if not place and target.standing.is_at_file:
        place = "in_storage"
    if not place and not held:
        running = "in_native" if innermost.native else "in_python" if found.frames else ""
        place = "in_syscall" if target.standing.is_asleep else running
    marks = {place, *(("gil_held", "in_native") if held else ())}
    said = "no answer of the worker server: native code holds the GIL\n" if held else ""
    return Stacks(ok=True, text=said + found.text, frames=frame_classes.write(found.frames), marks=_ordered(marks))


def _is_unclear(target: Target, found: _Found) -> bool:
    """Return whether a rank with unfinished collectives sleeps in C++ that its Python frames don't name."""
    if (
        not target.waits
        or target.standing.syscall != "futex"
        or not found.frames
        or frame_classes.place_of(found.frames)
    ):
        return False
    innermost = found.frames[0]
    return innermost.function != "_engine_run_backward" and not _WAITS_IN_PYTHON.search(innermost.file)


def _ordered(marks: set[str]) -> tuple[str, ...]:
    """Put marks into the order of the vocabulary."""
    return tuple(mark for mark in MARKS if mark in marks)


async def _lives(target: Target) -> bool:
    """Return whether the worker server answers what needs no GIL."""
    socket = flight_recorder.socket_path(target.box_dir, target.rank)
    try:
        return bool(await flight_recorder.ask(socket, "ping", _PING_S, target.owner))
    except NoAnswerError:
        return False


async def _by_server(target: Target, deadline_s: float) -> _Found:
    socket = flight_recorder.socket_path(target.box_dir, target.rank)
    data = await flight_recorder.ask(socket, "dump_traceback", min(deadline_s, _SERVER_S), target.owner)
    text = tracebacks.parse(data)
    if not text:
        raise NoAnswerError("no answer: the worker server knows no stacks")
    return _Found(text, tracebacks.main_frames(data))


async def _by_py_spy(target: Target, deadline_s: float) -> _Found:
    return _Found(*await _spy(target, deadline_s))


async def _by_native(target: Target, deadline_s: float) -> _Found:
    return _Found(*await _spy(target, deadline_s, "--native"))


async def _spy(target: Target, deadline_s: float, *options: str) -> py_spy.Spied:
    """Ask py-spy, which knows a process by its number alone: what it saw counts if that is the same process still."""
    spied = await py_spy.ask(target.pid, deadline_s, *options, owner=target.owner)
    if not target.process.is_same:
        raise NoAnswerError("no answer: the process ended or changed its user while py-spy looked")
    return spied


async def _by_signal(target: Target, deadline_s: float) -> _Found:
    path = Path(target.box_dir, f"{target.rank}.stacks")
    try:
        handle = files.opened(path, target.owner)
    except FileNotFoundError as error:
        raise NoAnswerError("no answer: no faulthandler is registered") from error
    except OSError as error:
        raise NoAnswerError(f"no answer: faulthandler: {error}") from error
    try:
        found = os.fstat(handle)
        if not (_is_registered(target.pid, path.name, found.st_ino) and target.process.is_same):
            raise NoAnswerError("no answer: no faulthandler is registered")
        stack_signal.ask(target.process)
        await _growth(handle, found.st_size, time.monotonic() + deadline_s)
        written = os.pread(handle, _MOST_BYTES, found.st_size)
    except OSError as error:
        raise NoAnswerError(f"no answer: faulthandler: {error}") from error
    finally:
        os.close(handle)
    if not written:
        raise TooLateError(f"no answer: faulthandler wrote nothing in {deadline_s:.2g} s")
    return _Found(tracebacks.parse(written), tracebacks.main_frames(written))


async def _growth(handle: int, before: int, end_s: float) -> None:
    """Wait until an open file has grown and grows no more."""
    size, quiet_from_s = before, time.monotonic()
    while time.monotonic() < end_s and (size == before or time.monotonic() - quiet_from_s < _QUIET_S):
        await asyncio.sleep(_POLL_S)
        if (now := os.fstat(handle).st_size) != size:
            size, quiet_from_s = now, time.monotonic()


def _is_registered(pid: int, name: str, inode: int) -> bool:
    """Return whether the process catches SIGUSR1 and holds the stacks file open, so that the signal is harmless."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        if not catches(status, signal.SIGUSR1):
            return False
        handles = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
    for handle in handles:
        with contextlib.suppress(OSError):
            # The name first: a stat of a file on a network disk that hangs would stop the agent.
            if handle.readlink().name == name and handle.stat().st_ino == inode:
                return True
    return False


def catches(status: str, number: int) -> bool:
    """Return whether a process has a handler for a signal, by the text of /proc/PID/status (line ``SigCgt``)."""
    for line in status.splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
