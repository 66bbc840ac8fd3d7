# SPDX-License-Identifier: Apache-2.0
"""Watch the processes that a launcher's ranks are, by their black boxes: when each ended, and how if that can be seen.

The runner is not their parent, so it gets no exit status by ``waitpid``. But a descriptor of a process (a pidfd)
becomes readable in the moment in which it ends, which orders the deaths of a node to the fraction of a millisecond. As
long as the launcher has not fetched the status, /proc shows it; afterwards the pidfd does, since Linux 6.15.
On older kernels torchrun, deepspeed and Lightning look ten times a second or less, so it is seen there; ``spawn`` and
MPI fetch it at once, and print it in words.

A launcher that never looks (one that joins its ranks in order, for instance) would wait for ever for ranks that wait
for the dead one. torch's engine stops all ranks when one has failed; here that is done when the launcher does not.
"""

import fcntl
import logging
import math
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import BoxIdentity
from megascale_ops.errors import MegascaleError
from megascale_ops.runner import exits
from megascale_ops.runner.processes import start_ticks
from megascale_ops.schema.progress import Progress

log = logging.getLogger(__name__)

# 0.2 s: how late a new box is found; a rank that dies sooner after its first collective is known by words only.
_LOOK_S = 0.2
_JUDGE_S = 1.0
# PIDFD_GET_INFO of the structure's first version, and its bit for the exit status.
_INFO_BYTES = 64
_GET_INFO = 3 << 30 | _INFO_BYTES << 16 | 0xFF << 8 | 11
_INFO_EXIT = 8
_MASK, _STATUS = struct.Struct("=Q"), struct.Struct("=i")
# 6 s: Lightning's launcher looks at its ranks every 5 s, all others sooner.
SLOW_S = 6.0


class Death(NamedTuple):
    """A rank's process that has ended; ``code`` is None where its status was not seen."""

    identity: BoxIdentity
    code: int | None
    seen_mono_s: float


class ChildWatch:
    """The thread that watches one node's ranks of one round, from :meth:`start` to :meth:`stop`.

    Args:
        folder: Where their black boxes are.
        node: Name of this node.
        round_: Number of the round.
        give_up: Called once with a failed rank whose launcher goes on while the other ranks do not.
        stranded_s: For how long they don't move until then, at least `SLOW_S`.
    """

    def __init__(
        self,
        folder: Path,
        node: str,
        round_: int,
        give_up: Callable[[Death], None] = lambda _death: None,
        stranded_s: float = math.inf,
    ) -> None:
        self._folder = folder
        self._give_up = give_up
        self._stranded_s = stranded_s
        self._gave_up = False
        self._node = node
        self._round = round_
        self._poll = select.poll()
        self._living: dict[int, BoxIdentity] = {}  # by pidfd
        self._files: dict[str, int] = {}  # name -> inode already looked at
        self._known: dict[int, tuple[int, int]] = {}  # rank -> pid and start ticks of its newest box
        self._deaths: dict[int, Death] = {}
        self._told: set[int] = set()  # pids
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="child-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and let go of the processes; safe to call again."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(2 * _LOOK_S + 1.0)

    def deaths(self) -> tuple[Death, ...]:
        """Return the ranks that have ended and were not started again, first death first."""
        return tuple(sorted(self._deaths.values(), key=lambda death: death.seen_mono_s))

    def ranks(self) -> dict[int, BoxIdentity]:
        """Return the newest owner of each black box of which anything is known."""
        living = {identity.rank: identity for identity in self._living.copy().values()}
        return {**{rank: death.identity for rank, death in self._deaths.copy().items()}, **living}

    def _run(self) -> None:
        looked_s = judged_s = 0.0
        while True:
            stopping = self._stopping.is_set()
            now_s = time.monotonic()
            if stopping or now_s - looked_s >= _LOOK_S:
                looked_s = now_s
                self._find()
            for handle, _ in self._poll.poll(0 if stopping else _LOOK_S * 1000):
                self._bury(handle)
            if self._deaths and not stopping and now_s - judged_s >= _JUDGE_S:
                judged_s = now_s
                self._judge(now_s)
            if stopping:
                break
        for handle in list(self._living):
            self._let_go(handle)

    def _find(self) -> None:
        """Take over boxes that are new."""
        with suppress(OSError):
            with os.scandir(self._folder) as entries:
                boxes = [(entry.name, entry.inode(), entry.path) for entry in entries if entry.name.endswith(".box")]
            for name, inode, path in boxes:
                if self._files.get(name) == inode:
                    continue
                self._files[name] = inode
                identity = _identity_of(Path(path))
                if identity is not None and (identity.round, identity.node) == (self._round, self._node):
                    self._known[identity.rank] = identity.pid, identity.start_ticks
                    self._watch(identity)

    def _watch(self, identity: BoxIdentity) -> None:
        """Watch a rank's process; when its launcher has started it again, what ended before is over."""
        if identity.rank in self._deaths:
            began_s = identity.started_mono_s
            self._deaths = {rank: one for rank, one in self._deaths.items() if one.seen_mono_s > began_s}
            self._deaths.pop(identity.rank, None)
        try:
            handle = os.pidfd_open(identity.pid)
        except OSError:
            self._deaths[identity.rank] = Death(identity, None, time.monotonic())
            return
        if start_ticks(identity.pid) != identity.start_ticks:
            os.close(handle)
            self._deaths[identity.rank] = Death(identity, None, time.monotonic())
            return
        self._living[handle] = identity
        self._poll.register(handle, select.POLLIN)

    def _bury(self, handle: int) -> None:
        """Note that a process has ended; read its status at once, before its parent has fetched it."""
        seen_s = time.monotonic()
        identity = self._living[handle]
        code = _of_zombie(identity)
        code = _of_reaped(handle) if code is None else code
        self._let_go(handle)
        if self._known.get(identity.rank) == (identity.pid, identity.start_ticks):
            self._deaths[identity.rank] = Death(identity, code, seen_s)

    def _judge(self, now_s: float) -> None:
        """Give the launcher up when a rank of it has failed and the others have not moved since."""
        old = [death for death in self.deaths() if now_s - death.seen_mono_s >= SLOW_S]
        if self._gave_up or not old:
            return
        failed = [death for death in old if has_failed(death, self._progress(death.identity))]
        for death in failed:
            if death.identity.pid not in self._told:
                self._told.add(death.identity.pid)
                log.warning(
                    "rank %d (process %d) ended %.0f s ago (%s), and its launcher has not reacted so far",
                    *(death.identity.rank, death.identity.pid, now_s - death.seen_mono_s),
                    exits.status_in_words(death.code),
                )
        moved_s = [one.moved_mono_s for identity in self._living.values() if (one := self._progress(identity))]
        if failed and is_stranded(failed[0].seen_mono_s, moved_s, now_s, self._stranded_s):
            self._gave_up = True
            self._give_up(failed[0])

    def _progress(self, identity: BoxIdentity) -> Progress | None:
        """Return the progress in the box of this very process; None where the box is another's, or gone."""
        with suppress(MegascaleError, OSError), BoxReader(self._folder / f"{identity.rank}.box") as reader:
            return reader.progress() if reader.identity().pid == identity.pid else None
        return None

    def _let_go(self, handle: int) -> None:
        self._poll.unregister(handle)
        del self._living[handle]
        os.close(handle)


def has_failed(death: Death, progress: Progress | None) -> bool:
    """Return whether a rank did not end well; without a status it has, unless its interpreter left in order."""
    if death.code is not None:
        return death.code != 0
    return progress is None or progress.state != "exited"


def is_stranded(failed_mono_s: float, moved_mono_s: Sequence[float], now_s: float, stranded_s: float) -> bool:
    """Return whether ranks still live and none has moved for ``stranded_s``, since another failed.

    Without living ranks the launcher is at something of its own; where they go on they do without the dead one.
    """
    since_s = max([failed_mono_s, *moved_mono_s])
    return bool(moved_mono_s) and now_s - since_s >= stranded_s


def _of_zombie(identity: BoxIdentity) -> int | None:
    """Return how a process ended that its parent has not fetched yet; None where it has."""
    with suppress(OSError, ValueError):
        state, flags, ticks, status = exits.read_stat(Path(f"/proc/{identity.pid}/stat").read_text())
        if ticks == identity.start_ticks and (state in "ZX" or exits.is_exiting(flags)):
            return exits.decode_wait_status(status)
    return None


def _of_reaped(handle: int) -> int | None:
    """Return how a process ended that its parent has fetched; None where the kernel does not keep it (before 6.15).

    Source: include/uapi/linux/pidfd.h, struct pidfd_info: the mask comes first, the status last.
    """
    told = bytearray(_INFO_BYTES)
    _MASK.pack_into(told, 0, _INFO_EXIT)
    with suppress(OSError):
        fcntl.ioctl(handle, _GET_INFO, told, True)  # noqa: FBT003  the kernel writes into it
        if _MASK.unpack_from(told)[0] & _INFO_EXIT:
            return exits.decode_wait_status(_STATUS.unpack_from(told, _INFO_BYTES - _STATUS.size)[0])
    return None


def _identity_of(path: Path) -> BoxIdentity | None:
    """Return whose box this is; None for what is no box."""
    with suppress(MegascaleError, OSError), BoxReader(path) as reader:
        return reader.identity()
    return None
