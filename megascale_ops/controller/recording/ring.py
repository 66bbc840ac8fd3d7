# SPDX-License-Identifier: Apache-2.0
"""Keep what came in of late: blocks of half a minute on disk, the oldest of which go.

An entry is encoded when it comes and waits in memory; twice a minute, at 4 MB, and seconds after an incident has
changed, what has gathered becomes a block, a file of its own. Each half a minute one begins with all that is known by
then, so that a replay can begin there. Compressing and writing is a thread's work. What can't be written is dropped and
told once: training and judgement never wait for a recording, and it leaves the last of a disk to the journal.
"""

import asyncio
import errno
import gzip
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

import megascale_ops
from megascale_ops.schema.events import Incident
from megascale_ops.schema.messages import Order
from megascale_ops.schema.recording.entries import (
    BLOCK_SUFFIX,
    PLAIN_VERSION,
    Broken,
    Entry,
    Given,
    Header,
    Joined,
    Polled,
    Said,
    Start,
    Stepped,
)
from megascale_ops.whole_file import write_whole

log = logging.getLogger(__name__)

# 30 s: what a controller that is killed may take with it, but for what led to an incident.
BLOCK_S = 30.0
# 4 MB: of 12,288 ranks they gather in a second; compressing them takes a thread 40 ms.
BLOCK_BYTES = 4 * 1024 * 1024
# 1.5 min of 1,536 nodes: what is known of them has 6 MB, as much as they tell in a second or two.
START_EACH_NODE_S = 0.06
# 5 s: an incident goes on changing for a while, and what follows at once belongs to it.
AFTER_CHANGE_S = 5.0
LOOK_S = 0.5
# 0.5 s: a wall clock that is slewed is no step.
_STEP_S = 0.5
# 10,000 orders: those of the newest rounds of 1,536 nodes; an older one that is told again is told twice.
_MOST_ORDERS = 10_000
# Level 1: 90 MB/s of a core; level 6 makes a fifth less of it for four times as long.
_LEVEL = 1

_encode = msgspec.json.Encoder().encode


class Block(NamedTuple):
    """What is to be written."""

    name: str
    header: Header
    start: Start | None
    lines: list[bytes]


class _Gathering:
    """What has come in since the last block; a block begins with a new one."""

    def __init__(self, began_s: float, began_wall_s: float) -> None:
        self.began_s, self.began_wall_s = began_s, began_wall_s
        self.lines: list[bytes] = []
        self.bytes = 0
        self.start: Start | None = None
        self.behind_s = 0.0  # of the wall clock against what has passed since
        self.changed_s: float | None = None  # when an incident first changed


class Ring:
    """What came in of late. Owned by the loop; ``write`` may run in a thread, one block at a time.

    Args:
        folder: where blocks go; made when the first is written.
        most_bytes: of all blocks together.
        keep_s: a block whose last entry is older goes.
        clock: monotonic seconds.
        wall: wall clock seconds.
    """

    def __init__(
        self,
        folder: Path,
        *,
        most_bytes: int,
        keep_s: float,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._folder, self._most_bytes, self._keep_s = folder, most_bytes, keep_s
        self._clock, self._wall = clock, wall
        self._process = secrets.token_hex(4)
        self._now = _Gathering(clock(), wall())
        self._start_of: Callable[[], Start] = lambda: Start(0.0)
        self._started_s = 0.0  # when the newest start was
        self._nodes = 0  # that it knew
        self._blocks = 0
        self._since = f"{round(self._now.began_wall_s * 1000):014d}-{self._process}"
        self._requests: dict[int, Polled | Joined] = {}  # that wait, by number
        self._number = 0
        self._orders: dict[str, None] = {}
        self._said: dict[str, Incident] = {}
        self._failing = ""
        self.entries = self.bytes = 0  # so far, of this process

    @property
    def folder(self) -> Path:
        """Where blocks are."""
        return self._folder

    @property
    def now_s(self) -> float:
        """Seconds since the block's beginning, as entries have them; never less than 0."""
        return round(max(0.0, self._clock() - self._now.began_s), 4)

    def begin(self, start_of: Callable[[], Start]) -> None:
        """Take over who says what is known, and ask for the first time."""
        self._start_of = start_of
        self._now = _Gathering(self._clock(), self._wall())
        self._begin_anew()

    def note(self, entry: Entry) -> None:
        """Take one entry in; one that can't be encoded is left out and told once."""
        try:
            line = _encode(entry)
        except Exception as error:  # noqa: BLE001  a heartbeat is judged whether or not it can be recorded
            self._fail(f"a {type(entry).__name__} can't be encoded: {error}")
            return
        self._now.lines.append(line)
        self._now.bytes += len(line)
        self.entries += 1
        self.bytes += len(line)

    def note_orders(self, orders: tuple[Order, ...]) -> None:
        """Note orders that go out, each once."""
        for order in orders:
            if order.id not in self._orders:
                self._orders[order.id] = None
                self.note(Given(self.now_s, order))
        while len(self._orders) > _MOST_ORDERS:
            del self._orders[next(iter(self._orders))]

    def next_number(self) -> int:
        """Return the number of the next request."""
        self._number += 1
        return self._number

    def open(self, request: Polled | Joined) -> None:
        """Note a request that may wait."""
        self._requests[request.n] = request
        self.note(request)

    def close_request(self, number: int, *, broken: bool) -> None:
        """Note that a request waits no longer."""
        self._requests.pop(number, None)
        if broken:
            self.note(Broken(self.now_s, number))

    def poll(self, incidents: Mapping[str, Incident]) -> None:
        """Note which incidents have changed, and a step of the wall clock."""
        for name, incident in incidents.items():
            before = self._said.get(name)
            if before is not incident:
                self._said[name] = incident
                self.note(Said(self.now_s, _short(incident)))
                # A warning's numbers change all the time: that alone is no reason for a block.
                if self._now.changed_s is None and (before is None or before.state != incident.state):
                    self._now.changed_s = self._clock()
        for name in [name for name in self._said if name not in incidents]:
            del self._said[name]
        wall_s = self._wall()
        behind_s = wall_s - self._now.began_wall_s - (self._clock() - self._now.began_s)
        if abs(behind_s - self._now.behind_s) > _STEP_S:
            self._now.behind_s = behind_s
            self.note(Stepped(self.now_s, wall_s))

    @property
    def is_due(self) -> bool:
        """Return whether it is time for a block."""
        gathered, now_s = self._now, self._clock()
        if not gathered.lines:
            return False
        changed = gathered.changed_s is not None and now_s - gathered.changed_s >= AFTER_CHANGE_S
        return changed or gathered.bytes >= BLOCK_BYTES or now_s - gathered.began_s >= BLOCK_S

    def cut(self) -> Block:
        """End the block and begin the next one."""
        ended = self._now
        header = Header(
            recording=PLAIN_VERSION,
            began_mono_s=ended.began_s,
            began_wall_s=ended.began_wall_s,
            process=self._process,
            program=megascale_ops.__version__,
            goes_on=ended.start is None,
        )
        self._blocks += 1
        self._now = _Gathering(self._clock(), self._wall())
        if self._now.began_s - self._started_s >= max(BLOCK_S, self._nodes * START_EACH_NODE_S):
            self._begin_anew()
        return Block(f"{self._since}-{self._blocks:08d}{BLOCK_SUFFIX}", header, ended.start, ended.lines)

    def _begin_anew(self) -> None:
        """Let the block begin with all that is known."""
        start = self._start_of()
        self._started_s, self._nodes = self._now.began_s, len(start.agents)
        waiting = [msgspec.structs.replace(one, t=0.0) for one in self._requests.values()]
        self._now.start = msgspec.structs.replace(
            start,
            polls=tuple(one for one in waiting if isinstance(one, Polled)),
            joins=tuple(one for one in waiting if isinstance(one, Joined)),
        )

    def write(self, block: Block) -> None:
        """Write a block, and remove what is too old or too much; errors are told once."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._require_room()
            start = [_encode(block.start)] if block.start is not None else []
            lines = [_encode(block.header), *start, *block.lines, b""]
            write_whole(self._folder / block.name, gzip.compress(b"\n".join(lines), _LEVEL, mtime=0))
            self._remove_old()
        except Exception as error:  # noqa: BLE001  a disk, a bug of ours: the controller goes on without a recording
            self._fail(str(error))
            return
        if self._failing:
            log.warning("what comes in is recorded again in %s", self._folder)
        self._failing = ""

    def _require_room(self) -> None:
        free_bytes = shutil.disk_usage(self._folder).free
        if free_bytes < self._most_bytes:
            raise OSError(errno.ENOSPC, f"only {free_bytes >> 20} MB are free, which are left to the journal")

    def _fail(self, why: str) -> None:
        if not self._failing:
            log.warning("what comes in is not recorded in %s: %s; all else goes on", self._folder, why)
        self._failing = why

    def _remove_old(self) -> None:
        blocks = sorted(self._folder.glob(f"*{BLOCK_SUFFIX}"), reverse=True)
        since_s, left = time.time() - self._keep_s, self._most_bytes
        for number, path in enumerate(blocks):
            try:
                found = path.stat()
                left -= found.st_size
                if number and (left < 0 or found.st_mtime < since_s):
                    path.unlink()
            except FileNotFoundError:
                continue

    def write_due(self) -> None:
        """Write a block here and now if it is time for one."""
        if self.is_due:
            self.write(self.cut())

    async def keep(self, look: Callable[[], None]) -> None:
        """Write blocks as they become due, until cancelled; ``look`` is called before each look."""
        while True:
            await asyncio.sleep(LOOK_S)
            look()
            if self.is_due:
                await asyncio.to_thread(self.write, self.cut())


def _short(incident: Incident) -> Incident:
    return msgspec.structs.replace(incident, events=(), evidence=())
