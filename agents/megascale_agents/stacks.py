# SPDX-License-Identifier: Apache-2.0
"""Where is a rank's Python code right now? Three ways, the gentlest first, each with a deadline.

1. Its worker server (``dump_traceback``): no signal, no ptrace; answers in 0.3 ms, mostly also under a held GIL.
2. ``SIGUSR1`` to the faulthandler that the recorder registered: 0.6 ms, also under a held GIL. The stacks are appended
   to ``<box dir>/<rank>.stacks``. A process without a handler would die of the signal, so it is sent only to one that
   catches it *and* holds that very file open.
3. ``py-spy``, where installed and permitted: 10 ms; the only one that sees into a stopped process.

A stopped process answers neither of the first two. That is said, and is evidence by itself.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from megascale_agents import flight_recorder
from megascale_agents.flight_recorder import NoAnswerError

_POLL_S = 0.01
# Faulthandler writes its text in one go within a millisecond: 30 ms without growth is the end.
_QUIET_S = 0.03
_MOST_BYTES = 1 << 20  # 100 threads of 100 frames


class Stacks(NamedTuple):
    """What was found; ``text`` says why when ``ok`` is false."""

    ok: bool
    text: str


class Target(NamedTuple):
    """Whose stacks are wanted."""

    rank: int
    pid: int
    box_dir: str
    state: str  # the kernel's letter, "" when the process is gone
    stopped_s: float = 0.0


class _Frame(msgspec.Struct):
    name: str = ""
    filename: str = ""
    line: int = 0


class _Thread(msgspec.Struct):
    thread_name: str | None = None
    os_thread_id: int | None = None
    active: bool = False
    owns_gil: bool = False
    frames: list[_Frame] = []


async def dump(target: Target, deadline_s: float) -> Stacks:
    """Get a rank's stacks in one of the three ways before the deadline."""
    if not target.state:
        return Stacks(ok=False, text="no answer: process is gone")
    if target.state == "T":
        said = f"no answer: process is stopped (state T for {target.stopped_s:.1f} s)"
        try:
            return Stacks(ok=True, text=f"{said}\n{await _by_py_spy(target, deadline_s)}")
        except NoAnswerError:
            return Stacks(ok=False, text=said)
    reasons = []
    end_s = time.monotonic() + deadline_s
    for left, way in ((3, _by_server), (2, _by_signal), (1, _by_py_spy)):
        share_s = (end_s - time.monotonic()) / left
        if share_s <= 0:
            reasons.append("no answer: the deadline has passed")
            break
        try:
            return Stacks(ok=True, text=await way(target, share_s))
        except NoAnswerError as error:
            reasons.append(str(error))
    return Stacks(ok=False, text="; ".join(reasons))


async def _by_server(target: Target, deadline_s: float) -> str:
    socket = flight_recorder.socket_path(target.box_dir, target.rank)
    text = parse_traceback(await flight_recorder.ask(socket, "dump_traceback", deadline_s))
    if not text:
        raise NoAnswerError("no answer: the worker server knows no stacks")
    return text


async def _by_signal(target: Target, deadline_s: float) -> str:
    path = Path(target.box_dir, f"{target.rank}.stacks")
    try:
        if not _is_registered(target.pid, path):
            raise NoAnswerError("no answer: no faulthandler is registered")
        before = _size(path)
        os.kill(target.pid, signal.SIGUSR1)
        size, end_s = before, time.monotonic() + deadline_s
        quiet_from_s = time.monotonic()
        while time.monotonic() < end_s and (size == before or time.monotonic() - quiet_from_s < _QUIET_S):
            await asyncio.sleep(_POLL_S)
            if (now := _size(path)) != size:
                size, quiet_from_s = now, time.monotonic()
        written = _read_from(path, before)
    except OSError as error:
        raise NoAnswerError(f"no answer: faulthandler: {error}") from error
    if not written:
        raise NoAnswerError(f"no answer: faulthandler wrote nothing in {deadline_s:.2g} s")
    return parse_traceback(written)


def _size(path: Path) -> int:
    return path.stat().st_size


def _read_from(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(_MOST_BYTES)


def _is_registered(pid: int, path: Path) -> bool:
    """Tell whether the process catches SIGUSR1 and holds the stacks file open, so that the signal is harmless."""
    try:
        inode = path.stat().st_ino
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        if not catches(status, signal.SIGUSR1):
            return False
        handles = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
    for handle in handles:
        with contextlib.suppress(OSError):
            if handle.stat().st_ino == inode:
                return True
    return False


def catches(status: str, number: int) -> bool:
    """Tell from the text of /proc/PID/status whether the process has a handler for a signal (line ``SigCgt``)."""
    for line in status.splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


async def _by_py_spy(target: Target, deadline_s: float) -> str:
    program = py_spy_program()
    if not program:
        raise NoAnswerError("no answer: py-spy is not installed")
    # A process that is stopped already can't be paused, and need not be.
    pause = ("--nonblocking",) if target.state == "T" else ()
    process = await asyncio.create_subprocess_exec(
        program, "dump", "--json", "--pid", str(target.pid), *pause,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(deadline_s):
            out, complaint = await process.communicate()
    except TimeoutError as error:
        raise NoAnswerError(f"no answer: py-spy took longer than {deadline_s:.2g} s") from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode != 0:
        last = complaint.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise NoAnswerError(f"no answer: py-spy: {last[:200]}")
    return parse_py_spy(out)


def py_spy_program() -> str:
    """Return where py-spy is: beside the Python that runs us, or on the PATH; "" when nowhere."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy") or ""


def parse_traceback(data: bytes) -> str:
    """Put the main thread, which both faulthandler and the worker server write last, first; drop empty threads."""
    blocks = [block.strip("\n") for block in data.decode("utf-8", "replace").split("\n\n")]
    kept = [block for block in blocks if block.strip() and "<no Python frame>" not in block]
    threads: list[str] = []
    for line in "\n".join(kept).splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x")) or not threads:
            threads.append(line)
        elif line.strip():
            threads[-1] += "\n" + line
    return "\n\n".join(reversed(threads))


def parse_py_spy(data: bytes) -> str:
    """Write py-spy's JSON as text, the main thread first, with who holds the GIL.

    Raises:
        NoAnswerError: when it is not py-spy's JSON.
    """
    try:
        threads = msgspec.json.decode(data, type=list[_Thread])
    except msgspec.MsgspecError as error:
        raise NoAnswerError(f"no answer: what py-spy wrote can't be read: {error}") from error
    threads.sort(key=lambda thread: thread.thread_name != "MainThread")
    blocks = []
    for thread in threads:
        notes = ["active" if thread.active else "idle", *(["holds the GIL"] if thread.owns_gil else [])]
        head = f"Thread {thread.os_thread_id or 0} {thread.thread_name or ''} ({', '.join(notes)})"
        frames = [f'  File "{frame.filename}", line {frame.line} in {frame.name}' for frame in thread.frames]
        blocks.append("\n".join((head, *frames)))
    return "\n\n".join(blocks)
