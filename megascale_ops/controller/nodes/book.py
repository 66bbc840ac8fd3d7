# SPDX-License-Identifier: Apache-2.0
"""The book of all nodes: every move in order, where each node stands by them, and the way back.

A move keeps the whole life before and after it. So the book is its moves: a controller that is started again reads them
and stands where it stood, and a move that is taken back restores exactly what was before it.

Pure: moves in, moves out; the caller journals them before anything follows from them.
"""

from collections.abc import Collection, Iterable
from itertools import takewhile
from statistics import median

import msgspec

from megascale_ops.controller.nodes.life import (
    BARRED,
    BY_CONTROLLER,
    LEAVES,
    Happening,
    IllegalNodeMoveError,
    NodeEvent,
    NodeState,
    at_deadline,
    step,
)
from megascale_ops.controller.nodes.limits import leaves
from megascale_ops.schema.health import OUT, EngineWord, NodeLife, NodeMove

UNDONE = "undone"
# Facts about the engine that owns the nodes; none of them moves a node here, and none is taken back by ``undo``.
DRAINED, NOT_DRAINED = "drained_by_engine", "not_drained_by_engine"
RESUMED, NOT_RESUMED = "resumed_by_engine", "not_resumed_by_engine"
# An administrator or another program put it back into service there, while a person here has it out.
RESUMED_BY_OTHERS = "resumed_by_others"
# A person wants a node back that stands here as healthy and that the engine still has out.
RESUME_ASKED = "resume_asked"
OF_ENGINE = frozenset({DRAINED, NOT_DRAINED, RESUMED, NOT_RESUMED, RESUMED_BY_OTHERS, RESUME_ASKED})
_WORDS = {
    DRAINED: "drained",
    NOT_DRAINED: "not drained",
    NOT_RESUMED: "not resumed",
    RESUMED_BY_OTHERS: "resumed by others",
}
_PUTS_OUT = (*LEAVES, NodeEvent.QUARANTINED_BY_HAND, NodeEvent.DRAINED_BY_HAND)
# A check or a person took the node back; time alone puts none into service.
_TAKES_BACK = (NodeEvent.CHECK_PASSED, NodeEvent.CHECK_PASSED_CLEAN, NodeEvent.RELEASED, UNDONE, RESUME_ASKED)
# 20,000 moves are 20 MB in memory and 10 MB in the journal: years of a thousand nodes. The oldest go first.
MOST_MOVES = 20_000


class NodeBook:
    """All moves, the oldest first. Owned by the loop."""

    def __init__(self, moves: Iterable[NodeMove] = (), most: int = MOST_MOVES) -> None:
        self._most = most
        self.moves: dict[int, NodeMove] = {}
        self._lives: dict[str, NodeLife] = {}
        for move in sorted(moves, key=lambda one: one.number):
            self._add(move)

    def life(self, node: str) -> NodeLife:
        """Return where a node stands; one without a move is healthy."""
        return self._lives.get(node) or NodeLife(node)

    @property
    def noted(self) -> Collection[str]:
        """The nodes of which anything is to be remembered; all others never were anything but healthy."""
        return self._lives.keys()

    def lives(self) -> tuple[NodeLife, ...]:
        """Return all nodes that are not simply healthy, by name."""
        return tuple(self._lives[node] for node in sorted(self._lives))

    def shown(self) -> tuple[NodeLife, ...]:
        """Return those that people are to see: not healthy here, or out of service in the engine by us."""
        return tuple(filter(_is_shown, self.lives()))

    def is_barred(self, node: str) -> bool:
        """Return whether a node has no place in a round that is formed now."""
        life = self._lives.get(node)
        return life is not None and life.state in BARRED

    def moves_of(self, node: str) -> tuple[NodeMove, ...]:
        """Return a node's moves, oldest first."""
        return tuple(move for move in self.moves.values() if move.node == node)

    def move(
        self, node: str, happening: Happening, *, evidence: tuple[str, ...] = (), job: str = ""
    ) -> tuple[NodeMove, ...]:
        """Let something happen to a node; return what is to be journaled: the move, and those that are dropped for it.

        Raises:
            IllegalNodeMoveError: it cannot happen where the node stands; nothing was changed.
        """
        before = self.life(node)
        after = step(before, happening)
        move = NodeMove(
            number=self._next(),
            node=node,
            event=happening.event,
            wall_s=happening.wall_s,
            before=before,
            after=after,
            by=happening.by,
            reason=happening.reason,
            key=happening.key,
            evidence=evidence,
            for_s=happening.for_s,
            job=job,
        )
        return self._keep(move)

    def note_engine(
        self, node: str, event: str, wall_s: float, text: str, by: str = BY_CONTROLLER
    ) -> tuple[NodeMove, ...]:
        """Take note of what the engine has done with a node, or of what it was asked; see ``move``.

        Args:
            node: its name.
            event: of ``OF_ENGINE``.
            wall_s: now.
            text: the engine's sentence.
            by: who asked for it.
        """
        before = self.life(node)
        after = _by_engine(before, event, wall_s, text)
        move = NodeMove(
            number=self._next(), node=node, event=event, wall_s=wall_s, before=before, after=after, by=by, reason=text
        )
        return self._keep(move)

    def is_wanted_back(self, node: str) -> bool:
        """Return whether a check or a person has taken the node back since it was out last."""
        for move in reversed(self.moves_of(node)):
            if move.event in _TAKES_BACK:
                return True
            if move.after.state in OUT:
                return False
        return False

    def is_out_anew(self, node: str) -> bool:
        """Return whether a person or evidence has put the node out since others put it back in the engine."""
        for move in reversed(self.moves_of(node)):
            if move.event in _PUTS_OUT:
                return True
            if move.event == RESUMED_BY_OTHERS:
                return False
        return False

    def is_taken_back_since(self, node: str, wall_s: float) -> bool:
        """Return whether a check or a person has taken the node back, here or in the engine, since then."""
        since = takewhile(lambda move: move.wall_s > wall_s, reversed(self.moves.values()))
        return any(move.node == node and move.event in (*_TAKES_BACK, RESUMED) for move in since)

    def is_drained_since(self, node: str, wall_s: float) -> bool:
        """Return whether the engine has drained the node since then."""
        since = takewhile(lambda move: move.wall_s >= wall_s, reversed(self.moves.values()))
        return any(move.node == node and move.event == DRAINED for move in since)

    def undo(self, node: str, wall_s: float, by: str, reason: str = "") -> tuple[NodeMove, ...]:
        """Take back the newest move of a node that was not taken back yet; the same return value as ``move``.

        What was only told again, and what the engine did, are no moves that a person would mean.

        Raises:
            IllegalNodeMoveError: there is none.
        """
        undone: set[int] = set()
        last = None
        for move in reversed(self.moves_of(node)):
            if move.event == UNDONE:
                undone.add(move.undoes)
            elif move.number not in undone and move.event not in (NodeEvent.TOLD_AGAIN, *OF_ENGINE):
                last = move
                break
        if last is None:
            raise IllegalNodeMoveError(f"node {node} has made no move that could be taken back")
        why = reason or f"move {last.number} ({last.event.replace('_', ' ')}) is taken back"
        before = self.life(node)
        move = NodeMove(
            number=self._next(), node=node, event=UNDONE, wall_s=wall_s, before=before,
            after=msgspec.structs.replace(last.before, engine=before.engine), by=by, reason=why, undoes=last.number,
        )  # fmt: skip
        return self._keep(move)

    def due(self, wall_s: float) -> list[tuple[str, NodeEvent]]:
        """Return the nodes whose state's time is over, and what happens to each."""
        found = []
        for node, life in self._lives.items():
            event = at_deadline(life) if life.until_wall_s <= wall_s else None
            if event is not None:
                found.append((node, event))
        return found

    def out_times(self) -> list[float]:
        """Return how long nodes that evidence has put out and that came back were out, seconds."""
        since: dict[str, float] = {}
        found = []
        for move in self.moves.values():
            if leaves(move):
                since.setdefault(move.node, move.wall_s)
            elif move.node in since and move.after.state not in (*OUT, NodeState.UNDER_CHECK):
                found.append(max(0.0, move.wall_s - since.pop(move.node)))
        return found

    def usual_out_s(self) -> float:
        """Return the median of these; 0 where there is none."""
        times = self.out_times()
        return median(times) if times else 0.0

    def _next(self) -> int:
        return next(reversed(self.moves), 0) + 1

    def _keep(self, move: NodeMove) -> tuple[NodeMove, ...]:
        self._add(move)
        return move, *(self._drop() if len(self.moves) > self._most else ())

    def _drop(self) -> tuple[NodeMove, ...]:
        """Drop a tenth of the moves, the oldest, but those by which a node stands where it does and is shown.

        A tenth at once, since each time all of them are looked at: 0.3 s for 20,000.
        """
        newest = {move.node: number for number, move in self.moves.items()}
        old = [
            number for number, move in self.moves.items() if number != newest[move.node] or not _is_shown(move.after)
        ]
        dropped = [self.moves.pop(number) for number in old[: len(self.moves) - self._most * 9 // 10]]
        left = {move.node for move in self.moves.values()}
        for node in {move.node for move in dropped} - left:
            self._lives.pop(node, None)  # the journal knows nothing of it any more either
        return tuple(msgspec.structs.replace(move, event="") for move in dropped)

    def _add(self, move: NodeMove) -> None:
        self.moves[move.number] = move
        if _is_plain(move.after):
            self._lives.pop(move.node, None)
        else:
            self._lives[move.node] = move.after


def _is_shown(life: NodeLife) -> bool:
    return life.state != NodeState.HEALTHY or life.engine is not None


def _by_engine(life: NodeLife, event: str, wall_s: float, text: str) -> NodeLife:
    """Return a life after what the engine did, or was asked; a state that it keeps has its first moment."""
    if event == RESUME_ASKED:
        return life
    word = _WORDS.get(event, "")
    since_s = life.engine.wall_s if life.engine is not None and life.engine.state == word else wall_s
    return msgspec.structs.replace(life, engine=EngineWord(word, since_s, text) if word else None)


def _is_plain(life: NodeLife) -> bool:
    """Return whether nothing is to be remembered of a node: it never was anything but healthy."""
    return life == NodeLife(life.node)


def same_again(moves: Iterable[NodeMove]) -> dict[str, NodeLife]:
    """Return where the nodes stand when everything that happened happens again, from nothing; for tests and doubts."""
    lives: dict[str, NodeLife] = {}
    by_number: dict[int, NodeMove] = {}
    for move in moves:
        by_number[move.number] = move
        before = lives.get(move.node) or NodeLife(move.node)
        if move.event == UNDONE:
            lives[move.node] = msgspec.structs.replace(by_number[move.undoes].before, engine=before.engine)
            continue
        if move.event in OF_ENGINE:
            lives[move.node] = _by_engine(before, move.event, move.wall_s, move.reason)
            continue
        happening = Happening(move.event, move.wall_s, move.by, move.reason, move.key, move.for_s)
        lives[move.node] = step(before, happening)
    return lives
