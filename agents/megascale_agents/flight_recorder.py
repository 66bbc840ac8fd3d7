# SPDX-License-Identifier: Apache-2.0
"""Ask a rank's worker server: torch's own HTTP server on a unix socket beside the black box (``<rank>.sock``).

It answers from a C++ thread: in 0.2 ms while the main thread waits in a collective, and also while somebody holds the
GIL. A stopped process accepts the connection and never answers, hence the deadline. Its flight recorder knows every
collective of every process group, which is what tells the rank that did not come from those that wait for it.

There are two of them: NCCL's (``dump_nccl_trace_json``, not in torch builds without CUDA) and that of all other
backends (``fr_trace_json``), each empty where its backend is not used.

On Gloo an entry's ``state`` is "scheduled" even when it is over, ``pg_config`` has one entry without a name for all
groups, ``last_completed_collective`` stays behind until the next one when several end at once (2 of 40 bursts of five),
and sends and receives are not recorded. ``retired`` is exact (torch 2.13).
"""

import asyncio
import os
import time
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

import aiohttp
import msgspec

from megascale_agents import facts
from megascale_ops.blackbox.calls import function_of, group_of
from megascale_ops.schema.messages import CollectiveFact

# The oldest unfinished collectives tell where a rank waits; what was queued behind them adds nothing.
_MOST_NAMED = 20
# NCCL's first: where both have something, a group that stands in both is NCCL's.
HANDLERS = ("dump_nccl_trace_json", "fr_trace_json")
# A full ring of 2,000 collectives is 1 MB; 16 MB holds the largest ring people set and bounds what we read.
MOST_BYTES = 16 * 1024 * 1024
_NO_OTHER = {"Connection": "close"}
_turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by socket


class NoAnswerError(Exception):
    """The one who was asked did not answer; the text says why."""


class TooLateError(NoAnswerError):
    """It did not answer in time."""


class Summary(NamedTuple):
    """What a dump says, for people and for a judge."""

    text: str
    collectives: tuple[CollectiveFact, ...]


class _Entry(msgspec.Struct):
    profiling_name: str = "?"
    process_group: list[str] = []
    collective_seq_id: int = -1
    input_sizes: list[list[int]] = []
    input_dtypes: list[str] = []
    is_p2p: bool = False
    state: str = ""
    retired: bool = False

    @property
    def is_over(self) -> bool:
        """NCCL's watchdog says "completed" up to a second before it retires an entry; Gloo never says it."""
        return self.retired or self.state == "completed"


class _Trace(msgspec.Struct):
    """The part of a dump that a summary needs."""

    pg_status: dict[str, dict[str, int | str]] = {}
    entries: list[_Entry] = []


def socket_path(box_dir: str, rank: int) -> Path:
    """Return where the worker server of a rank listens."""
    return Path(box_dir, f"{rank}.sock")


async def ask(socket: Path, handler: str, deadline_s: float) -> bytes:
    """Call one handler of the worker server; one at a time, for two that dump stacks at once may crash the rank.

    Raises:
        NoAnswerError: no socket, nobody listens, an HTTP error, or (``TooLateError``) the deadline passed.
    """
    if not os.path.exists(socket):  # noqa: ASYNC240, PTH110  one stat on tmpfs: 2 us
        raise NoAnswerError("no answer: the rank has no worker server")
    turn = _turns.setdefault(str(socket), asyncio.Lock())
    try:
        async with (
            asyncio.timeout(deadline_s),
            turn,
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=str(socket))) as session,
            session.post(f"http://rank/handler/{handler}", headers=_NO_OTHER) as response,
        ):
            data = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                data += chunk
                if len(data) > MOST_BYTES:
                    raise NoAnswerError(f"answer of {handler} is larger than {MOST_BYTES} bytes")
            status = response.status
    except TimeoutError as error:
        raise TooLateError(f"no answer: {handler} did not answer in {deadline_s:.2g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise NoAnswerError(f"no answer: worker server of the rank: {error}") from error
    if status != 200:
        raise NoAnswerError(f"no answer: {handler} answered HTTP {status}: {bytes(data[:200])!r}")
    return bytes(data)


async def take(socket: Path, deadline_s: float) -> tuple[bytes, Summary]:
    """Get the flight recorder that has something in it, NCCL's if both have; else the one that answers.

    Raises:
        NoAnswerError: neither answered, ``TooLateError`` if in time.
        ValueError: what came is not a flight recorder's JSON.
    """
    found: tuple[bytes, Summary] | None = None
    why: NoAnswerError | None = None
    end_s = time.monotonic() + deadline_s
    for handler in HANDLERS:
        try:
            dump = await ask(socket, handler, end_s - time.monotonic())
        except TooLateError:
            raise  # the other one would not answer either
        except NoAnswerError as error:
            why = error
            continue
        found = dump, parse(dump)
        if found[1].collectives:
            break
    if found is None:
        raise why or NoAnswerError("no answer")
    return found


def parse(dump: bytes) -> Summary:
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
    waiting = [entry for entry in trace.entries if not entry.is_over]
    lines += [f"not finished: {_name(entry)}" for entry in waiting[:_MOST_NAMED]]
    if len(waiting) > _MOST_NAMED:
        lines.append(f"and {len(waiting) - _MOST_NAMED} more")
    return Summary("\n".join(lines), facts.choose([_fact(entry) for entry in trace.entries]))


def _fact(entry: _Entry) -> CollectiveFact:
    kinds = list(dict.fromkeys(entry.input_dtypes))  # one for each tensor; usually all the same
    return CollectiveFact(
        group=group_of(_group(entry)),
        seq=-1 if entry.is_p2p else entry.collective_seq_id,
        function=function_of(entry.profiling_name),
        sizes=facts.sizes_of(entry.input_sizes),
        dtype=",".join(kinds)[:60],
        done=entry.is_over,
    )


def _name(entry: _Entry) -> str:
    return f"{entry.profiling_name} {entry.collective_seq_id} of group {_group(entry)}"


def _group(entry: _Entry) -> str:
    return entry.process_group[0] if entry.process_group else "?"


def _number(value: int | str) -> int:
    """Numbers come as text from the JSON dump."""
    try:
        return int(value)
    except ValueError:
        return -1
