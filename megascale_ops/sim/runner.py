# SPDX-License-Identifier: Apache-2.0
"""A node's runner: joins rounds, starts ranks, listens for orders, stops ranks, reports how they ended.

It does what ``megascale_ops.runner`` does, by the same messages and with the same long polls.
"""

import asyncio
from typing import Any, Protocol

import msgspec

from megascale_ops.controller.embedded import Embedded
from megascale_ops.errors import MegascaleError
from megascale_ops.schema.health import NodeCheck
from megascale_ops.schema.messages import Join, JoinReply, Leave, Order, OrdersReply, RankExit
from megascale_ops.sim.clock import Clock
from megascale_ops.sim.machine import JOB, RUN_DIR, Crew, Machine
from megascale_ops.sim.settings import Settings
from megascale_ops.sim.wire import Wire

# As in the runner (``runner/membership.py``).
LONG_POLL_S = 20.0
RETRY_S = 0.5
# Half a minute is what a node's check is meant to take.
CHECK_S = 30.0
# A runner sees the end of a rank and stops the others on its node within about a second.
LOCAL_STOP_S = 1.0


class Host(Protocol):
    """What a runner asks and tells (``world.World``)."""

    settings: Settings
    clock: Clock
    controller: Embedded
    wire: Wire
    stirs: int  # how often an answer came

    def enter(self, reply: JoinReply, machine: Machine) -> Crew:
        """Start a node's ranks in a round that was formed."""

    def be_loud(self) -> None:
        """Something happens."""

    def note_refused(self, what: str, error: MegascaleError) -> None:
        """The controller has refused something."""


class Runner:
    """One life of a node's runner. Owned by the world."""

    def __init__(self, world: Host, machine: Machine) -> None:
        self._world = world
        self._machine = machine
        self._id = f"runner-{machine.name}.{machine.life.number}"
        self._joins = 0
        self._round = 0
        self._incidents = 0
        self._last_order = ""
        self._order: asyncio.Future[Order] = asyncio.get_running_loop().create_future()
        self._listener: asyncio.Task[None] | None = None
        self._life = machine.life.number

    async def run(self) -> None:
        """Take part until the job is over, or the machine dies under it."""
        exits: tuple[RankExit, ...] = ()
        ordered = False
        try:
            while True:
                reply = await self._join(exits, ordered=ordered)
                if reply.status != "go":
                    return
                self._round = reply.round
                self._order = asyncio.get_running_loop().create_future()  # what was ordered for another round is void
                self._incidents = max(self._incidents, reply.incidents)
                if self._listener is None:
                    self._listener = asyncio.create_task(self._listen())
                crew = self._world.enter(reply, self._machine)
                ordered = await self._serve(crew)
                exits = self._stopped(crew)
                if ordered and self._order.result().kind == "shutdown":
                    self._leave(exits)
                    return
        finally:
            if self._listener is not None:
                self._listener.cancel()

    async def _alive(self) -> None:
        """Note that a request was answered; on a machine that died meanwhile nothing goes on."""
        self._world.stirs += 1
        if not self._machine.life.is_on or self._machine.life.number != self._life:
            await asyncio.get_running_loop().create_future()  # for ever: the process is no more

    async def _join(self, exits: tuple[RankExit, ...], *, ordered: bool) -> JoinReply:
        world, machine = self._world, self._machine
        failed = any(exit_.code != 0 and not exit_.by_us for exit_ in exits)
        self._joins += 1
        join = Join(
            job=JOB,
            node=machine.name,
            runner_id=self._id,
            join_id=f"{self._id}:{self._joins}",
            nproc=machine.count,
            min_nodes=world.settings.nodes,
            max_nodes=world.settings.nodes,
            addr=f"10.{machine.number >> 16}.{machine.number >> 8 & 255}.{machine.number & 255}",
            store_port=29_500,
            mono_s=self._mono_s(),
            previous_round=self._round,
            incidents=self._incidents,
            cause="start" if not self._round else "failure" if failed or not ordered else "order",
            exits=exits,
            policy=world.settings.policy,
            run_dir=RUN_DIR,
            can_check=True,
        )
        while True:
            fresh = msgspec.structs.replace(join, mono_s=self._mono_s())
            reply = await world.controller.join(world.wire.checked(fresh, Join), LONG_POLL_S)
            await self._alive()
            self._incidents = max(self._incidents, reply.incidents)
            if reply.status == "check":
                await asyncio.sleep(CHECK_S)
                await self._alive()
                is_bad = world.clock.passed_s < machine.bad_until_s
                text = f"GPU {machine.bad_gpu} computes wrong" if is_bad else ""
                join = msgspec.structs.replace(join, check=NodeCheck("bad" if is_bad else "good", text, CHECK_S))
            elif reply.status != "wait":
                return reply

    async def _serve(self, crew: Crew) -> bool:
        """Wait until the ranks are to be stopped; return whether that was ordered."""
        ended: set[asyncio.Future[Any]] = {crew.failed, self._order}
        await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        await self._alive()
        ordered = self._order.done()
        crew.training.end()
        await asyncio.sleep(self._world.settings.stop_s if ordered else LOCAL_STOP_S)
        await self._alive()
        return ordered

    def _stopped(self, crew: Crew) -> tuple[RankExit, ...]:
        crew.is_stopped = True
        self._machine.life.crew = None
        self._machine.life.wants_full = True
        self._machine.beats.end(self._machine.number)
        return crew.exits(self._mono_s())

    def _leave(self, exits: tuple[RankExit, ...]) -> None:
        world = self._world
        word = Leave(
            job=JOB, node=self._machine.name, runner_id=self._id, outcome="cancelled", round=self._round, exits=exits,
            mono_s=self._mono_s(),
        )  # fmt: skip
        try:
            world.controller.leave(world.wire.checked(word, Leave))
        except MegascaleError as error:
            world.note_refused(f"{self._machine.name} leaves", error)

    async def _listen(self) -> None:
        """Hold a long poll for orders; it is also this runner's heartbeat."""
        machine = self._machine
        while True:
            reply: OrdersReply = await self._world.controller.orders(
                JOB, machine.name, self._id, self._round, self._last_order, self._incidents, LONG_POLL_S
            )
            await self._alive()
            self._incidents = max(self._incidents, reply.incidents)
            for order in reply.orders:
                self._last_order = order.id
                if order.round == self._round and not self._order.done():
                    self._world.be_loud()
                    self._order.set_result(order)
            if not reply.orders and not reply.known:
                await asyncio.sleep(RETRY_S)

    def _mono_s(self) -> float:
        return self._world.clock.mono_s() + self._machine.offset_s
