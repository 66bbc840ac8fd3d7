# SPDX-License-Identifier: Apache-2.0
"""Replay a recording: hand what came in to a real controller, at the times at which it came, on a virtual clock.

The controller decides by itself, so its orders have names and moments of their own. An answer of the recording belongs
to the order of the same kind to the same node; where the controller gives that a little later, the answer waits for it.
Where it decides otherwise than the one that was recorded, what follows in the recording is no answer to what it did:
its verdicts up to there are what a replay can tell.
"""

import asyncio
import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from megascale_ops.controller.embedded import TICK_EVERY_S, Embedded
from megascale_ops.errors import MegascaleError, UsageError
from megascale_ops.foreign import UNREADABLE
from megascale_ops.replay.answers import Answers
from megascale_ops.replay.files import Recording, job_of
from megascale_ops.schema.events import Incident
from megascale_ops.schema.messages import Join
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.policy_settings import apply_settings
from megascale_ops.schema.recording.entries import (
    Answered,
    Beat,
    Broken,
    Entry,
    Given,
    Joined,
    Left,
    PolicySet,
    Polled,
    Start,
    Stepped,
    StopAsked,
)
from megascale_ops.sim.clock import Clock, on_virtual_time

# Turns of the event loop without anything, until everything that could run has run.
_IDLE_TURNS = 4
_MEMORY = Path("/dev/shm")  # noqa: S108  a folder of its own is made there
# 100: what the controller refused; the first are enough to see why.
_MOST_REFUSED = 100


class Replayed(NamedTuple):
    """What a controller made of a recording."""

    incidents: tuple[Incident, ...]  # oldest first, with events and evidence
    span_s: float  # of the recording
    took_s: float
    refused: tuple[str, ...]  # what the controller did not take


def replay(
    recording: Recording,
    settings: Mapping[str, str] | None = None,
    *,
    speed: float = 0.0,
    sleep: Callable[[float], None] = time.sleep,
) -> Replayed:
    """Replay a recording of one job.

    Args:
        recording: as it was exported.
        settings: of the policy, checked; they replace those of the recording.
        speed: so many times as fast as it happened; 0: as fast as possible.
        sleep: how to wait where a speed is given.

    Raises:
        UsageError: it tells of more than one job, or of none.
        MegascaleError: the controller has a fault of its own.
    """
    job = job_of(recording)
    began_s, clock = time.perf_counter(), Clock()
    with _playing(recording, clock, settings) as player:
        player.pace = _Pace(speed, sleep) if speed else None
        with on_virtual_time(clock) as runner:
            runner.run(player.run())
        controller = player.controller
        names = [one.id for one in controller.incidents(job)]
        found = tuple(one for name in names if (one := controller.incident(name)) is not None)
    return Replayed(found, recording.span_s, time.perf_counter() - began_s, tuple(player.refused))


@contextlib.contextmanager
def _playing(recording: Recording, clock: Clock, settings: Mapping[str, str] | None = None) -> Iterator["_Player"]:
    """Yield who plays a recording to a controller with a journal in a folder of its own, which goes."""
    memory = str(_MEMORY) if _MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="megascale-replay-", dir=memory) as folder:
        wall = _Wall(clock, recording.header.began_wall_s)
        controller = Embedded(f"sqlite:///{Path(folder) / 'ops.db'}", clock=clock.mono_s, wall=wall.now_s)
        with contextlib.closing(controller):
            yield _Player(recording, controller, clock, wall, settings or {})


def begun_later(recording: Recording, from_s: float) -> Recording:
    """Return a recording that begins later: with what a controller knows by then, told all that came before.

    Args:
        recording: of one job.
        from_s: seconds since its beginning.
    """
    clock = Clock()
    with _playing(recording, clock) as player:
        with on_virtual_time(clock) as runner:
            runner.run(player.run(from_s))
        start, wall_s = player.known, player.wall_s
    header = msgspec.structs.replace(
        recording.header, began_mono_s=recording.header.began_mono_s + from_s, began_wall_s=wall_s
    )
    later = (
        msgspec.structs.replace(entry, t=round(entry.t - from_s, 4))
        for entry in recording.entries
        if entry.t >= from_s and not isinstance(entry, Start)
    )
    return Recording(header, (start, *later))


class _Wall:
    """The wall clock as it went."""

    def __init__(self, clock: Clock, began_wall_s: float) -> None:
        self._clock = clock
        self.began_wall_s = began_wall_s

    def now_s(self) -> float:
        """Return the wall clock's seconds now."""
        return self.began_wall_s + self._clock.passed_s


class _Pace:
    """So many times as fast as it happened."""

    def __init__(self, speed: float, sleep: Callable[[float], None]) -> None:
        self._speed, self._sleep = speed, sleep
        self._began_s = time.perf_counter()

    def keep(self, passed_s: float) -> None:
        """Wait until so much may have passed."""
        self._sleep(max(0.0, passed_s / self._speed - (time.perf_counter() - self._began_s)))


class _Player:
    """One replay. Owned by ``replay``."""

    def __init__(
        self,
        recording: Recording,
        controller: Embedded,
        clock: Clock,
        wall: _Wall,
        settings: Mapping[str, str],
    ) -> None:
        self._entries = recording.entries
        self.controller, self._clock, self._wall = controller, clock, wall
        self._settings = settings
        self._answers = Answers()
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._ticks = 0
        self._stirs = 0
        self.pace: _Pace | None = None
        self.refused: list[str] = []
        self.known = Start(0.0)
        self.wall_s = 0.0

    async def run(self, until_s: float = math.inf) -> None:
        """Replay all of it, or what came before ``until_s``: then what is known is noted."""
        is_first = True
        try:
            for entry in self._entries:
                if entry.t >= until_s:
                    break
                await self._pass(entry.t)
                if isinstance(entry, Start):
                    if is_first:
                        self._begin(entry)
                elif isinstance(entry, Beat):
                    self._beat(entry)
                    is_first = False
                    continue
                else:
                    self._take(entry)
                is_first = False
                await self._settle()
            if until_s < math.inf:
                await self._pass(until_s)
            await self._settle()
            self._note_known()
        finally:
            for task in self._requests.values():
                task.cancel()
            await asyncio.gather(*self._requests.values(), return_exceptions=True)

    def _note_known(self) -> None:
        """Note what the controller knows, and which of the recorded requests wait."""
        waiting = {number for number, task in self._requests.items() if not task.done()}
        started = self._entries[0] if self._entries and isinstance(self._entries[0], Start) else Start(0.0)
        asked = [one for one in (*started.polls, *started.joins, *self._entries) if isinstance(one, (Polled, Joined))]
        open_ = {one.n: msgspec.structs.replace(one, t=0.0) for one in asked if one.n in waiting}
        self.wall_s = self._wall.now_s()
        self.known = msgspec.structs.replace(
            self.controller.known(),
            polls=tuple(one for one in open_.values() if isinstance(one, Polled)),
            joins=tuple(one for one in open_.values() if isinstance(one, Joined)),
        )

    def _begin(self, start: Start) -> None:
        """Go on from what was known when the recording begins."""
        try:
            records = {name: _under(bytes(raw), self._settings) for name, raw in start.records.items()}
        except UNREADABLE as error:
            raise UsageError(f"what was known of the job at the beginning can't be read: {error}") from error
        self.controller.restore(records, start.incidents, start.hardware)
        for order in (order for raw in records.values() for order in _orders_of(raw)):
            self._answers.note(order.id, order.node, order.kind)
            self._answers.give((order,))
        for agent in start.agents:
            self._beat(Beat(0.0, agent.m, agent.only_job))
        for join in start.joins:
            self._take(join)
        for poll in start.polls:
            self._take(poll)

    def _beat(self, entry: Beat) -> None:
        heartbeat = entry.m
        if heartbeat.done_orders:
            heartbeat = msgspec.structs.replace(heartbeat, done_orders=())
        done = self._answers.done(entry.m.node, entry.m.done_orders, self._clock.passed_s)
        if done:
            heartbeat = msgspec.structs.replace(heartbeat, done_orders=done)
        try:
            reply = self.controller.heartbeat(heartbeat, entry.only_job)
        except MegascaleError as error:
            self._note_refused(f"a heartbeat of {heartbeat.node}", error)
            return
        if self._answers.give(reply.orders):
            self._hand_on()

    def _take(self, entry: Entry) -> None:
        """Hand in what is no heartbeat."""
        if isinstance(entry, Joined):
            self._ask(entry.n, self._join(entry.m, entry.wait_s))
        elif isinstance(entry, Polled):
            self._ask(entry.n, self._poll(entry))
        elif isinstance(entry, Broken):
            if entry.n in self._requests:
                self._requests[entry.n].cancel()
        elif isinstance(entry, Given):
            self._answers.note(entry.m.id, entry.m.node, entry.m.kind)
        elif isinstance(entry, Answered):
            self._answers.keep(entry.m, self._clock.passed_s)
            self._hand_on()
        elif isinstance(entry, Stepped):
            self._wall.began_wall_s = entry.wall_s - self._clock.passed_s
        else:
            self._take_word(entry)

    def _take_word(self, entry: Entry) -> None:
        """Hand in a runner's or a person's word."""
        try:
            if isinstance(entry, Left):
                self.controller.leave(entry.m)
            elif isinstance(entry, PolicySet):
                kept = {name: value for name, value in entry.settings.items() if name not in self._settings}
                if kept:
                    self.controller.set_policy(entry.job, kept)
            elif isinstance(entry, StopAsked):
                self.controller.stop(entry.job, entry.reason)
        except MegascaleError as error:
            self._note_refused(type(entry).__name__, error)

    def _hand_on(self) -> None:
        """Hand in evidence whose order has been given."""
        for evidence in self._answers.due(self._clock.passed_s):
            try:
                self.controller.evidence(evidence)
            except MegascaleError as error:
                self._note_refused(f"evidence of {evidence.node}", error)

    def _ask(self, number: int, asking: Any) -> None:  # noqa: ANN401  a coroutine without an answer
        self._requests[number] = asyncio.create_task(asking)
        if len(self._requests) > 1024:
            self._requests = {n: task for n, task in self._requests.items() if not task.done()}

    async def _join(self, join: Join, wait_s: float) -> None:
        if self._settings:
            join = msgspec.structs.replace(join, policy=apply_settings(join.policy, self._settings))
        try:
            await self.controller.join(join, wait_s)
        except MegascaleError as error:
            self._note_refused(f"the join of {join.node}", error)
        self._stirs += 1

    async def _poll(self, entry: Polled) -> None:
        after = self._answers.name_now(entry.after)
        try:
            reply = await self.controller.orders(
                entry.job, entry.node, entry.runner_id, entry.round, after, entry.incidents, entry.wait_s
            )
            self._answers.give(reply.orders)
        except MegascaleError as error:
            self._note_refused(f"a poll of {entry.node}", error)
        self._stirs += 1

    def _note_refused(self, what: str, error: MegascaleError) -> None:
        if len(self.refused) < _MOST_REFUSED:
            self.refused.append(f"{self._clock.passed_s:.1f} s: {what}: {error}")

    async def _pass(self, until_s: float) -> None:
        """Let time pass until then, in ticks."""
        while (due_s := round((self._ticks + 1) * TICK_EVERY_S, 4)) <= until_s:
            self._ticks += 1
            self._clock.advance(due_s, with_timers=True)
            if self.pace is not None:
                self.pace.keep(due_s)
            self.controller.tick()
            await self._settle()
        self._clock.advance(max(until_s, self._clock.passed_s), with_timers=True)

    async def _settle(self) -> None:
        """Let everything run that can, until nothing does."""
        idle = 0
        while idle < _IDLE_TURNS:
            before = self._stirs
            await asyncio.sleep(0)
            idle = 0 if self.controller.settle() or self._stirs != before else idle + 1


def _under(raw: bytes, settings: Mapping[str, str]) -> bytes:
    """Return a job's record under these settings of its policy."""
    if not settings:
        return raw
    record = msgspec.json.decode(raw, type=dict[str, Any])
    policy = msgspec.convert(record.get("policy", {}), JobPolicy)
    record["policy"] = msgspec.to_builtins(apply_settings(policy, settings))
    return msgspec.json.encode(record)


class _Ordered(msgspec.Struct):
    """What is read of an order in a job's record."""

    id: str
    node: str
    kind: str
    incident: str = ""
    round: int = 0


class _Facts(msgspec.Struct):
    """What is read of a job's record."""

    orders: tuple[_Ordered, ...] = ()


def _orders_of(raw: bytes) -> tuple[_Ordered, ...]:
    return msgspec.json.decode(raw, type=_Facts).orders
