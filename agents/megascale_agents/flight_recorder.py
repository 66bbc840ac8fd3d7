# SPDX-License-Identifier: Apache-2.0
"""Ask a rank's worker server: torch's own HTTP server on a unix socket beside the black box (``<rank>.sock``).

It answers from a C++ thread: in 0.2 ms while the main thread waits in a collective, and also while somebody holds the
GIL. A stopped process accepts the connection and never answers, hence the deadline. Its flight recorder knows every
collective of every process group, which is what tells the rank that did not come from those that wait for it.
"""

import asyncio
import os
from pathlib import Path

import aiohttp
import msgspec

# The oldest unfinished collectives tell where a rank waits; what was queued behind them adds nothing.
_MOST_NAMED = 20
# A full ring of 2,000 collectives is 1 MB; 16 MB holds the largest ring people set and bounds what we read.
MOST_BYTES = 16 * 1024 * 1024


class NoAnswerError(Exception):
    """The worker server did not answer; the text says why."""


class _Entry(msgspec.Struct):
    profiling_name: str = "?"
    process_group: list[str] = []
    collective_seq_id: int = -1
    retired: bool = False


class _Trace(msgspec.Struct):
    """The part of a dump that a summary needs.

    On Gloo an entry's ``state`` says nothing, and ``last_completed_collective`` stays behind, until the next one, when
    several collectives end at once (2 of 40 bursts of five; torch 2.13). Only ``retired`` is exact.
    """

    pg_status: dict[str, dict[str, int | str]] = {}
    entries: list[_Entry] = []


def socket_path(box_dir: str, rank: int) -> Path:
    """Return where the worker server of a rank listens."""
    return Path(box_dir, f"{rank}.sock")


async def ask(socket: Path, handler: str, deadline_s: float) -> bytes:
    """Call one handler of the worker server.

    Raises:
        NoAnswerError: no socket, nobody listens, an HTTP error, or the deadline passed.
    """
    if not os.path.exists(socket):  # noqa: ASYNC240, PTH110  one stat on tmpfs: 2 us
        raise NoAnswerError("no answer: the rank has no worker server")
    try:
        async with (
            asyncio.timeout(deadline_s),
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=str(socket))) as session,
            session.post(f"http://rank/handler/{handler}") as response,
        ):
            data = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                data += chunk
                if len(data) > MOST_BYTES:
                    raise NoAnswerError(f"answer of {handler} is larger than {MOST_BYTES} bytes")
            status = response.status
    except TimeoutError as error:
        raise NoAnswerError(f"no answer: {handler} did not answer in {deadline_s:.2g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise NoAnswerError(f"no answer: worker server of the rank: {error}") from error
    if status != 200:
        raise NoAnswerError(f"no answer: {handler} answered HTTP {status}: {bytes(data[:200])!r}")
    return bytes(data)


def parse(dump: bytes) -> str:
    """Say in a few lines how far the rank is in each process group, and which collectives it has not finished.

    Raises:
        ValueError: when it is not a flight recorder's JSON.
    """
    try:
        trace = msgspec.json.decode(dump, type=_Trace)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a flight recorder dump: {error}") from error
    lines = [f"{len(trace.entries)} collectives recorded"]
    for group, status in sorted(trace.pg_status.items()):
        lines.append(f"group {group}: entered {_number(status.get('last_enqueued_collective', -1))}")
    waiting = [entry for entry in trace.entries if not entry.retired]
    lines += [f"not finished: {_name(entry)}" for entry in waiting[:_MOST_NAMED]]
    if len(waiting) > _MOST_NAMED:
        lines.append(f"and {len(waiting) - _MOST_NAMED} more")
    return "\n".join(lines)


def _name(entry: _Entry) -> str:
    group = entry.process_group[0] if entry.process_group else "?"
    return f"{entry.profiling_name} {entry.collective_seq_id} of group {group}"


def _number(value: int | str) -> int:
    """Numbers come as text from the JSON dump."""
    try:
        return int(value)
    except ValueError:
        return -1
