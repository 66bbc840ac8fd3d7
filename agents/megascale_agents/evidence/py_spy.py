# SPDX-License-Identifier: Apache-2.0
"""Stacks by py-spy, where installed and permitted: from outside, also of a process that is stopped or holds the GIL.

10 ms for Python frames. With native frames (``--native``) 0.2 to 1.8 s of CPU time, most of it to read torch's symbols:
only for a rank that nothing else explains.
"""

import asyncio
import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from megascale_agents.evidence.flight_recorder import NoAnswerError, TooLateError
from megascale_agents.evidence.frame_classes import Frame
from megascale_agents.ownership.rights import Owner
from megascale_ops.foreign import UNREADABLE

# A py-spy that was killed in state D (its target's disk hangs) can't be waited for.
_REAP_S = 0.2


class Spied(NamedTuple):
    """What py-spy saw; ``frames`` are the main thread's, innermost first."""

    text: str
    frames: tuple[Frame, ...]
    owns_gil: bool  # some thread holds the GIL


class _Frame(msgspec.Struct):
    name: str = ""
    filename: str = ""
    module: str | None = None  # the shared object of a native frame
    line: int = 0


class _Thread(msgspec.Struct):
    thread_name: str | None = None
    os_thread_id: int | None = None
    active: bool = False
    owns_gil: bool = False
    frames: list[_Frame] = []


def program() -> str:
    """Return where py-spy is: beside the Python that runs us, or on the PATH; "" when nowhere."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy") or ""


async def ask(pid: int, deadline_s: float, *options: str, owner: Owner | None = None) -> Spied:
    """Run ``py-spy dump`` with more options, as another user where the process is his.

    It unwinds stacks and reads symbols of files that a user has made: none of that is for root to do. Where the kernel
    lets only root look (Yama's ``ptrace_scope``), there are no stacks by this way.

    Raises:
        NoAnswerError: it is not there, may not look, failed, or (``TooLateError``) took too long.
    """
    path = program()
    if not path:
        raise NoAnswerError("no answer: py-spy is not installed")
    try:
        process = await asyncio.create_subprocess_exec(
            path, "dump", "--json", "--pid", str(pid), *options,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            **_as_user(owner),
        )  # fmt: skip
    except OSError as error:
        raise NoAnswerError(f"no answer: py-spy: {error}") from error
    try:
        async with asyncio.timeout(deadline_s):
            out, complaint = await process.communicate()
    except TimeoutError as error:
        raise TooLateError(f"no answer: py-spy took longer than {deadline_s:.2g} s") from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _REAP_S)
    if process.returncode != 0:
        last = complaint.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise NoAnswerError(f"no answer: py-spy: {last[:200]}")
    return parse(out, pid)


def _as_user(owner: Owner | None) -> dict[str, Any]:
    """Return how to start a program as another user, without our environment, which that user could read."""
    if owner is None or owner.uid == os.geteuid():
        return {}
    return {
        "user": owner.uid,
        "group": owner.gid,
        "extra_groups": list(owner.groups),
        "env": {"PATH": os.defpath},
        "cwd": "/",
    }


def parse(data: bytes, pid: int) -> Spied:
    """Write py-spy's JSON as text, the main thread first, marking the thread that holds the GIL.

    The main thread is the one whose id is the process's; its name is missing where ``threading`` was never imported.

    Raises:
        NoAnswerError: when it is not py-spy's JSON.
    """
    try:
        threads = msgspec.json.decode(data, type=list[_Thread])
    except UNREADABLE as error:
        raise NoAnswerError(f"no answer: what py-spy wrote can't be read: {error}") from error
    threads.sort(key=lambda thread: thread.os_thread_id != pid)
    blocks = []
    for thread in threads:
        notes = ["active" if thread.active else "idle", *(["holds the GIL"] if thread.owns_gil else [])]
        head = f"Thread {thread.os_thread_id or 0} {thread.thread_name or ''} ({', '.join(notes)})"
        frames = [f'  File "{frame.filename}", line {frame.line} in {frame.name[:200]}' for frame in thread.frames]
        blocks.append("\n".join((head, *frames)))
    mine = threads[0].frames if threads and threads[0].os_thread_id == pid else []
    return Spied(
        "\n\n".join(blocks),
        tuple(Frame(frame.name, frame.filename, frame.line, native=frame.module is not None) for frame in mine),
        any(thread.owns_gil for thread in threads),
    )
