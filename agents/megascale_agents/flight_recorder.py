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

On NCCL the pieces of a batch (``batch_isend_irecv``, a coalescing manager) stay "scheduled" for ever: the end of all of
them is that of the entry "coalesced" which follows under the same number (torch's ``test_batched_send_recv``).
"""

import asyncio
import contextlib
import http.client
import os
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple
from weakref import WeakValueDictionary

import msgspec

from megascale_agents import facts, own_thread
from megascale_agents.ownership.rights import Owner, myself, taken
from megascale_ops.blackbox.calls import begun_anew, function_of, group_of
from megascale_ops.foreign import UNREADABLE
from megascale_ops.schema.messages import CollectiveFact

# The oldest unfinished collectives tell where a rank waits; what was queued behind them adds nothing.
_MOST_NAMED = 20
# NCCL's first: where both have something, a group that stands in both is NCCL's.
HANDLERS = ("dump_nccl_trace_json", "fr_trace_json")
# A full ring of 2,000 collectives is 1 MB; 16 MB holds the largest ring people set and bounds what we read.
MOST_BYTES = 16 * 1024 * 1024
_PEER = struct.Struct("=iII")  # struct ucred: pid, uid, gid
_turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by socket


class NoAnswerError(Exception):
    """The one who was asked did not answer; the text says why."""


class TooLateError(NoAnswerError):
    """It did not answer in time."""


class Summary(NamedTuple):
    """What a dump says, for people and for a judge."""

    text: str
    collectives: tuple[CollectiveFact, ...]


# -1: none. What is no number that fits into 63 bits is from a broken record.
_Number = Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]


class _Entry(msgspec.Struct):
    profiling_name: str = "?"
    process_group: list[str] = []
    collective_seq_id: _Number = -1
    p2p_seq_id: _Number = -1
    input_sizes: list[list[int]] = []
    input_dtypes: list[str] = []
    is_p2p: bool = False
    state: str = ""
    retired: bool = False

    @property
    def is_over(self) -> bool:
        """NCCL's watchdog says "completed" up to a second before it retires an entry; Gloo never says it."""
        return self.retired or self.state == "completed"

    @property
    def number(self) -> tuple[str, bool, int]:
        """What the pieces of a batch share with the entry that ends it."""
        return _group(self), self.is_p2p, self.p2p_seq_id if self.is_p2p else self.collective_seq_id


class _Trace(msgspec.Struct):
    """The part of a dump that a summary needs."""

    pg_status: msgspec.Raw = msgspec.Raw(b"{}")
    entries: list[msgspec.Raw] | None = None


_ENTRY = msgspec.json.Decoder(_Entry)


def socket_path(box_dir: str, rank: int) -> Path:
    """Return where the worker server of a rank listens."""
    return Path(box_dir, f"{rank}.sock")


async def ask(socket_file: Path, handler: str, deadline_s: float, owner: Owner | None = None) -> bytes:
    """Call one handler of the worker server; one at a time, for two that dump stacks at once may crash the rank.

    Raises:
        NoAnswerError: no socket, nobody listens, an HTTP error, or (``TooLateError``) the deadline passed.
    """
    owner = owner or myself()
    with taken(owner):
        if not os.path.exists(socket_file):  # noqa: ASYNC240, PTH110  one stat on tmpfs: 2 us
            raise NoAnswerError("no answer: the rank has no worker server")
    turn = _turns.setdefault(str(socket_file), asyncio.Lock())
    connection = _UnixConnection(str(socket_file), deadline_s, owner)
    try:
        async with asyncio.timeout(deadline_s), turn:
            status, data = await own_thread.run(lambda: _post(connection, handler), f"ask {socket_file.name}")
    except TimeoutError as error:
        raise TooLateError(f"no answer: {handler} did not answer in {deadline_s:.2g} s") from error
    except (http.client.HTTPException, OSError) as error:
        raise NoAnswerError(f"no answer: worker server of the rank: {error}") from error
    finally:
        connection.cut()  # the thread of one that is late ends
    if status != 200:
        raise NoAnswerError(f"no answer: {handler} answered HTTP {status}: {data[:200]!r}")
    return data


class _UnixConnection(http.client.HTTPConnection):
    """A connection to a server on a unix socket that the owner may reach; ``timeout_s`` is from byte to byte."""

    def __init__(self, path: str, timeout_s: float, owner: Owner) -> None:
        super().__init__("rank", timeout=max(timeout_s, 0.001))
        self._path = path
        self._owner = owner
        self._wire: socket.socket | None = None
        self._is_cut = False

    def connect(self) -> None:
        """Connect, unless nobody waits for it any more."""
        self.sock = self._wire = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._wire.settimeout(self.timeout)
        if self._is_cut:
            raise ConnectionAbortedError("nobody waits for the answer any more")
        with taken(self._owner):
            self._wire.connect(self._path)
        uid = _PEER.unpack(self._wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1]
        if self._owner.uid not in (0, uid):  # a link to a server of somebody else's
            raise ConnectionRefusedError(f"the socket is user {uid}'s, the job user {self._owner.uid}'s")

    def cut(self) -> None:
        """Let a thread that waits for it wait no more; that thread closes it.

        Not by ``sock``: the base class lets go of that as soon as an answer has begun after which the server closes.
        """
        self._is_cut = True
        if self._wire is not None:
            with contextlib.suppress(OSError):
                self._wire.shutdown(socket.SHUT_RDWR)


def _post(connection: _UnixConnection, handler: str) -> tuple[int, bytes]:
    """Call a handler, in a thread; return status and body.

    Raises:
        NoAnswerError: the body is too long, or not whole.
        HTTPException, OSError: nobody is there, time is up, or what came was no response.
    """
    with contextlib.closing(connection):
        connection.request("POST", f"/handler/{handler}", headers={"Connection": "close"})
        with connection.getresponse() as response:
            data = response.read(MOST_BYTES + 1)
            missing = response.length or 0  # of what its head announced
        if len(data) > MOST_BYTES:
            raise NoAnswerError(f"answer of {handler} is larger than {MOST_BYTES} bytes")
        if missing:
            raise NoAnswerError(f"no answer: {handler} ended {missing} bytes early")
        return response.status, data


async def take(socket_file: Path, deadline_s: float, owner: Owner | None = None) -> tuple[bytes, Summary]:
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
            dump = await ask(socket_file, handler, end_s - time.monotonic(), owner)
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

    What can't be read of one entry (another version, a broken one) costs that entry, and is said.

    Raises:
        ValueError: when it is not a flight recorder's JSON.
    """
    try:
        trace = msgspec.json.decode(dump, type=_Trace)
        recorded = trace.entries or []
        reached = _reached(trace.pg_status, or_nothing=bool(recorded))
    except UNREADABLE as error:
        raise ValueError(f"not a flight recorder dump: {error}") from error
    entries = []
    lines = [f"{len(recorded)} collectives recorded"]
    broken = ""
    for raw in recorded:
        try:
            entries.append(_ENTRY.decode(raw))
        except UNREADABLE as error:
            broken = broken or str(error)
    if broken:
        lines.append(f"{len(recorded) - len(entries)} of them can't be read: {broken}")
    entries = _living(entries)
    _end_batches(entries)
    for group, status in sorted(reached.items()):
        lines.append(f"group {group}: entered {_number(status.get('last_enqueued_collective', -1))}")
    waiting = [entry for entry in entries if not entry.is_over]
    lines += [f"not finished: {_name(entry)}" for entry in waiting[:_MOST_NAMED]]
    if len(waiting) > _MOST_NAMED:
        lines.append(f"and {len(waiting) - _MOST_NAMED} more")
    return Summary("\n".join(lines), facts.choose([_fact(entry) for entry in entries]))


def _reached(raw: msgspec.Raw, *, or_nothing: bool) -> dict[str, dict[str, object]]:
    """Return how far each group is; nothing where that can't be read and the entries tell as much."""
    try:
        return msgspec.json.decode(raw, type=dict[str, dict[str, object]])
    except UNREADABLE:
        if or_nothing:
            return {}
        raise


def _living(entries: Sequence[_Entry]) -> list[_Entry]:
    """Leave out groups that have ended: the recorder keeps them, and a later group may have the name of one."""
    begins = begun_anew((_group(entry), -1 if entry.is_p2p else entry.collective_seq_id) for entry in entries)
    return [entry for at, entry in enumerate(entries) if at >= begins.get(_group(entry), 0)]


def _end_batches(entries: Sequence[_Entry]) -> None:
    """Let the pieces of each batch end with it; of a batch that was not sent off yet, none has ended."""
    over = {entry.number: entry.is_over for entry in entries if entry.profiling_name.endswith("coalesced")}
    for entry in entries:
        entry.retired = entry.is_over or over.get(entry.number, False)


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


def _number(value: object) -> int:
    """Numbers come as text from the JSON dump."""
    try:
        return int(str(value))
    except ValueError:
        return -1
