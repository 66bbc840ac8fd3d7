# SPDX-License-Identifier: Apache-2.0
"""The wait graph: from the collective that each rank is in back to the ranks that nothing keeps from going on.

A rank waits in its oldest unfinished collective for all members of that group that have not entered it. Some of those
wait in another group themselves (tensor parallel ranks for one of theirs, which waits for its data parallel peers, and
so on); they are victims in the middle. A rank that is waited for and waits in no collective is a *root*: it holds all
the others up.

All members may be in and it still does not end. Then they called different things (``odd_ones``), or the groups wait
for each other in a circle (``crossed``), or the network does not deliver.

Membership is what evidence shows: a rank that was seen in a group belongs to it. A rank of which no collective is known
at all is taken to belong to every group.

Pure: views and looks in, ranks out.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from megascale_ops.diagnosis.hangs import siblings
from megascale_ops.diagnosis.hangs.call_order import (
    Deviation,
    call_of,
    calls,
    common_sources,
    compare,
    first_difference,
    fits,
)
from megascale_ops.diagnosis.hangs.evidence import NOTHING, Look, Position
from megascale_ops.diagnosis.hangs.rank_wait import RankWait
from megascale_ops.diagnosis.rank_view import RankView
from megascale_ops.schema.messages import CollectiveFact

# A rank there does not wait in a collective, even if one that it began in the background has not ended.
ELSEWHERE = frozenset({"in_data_loader", "in_storage", "in_rendezvous", "stopped", "gil_held"})
# 64 ranks are compared call by call; of more that deviate, the first stand for all.
MOST_COMPARED = 64
# 3: a majority is among the three largest sides, or there is none.
MOST_SIDES = 3
# 8: groups that are compared with all others, and ranks of a circle that are.
MOST_DISPUTED = 8


class Chain(NamedTuple):
    """The waits where all ranks wait: ``ranks`` at the end of the chain hold all the others up."""

    place: tuple[str, int] | None  # the collective that they are in; None: in none that is known, or in several
    ranks: list[RankWait]
    circle: bool = False  # they wait for each other
    followed: bool = False  # the largest crowd waits for them, and is not among them


class Odd(NamedTuple):
    """A rank that deviates; ``sure``: a majority or the ranks' own history shows which side is right."""

    stand: RankWait
    deviation: Deviation
    sure: bool


def stand_of(view: RankView, looks: Mapping[int, Look]) -> RankWait:
    """Put together what is known of a rank; its heartbeat counts where its evidence is missing."""
    report = view.report
    look = looks.get(report.rank, NOTHING)
    positions = look.positions
    known = report.collective
    if not positions and known is not None and known.enqueued >= 0:
        group = known.name.removeprefix("pg ")
        at = CollectiveFact(group, known.completed + 1, "") if known.enqueued > known.completed else None
        positions = (Position(group, known.enqueued, at),)
    halted = report.process.state == "T" or "stopped" in look.marks
    of_tiles = _tile_positions(look) if look.tiles and not halted else ()
    if of_tiles and any(position.waits_in for position in of_tiles):
        # Its GPU stands there, whatever its host has queued behind it or does meanwhile.
        return RankWait(
            report.rank, view, look, (*of_tiles, *positions), of_tiles[0].waits_in, waits=True, tile_wait=True
        )
    positions = (*positions, *of_tiles) if of_tiles else positions
    elsewhere = halted or not ELSEWHERE.isdisjoint(look.marks)
    inside = positions[0].waits_in if positions and not elsewhere else None
    waits = inside is not None or (not elsewhere and (look.waits_for_peer or "in_collective" in look.marks))
    return RankWait(report.rank, view, look, positions, inside, waits)


def _tile_positions(look: Look) -> tuple[Position, ...]:
    """Return how far a rank is in the launches of each workspace; one in which it waits for another's tile is first."""
    found = []
    for fact in look.tiles:
        at = CollectiveFact(fact.group, fact.launch, fact.operator) if fact.waiting else None
        found.append(Position(fact.group, fact.launch, at))
    return tuple(sorted(found, key=lambda position: position.waits_in is None))


def roots(stands: Sequence[RankWait]) -> list[RankWait]:
    """Return the ranks that others wait for and that wait in no collective themselves."""
    latest: dict[str, int] = {}
    for stand in stands:
        if stand.inside is not None:
            group = stand.inside.group
            latest[group] = max(latest.get(group, -1), stand.inside.seq)
    if not latest:
        return []
    return [stand for stand in stands if not stand.waits and _holds_up(stand, latest)]


def _holds_up(stand: RankWait, latest: Mapping[str, int]) -> bool:
    if not stand.positions:
        return True
    return any(position.entered < latest.get(position.group, -1) for position in stand.positions)


def held_up(stands: Sequence[RankWait], missing: Sequence[RankWait]) -> list[RankWait]:
    """Return the ranks that wait in collectives to which one of the missing ranks belongs and has not come.

    The rest waits for these, in groups of its own. Where no group of a missing rank is known, it may be any.
    """
    entered: dict[str, int] = {}  # by group: how far the one of them is that is least far
    for stand in missing:
        for position in stand.positions:
            entered[position.group] = min(position.entered, entered.get(position.group, position.entered))
    inside = [(stand, stand.inside) for stand in stands if stand.inside is not None]
    held = [stand for stand, fact in inside if fact.seq > entered.get(fact.group, fact.seq)]
    return held or [stand for stand, _ in inside]


def by_place(stands: Sequence[RankWait]) -> Counter[tuple[str, int]]:
    """Count the ranks that wait, by collective."""
    return Counter((stand.inside.group, stand.inside.seq) for stand in stands if stand.inside is not None)


def odd_ones(stands: Sequence[RankWait]) -> list[Odd]:
    """Return the waiting ranks whose calls deviate from those of the rest of their group."""
    same_call: dict[CollectiveFact, list[RankWait]] = {}
    for stand in stands:
        if stand.inside is not None:
            same_call.setdefault(stand.inside, []).append(stand)
    groups: dict[str, dict[CollectiveFact, list[RankWait]]] = {}
    for fact, side in same_call.items():
        if fact.function:
            groups.setdefault(fact.group, {}).setdefault(call_of(fact), []).extend(side)
    found: list[Odd] = []
    disputed = {group: same for group, same in groups.items() if len(same) > 1}
    # Where so many groups disagree, none of them is a model for another.
    asked = stands if len(disputed) <= MOST_DISPUTED else ()
    for group, same in disputed.items():
        found.extend(_odd_in_group(group, same, asked))
    return found


def _odd_in_group(group: str, same: Mapping[CollectiveFact, list[RankWait]], stands: Sequence[RankWait]) -> list[Odd]:
    """Let the majority of a group decide what is right; without one, groups alike and the history of the two sides."""
    order = sorted(same.values(), key=lambda side: (-len(side), min(stand.rank for stand in side)))
    total = sum(len(side) for side in order)
    for right in order[:MOST_SIDES]:
        odd = [odd for side in order if side is not right for odd in _compared(group, right, side)]
        # One call has several sides where of some ranks only the black box is known, which has no sizes.
        if 2 * _agreeing(right, order, odd) > total:
            return [one._replace(sure=True) for one in odd]
    judged = _without_majority(group, order, stands)
    if judged is None:
        return [odd for side in order for odd in _compared(group, order[0] if side is not order[0] else order[1], side)]
    right, rest = judged
    return [odd._replace(sure=True) for side in rest for odd in _compared(group, right, side)]


def _agreeing(right: Sequence[RankWait], order: Sequence[Sequence[RankWait]], odd: Sequence[Odd]) -> int:
    """Count the ranks that wait where ``right`` does and do not deviate from it."""
    deviant = {one.stand.rank for one in odd}
    place = right[0].inside
    there = [
        side for side in order if (at := side[0].inside) and place and (at.group, at.seq) == (place.group, place.seq)
    ]
    return sum(1 for side in there for stand in side if stand.rank not in deviant)


def _compared(group: str, right: Sequence[RankWait], side: Sequence[RankWait]) -> list[Odd]:
    model = min(right, key=lambda stand: stand.rank)
    found = []
    for stand in side[:MOST_COMPARED]:
        deviation = compare(model.look, stand.look, group, ahead=stand.step > model.step >= 0)
        if deviation is not None:
            found.append(Odd(stand, deviation, sure=False))
    if found and len(side) > MOST_COMPARED:
        found += [Odd(stand, found[0].deviation, sure=False) for stand in side[MOST_COMPARED:]]
    return found


def _without_majority(
    group: str, order: Sequence[list[RankWait]], stands: Sequence[RankWait]
) -> tuple[list[RankWait], list[list[RankWait]]] | None:
    """Return first the side that did as groups alike did, or as in earlier steps; None: not known, or they differ."""
    if len(order) != 2:
        return None
    one, other = (min(side, key=lambda stand: stand.rank) for side in order)
    mine, theirs = common_sources(one.look, other.look, group)
    seq = first_difference(mine, theirs)
    if seq < 0:
        return None
    # Before they diverged both had made the same calls, and one may have kept more of them.
    history = {number: fact for number, fact in {**theirs, **mine}.items() if number < seq}
    first, second = fits(history, seq, mine[seq]), fits(history, seq, theirs[seq])
    if first is second and one.step != other.step:
        # Nothing can be a step ahead that has not left out a collective.
        first, second = one.step < other.step, other.step < one.step
    history_says = None if first is second or None in (first, second) else first
    others_say = siblings.first_is_right(mine, theirs, group, seq, stands)
    said = {one for one in (history_says, others_say) if one is not None}
    if len(said) != 1:
        return None
    return (order[0], [order[1]]) if said.pop() else (order[1], [order[0]])


def behind(stands: Sequence[RankWait]) -> list[RankWait]:
    """Return the few that are still inside a collective that most others of its group have finished."""
    places = by_place(stands)
    groups = {group for group, _ in places}
    finished: dict[str, list[int]] = {}  # by group: how far each rank has finished, wherever it waits now
    for stand in stands:
        for position in stand.positions:
            # A black box does not see the end of what goes on in the background.
            if position.group in groups and (position.waits_in is not None or stand.look.recorded):
                over = position.waits_in.seq - 1 if position.waits_in is not None else position.entered
                finished.setdefault(position.group, []).append(over)
    for seqs in finished.values():
        seqs.sort()
    late = set()  # worked out once for each place: thousands of ranks may be in a thousand groups
    for (group, seq), count in places.items():
        seqs = finished.get(group, [])
        if len(seqs) - bisect_left(seqs, seq) > count:
            late.add((group, seq))
    return [stand for stand in stands if stand.inside is not None and (stand.inside.group, stand.inside.seq) in late]


def crossed(stands: Sequence[RankWait]) -> tuple[list[RankWait], bool]:
    """Return the ranks that close a circle of groups that wait for each other, and whether a majority agrees.

    The largest crowd that waits in one place is right; those it waits for sit in another collective, and a rank of
    the crowd is missing there. Of the crowd only ranks in both groups count: the others could not have
    called the other collective first.
    """
    ranked = sorted(by_place(stands).items(), key=lambda item: (-item[1], item[0]))
    if len(ranked) < 2:
        return [], False
    group, seq = ranked[0][0]
    crowd = [stand for stand in stands if _is_at(stand, (group, seq))]
    missing = [stand for stand in stands if stand.waits and stand.inside is not None and _entered(stand, group) < seq]
    closing = [
        stand
        for stand in missing
        if stand.inside is not None
        and any(_entered(other, stand.inside.group) < stand.inside.seq for other in crowd[:MOST_COMPARED])
    ]
    if not closing:
        return [], False
    others = {stand.inside.group for stand in closing if stand.inside is not None}
    voters = [stand for stand in crowd if any(position.group in others for position in stand.positions)]
    if len(voters) != len(closing):
        return min(voters, closing, key=len), True
    disputed = {stand.inside.group for stand in missing if stand.inside is not None}
    late = _crowd_is_late(closing, crowd, disputed) if voters else None
    if late is not None:
        return (voters if late else closing), True
    return [*closing, *voters], False


def _crowd_is_late(closing: Sequence[RankWait], crowd: Sequence[RankWait], disputed: Container[str]) -> bool | None:
    """Return whether a crowd has made the call, in groups alike that are whole, that one side of a circle waits in."""
    told = {
        siblings.has_gone_on(calls(stand.look.recorded, at.group), at.group, at.seq, crowd, disputed)
        for stand in closing[:MOST_DISPUTED]
        if (at := stand.inside) is not None
    }
    return told.pop() if len(told) == 1 else None


def as_begun(stands: Sequence[RankWait]) -> list[RankWait]:
    """Return the ranks without what each has given to its GPU behind the call that it waits in.

    What waits in a GPU's queue has been called and has not begun: ranks whose hosts run ahead seem to be in all of
    their groups, while their GPUs wait for each other. All ranks queue the calls of two groups in one order, so that
    none waits in a call that another has queued behind its own, unless one of them left it out or swapped it.
    """
    return [_as_begun(stand) if stand.inside is not None and stand.look.recorded else stand for stand in stands]


def _as_begun(stand: RankWait) -> RankWait:
    # Behind a send or a receive that does not end, no collective of its has begun.
    oldest = next((fact for fact in stand.look.recorded if not fact.done), None)
    first = stand.positions[0].group if oldest is None or oldest.seq >= 0 else None
    positions = tuple(
        at if at.group == first or at.waits_in is None or at.waits_in.begun else Position(at.group, at.waits_in.seq - 1)
        for at in stand.positions
    )
    return stand._replace(positions=positions, inside=None if first is None else stand.inside)


def is_known(stand: RankWait) -> bool:
    """Return whether a dump, a stack or a heartbeat tells anything of where a rank is."""
    return stand.look is not NOTHING or bool(stand.positions)


def chain(stands: Sequence[RankWait]) -> Chain:
    """Follow the wait-for edges from the largest crowd on, to the ranks that wait in no known collective.

    In a circle those are named that sit in one of its groups and are missing in the one that waits for it.
    """
    members: dict[str, list[tuple[int, RankWait]]] = {}  # the chain may have a place for each of a thousand groups
    for stand in stands:
        for position in stand.positions:
            members.setdefault(position.group, []).append((position.entered, stand))
    passed: dict[tuple[str, int], int] = {}
    missing: list[list[RankWait]] = []
    place = _largest(stands)
    while place is not None:
        if place in passed:
            first = passed[place]
            around = zip([*list(passed)[first + 1 :], place], missing[first:], strict=True)
            closing = [stand for at, absent in around for stand in absent if _is_at(stand, at)]
            return Chain(None, closing, circle=True)
        group, seq = place
        absent = [stand for entered, stand in members[group] if entered < seq]
        if not absent:
            inside = [stand for _, stand in members[group] if _is_at(stand, place)]
            return Chain(place, inside, followed=bool(passed))
        passed[place] = len(passed)
        missing.append(absent)
        place = _largest(absent)
    return Chain(None, missing[-1] if missing else list(stands), followed=bool(missing))


def awaited_of(ranks: Sequence[int], stands: Sequence[RankWait]) -> list[int]:
    """Return which of these ranks, of which nothing is known, ranks at the end of the chain of waits may wait for.

    Where all members of a group are known to have entered its call, who is no member of it can't end it.
    """
    begun = as_begun(stands)
    for known in (stands, begun):
        end = chain(known)
        if end.place is None:
            peers = {fact.peer for stand in end.ranks for fact in stand.look.recorded if fact.seq < 0 and not fact.done}
            if any(stand.inside is not None for stand in end.ranks) or -1 in peers or not peers:
                return list(ranks)
            found = [rank for rank in ranks if rank in peers]
        else:
            told = [one for stand in stands for one in stand.look.members if one.group == end.place[0]]
            if not told:
                return list(ranks)
            members = {rank for one in told for rank in one.ranks()}
            found = [rank for rank in ranks if rank in members]
        if found:
            return found
    return []


def _largest(stands: Sequence[RankWait]) -> tuple[str, int] | None:
    """Return where most wait."""
    places = by_place(stands)
    return min(places, key=lambda place: (-places[place], place)) if places else None


def _is_at(stand: RankWait, place: tuple[str, int]) -> bool:
    return stand.inside is not None and (stand.inside.group, stand.inside.seq) == place


def _entered(stand: RankWait, group: str) -> int:
    """Return how far a rank is in a group; a group that it was never seen in does not wait for it."""
    return next((position.entered for position in stand.positions if position.group == group), 1 << 62)
