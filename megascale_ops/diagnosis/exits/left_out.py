# SPDX-License-Identifier: Apache-2.0
"""Which ranks went past a collective without it, by where each was when it ended.

Of several ranks that are not in a call, one may have left it out and another may only be late for it. Neither has made
it, but the one is beyond the place where it belongs. Ranks run one program: the same phases and steps in the same
order, with the same calls of a group in the same phases. Their trails show whether they did so in this run, and where
the call belongs: where those that are in it made it.

    in the call   data forward backward optimizer | other CALL
    late          data forward backward optimizer | other
    past it       data forward backward optimizer | other data forward backward

So a rank is *past* a call if its trail is that of a rank which made it, over two whole steps at least and up to that
call, and goes on where the other called. It goes on as in one of these steps, for what is new there may well end in the
call: a checkpoint that one rank writes while the others wait for it. And it has begun to learn from what it read since,
for an evaluation that the script does not declare begins like a step. Ranks whose trails differ anywhere before, as
those of different stages of a pipeline may, are not compared: half of the group at least must have made the call at a
place that a rank is past.

Pure: exits in, the ranks that are past a call out.
"""

from collections.abc import Mapping, Sequence
from string import ascii_lowercase
from typing import NamedTuple

from megascale_ops.diagnosis.hangs.call_order import Deviation, describe, difference
from megascale_ops.schema.folding import named
from megascale_ops.schema.messages import CollectiveFact, RankExit
from megascale_ops.schema.progress import Trail

# 2: one step may be like the next by chance; twice the same phases, with the same calls in them, is a program.
_FEWEST_STEPS = 2
# 2, and half of the group: fewer that wait in a call which others went past may have called once too often.
_FEWEST_INSIDE = 2
# 8, spread over all that are in a call: thousands that are there need not all be compared with all that are not.
_MOST_MODELS = 8
# Steps are numbers of 24 bits in a trail.
_STEPS = 1 << 24
# How the pieces of a walk begin: a phase began, or a step ended and left the rank in a phase. A call is a piece itself.
_PHASE, _END, _CALL = ">", "|", "!"
# What follows a forward pass in training alone.
_LEARNS = (f"{_PHASE}backward", f"{_PHASE}optimizer")


class Walk(NamedTuple):
    """A trail as one group sees it: calls of others are left out. ``ends``: where in ``pieces`` each step ended."""

    pieces: list[str]
    ends: dict[int, int]


_NOWHERE = Walk([], {})


class Model(NamedTuple):
    """A rank that made the call: ``began`` is the step that its process counted from, ``walk`` ends before the call."""

    began: int
    walk: Walk


def left_out(exits: Sequence[RankExit]) -> dict[int, Deviation]:
    """Return the ranks that went past a call in which others wait; empty where none is known to have done that."""
    members: dict[str, list[RankExit]] = {}
    places: dict[tuple[str, int], dict[int, CollectiveFact]] = {}
    for exit_ in exits:
        called = exit_.trail.groups if exit_.trail is not None else ()
        for group in {*called, *(fact.group for fact in exit_.calls)}:
            members.setdefault(group, []).append(exit_)
        for fact in exit_.calls:
            if fact.seq >= 0 and fact.function:  # one without a name is only counted, and the count may be old
                places.setdefault((fact.group, fact.seq), {})[exit_.rank] = fact
    for (group, seq), facts in sorted(places.items(), key=lambda item: (-len(item[1]), item[0])):
        if len(facts) >= _FEWEST_INSIDE and not all(fact.done for fact in facts.values()):
            past = _past(group, seq, facts, members[group])
            if 0 < len(past) < len(facts):
                return {exit_.rank: _deviation(exit_, group, seq, facts) for exit_ in past}
    return {}


def _past(group: str, seq: int, facts: Mapping[int, CollectiveFact], members: Sequence[RankExit]) -> list[RankExit]:
    """Return the members of a group that went past its call number ``seq``."""
    meant, *others = facts.values()
    if any(difference(meant, fact) for fact in others):
        return []
    inside = [exit_ for exit_ in members if exit_.rank in facts]
    spread = sorted({at * (len(inside) - 1) // (_MOST_MODELS - 1) for at in range(_MOST_MODELS)})
    models = [model for at in spread if (model := _model(inside[at], group, seq)) is not None]
    needed = len(members) / 2 / len(inside) * len(spread)
    found = []
    for exit_ in members if len(models) >= needed else ():
        if exit_.rank not in facts:
            walk, began = _walk(exit_.trail, group), _began(exit_)
            # Numbers of steps mean the same where both count from the same one, as processes that began together do.
            said = [_is_past(model.walk, walk) for model in models if model.began == began]
            if said.count(True) >= needed and False not in said:
                found.append(exit_)
    return found


def _deviation(exit_: RankExit, group: str, seq: int, facts: Mapping[int, CollectiveFact]) -> Deviation:
    who, call = named(facts), describe(next(iter(facts.values())))
    text = f"left {call} out: it went on to phase {exit_.phase} without it, while {who} were in it"
    return Deviation("skipped", group, seq, text)


def _model(exit_: RankExit, group: str, seq: int) -> Model | None:
    """Return a rank's walk to its call number ``seq``, which its trail must know as the last one of the group."""
    trail = exit_.trail
    if trail is None or (group, seq) not in zip(trail.groups, trail.seqs, strict=False):
        return None
    pieces, ends = _walk(trail, group)
    if _CALL not in pieces:
        return None
    last = len(pieces) - 1 - pieces[::-1].index(_CALL)
    return Model(_began(exit_), Walk(pieces[:last], {step: at for step, at in ends.items() if at < last}))


def _began(exit_: RankExit) -> int:
    return exit_.step - exit_.steps_seen


def _is_past(model: Walk, walk: Walk) -> bool | None:
    """Return whether a rank went the same way as one that made a call, and on without it; None: not comparable.

    Args:
        model: the way of the rank that made the call, up to it.
        walk: the whole way of the rank in question.
    """
    first = next((step for step in model.ends if step in walk.ends), None)
    if first is None:
        return None
    way, own = model.pieces[model.ends[first] :], walk.pieces[walk.ends[first] :]
    further = own[len(way) :]
    if way[: len(own)] != own[: len(way)] or _CALL in further:
        return None
    if not further:
        return False
    *whole, _ = _steps(way)
    *gone, under_way = _steps(own)[len(whole) :]
    is_usual = all(step in whole for step in gone) and any(step[: len(under_way)] == under_way for step in whole)
    has_learned = any(piece in _LEARNS or piece.startswith(_END) for piece in further)
    return True if len(whole) >= _FEWEST_STEPS and is_usual and has_learned else None


def _walk(trail: Trail | None, group: str) -> Walk:
    """Return what a trail tells of one group."""
    if trail is None:
        return _NOWHERE
    digit = str(trail.groups.index(group)) if group in trail.groups else ""
    pieces: list[str] = []
    ended: list[int] = []
    for letter in trail.path:
        at = ascii_lowercase.find(letter.lower())
        if 0 <= at < len(trail.phases):
            if letter.isupper():
                ended.append(len(pieces))
            pieces.append((_END if letter.isupper() else _PHASE) + trail.phases[at])
        elif letter == digit:
            pieces.append(_CALL)
    newest = len(ended) - 1
    ends = {(trail.step - (newest - number) * trail.stride) % _STEPS: at for number, at in enumerate(ended)}
    return Walk(pieces, ends)


def _steps(pieces: Sequence[str]) -> list[list[str]]:
    """Return the phases of each step, without calls, the step under way last; ``pieces`` begin where a step ended."""
    steps: list[list[str]] = []
    for piece in pieces:
        if piece.startswith(_END):
            steps.append([])
        if piece != _CALL:
            steps[-1].append(piece)
    return steps
