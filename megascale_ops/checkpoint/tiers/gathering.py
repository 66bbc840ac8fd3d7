# SPDX-License-Identifier: Apache-2.0
"""How the ranks seal a set on the nodes behind the training: they meet at rank 0, over TCP, in threads.

    each rank -> rank 0   its files and their digests, or why there are none
    rank 0 -> each rank   when all have come: the manifest of the set, for nodes' leading ranks also its plan
    each rank -> rank 0   its node has sealed its part (or this rank had nothing to seal)
    rank 0 -> each rank   all nodes have: the copies to the buddies may begin

Collectives belong to the training thread, and a shared folder is what these sets do without. A connection shows the
token that the process group has carried. The first failure ends it for all, with its rank and its sentence; a rank that
does not come ends it by the deadline.
"""

import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from megascale_ops import foreign
from megascale_ops.checkpoint import manifest as manifests
from megascale_ops.checkpoint.manifest import FileEntry, Manifest
from megascale_ops.checkpoint.storage import describe
from megascale_ops.checkpoint.tiers.copies import receive_message, send_message
from megascale_ops.errors import CheckpointError

# 30 s: a rank that has connected says at once what it has to say.
_STALLED_S = 30.0
# 1 GB: of a plan and a manifest, some 200 bytes for each part of each tensor.
_MOST_BYTES = 1 << 30

_log = logging.getLogger("megascale_ops.checkpoint")


class Part(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has of a save. ``failure``: why it has nothing. ``plan``: of the leading rank only."""

    auth: bytes
    save: str
    rank: int
    files: tuple[FileEntry, ...] = ()
    failure: str = ""
    plan: bytes = b""


class Agreed(msgspec.Struct, frozen=True, array_like=True):
    """The set as all ranks have it. ``failure``: why there will be none."""

    manifest: bytes = b""
    plan: bytes = b""
    failure: str = ""


class _Outcome(msgspec.Struct, frozen=True, array_like=True):
    failure: str = ""


class Round:
    """One save as its ranks come together; waited on by a thread for each of them.

    Args:
        world_size: how many ranks there are.
        seal: makes the manifest of all files.
    """

    def __init__(self, world_size: int, seal: Callable[[tuple[FileEntry, ...]], Manifest]) -> None:
        self._world_size, self._seal = world_size, seal
        self._parts: dict[int, Part] = {}
        self._sealed: set[int] = set()
        self._failure = ""
        self._agreed: Agreed | None = None
        self._changed = threading.Condition()

    def come(self, part: Part, until_s: float) -> Agreed:
        """A rank has come; what all have, when all have come."""
        with self._changed:
            self._parts[part.rank] = part
            if part.failure:
                self._fail(part.rank, part.failure)
            self._changed.notify_all()
            self._wait(lambda: len(self._parts) >= self._world_size, until_s, self._parts)
            if self._failure:
                return Agreed(failure=self._failure)
            if self._agreed is None:
                files = [entry for each in self._parts.values() for entry in each.files]
                raw_plan = next((each.plan for each in self._parts.values() if each.plan), b"")
                sealed = self._seal(tuple(sorted(files, key=lambda entry: entry.name)))
                self._agreed = Agreed(manifests.encode(sealed), raw_plan)
            return self._agreed

    def conclude(self, rank: int, failure: str, until_s: float) -> str:
        """A rank's node has sealed its part, or not; why there is no set, or nothing, when all have."""
        with self._changed:
            self._sealed.add(rank)
            if failure:
                self._fail(rank, failure)
            self._changed.notify_all()
            self._wait(lambda: len(self._sealed) >= self._world_size, until_s, self._sealed)
            return self._failure

    def lose(self, rank: int) -> None:
        """A rank's connection has broken before it was done."""
        with self._changed:
            self._fail(rank, "its connection broke off")
            self._changed.notify_all()

    def _fail(self, rank: int, failure: str) -> None:
        where = f"on rank {rank}: " if self._world_size > 1 else ""
        self._failure = self._failure or f"{where}{failure}"

    def _wait(self, is_so: Callable[[], bool], until_s: float, came: "dict[int, Part] | set[int]") -> None:
        left_s = until_s - time.monotonic()
        if not self._changed.wait_for(lambda: bool(self._failure) or is_so(), left_s):
            missing = next(rank for rank in range(self._world_size) if rank not in came)
            self._fail(missing, "it did not come in time")
            self._changed.notify_all()


class Gathering:
    """Rank 0's end: listens, and has a thread for each connection while a set is sealed.

    Args:
        host: the address that the others are told.
        auth: what a connection must show.
        world_size: how many ranks there are.
        deadline_s: how long the ranks of a save wait for each other.
    """

    def __init__(self, host: str, auth: bytes, world_size: int, deadline_s: float) -> None:
        self._auth, self._world_size, self._deadline_s = auth, world_size, deadline_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family, backlog=min(world_size, 4096))
        self.address: tuple[str, int] = (host, self._listening.getsockname()[1])
        self._rounds: dict[str, Round] = {}
        self._busy = threading.Lock()
        self._stopped = False
        threading.Thread(target=self._accept, name="checkpoint-gathering", daemon=True).start()

    def expect(self, save: str, seal: Callable[[tuple[FileEntry, ...]], Manifest]) -> None:
        """A save begins; what is left of earlier ones is of ranks that failed."""
        with self._busy:
            self._rounds = {save: Round(self._world_size, seal)}

    def close(self) -> None:
        """Stop listening."""
        self._stopped = True
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while not self._stopped:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            connection.settimeout(_STALLED_S)
            threading.Thread(target=self._serve, args=(connection,), name="checkpoint-rank", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        meeting: Round | None = None
        rank = -1
        try:
            with connection:
                part = msgspec.msgpack.decode(receive_message(connection, _MOST_BYTES), type=Part)
                if not hmac.compare_digest(part.auth, self._auth):
                    return
                with self._busy:
                    found = self._rounds.get(part.save)
                if found is None:
                    send_message(connection, msgspec.msgpack.encode(Agreed(failure="the save is over")))
                    return
                meeting, rank = found, part.rank
                until_s = time.monotonic() + self._deadline_s
                agreed = meeting.come(part, until_s)
                send_message(connection, msgspec.msgpack.encode(agreed))
                if agreed.failure:
                    return
                connection.settimeout(self._deadline_s)
                outcome = msgspec.msgpack.decode(receive_message(connection), type=_Outcome)
                failure = meeting.conclude(rank, outcome.failure, until_s)
                meeting = None
                send_message(connection, msgspec.msgpack.encode(_Outcome(failure)))
        except (OSError, *foreign.UNREADABLE) as exc:
            if meeting is not None:
                meeting.lose(rank)
            _log.debug("a rank broke off while a set on the nodes was sealed: %s", exc)


def take_part(
    address: tuple[str, int], part: Part, seal: Callable[[Manifest, bytes], object], deadline_s: float
) -> Manifest:
    """A rank's end: tell its part, have its node seal what all agreed on, and return when all nodes have.

    Args:
        address: of rank 0's end.
        part: what this rank has.
        seal: seals this node's part of the set, given its manifest and plan; what it raises ends the set for all.
        deadline_s: how long the ranks wait for each other.

    Raises:
        CheckpointError: there will be no set; it says why, and on which rank.
    """
    try:
        with socket.create_connection(address, timeout=_STALLED_S) as connection:
            send_message(connection, msgspec.msgpack.encode(part))
            connection.settimeout(deadline_s + _STALLED_S)
            agreed = msgspec.msgpack.decode(receive_message(connection, _MOST_BYTES), type=Agreed)
            if agreed.failure:
                raise CheckpointError(agreed.failure)
            sealed, failure = manifests.decode(agreed.manifest), ""
            try:
                seal(sealed, agreed.plan)
            except (OSError, CheckpointError) as exc:
                failure = describe(exc) if isinstance(exc, OSError) else str(exc)
            send_message(connection, msgspec.msgpack.encode(_Outcome(failure)))
            outcome = msgspec.msgpack.decode(receive_message(connection), type=_Outcome)
    except (OSError, *foreign.UNREADABLE) as exc:
        said = describe(exc) if isinstance(exc, OSError) else "rank 0 closed the connection"
        raise CheckpointError(f"rank 0 could not be reached: {said}") from exc
    if outcome.failure:
        raise CheckpointError(outcome.failure)
    return sealed
