# SPDX-License-Identifier: Apache-2.0
"""The one place where a node's life changes: the book is moved, the move journaled and told.

What a move needs of the world is gathered here (which rounds run on the node, how many nodes there are); what it means
is judged in ``controller.nodes``, which is pure. The loop lets time pass; evidence comes from detectors and from the
verdicts that end rounds, the rest from people.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from megascale_ops.controller.cluster.registry import Registry
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.nodes import evidence, limits
from megascale_ops.controller.nodes.book import (
    NOT_DRAINED,
    NOT_RESUMED,
    RESUME_ASKED,
    RESUMED,
    RESUMED_BY_OTHERS,
    NodeBook,
)
from megascale_ops.controller.nodes.evidence import Accusation
from megascale_ops.controller.nodes.life import (
    BY_CONTROLLER,
    LEAVES,
    Happening,
    IllegalNodeMoveError,
    NodeEvent,
    NodeState,
    is_to_check,
    unmade,
)
from megascale_ops.controller.nodes.newest_checks import NewestChecks, checked_nodes
from megascale_ops.controller.record.state_machine import ACTIVE, State
from megascale_ops.errors import RefusedError
from megascale_ops.schema.events import Event
from megascale_ops.schema.health import FleetFailures, NodeCheck, NodeLife, NodeMove, NodesView, SelfCheckView
from megascale_ops.schema.wording import clock

log = logging.getLogger(__name__)

EVENT_KIND = "node_moved"
DAY_S = 86_400.0
# Ranks of a round may run on a node in these states of its job.
_RUNS = (*ACTIVE, State.STOPPING)
# What people must hear of: it stays as it is until a person acts.
_LOUD = frozenset(
    {
        *(one.value for one in (NodeEvent.SPARED, NodeEvent.TOLD_AGAIN, NodeEvent.RESUMED_ELSEWHERE, *LEAVES)),
        *(NOT_DRAINED, NOT_RESUMED, RESUMED_BY_OTHERS),
    }
)


class NodeMoves:
    """The lives of all nodes. Owned by the loop.

    Args:
        journal: takes a batch and what to call when it is safe; see ``transitions.Journal``.
        registry: which nodes there are.
        wall: wall clock seconds.
    """

    def __init__(
        self, journal: Callable[[Batch, Callable[[], None]], None], registry: Registry, wall: Callable[[], float]
    ) -> None:
        self.book = NodeBook()
        self.checks = NewestChecks()
        self.by_agent: set[str] = set()  # nodes that their agents measure now; runners wait with theirs
        self.jobs: Mapping[str, Job] = {}
        self.share = limits.SHARE
        self.engine = ""  # whose nodes are drained, for people; "": there is none
        self._journal = journal
        self._registry = registry
        self._wall = wall

    def over(self, jobs: Mapping[str, Job]) -> "NodeMoves":
        """Look at these jobs from now on; return self."""
        self.jobs = jobs
        return self

    def restore(self, moves: Iterable[NodeMove], checks: Iterable[SelfCheckView] = ()) -> None:
        """Stand where the journal says that all nodes stood, and know the newest self-check of each."""
        self.book = NodeBook(moves)
        self.checks = NewestChecks(checks)

    # Evidence.

    def accuse(self, accusation: Accusation) -> NodeMove | None:
        """Take evidence against a node in; return the move that it led to."""
        wall_s, node = self._wall(), accusation.node
        event = evidence.event_for(
            self.book.life(node), accusation, wall_s, is_busy=bool(self.runs_on(node)), has_room=self._has_room(wall_s)
        )
        if event is None:
            return None
        reason = self._with_limit(event, accusation.text)
        happening = Happening(event.value, wall_s, BY_CONTROLLER, reason, accusation.key)
        return self._move(node, happening, accusation.evidence, accusation.job)

    # Checks.

    def is_to_check(self, node: str) -> bool:
        """Return whether a node measures itself before it may be in a round."""
        return is_to_check(self.book.life(node))

    def begin_check(self, node: str, reason: str, job: str) -> None:
        """A runner is asked to measure its node."""
        self._move(node, Happening(NodeEvent.CHECK_BEGAN.value, self._wall(), BY_CONTROLLER, reason), (), job)

    def end_check(self, node: str, check: NodeCheck, job: str = "") -> NodeMove | None:
        """Take the result of a check in; None: none is waited for."""
        life, wall_s = self.book.life(node), self._wall()
        if life.state != NodeState.UNDER_CHECK:
            return None
        if check.outcome == "bad":
            event = NodeEvent.CHECK_FAILED
            if life.was != NodeState.QUARANTINED and not self._has_room(wall_s):
                event = NodeEvent.SPARED
        elif check.outcome == "good":
            clean = life.was == NodeState.HEALTHY
            event = NodeEvent.CHECK_PASSED_CLEAN if clean else NodeEvent.CHECK_PASSED
        else:
            event = unmade(life)
        said = {"good": f"its self-check found nothing bad ({check.seconds:.0f} s)", "bad": check.text}
        text = said.get(check.outcome, f"its self-check could not be made: {check.text}")
        found = (check.text, *((f"the report is {check.path} on {node}",) if check.path else ()))
        key = "check" if check.outcome == "bad" else ""
        happening = Happening(event.value, wall_s, BY_CONTROLLER, self._with_limit(event, text), key)
        return self._move(node, happening, tuple(one for one in found if one), job)

    def keep_check(self, view: SelfCheckView) -> None:
        """Keep the newest self-check of a node with its life."""
        self._journal(Batch(checks=self.checks.keep(view)), _nothing)

    # People.

    def quarantine(self, node: str, by: str, reason: str, for_s: float) -> NodeLife:
        """Take a node out by hand; what runs on it runs on until its round ends."""
        event = NodeEvent.DRAINED_BY_HAND if self.runs_on(node) else NodeEvent.QUARANTINED_BY_HAND
        self._move(node, Happening(event.value, self._wall(), by, reason, for_s=for_s), (), "")
        return self.book.life(node)

    def release(self, node: str, by: str, reason: str) -> NodeLife:
        """Declare a node healthy by hand: what happened before is forgiven, and an engine that has it out resumes it.

        Raises:
            RefusedError: it is healthy, here and in the engine.
        """
        life = self.book.life(node)
        if life.state == NodeState.HEALTHY and life.engine is not None:
            self.note_engine(node, RESUME_ASKED, reason or "a person wants it back", by)
            return self.book.life(node)
        with _refusing():
            self._move(node, Happening(NodeEvent.RELEASED.value, self._wall(), by, reason), (), "")
        return self.book.life(node)

    def undo(self, node: str, by: str, reason: str) -> NodeLife:
        """Take the node's last move back.

        Raises:
            RefusedError: there is none.
        """
        with _refusing():
            self._tell(self.book.undo(node, self._wall(), by, reason))
        return self.book.life(node)

    # The engine.

    def note_engine(self, node: str, event: str, text: str, by: str = BY_CONTROLLER) -> None:
        """Keep what the engine that owns a node has done with it."""
        self._tell(self.book.note_engine(node, event, self._wall(), text, by))

    def resumed_elsewhere(self, node: str) -> None:
        """Others have put a node into service in the engine that is out here by a drain of ours.

        What evidence has put out becomes a suspect, which is measured before it takes part. What a person has put out
        here stays so until a person says otherwise: which of the two is right the controller can't know.
        """
        life, where = self.book.life(node), self.engine or "the engine"
        text = f"somebody has put node {node} back into service in {where}"
        if life.is_held or life.for_s:
            text = f"{text}, and {life.by} has it out here ({life.reason}): no job of this controller goes there"
            self.note_engine(node, RESUMED_BY_OTHERS, text)
            return
        happening = Happening(
            NodeEvent.RESUMED_ELSEWHERE.value,
            self._wall(),
            BY_CONTROLLER,
            f"{text}; it is measured before it takes part again ({life.reason})",
        )
        self._move(node, happening, (), "")
        self.note_engine(node, RESUMED, f"{text}: it is a suspect here")

    # Time.

    def poll(self) -> None:
        """Let time pass: states end by themselves or are told again, and what drains is empty at some moment."""
        wall_s = self._wall()
        for life in self.book.lives():
            if life.state == NodeState.DRAINING and not self.runs_on(life.node):
                text = f"no round runs on it any more; {life.reason}"
                self._move(life.node, Happening(NodeEvent.VACATED.value, wall_s, life.by, text), (), "")
        for node, event in self.book.due(wall_s):
            life = self.book.life(node)
            self._move(node, Happening(event.value, wall_s, BY_CONTROLLER, self._at_deadline(life, event)), (), "")
        old = self.checks.forget(wall_s)
        if old:
            self._journal(Batch(checks=old), _nothing)

    def _at_deadline(self, life: NodeLife, event: NodeEvent) -> str:
        since = clock(life.since_wall_s)
        if event is NodeEvent.EXPIRED:
            return f"nothing more was found since {since} ({life.reason})"
        if event is NodeEvent.SERVED:
            return f"its time in quarantine is over; it is measured before it takes part again ({life.reason})"
        if life.state == NodeState.UNDER_CHECK:
            return f"no result of its self-check came since {since}"
        if life.state == NodeState.DRAINING:
            jobs = ", ".join(self.runs_on(life.node)) or "a round"
            return f"{jobs} still runs on it; draining since {since}: {life.reason}"
        return f"in quarantine since {since} by {life.by}, until a person releases it: {life.reason}"

    # What others ask.

    def runs_on(self, node: str) -> tuple[str, ...]:
        """Return the jobs whose round runs on a node."""
        return tuple(job.name for job in self.jobs.values() if job.state in _RUNS and node in job.round.places)

    def why_barred(self, node: str) -> str:
        """Return why a node has no place in a round now, for its runner's log; "" where it has."""
        life = self.book.life(node)
        if not self.book.is_barred(node):
            return ""
        if life.state == NodeState.UNDER_CHECK:
            return f"{node} measures itself before it takes part ({life.reason})"
        until = "until a person releases it" if life.is_held else f"until {clock(life.until_wall_s)}"
        return (
            f"{node} is {life.state} {until}, by {life.by}: {life.reason}; "
            f"`megascale-ops nodes release {node}` ends that"
        )

    def names(self) -> set[str]:
        """Return the nodes that there are: those with an agent or a runner that is heard."""
        names = {view.node for view in self._registry.nodes()}
        return names.union(*(job.runners for job in self.jobs.values() if not job.is_over))

    def view(self) -> NodesView:
        """Return the nodes that are not simply healthy, the day's limit, and newest self-checks that matter."""
        wall_s, known = self._wall(), len(self.names())
        shown = self.book.shown()
        return NodesView(
            nodes=shown,
            known=known,
            moved_out=limits.moved_out(self.book.moves.values(), wall_s),
            most_out=limits.most_out(known, self.share),
            spared=tuple(life.node for life in shown if life.is_spared),
            failures=self._failures(wall_s),
            engine=self.engine,
            checks=checked_nodes(self.checks.all(), {life.node for life in shown}),
        )

    def _failures(self, wall_s: float) -> FleetFailures:
        """Return how often nodes of the jobs that are known here have failed: moved out by evidence, or lost."""
        days, lost = 0.0, 0
        for job in self.jobs.values():
            record = job.record
            until_s = record.since_wall_s if job.is_over else wall_s
            if record.started_wall_s:
                days += len(record.members) * max(0.0, until_s - record.started_wall_s) / DAY_S
            lost += record.restarted.get("node_lost", 0)
        out = sum(limits.leaves(move) for move in self.book.moves.values())
        return FleetFailures(out + lost, days, self.book.usual_out_s())

    def _has_room(self, wall_s: float) -> bool:
        out = limits.moved_out(self.book.moves.values(), wall_s)
        return out < limits.most_out(len(self.names()), self.share)

    def _with_limit(self, event: NodeEvent, text: str) -> str:
        if event is not NodeEvent.SPARED:
            return text
        most = limits.most_out(len(self.names()), self.share)
        return (
            f"{text}; it stays all the same: {most} of {len(self.names())} nodes a day go by themselves at most, and a "
            "person decides about more (`megascale-ops nodes quarantine` or `release`)"
        )

    def _move(self, node: str, happening: Happening, found: tuple[str, ...], job: str) -> NodeMove:
        moves = self.book.move(node, happening, evidence=found, job=job)
        self._tell(moves)
        return moves[0]

    def _tell(self, moves: tuple[NodeMove, ...]) -> None:
        """Journal a move, and log it; rounds look at the book ten times a second."""
        move = moves[0]
        text = f"{move.node} is {move.after.state} ({move.event.replace('_', ' ')}, by {move.by}): {move.reason}"
        event = Event(move.wall_s, move.job, EVENT_KIND, text, node=move.node, data={"number": move.number})
        log.log(logging.WARNING if move.event in _LOUD else logging.INFO, "%s", text, extra={"node": move.node})
        self._journal(Batch(events=(event,), nodes=moves), _nothing)


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn what the table forbids into a refusal for the person who asked."""
    try:
        yield
    except IllegalNodeMoveError as error:
        raise RefusedError(str(error)) from error


def _nothing() -> None:
    """Do nothing: no request waits for a move to be safe."""
