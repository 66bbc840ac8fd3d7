# SPDX-License-Identifier: Apache-2.0
"""The questions that are asked about a hang, one function each; the first that has an answer decides (``QUESTIONS``).

Each looks at what all ranks do and names those to blame, with the class, a sentence that carries the numbers, and the
patience that the answer deserves. What each rests on is worked out in ``wait_graph``, ``call_order`` and ``causes``.

Pure: stands in, an answer or None out.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from megascale_ops.diagnosis.hangs import exchanges, moments, wait_graph
from megascale_ops.diagnosis.hangs.call_order import FAULT_OF, describe
from megascale_ops.diagnosis.hangs.causes import SAME_LOOKS, Cause, Patience, cause_of
from megascale_ops.diagnosis.hangs.evidence import NOTHING
from megascale_ops.diagnosis.hangs.gpu_queue import not_begun
from megascale_ops.diagnosis.hangs.habits import line_of_script, standing_in
from megascale_ops.diagnosis.hangs.rank_wait import RankWait
from megascale_ops.diagnosis.hangs.unmatched import unmatched
from megascale_ops.diagnosis.hangs.work import sends
from megascale_ops.diagnosis.rank_view import RankView
from megascale_ops.schema.folding import named
from megascale_ops.schema.health import Finding

if TYPE_CHECKING:
    from megascale_ops.schema.messages import CollectiveFact

# 0.9: below it a verdict does not shorten the patience.
CLEAR = 0.9
# How sure it is that a GPU does not come, by how many looks have seen it begin and end nothing.
GPU_SURE = (0.7, 0.8, 0.9)
# 16 culprits with two findings each fit on two screens; the folded line has all ranks.
MOST_TOLD = 16
# 0.6: a rank without a record of its calls may wait like the others, in what its stack does not show.
UNSEEN = 0.6
# Marks of a rank that waits in no collective; in ``cause_of`` these classes are seen as well.
OUTSIDE = wait_graph.ELSEWHERE | {"in_syscall", "in_python", "uninterruptible", "worker_stopped", "gone"}
_SEEN_OUTSIDE = frozenset({"data_stall", "storage_stall", "frozen", "gil_held"})
# 2 collectives with absent ranks are named; a rank that is missing is missing in all of its groups.
MOST_PLACES = 2


class Answer(NamedTuple):
    """What one question found."""

    fault: str
    culprits: Sequence[int]
    confidence: float
    why: str
    patience: Patience | None  # None: the watchdog's own
    otherwise: str
    findings: tuple[Finding, ...] = ()


def claimed_twice(ranks: Sequence[RankView]) -> Answer | None:
    """Question 1: two processes for one rank."""
    live = [view.report.rank for view in ranks if not view.gone]
    if len(set(live)) == len(live):
        return None
    count = Counter(live)
    twice = [rank for rank, claims in count.items() if claims > 1]
    places = sorted(f"{view.node} pid {view.report.pid}" for view in ranks if view.report.rank in twice)
    why = f"{named(twice)} is claimed by {len(places)} processes: {', '.join(places[:4])}"
    return Answer("duplicate_rank", twice, 0.95, why, Patience.NONE, "nothing, had one process each claimed them")


def gone_on(stands: Sequence[RankWait]) -> Answer | None:
    """Question 2: have collectives ended while evidence was gathered?"""
    moved = [stand.rank for stand in stands if stand.look.went_on or stand.look.tiles_went_on]
    if not moved:
        return None
    why = f"the collectives of {named(moved)} went on between two looks: slow, not stuck"
    return Answer("slow", moved, CLEAR, why, None, "a hang, had no collective ended between two looks")


def apart(stands: Sequence[RankWait]) -> Answer | None:
    """Question 2, of records that are left as files: were they taken at one moment?"""
    before, call = moments.taken_before(stands)
    if call is None:
        return None
    why = (
        f"the record of {named(before)} is older than those of others, or no hang: {describe(call)} has ended, which "
        f"it had not come to"
    )
    return Answer("slow", [], 0.6, why, None, "a name, had all records been taken while nothing moved")


def disagreement(stands: Sequence[RankWait]) -> Answer | None:
    """Question 4: ranks that wait in the collectives of one group and called different things."""
    odd = wait_graph.odd_ones(stands)
    if not odd:
        return None
    first = next((one for one in odd if one.sure), odd[0])
    kind, sure = first.deviation.kind, first.sure
    culprits = [one.stand.rank for one in odd if one.sure is sure]
    fault = FAULT_OF[kind]
    same = [one.stand.rank for one in odd if one.sure is sure and one.deviation.text == first.deviation.text]
    why = f"{named(same)} {first.deviation.text}"
    inside, line = first.stand.inside, line_of_script(first.stand.look.frames)
    if line and inside is not None and (inside.group, inside.seq) == (first.deviation.group, first.deviation.seq):
        why += f"; that call is in {line}"
    rest = sorted(set(culprits) - set(same))
    if rest:
        why += f"; so did {named(rest)} in another way"
    # A rank outside all collectives is to blame as well: the others wait for it, too.
    absent = wait_graph.roots(stands) if sure else []
    # Where neither a dump nor a heartbeat has its collectives, the rank is not known to be outside.
    outside = [stand.rank for stand in absent if is_outside(stand)]
    unknown = [stand.rank for stand in absent if not is_outside(stand)]
    if outside:
        why += f"; {named(outside)} waits in no collective"
    if unknown:  # that proves nothing, and the difference alone explains the hang
        why += f"; of {named(unknown)} nothing is known"
    if not sure:
        why += "; nobody is the majority, and earlier steps do not tell who is right"
    findings = tuple(
        finding_of("collective_differs", f"rank {one.stand.rank} {one.deviation.text}", "flight recorder", one.stand)
        for one in odd[:MOST_TOLD]
    )
    otherwise = f"another class, had it called the same as the others as number {first.deviation.seq}"
    return Answer(fault, [*culprits, *outside], 0.95 if sure else 0.5, why, Patience.NONE, otherwise, findings)


def exchange(stands: Sequence[RankWait]) -> Answer | None:
    """Question 4, of exchanges: ranks that wait for each other and brought what can't meet, pair by pair."""
    clash = _all_to_all(stands) or exchanges.pairs_clash(
        {stand.rank: stand.look.recorded for stand in stands if stand.waits and stand.look.waits_for_peer}
    )
    if clash is None or _is_held_up(clash, stands):
        return None
    findings = tuple(
        finding_of("exchange_differs", clash.text, "flight recorder", stand)
        for stand in stands
        if stand.rank in clash.ranks[:MOST_TOLD]
    )
    why = clash.text if clash.confidence >= CLEAR else f"{clash.text}; which of them is right is not known"
    otherwise = "a rank that holds the others up, had sizes and order fitted"
    return Answer(clash.fault, clash.ranks, clash.confidence, why, Patience.NONE, otherwise, findings)


def _is_held_up(clash: exchanges.Clash, stands: Sequence[RankWait]) -> bool:
    """Return whether ranks that seem to wait for each other are in a collective to which a rank has not come.

    A receive that was posted ahead looks like one that is waited in. If it were waited in, it would keep no rank
    outside from coming.
    """
    roots = wait_graph.roots(stands) if clash.fault == "collective_order" else []
    return bool(roots) and any(stand.rank in clash.ranks for stand in wait_graph.held_up(stands, roots))


def _all_to_all(stands: Sequence[RankWait]) -> exchanges.Clash | None:
    """Return what does not fit in an all_to_all that ranks of a group are in."""
    places: dict[tuple[str, int], dict[int, CollectiveFact]] = {}
    for stand in stands:
        if stand.inside is not None and stand.inside.function == "all_to_all":
            places.setdefault((stand.inside.group, stand.inside.seq), {})[stand.rank] = stand.inside
    members: dict[str, list[int]] = {}
    for stand in stands if places else ():
        for position in stand.positions:
            members.setdefault(position.group, []).append(stand.rank)
    for (group, _), calls in places.items():
        if len(calls) < 2:
            continue
        if clash := exchanges.splits_clash(calls, members[group]):
            return clash
    return None


def rendezvous(stands: Sequence[RankWait], world_size: int) -> Answer | None:
    """Question 6: ranks that form a process group, or meet for the first time, and others that do not."""
    forming = [stand for stand in stands if "in_rendezvous" in stand.look.marks]
    if not forming:
        # One look may fall between a call's begin and its record; two that show the same stack do not.
        forming = [stand for stand in stands if _is_first_call(stand) and stand.look.alike > 1]
        if len(forming) == len(stands):  # of a call that all are in, it is not known to be the first
            return None
    if not forming:
        return None
    fault, otherwise = "group_never_formed", "nothing, had all ranks come to form the group"
    inside = {stand.rank for stand in forming}
    others = [stand for stand in stands if stand.rank not in inside]
    lead = f"{len(forming)} of {world_size} ranks wait for a process group to form"
    outside = [stand for stand in others if not stand.waits]
    if outside:
        cause = cause_of(outside[0])
        who = [stand.rank for stand in outside]
        why = f"{lead}, and {named(who)} does not come: {cause.text}"
        sure = CLEAR if len(outside) <= len(forming) else 0.7
        return Answer(fault, who, sure, why, cause.patience, otherwise)
    if others:
        where = describe(others[0].inside) if others[0].inside is not None else "a collective"
        why = f"{lead}, the other {len(others)} wait in {where}"
        if len(others) == len(forming):
            return Answer(fault, [stand.rank for stand in stands], 0.5, why, Patience.NONE, otherwise)
        few = min(others, forming, key=len)
        return Answer(fault, [stand.rank for stand in few], 0.95, why, Patience.NONE, otherwise)
    absent = sorted(set(range(world_size)) - inside)
    why = f"{lead}, and {named(absent)} is not there" if absent else f"{lead}, all of them"
    return Answer(fault, absent, 0.85 if absent else 0.4, why, None, otherwise)


def _is_first_call(stand: RankWait) -> bool:
    """Return whether it is inside a collective although all that are known of it have ended.

    NCCL forms a group inside the first collective of it, and no recorder shows that before the group is formed.
    A rank that waits in a send or a receive looks the same (Gloo's are not in torch's recorder), but for its black box.
    """
    look = stand.look
    is_inside = "in_collective" in look.marks and bool(look.positions) and stand.waits and stand.inside is None
    return is_inside and look.peer_call is None


def missing(stands: Sequence[RankWait]) -> Answer | None:
    """Question 7: the ranks that others wait for and that wait for no rank."""
    roots = wait_graph.roots(stands)
    if not roots:
        return None
    unknown = [stand for stand in roots if not is_outside(stand)]
    if unknown and len(unknown) < len(roots):
        # It proves nothing that nothing is known of a rank, and the others explain the hang.
        roots = [stand for stand in roots if stand not in unknown]
    elif unknown:
        waiting = [stand for stand in stands if stand.waits]
        if (circle := _any_circle(waiting)) is not None:
            return circle
        if moments.are_left(stands):
            # A line that launches work, or waits for a GPU, is where a rank that waits like the others is seen as well.
            unknown = [stand for stand in unknown if not stand.look.frames]
        awaited = wait_graph.awaited_of([stand.rank for stand in unknown], waiting)
        roots = [stand for stand in unknown if stand.rank in awaited]
        if not roots:
            return None
    victims = [stand for stand in stands if stand.waits]
    places = wait_graph.by_place(wait_graph.held_up(stands, roots)).most_common(MOST_PLACES)
    facts = {(fact.group, fact.seq): fact for stand in victims if (fact := stand.inside) is not None}
    at = " and ".join(describe(facts[place]) for place, _ in places)
    # A rank that waits in an unknown collective is taken to be there, too.
    there = sum(count for _, count in places) + sum(1 for stand in victims if stand.inside is None)
    lead = f"has not come to {at}, where {there} {'rank waits' if there == 1 else 'ranks wait'}"
    lead += f" ({len(victims)} wait in all)" if there < len(victims) else ""
    answer = _by_cause(roots, lead, crowd=len(victims))
    if roots[0] in unknown and roots[0].look.frames:
        answer = answer._replace(confidence=min(answer.confidence, UNSEEN))
    return _unless_unexplained(answer, stands)


def _unless_unexplained(answer: Answer, stands: Sequence[RankWait]) -> Answer:
    """Return the answer without names where files show a call that hangs without those who are named."""
    call = moments.met_by_all(stands) if moments.are_left(stands) else None
    if call is None:
        return answer
    why = f"{answer.why}; but {describe(call)} hangs though nobody is missing in it, so they are not all that is wrong"
    return answer._replace(fault="silent", culprits=[], confidence=min(answer.confidence, UNSEEN), why=why)


def _by_cause(culprits: Sequence[RankWait], lead: str, *, crowd: int) -> Answer:
    """Name ranks by what they do: the class of most of them, and of several the surer one."""
    causes = [(stand, cause_of(stand)) for stand in culprits]
    count = Counter(cause.fault for _, cause in causes)
    main = max((cause for _, cause in causes), key=lambda cause: (count[cause.fault], cause.confidence, cause.fault))
    kinds: dict[str, list[int]] = {}
    for stand, cause in causes:
        kinds.setdefault(cause.text, []).append(stand.rank)
    parts = [f"{named(ranks)}: {text}" for text, ranks in list(kinds.items())[:4]]
    who = [stand.rank for stand in culprits]
    why = f"{named(who)} {lead}: {causes[0][1].text}" if len(kinds) == 1 else f"{named(who)} {lead}; {'; '.join(parts)}"
    # They are not all known by name; but if more are missing than wait, most of them may wait for one another.
    confidence = main.confidence if crowd >= len(culprits) else min(main.confidence, 0.6)
    patience = max((cause.patience for _, cause in causes), key=list(Patience).index)
    otherwise = "another class, had it been somewhere else at the next look; nothing, had it come to the collective"
    return Answer(main.fault, who, _told_by_others(confidence, main), why, patience, otherwise)


def gpu(stands: Sequence[RankWait]) -> Answer | None:
    """Question 7: all have given a collective to their GPUs, and the GPU of a few has not begun it."""
    queues = {stand.rank: stand.look.gpu for stand in stands if stand.look.gpu is not None and stand.waits}
    found = not_begun(queues)
    if found is None:
        return None
    blamed = [stand for stand in stands if stand.rank in found.ranks]
    looks = min(stand.look.gpu_alike for stand in blamed)
    one = found.operation
    where = one.name or f"communicator {one.communicator}"
    since = f", which it was given {one.waited_s:.1f} s before" if one.waited_s else ""
    lead = f"the GPU of {named(found.ranks)} has not begun {one.function} #{one.seq} of {where}{since}"
    others = "that of another rank waits" if found.waiting == 1 else f"those of {found.waiting} others wait"
    why = f"{lead}, and {others} in it: what was launched before does not end"
    if any(stand.look.gpu_looks > 1 and stand.look.gpu_alike == 1 for stand in blamed):
        why = f"{lead}, and goes on between two looks: it is late, not stuck"
        return Answer("slow", found.ranks, 0.6, why, Patience.MOVING, "a GPU that is stuck, had it ended nothing")
    frames = next((stand.look.frames for stand in blamed if stand.look.frames), ())
    why += f"; the script is in {standing_in(frames)}" if frames else ""
    findings = tuple(
        finding_of("gpu_not_begun", _not_begun_text(stand), "NCCL profiler", stand, stand.look.gpu_alike)
        for stand in blamed[:MOST_TOLD]
    )
    # A queue of much work looks the same until something of it ends; each look without that makes it less likely.
    # Nor can it be much: a stream takes some thousand launches, then its host waits and gives it no collective.
    patience = Patience.STUCK if looks >= SAME_LOOKS else Patience.WORKING
    otherwise = "nothing, had the GPU begun it by the next look; another class, had none begun it"
    return Answer("gpu_stuck", found.ranks, GPU_SURE[min(looks, SAME_LOOKS) - 1], why, patience, otherwise, findings)


def _not_begun_text(stand: RankWait) -> str:
    """Return what one GPU shows, and the kernel that is the likeliest to be in front."""
    queue, looks = stand.look.gpu, stand.look.gpu_alike
    count = len(queue.operations) if queue is not None else 0
    text = f"the GPU of rank {stand.rank} has begun none of the {count} that NCCL has before it"
    text += f"; it began and ended nothing in {looks} looks" if looks > 1 else ""
    kernel = queue.kernel if queue is not None else ""
    return f"{text}; the longest kernel of its last profile is {kernel}" if kernel else text


def _told_by_others(confidence: float, cause: Cause) -> float:
    """A rank that is missing in a collective is missing, whether it answers or not; only its class is not known."""
    return CLEAR if cause.fault == "not_joined" and confidence > 0.8 else confidence


def is_outside(stand: RankWait) -> bool:
    """Return whether it is known that a rank that does not seem to wait is outside all collectives.

    Its calls tell, or a look that shows it elsewhere. A line of Python, or a wait for its GPU, does not: a host runs
    ahead of what its GPU waits in.
    """
    if stand.positions or not OUTSIDE.isdisjoint(stand.look.marks):
        return True
    cause = cause_of(stand)
    return cause.fault in _SEEN_OUTSIDE or cause.patience is Patience.MOVING


def all_wait(stands: Sequence[RankWait], world_size: int) -> Answer | None:
    """Question 9: all ranks of which anything is known wait in a collective, and no call deviates."""
    # Of a rank with a stack in a file something is known, though not whether it waits.
    known = {stand.rank for stand in stands if stand.waits or (stand.look.frames and moments.are_left(stands))}
    stands = [stand for stand in stands if stand.waits or is_outside(stand)]
    if not stands or not all(stand.waits for stand in stands):
        return None
    end = wait_graph.chain(stands)
    begun = wait_graph.as_begun(stands)
    circle = _circle(stands, end) or _circle(begun, wait_graph.chain(begun))
    if circle is not None:
        return circle
    if late := wait_graph.behind(stands):
        return _still_inside(late)
    if unheard := sorted(set(range(world_size)) - known):
        return _unless_unexplained(_unheard(unheard, stands), stands)
    return _unfinished_by_all(stands, end)


def _still_inside(late: Sequence[RankWait]) -> Answer:
    """Return those who are inside a collective that most others have finished."""
    # Records of one moment do not show that: what ends does so on all, so those of the others are younger.
    who = [stand.rank for stand in late] if not moments.are_left(late) else []
    at = describe(late[0].inside) if late[0].inside is not None else "a collective"
    why = f"{named([stand.rank for stand in late])} is still inside {at}, which most others have finished"
    return Answer("silent", who, 0.6, why, None, "nobody named, had the others not finished it")


def _unheard(unheard: Sequence[int], stands: Sequence[RankWait]) -> Answer:
    """Return the ranks that no agent tells of, while all others wait."""
    why = f"of {named(unheard)} nothing is known, and all {len(stands)} that are known wait for others"
    inside = Counter(stand.inside for stand in stands if stand.inside is not None).most_common(1)
    why += f", {inside[0][1]} of them in {describe(inside[0][0])}" if inside else ""
    otherwise = "another answer, had an agent told of them"
    # That so many are missing is evidence about their agents, and not about any one rank.
    named_ones = wait_graph.awaited_of(unheard, stands) if len(unheard) <= len(stands) else []
    # A file that is lost is mostly lost by chance: of two such ranks one at least is there like the others.
    named_ones = [] if len(named_ones) > 1 and moments.are_left(stands) else named_ones
    fault, sure_of = ("not_joined", UNSEEN) if named_ones else ("silent", 0.3)
    return Answer(fault, named_ones, sure_of, why, None, otherwise)


def _unfinished_by_all(stands: Sequence[RankWait], end: wait_graph.Chain) -> Answer:
    """Return that no rank is to blame: all ranks are in the collective, and it moves data or does not end."""
    otherwise = "a name, had one rank been missing in the collective"
    # Not what their children do: a data loader's workers fill their queues in a hang, too.
    moving = next((seen for stand in stands if (seen := sends(stand.look.work))), "")
    if moving:
        why = f"{_unfinished(stands, end)}, and data moves: {moving}"
        return Answer("slow", [], 0.5, why, Patience.MOVING, otherwise)
    why = _unfinished(stands, end) + ": the network or a library does not finish it"
    # In the first call of a group its communicator is formed, which takes minutes among many thousand ranks.
    is_forming = any(stand.inside is not None and 0 <= stand.inside.seq <= 1 for stand in stands)
    return Answer("silent", [], 0.3, why, Patience.SPINNING if is_forming else Patience.STUCK, otherwise)


def _circle(stands: Sequence[RankWait], end: wait_graph.Chain) -> Answer | None:
    """Return groups, or a group and a pair, that wait for each other."""
    if (circle := _of_groups(stands, end)) is not None:
        return circle
    if end.followed and end.place is None and (pair := unmatched(end.ranks, stands)) is not None:
        half = "receive from" if pair.call.function == "recv" else "send to"
        if pair.order:
            why = (
                f"rank {pair.rank} waits in a {half} rank {pair.peer}, which has called {describe(pair.inside)} before "
                f"the other half"
            )
            why += f", as {named(pair.order)} did" if pair.is_early else "; which of them is right is not known"
            who = [pair.rank] if pair.is_early else sorted((pair.rank, pair.peer))
            sure = CLEAR if pair.is_early else 0.5
            return Answer("collective_order", who, sure, why, Patience.NONE, "nothing, in one order")
        why = (
            f"rank {pair.rank} waits in a {half} rank {pair.peer}, which has not made the other half and waits "
            f"with the others in {describe(pair.inside)}; which of them is right is not known"
        )
        otherwise = "nothing, had both made the same exchange"
        return Answer("collective_order", sorted((pair.rank, pair.peer)), 0.5, why, Patience.NONE, otherwise)
    return None


def _any_circle(stands: Sequence[RankWait]) -> Answer | None:
    """Return groups that wait for each other, by what was called or by what has begun."""
    begun = wait_graph.as_begun(stands)
    return _of_groups(stands, wait_graph.chain(stands)) or _of_groups(begun, wait_graph.chain(begun))


def _of_groups(stands: Sequence[RankWait], end: wait_graph.Chain) -> Answer | None:
    closing, sure = wait_graph.crossed(stands)
    if not closing and not end.circle:
        return None
    held = stands if closing else end.ranks
    facts = sorted({describe(stand.inside) for stand in held if stand.inside is not None})
    who = sorted(stand.rank for stand in closing or end.ranks)
    verb = "closes" if len(who) == 1 else "close"
    why = f"groups wait for each other in a circle ({', '.join(facts[:3])}); {named(who)} {verb} it"
    return Answer("collective_order", who, CLEAR if sure else 0.5, why, Patience.NONE, "nothing, in one order")


def _unfinished(stands: Sequence[RankWait], end: wait_graph.Chain) -> str:
    """Return where a job waits that no rank holds up: the end of the wait-for chain."""
    inside = Counter(stand.inside for stand in end.ranks if stand.inside is not None).most_common(1)
    who = named([stand.rank for stand in end.ranks])
    if end.place is None or not inside:
        others = "; all others wait for them" if end.followed else ""
        return f"all ranks wait, {who} in a send, a receive or a call that no record tells of{others}"
    most, count = inside[0]
    if end.followed:
        return f"all ranks wait for {who} inside {describe(most)}, and all of that group have entered it"
    return f"all ranks are inside a collective, {count} of {len(stands)} in {describe(most)}, and all have entered it"


def nobody_waits(stands: Sequence[RankWait], blamed: frozenset[int]) -> Answer | None:
    """Question 10: no collective shows which rank waits for which."""
    suspects = [stand for stand in stands if stand.rank in blamed and not stand.waits]
    if not suspects or not any(stand.look is not NOTHING for stand in suspects):
        return None
    lead = "makes no step"
    victims = [stand.rank for stand in stands if stand.waits and stand.look.peer_call is not None]
    if victims:
        lead += f", while {named(victims)} {'waits' if len(victims) == 1 else 'wait'} in a send or a receive"
    if moments.are_left(stands) and any(_is_seen(stand) for stand in suspects):
        # It proves nothing that nothing is known of a rank, where others are seen elsewhere.
        suspects = [stand for stand in suspects if is_outside(stand)]
    if len(suspects) < 2 or len(suspects) < len(stands):
        answer = _by_watchdog(_by_cause(suspects, lead, crowd=len(stands)))
        # No call waits for them, and nothing tells what they do: that they are silent is all there is. Nor are they
        # named for sure by a send or a receive of a few: most of those wait for others of them.
        in_doubt = answer.fault == "not_joined" if not victims else len(suspects) > max(1, len(victims))
        answer = answer._replace(confidence=min(answer.confidence, 0.5)) if in_doubt else answer
        if in_doubt and moments.are_left(stands) and not any(_is_seen(stand) for stand in suspects):
            why = f"{answer.why}; which of them the others wait for, no record tells"
            return answer._replace(fault="silent", culprits=[], confidence=0.3, why=why)
        return _unless_unexplained(answer, stands)
    causes = {stand.rank: cause_of(stand).fault for stand in suspects}
    special = [stand for stand in suspects if causes[stand.rank] not in ("sleeping", "not_joined")]
    if not special:
        why = f"all {len(stands)} ranks sleep, and none waits for another"
        return Answer("idle", [], 0.5, why, None, "a name, had one rank been seen to do something else")
    if len(special) * 2 < len(suspects):
        return _by_watchdog(_by_cause(special, lead, crowd=len(stands)))._replace(confidence=0.7)
    return _by_watchdog(_by_cause(special, f"{lead}, like all others", crowd=0))


def _is_seen(stand: RankWait) -> bool:
    """Return whether a look, and not only its calls, shows a rank outside all collectives."""
    return not OUTSIDE.isdisjoint(stand.look.marks) or cause_of(stand).fault in _SEEN_OUTSIDE


def _by_watchdog(answer: Answer) -> Answer:
    """Leave it to the watchdog how long to wait, unless a rank compiles."""
    return answer if answer.patience is Patience.MOVING else answer._replace(patience=None)


def finding_of(name: str, text: str, source: str, stand: RankWait, value: float = 0.0) -> Finding:
    """Return a fact about one rank."""
    return Finding(name=name, text=text, source=source, rank=stand.rank, node=stand.view.node, value=float(value))
