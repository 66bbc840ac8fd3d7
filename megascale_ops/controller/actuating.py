# SPDX-License-Identifier: Apache-2.0
"""Tell the engine that owns the nodes which of them a verdict has put out, and read back which it has put out itself.

Two ways: a node that a job goes on without, or that is out for all jobs (``controller.nodes``), is drained, with a
reason that says whose it is and why; it comes back by a check or by hand, never by time alone. What was drained since
the table of nodes has it out is resumed when a check or a person takes it back there. And a node that an administrator
has drained gets no rank of a new round while others suffice; what runs there goes on.

State is never kept there: what was done, or could not be, is a move in the book of nodes, so a controller that is
started again goes on with it. What failed is tried again, ever more rarely, as long as it is wanted: an eviction as
long as it stands. What others have put back into service there while it is out here is a move in the table of
nodes, and is not drained a second time for the same reason. Each call waits for a program of the
engine's, so it is made in a thread; a cluster without the right to drain loses one sentence, and nothing else.
"""

import asyncio
import contextlib
import enum
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar, cast

from megascale_ops.controller.job.job import Job
from megascale_ops.controller.loop import Loop
from megascale_ops.controller.nodes.book import DRAINED, NOT_DRAINED, NOT_RESUMED, RESUMED
from megascale_ops.controller.nodes.life import NodeState
from megascale_ops.controller.policy.decision import Eviction
from megascale_ops.controller.record.state_machine import FINAL
from megascale_ops.engines.actuator import EngineError, EngineNode, ForeignError, Nodes, find
from megascale_ops.schema.health import OUT, NodeLife

log = logging.getLogger(__name__)
T = TypeVar("T")

LOOK_S = 1.0
_SICK_S = 60.0
_MOST_TOLD = 10_000  # evictions: a job remembers 100
# 1 min, doubled up to an hour: an engine that is away comes back, a right that lacks is given by a person.
_AGAIN_S, _LONGEST_AGAIN_S = 60.0, 3600.0
_IN = (NodeState.BACK, NodeState.HEALTHY, NodeState.SUSPECT)


class _Wanted(enum.Enum):
    """What the table of nodes wants of the engine."""

    DRAIN = enum.auto()
    RESUME = enum.auto()
    NOTHING_LEFT = enum.auto()  # it could not be drained, and needs to be no more


class _Tries:
    """One thing that is wanted of the engine, until it is done."""

    def __init__(self, wanted: _Wanted) -> None:
        self.wanted = wanted
        self.failed = 0
        self.next_s = 0.0

    def put_off(self, now_s: float) -> None:
        """It failed: it is tried again, ever more rarely."""
        self.next_s = now_s + min(_AGAIN_S * 2.0 ** min(self.failed, 20), _LONGEST_AGAIN_S)
        self.failed += 1


class Actuating:
    """The link of one controller to one engine's nodes.

    Args:
        loop: Whose evictions are told, and whose registry is told of nodes that are out.
        nodes: The engine's; None where there is no engine.
        states_s: The states are read so often; 0: never.
    """

    def __init__(self, loop: Loop, nodes: Nodes | None, states_s: float) -> None:
        self._loop = loop
        self._nodes = nodes
        self._states_s = states_s
        self._next_s = 0.0
        self._told: dict[tuple[str, str, float], None] = {}
        self._owed: dict[tuple[str, str, float], _Tries] = {}  # evictions that the engine does not know of yet
        self._tries: dict[str, _Tries] = {}  # by node: what is wanted of the engine and was not done yet
        self._said = ""

    def begin(self) -> None:
        """Begin; what the controller before has told the engine is not told again, and what it could not tell is."""
        book, wall_s = self._loop.nodes.book, self._loop.wall()
        for key, _, one in self._evictions():
            if one.until_wall_s <= wall_s or book.is_drained_since(one.node, one.wall_s):
                self._told[key] = None
        if self._nodes is not None:
            self._loop.nodes.engine = self._nodes.title

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            try:
                await self.poll()
            except Exception:  # a boundary: a fault here must not end the controller, and is logged
                log.exception("the engine's nodes could not be looked at; it is tried again in %g s", _SICK_S)
                await asyncio.sleep(_SICK_S)
            await asyncio.sleep(LOOK_S)

    async def poll(self) -> None:
        """Drain what was evicted since the last look, and read the states where it is time."""
        if self._nodes is None:
            return
        evictions = self._evictions()
        self._owed = {key: self._owed[key] for key, _, _ in evictions if key in self._owed}
        for key, job, one in evictions:
            if key not in self._told:
                await self._tell_eviction(self._nodes, key, job, one)
        await self._follow_table(self._nodes)
        if self._states_s > 0 and self._loop.clock() >= self._next_s and self._has_work():
            self._next_s = self._loop.clock() + self._states_s
            await self._read(self._nodes)

    def _evictions(self) -> list[tuple[tuple[str, str, float], Job, Eviction]]:
        """Return each eviction that jobs remember, by its key, with its job."""
        return [
            ((job.name, one.node, one.wall_s), job, one)
            for job in self._loop.jobs.values()
            for one in job.record.evictions
        ]

    def _has_work(self) -> bool:
        is_out = any(one.state in OUT and one.engine is not None for one in self._loop.nodes.book.lives())
        return is_out or any(job.state not in FINAL for job in self._loop.jobs.values()) or any(self._left())

    def _left(self) -> Iterator[str]:
        """Yield the nodes that take part here and that the engine still has out, as far as is known."""
        for life in self._loop.nodes.book.lives():
            if life.state in _IN and life.engine is not None and life.engine.state in ("drained", "not resumed"):
                yield life.node

    async def _tell_eviction(self, nodes: Nodes, key: tuple[str, str, float], job: Job, one: Eviction) -> None:
        """Drain a node that a job goes on without, once; what failed is tried again as long as the eviction stands."""
        tries = self._owed.setdefault(key, _Tries(_Wanted.DRAIN))
        is_over = self._loop.wall() >= one.until_wall_s and tries.failed
        is_over = is_over or self._loop.nodes.book.is_taken_back_since(one.node, one.wall_s)
        if not is_over:
            if self._loop.clock() < tries.next_s:
                return
            if not await self._drain(nodes, job, one):
                tries.put_off(self._loop.clock())
                return
        del self._owed[key]
        self._told[key] = None
        while len(self._told) > _MOST_TOLD:
            del self._told[next(iter(self._told))]

    async def _drain(self, nodes: Nodes, job: Job, one: Eviction) -> bool:
        node = one.node
        try:
            said = await _aside(lambda: nodes.drain(node, f"{job.name}: {one.reason}"))
        except EngineError as error:
            text = f"node {node} is not drained in {nodes.title}, {job.name} goes on without it: {error}"
            known = self._loop.nodes.book.life(node).engine
            if known is None or known.text != text:  # the same again is no news
                self._loop.nodes.note_engine(node, NOT_DRAINED, text)
                self._note(job, "node_not_drained", f"{node} is not drained: {error}", node)
            return False
        self._next_s = 0.0
        self._loop.nodes.note_engine(node, DRAINED, said)
        self._note(job, "node_drained", said, node)
        return True

    async def _follow_table(self, nodes: Nodes) -> None:
        """Drain what the table of nodes puts out, resume that when it is taken back, and keep what came of it."""
        for life in self._loop.nodes.book.lives():
            wanted = self._wanted(life)
            if wanted is None:
                self._tries.pop(life.node, None)
                continue
            tries = self._tries.get(life.node)
            if tries is None or tries.wanted is not wanted:
                tries = self._tries[life.node] = _Tries(wanted)
            if self._loop.clock() < tries.next_s:
                continue
            if await self._do(nodes, life, wanted):
                self._tries.pop(life.node, None)
                self._next_s = 0.0
            else:
                tries.put_off(self._loop.clock())

    def _wanted(self, life: NodeLife) -> _Wanted | None:
        """Return what is to be done about a node in the engine; None: nothing."""
        word = life.engine.state if life.engine is not None else ""
        if life.state in OUT:
            is_theirs = word == "resumed by others" and not self._loop.nodes.book.is_out_anew(life.node)
            return None if word == "drained" or is_theirs else _Wanted.DRAIN
        if life.state not in _IN or not word:
            return None
        if word == "not drained" and any(node == life.node for _, node, _ in self._owed):
            return None  # a job goes on without it, and the engine is asked again for that
        if word in ("not drained", "resumed by others"):
            return _Wanted.NOTHING_LEFT
        return _Wanted.RESUME if self._loop.nodes.book.is_wanted_back(life.node) else None

    async def _do(self, nodes: Nodes, life: NodeLife, wanted: _Wanted) -> bool:
        """Do it; return whether it is done, or at least nothing of it is left to do."""
        node, note = life.node, self._loop.nodes.note_engine
        if wanted is _Wanted.NOTHING_LEFT:
            note(node, RESUMED, f"it is out no more, and {nodes.title} has not drained it")
            return True
        is_drain = wanted is _Wanted.DRAIN
        try:
            if is_drain:
                said = await _aside(lambda: nodes.drain(node, f"{life.state} by {life.by}: {life.reason}"))
            else:
                said = await _aside(lambda: nodes.resume(node))
        except ForeignError as error:
            note(node, RESUMED, str(error))
            return True
        except EngineError as error:
            event = NOT_DRAINED if is_drain else NOT_RESUMED
            text = f"node {node} is {'not drained' if is_drain else 'not resumed'} in {nodes.title}: {error}"
            if life.engine is None or life.engine.text != text:  # the same again is no news
                note(node, event, text)
            return False
        note(node, DRAINED if is_drain else RESUMED, said)
        return True

    async def _read(self, nodes: Nodes) -> None:
        try:
            states = await _aside(nodes.states)
        except EngineError as error:
            if str(error) != self._said:
                log.warning("the states of the cluster's nodes can't be read, what was read before holds: %s", error)
            self._said = str(error)
            return
        self._said = ""
        self._take(states)

    def _take(self, states: Mapping[str, EngineNode]) -> None:
        """Let the registry have the nodes that are out, and tell the jobs that have one."""
        for node in list(self._left()):
            known = find(states, node)
            if known is not None and known.is_usable:
                text = f"node {node} is back in service in the engine, by somebody else"
                self._loop.nodes.note_engine(node, RESUMED, text)
        for life in self._loop.nodes.book.lives():
            known = find(states, life.node)
            is_drained = life.state in OUT and life.engine is not None and life.engine.state == "drained"
            if is_drained and known is not None and known.is_usable:
                self._loop.nodes.resumed_elsewhere(life.node)
        before = self._loop.registry.withheld
        now = {name: sentence(one) for name, one in states.items() if not one.is_usable}
        self._loop.registry.withheld = now
        for job in [one for one in self._loop.jobs.values() if one.state not in FINAL]:
            for node in {*job.nodes, *job.waiting}:
                known = find(states, node)
                if known is not None and (text := now.get(known.name, "")) != before.get(known.name, ""):
                    told = f"{text}: no new round takes it while others suffice" if text else f"{node} is usable again"
                    self._note(job, "node_withheld" if text else "node_usable", told, node)

    def _note(self, job: Job, kind: str, text: str, node: str) -> None:
        self._loop.transitions.note(job, kind, text, node=node)
        self._loop.transitions.save(job)


async def _aside(call: Callable[[], T]) -> T:
    """Return what a call returns or raises, made in a thread for which the end of the controller does not wait."""
    events = asyncio.get_running_loop()
    answer: asyncio.Future[T] = events.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if answer.done():
            return  # cancelled meanwhile
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(cast("T", result))

    def work() -> None:
        result, error = None, None
        try:
            result = call()
        except Exception as raised:  # noqa: BLE001  handed to who waits
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            events.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="engine", daemon=True).start()
    return await answer


def sentence(node: EngineNode) -> str:
    """Return why a node is out, in the engine's words."""
    who = f" by {node.by}" if node.by and not node.is_ours else ""
    return f"node {node.name} is {node.words}{who}" + (f" ({node.reason})" if node.reason else "")
