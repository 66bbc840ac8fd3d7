# SPDX-License-Identifier: Apache-2.0
"""Which rank called another collective than all others, from what each called last before its end.

A receiver that gets more or fewer bytes than it expects dies of it, often all of them do, and the sender dies of that.
No rank's end shows which was wrong, but their calls do: the one that differs from the majority's.

Pure: exits in, the odd ranks out.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

from megascale_ops.diagnosis.exits.left_out import left_out
from megascale_ops.diagnosis.hangs.call_order import (
    FAULT_OF,
    UNNAMED,
    Deviation,
    compare,
    describe,
    difference,
    of_group,
)
from megascale_ops.diagnosis.hangs.evidence import NOTHING, Look
from megascale_ops.schema.folding import named
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import RankExit

# 3: where most ranks are right, one of three that were taken far apart is right as well in all but odd cases.
_MODELS = 3
# What differs is on record; that a rank is past a call follows from its way there.
_SURE, _SURE_OF_A_TRAIL = 0.95, 0.9
# 0.7: two groups may be at one number.
_SURE_OF_UNNAMED = 0.7
# Fewer ranks have no majority: one of two is wrong, and it is not known which.
_FEWEST = 3


def blame_caller(verdict: Verdict, ended: Sequence[tuple[str, RankExit]]) -> Verdict:
    """Name the ranks that called something else than more than half of all; the same verdict where there are none.

    Args:
        verdict: on a round of which only victims are known; its first clause is kept.
        ended: node and exit of each rank.
    """
    exits = [exit_ for _, exit_ in ended]
    odd, past = odd_calls(exits), {}
    if verdict.fault == "collective_mismatch":
        past = left_out(exits)
        # Where both name the same ranks, that a call was left out tells more than that another met it.
        odd = past if past and set(odd) <= set(past) else odd or _outsider(exits)
    if not odd:
        return verdict
    kind, _ = Counter(found.kind for found in odd.values()).most_common(1)[0]
    ranks = tuple(sorted(rank for rank, found in odd.items() if found.kind == kind))
    victims = verdict.reason.partition(";")[0].rpartition(": ")[2]
    return msgspec.structs.replace(
        verdict,
        fault=FAULT_OF[kind],
        reason=f"{named(ranks)} {odd[ranks[0]].text}; {victims}",
        confidence=_SURE_OF_UNNAMED if odd[ranks[0]].group == UNNAMED else _SURE_OF_A_TRAIL if odd is past else _SURE,
        culprits=ranks,
        nodes=tuple(sorted({node for node, exit_ in ended if exit_.rank in ranks})),
        otherwise="no rank would be named, had all called the same",
    )


def odd_calls(exits: Sequence[RankExit]) -> dict[int, Deviation]:
    """Return the ranks whose calls deviate from the majority of their group; empty where there is no majority."""
    members: dict[str, list[RankExit]] = {}
    for exit_ in sorted(exits, key=lambda exit_: exit_.rank):
        for group in dict.fromkeys(fact.group for fact in exit_.calls if fact.seq >= 0):
            members.setdefault(group, []).append(exit_)
    found: dict[int, Deviation] = {}
    for group in sorted(members, key=lambda group: (-len(members[group]), group)):
        for rank, deviation in _odd_in(group, members[group]).items():
            found.setdefault(rank, deviation)
    return found


def _odd_in(group: str, known: Sequence[RankExit]) -> dict[int, Deviation]:
    for at in range(_MODELS if len(known) >= _FEWEST else 0):
        model = known[at * (len(known) - 1) // (_MODELS - 1)]
        pairs = [(exit_.rank, _deviation(model, exit_, group)) for exit_ in known]
        odd = {rank: found for rank, found in pairs if found is not None}
        if 0 < len(odd) < len(known) / 2:
            return odd
    return {}


def _outsider(exits: Sequence[RankExit]) -> dict[int, Deviation]:
    """Return the only rank that was not in the call that all others were in; empty where there is no such rank.

    A rank received data that did not fit, and all ranks in that call brought the same to it. So the data came from
    the one that was elsewhere, also where its box does not show in which call: DDP starts its own from C++. A call that
    is over counts as well, as long as it is not over for all: Gloo completes what fails, and a peer's call fails when
    the first to die closes its connections.
    """
    known = [exit_ for exit_ in exits if exit_.calls]
    # Without a name it is only counted, and a count is as old as the heartbeat that brought it.
    named_calls = [[fact for fact in exit_.calls if fact.seq >= 0 and fact.function] for exit_ in known]
    called = [{(fact.group, fact.seq): fact for fact in facts} for facts in named_calls]
    places = Counter(place for calls in called for place in calls)
    waited = {place for calls in called for place, fact in calls.items() if not fact.done}
    if len(known) < _FEWEST or not any(places[place] == len(known) - 1 for place in waited):
        return {}
    group, seq = min(place for place in waited if places[place] == len(known) - 1)
    outside = [exit_ for exit_, calls in zip(known, called, strict=True) if (group, seq) not in calls]
    meant = [calls[group, seq] for calls in called if (group, seq) in calls]
    is_member = any(fact.group == group for fact in outside[0].calls)
    if not is_member or any(difference(meant[0], fact) for fact in meant):
        return {}
    text = f"called something else as number {seq}{of_group(group)}, where all others were in {describe(meant[0])}"
    return {outside[0].rank: Deviation("order", group, seq, text)}


def _deviation(model: RankExit, other: RankExit, group: str) -> Deviation | None:
    """Return in what a rank deviates from one of its group that is taken to be right."""
    return compare(_look(model), _look(other), group, ahead=other.step > model.step)


def _look(exit_: RankExit) -> Look:
    return NOTHING._replace(ring=exit_.calls)
