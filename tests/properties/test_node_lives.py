# SPDX-License-Identifier: Apache-2.0
"""The lives of nodes under every order of events."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.controller.nodes import limits
from megascale_ops.controller.nodes.book import UNDONE, NodeBook, same_again
from megascale_ops.controller.nodes.evidence import Accusation, event_for
from megascale_ops.controller.nodes.life import (
    Happening,
    IllegalNodeMoveError,
    NodeEvent,
    NodeState,
    at_deadline,
    step,
    unmade,
)
from megascale_ops.schema.health import NodeLife, NodeMove

T0 = 1_795_000_000.0
NODES = tuple("abcdefgh")
DAYS_S = 86_400.0

nodes = st.sampled_from(NODES)
# Up to a day and a half between two happenings, so that deadlines pass and days end.
gaps = st.floats(min_value=0.0, max_value=130_000.0, allow_nan=False)
doings = st.lists(
    st.tuples(
        st.sampled_from(("accuse", "check", "good", "bad", "unmeasured", "tick", "out", "out for", "release", "undo")),
        nodes,
        st.sampled_from(("xid_79", "ecc", "evicted_killed")),
        st.booleans(),
        gaps,
    ),
    max_size=50,
)


class Cluster:
    """A book with a clock, and judges that are asked as the controller asks them."""

    def __init__(self) -> None:
        self.book = NodeBook()
        self.now_s = T0
        self.journal: list[NodeMove] = []

    def move(self, node: str, event: NodeEvent, key: str = "", for_s: float = 0.0) -> None:
        """Let something happen that may be illegal, which changes nothing."""
        before = self.book.life(node)
        happening = Happening(event.value, self.now_s, "somebody", "a reason", key, for_s)
        try:
            self.journal += self.book.move(node, happening)
        except IllegalNodeMoveError:
            assert self.book.life(node) == before

    @property
    def has_room(self) -> bool:
        """Whether one more node may go by itself."""
        out = limits.moved_out(self.book.moves.values(), self.now_s)
        return out < limits.most_out(len(NODES))

    def tick(self) -> None:
        """Let what is due happen, as often as a deadline leads to another one that is due."""
        for node, event in self.book.due(self.now_s):
            self.move(node, event)

    def do(self, what: str, node: str, key: str, *, flag: bool) -> None:  # noqa: C901  one branch for each thing
        """Do one drawn thing."""
        life = self.book.life(node)
        if what == "accuse":
            accusation = Accusation(node, key, self.now_s, "bad")
            event = event_for(life, accusation, self.now_s, is_busy=flag, has_room=self.has_room)
            if event is not None:
                self.move(node, event, key)
        elif what == "check":
            self.move(node, NodeEvent.CHECK_BEGAN)
        elif what == "good":
            clean = life.was == NodeState.HEALTHY
            self.move(node, NodeEvent.CHECK_PASSED_CLEAN if clean else NodeEvent.CHECK_PASSED)
        elif what == "bad":
            is_new = life.was != NodeState.QUARANTINED
            self.move(node, NodeEvent.SPARED if is_new and not self.has_room else NodeEvent.CHECK_FAILED, "check")
        elif what == "unmeasured":
            self.move(node, unmade(life))
        elif what == "tick":
            self.tick()
            if flag and life.state == NodeState.DRAINING:
                self.move(node, NodeEvent.VACATED)
        elif what in ("out", "out for"):
            event = NodeEvent.DRAINED_BY_HAND if flag else NodeEvent.QUARANTINED_BY_HAND
            self.move(node, event, for_s=5000.0 if what == "out for" else 0.0)
        elif what == "release":
            self.move(node, NodeEvent.RELEASED)
        else:
            self.undo(node)

    def undo(self, node: str) -> None:
        """Take a move back, and hold what that restores against what was."""
        taken_back = {move.undoes for move in self.book.moves_of(node)}
        last = [
            move
            for move in self.book.moves_of(node)
            if move.number not in taken_back and move.event not in (UNDONE, NodeEvent.TOLD_AGAIN)
        ]
        try:
            self.journal += self.book.undo(node, self.now_s, "somebody")
        except IllegalNodeMoveError:
            assert not last
            return
        assert self.book.life(node) == last[-1].before


def played(drawn: list[tuple[str, str, str, bool, float]]) -> Cluster:
    """Return a cluster to which all of this happened."""
    cluster = Cluster()
    for what, node, key, flag, gap_s in drawn:
        cluster.now_s += gap_s
        cluster.do(what, node, key, flag=flag)
    return cluster


@given(st.sampled_from(list(NodeState)), st.lists(st.sampled_from(list(NodeEvent)), max_size=60))
def test_no_order_of_events_leads_out_of_the_table(state: NodeState, events: list[NodeEvent]) -> None:
    """Whatever happens: the state is one of the table's, and each but healthy has a deadline that is still to come."""
    life = NodeLife("a", state=state.value, until_wall_s=T0 + 1.0 if state is not NodeState.HEALTHY else 0.0)

    for number, event in enumerate(events):
        try:
            life = step(life, Happening(event.value, T0 + 60.0 * number))
        except IllegalNodeMoveError:
            continue
        assert life.state in list(NodeState)
        assert (life.until_wall_s == 0.0) == (life.state == NodeState.HEALTHY)
        assert life.state == NodeState.HEALTHY or life.until_wall_s >= T0 + 60.0 * number


@given(doings)
def test_no_node_is_stuck(drawn: list[tuple[str, str, str, bool, float]]) -> None:
    """From wherever it is, time alone leads a node back, or has people told of it every day that only they can end."""
    cluster = played(drawn)

    for _ in range(200):
        due = [life.until_wall_s for life in cluster.book.lives() if at_deadline(life) is not None]
        if not due:
            break
        ahead_s = min(due) - cluster.now_s
        assert ahead_s <= DAYS_S
        cluster.now_s = max(cluster.now_s, min(due))
        told = {life.node: life for life in cluster.book.lives()}
        numbers = set(cluster.book.moves)
        cluster.tick()
        assert set(cluster.book.moves) > numbers  # what was due has happened, and is in the journal
        for move in [cluster.book.moves[number] for number in set(cluster.book.moves) - numbers]:
            stays = move.after.state == told[move.node].state
            assert not stays or move.event == NodeEvent.TOLD_AGAIN
            assert not stays or move.after.is_held or move.after.state == NodeState.DRAINING
    left = [life for life in cluster.book.lives() if life.state != NodeState.HEALTHY]
    assert all(life.is_held or life.state == NodeState.DRAINING for life in left)


@given(doings)
def test_the_blast_radius_is_never_exceeded(drawn: list[tuple[str, str, str, bool, float]]) -> None:
    """In no day more nodes go by themselves than the limit allows, whatever people do meanwhile."""
    cluster = played(drawn)

    gone = [move.wall_s for move in cluster.book.moves.values() if limits.leaves(move)]
    for first, later in pairwise(gone):  # of eight nodes one may go a day
        assert later - first >= limits.DAY_S


@given(doings)
def test_the_journal_gives_the_same_cluster_again(drawn: list[tuple[str, str, str, bool, float]]) -> None:
    """A controller that is started again stands where it stood; and so does one in which everything happens again."""
    cluster = played(drawn)

    assert NodeBook(cluster.journal).lives() == cluster.book.lives()
    again = same_again(cluster.journal)
    assert {node: life for node, life in again.items() if life != NodeLife(node)} == {
        life.node: life for life in cluster.book.lives()
    }


@given(doings)
def test_a_small_book_forgets_what_is_over_and_nothing_else(drawn: list[tuple[str, str, str, bool, float]]) -> None:
    """Of a journal that is full, moves go that say nothing of where a node stands that is not healthy."""
    cluster = Cluster()
    cluster.book = NodeBook(most=12)
    kept: dict[int, NodeMove] = {}
    for what, node, key, flag, gap_s in drawn:
        cluster.now_s += gap_s
        if what != "undo":
            cluster.do(what, node, key, flag=flag)
    for move in cluster.journal:
        kept[move.number] = move
        if not move.event:
            del kept[move.number]

    assert list(kept) == list(cluster.book.moves)
    assert NodeBook(kept.values()).lives() == cluster.book.lives()
    assert len(kept) <= max(12, len(NODES))
