# SPDX-License-Identifier: Apache-2.0
"""Which rank never came, when the script's own time-out ended those that waited for it.

``monitored_barrier``, a process group's time-out and NCCL's watchdog end the ranks that waited. The one they waited
for had done nothing yet when its runner stopped it. So at the end the black boxes of all ranks show which had not
entered: each rank's last calls are in its runner's report of its end. A rank that died of a time-out, or was
stopped inside a call, waited itself; a rank that waited nowhere and was behind in a group in which others waited is the
absentee.

A time-out of the store (``TCPStore.wait``) is no call, so the calls name no rank; then the only rank that did not die
of it is named, with much less confidence.

Pure: ends in, a verdict out.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from megascale_ops.diagnosis.exits.classify import Judged, text_of
from megascale_ops.diagnosis.exits.watchdog_words import given_up, is_of_one
from megascale_ops.diagnosis.hangs.call_order import calls as calls_of
from megascale_ops.diagnosis.hangs.call_order import describe, difference, fits
from megascale_ops.schema.folding import named
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import CollectiveFact, RankExit

# "[Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 6000 ms" (torch 2.13); it counts within its group.
# Numbers of at most nine digits: a text may hold longer ones, which are no ranks and no times.
_NAMES = re.compile(r"Ranks? (\d{1,9}(?:, *\d{1,9})*) failed to pass monitoredBarrier")
_PATIENCE_MS = re.compile(
    r"(?:Timed out waiting |failed to pass monitoredBarrier in |wait timeout after |Timeout\(ms\)=)(\d{1,9})(?!\d)"
)
_TIME_OUT = re.compile(
    rf"{_PATIENCE_MS.pattern}|collective operation timeout|Timed out initializing process group"
    r"|gloo.*(?:timed out|timeout)",
    re.IGNORECASE,
)
_TIME_OUT_WORDS = frozenset({"gloo_timeout", "nccl_timeout", "monitored_barrier", "gpu_wait"})
_TOLD_TO_END = "nccl_dump"
# What a rank is told tells that another one's time-out was over, even where that one's own line is cut away.
_OF_A_TIME_OUT = re.compile(r"dump signal due to a collective timeout from")
_WHOLE_JOB = "0"  # the name of the group of all ranks
# 2 ranks that died of the store's time-out each for itself: one may have been no other than the one that was stopped.
_FEWEST = 2
# A third, or fewer, that waited alone are odder than all others.
_FEW = 3
# 3 times as many that each timed out make it unlikely that the rest were only ended before their own time-out.
_MANY = 3
_FEW_SURE = 0.4
# 0.7: who is behind may have left one call out, or its GPU or its network has not ended it.
_BEHIND_SURE = 0.7


class _End(NamedTuple):
    """How one rank ended, for this question."""

    exit: RankExit
    place: CollectiveFact | None  # the collective that it waited in
    waited: bool  # also for a single peer, or for the store
    timed_out: bool


def blame_absent(verdict: Verdict, judged: Sequence[Judged], world_size: int) -> Verdict:
    """Name the ranks that never came; the same verdict where no rank reports a time-out or an end is unknown."""
    ends = [_end_of(one) for one in judged]
    if len(ends) < world_size or not any(end.timed_out or _OF_A_TIME_OUT.search(text_of(end.exit)) for end in ends):
        return verdict
    return (
        _behind(verdict, ends)
        or _contradict(verdict, ends)
        or _fell_behind(verdict, ends)
        or _silent(verdict, ends)
        or _elsewhere(verdict, ends)
        or verdict
    )


def _end_of(one: Judged) -> _End:
    exit_ = one.ended.exit
    is_victim = one.fault == "peer"
    told = _TIME_OUT.search(text_of(exit_)) is not None or not _TIME_OUT_WORDS.isdisjoint(
        {*exit_.last_words, *one.said}
    )
    timed_out = is_victim and told
    if is_victim and not told and _TOLD_TO_END in one.said:
        is_victim = False  # another rank's time-out ended it, wherever it was
    last = next((fact for fact in reversed(exit_.calls) if fact.function), None)
    if is_victim:  # what it failed in counts as done, to Gloo
        return _End(exit_, last if last is None or last.seq >= 0 else None, waited=True, timed_out=timed_out)
    unfinished = [fact for fact in exit_.calls if not fact.done and (fact is last or not fact.function)]
    place = next((fact for fact in unfinished if fact.seq >= 0), None)
    return _End(exit_, place, waited=bool(unfinished), timed_out=False)


def _behind(verdict: Verdict, ends: Sequence[_End]) -> Verdict | None:
    """Name those that waited nowhere and were behind; what rank 0 read in its own barrier counts where no call does."""
    latest: dict[str, CollectiveFact] = {}
    for fact in (fact for end in ends if end.waited for fact in _facts_in(end)):
        if fact.seq > (latest[fact.group].seq if fact.group in latest else -1):
            latest[fact.group] = fact
    absent = [end.exit for end in ends if not end.waited and latest and _holds_up(end.exit, latest)]
    said = _said(ends)
    if not absent:
        absent = [end.exit for end in ends if end.exit.rank in said and not end.timed_out]
    if not absent or len(absent) == len(ends):
        return None
    if (alone := _alone(verdict, ends, absent, latest)) is not None:
        return alone
    ranks = tuple(sorted(exit_.rank for exit_ in absent))
    place = _missed(absent[0], latest)
    waiters = [end.exit.rank for end in ends if end.waited]
    text = (
        f"{named(ranks)} never came to {place or 'where the others waited'}, {_waited(ends, waiters)}{_last(absent[0])}"
    )
    sure = 0.95 if said == set(ranks) or 2 * len(ranks) <= len(ends) else 0.7
    return _named(verdict, "not_joined", text, sure, ranks)


def _alone(
    verdict: Verdict, ends: Sequence[_End], absent: Sequence[RankExit], latest: dict[str, CollectiveFact]
) -> Verdict | None:
    """Return the verdict on few that waited in a call which all others, with nothing unfinished, have never entered.

    A script has most of its ranks right: those few called once too often, or the others wait for them elsewhere.
    """
    waiters = [end.exit for end in ends if end.waited]
    is_few = _FEW * len(waiters) <= len(ends) and len(absent) + len(waiters) == len(ends)
    if not is_few or any(not fact.done for exit_ in absent for fact in exit_.calls):
        return None
    ranks = tuple(sorted(exit_.rank for exit_ in waiters))
    place = _missed(absent[0], latest)
    text = f"{named(ranks)} alone waited in {place}, which the other {len(absent)} ranks never entered"
    return _named(verdict, "collective_order", f"{text}: called once too often, or left out by them", 0.5, ranks)


def _facts_in(end: _End) -> list[CollectiveFact]:
    """Return how far a rank that waited was: the place it waited in, and its groups' counts."""
    counted = [fact for fact in end.exit.calls if not fact.function and fact.seq >= 0]
    return [end.place, *counted] if end.place is not None else counted


def _holds_up(exit_: RankExit, latest: dict[str, CollectiveFact]) -> bool:
    entered: dict[str, int] = {}
    for fact in exit_.calls:
        if fact.seq >= 0:
            entered[fact.group] = max(fact.seq, entered.get(fact.group, -1))
    if not entered:
        # A black box without a call is evidence only before the first step: what C++ starts does not stand in each of
        # them.
        return bool(exit_.phase) and exit_.steps_seen == 0
    return any(group in latest and seq < latest[group].seq for group, seq in entered.items())


def _missed(exit_: RankExit, latest: dict[str, CollectiveFact]) -> str:
    """Return the call that a rank never came to, in words."""
    for group, fact in latest.items():
        entered = max((known.seq for known in exit_.calls if known.group == group), default=-1)
        if entered < fact.seq:
            return describe(fact)
    return ""


def _said(ends: Sequence[_End]) -> set[int]:
    """Return the ranks that a barrier of the whole job has named."""
    found: set[int] = set()
    for end in ends:
        match = _NAMES.search(text_of(end.exit))
        if match is not None and (end.place is None or end.place.group == _WHOLE_JOB):
            found |= {int(number) for number in match[1].split(",")}
    return found


def _contradict(verdict: Verdict, ends: Sequence[_End]) -> Verdict | None:
    """Return the verdict on ranks that waited in different calls of one group and number: they could never meet."""
    places = [(end.exit, end.place) for end in ends if end.place is not None and end.place.function]
    crowd = Counter((fact.group, fact.seq) for _, fact in places)
    for (group, seq), count in crowd.most_common():
        there = [(exit_, fact) for exit_, fact in places if (fact.group, fact.seq) == (group, seq)]
        odd = [(exit_, fact) for exit_, fact in there if difference(there[0][1], fact) == "function"]
        if count < _FEWEST or not odd:
            continue
        one, other = there[0], odd[0]
        text = f"rank {one[0].rank} waited in {describe(one[1])} and rank {other[0].rank} in {describe(other[1])}"
        wrong = [
            exit_.rank
            for exit_, fact in there
            if fits({n: call for n, call in calls_of(exit_.calls, group).items() if n < seq}, seq, fact) is False
        ]
        ranks = tuple(sorted(wrong)) if 0 < len(wrong) < len(there) else ()
        whose = f"; {named(ranks)} had called otherwise before" if ranks else ""
        return _named(verdict, "collective_order", f"{text}: they could never meet{whose}", 0.7, ranks)
    return None


def _fell_behind(verdict: Verdict, ends: Sequence[_End]) -> Verdict | None:
    """Name the few that waited in a call of a group which most had ended: they waited in the next one."""
    places = [(end.exit, end.place) for end in ends if end.place is not None and end.place.function and end.timed_out]
    for group, count in Counter(fact.group for _, fact in places).most_common():
        there = [(exit_, fact) for exit_, fact in places if fact.group == group]
        furthest = max((fact for _, fact in there), key=lambda fact: fact.seq)
        behind = [(exit_, fact) for exit_, fact in there if fact.seq < furthest.seq]
        together = sum(fact.seq == furthest.seq for _, fact in there)
        if not behind or together <= len(behind) or count <= _FEWEST:
            continue
        ranks = tuple(sorted(exit_.rank for exit_, _ in behind))
        first = behind[0][1]
        text = f"{named(ranks)} waited in {describe(first)}, which was over for {together} others: they waited in "
        text += describe(furthest)
        if first.seq + 1 == furthest.seq and not difference(first, furthest):
            text += "; the calls are alike: one before it was left out, or the rank's GPU or network did not end it"
        return _named(verdict, "not_joined", text, _BEHIND_SURE, ranks)
    return None


def _silent(verdict: Verdict, ends: Sequence[_End]) -> Verdict | None:
    """Name the only rank that did not die of a time-out, or few of many, where all others did, each for itself."""
    rest = [end.exit for end in ends if not end.timed_out]
    waiters = [end.exit.rank for end in ends if end.timed_out]
    is_few = len(rest) == 1 or (rest and _MANY * len(rest) <= len(waiters))
    if not is_few or len(waiters) < _FEWEST or any(not end.waited for end in ends if end.timed_out):
        return None
    ranks = tuple(sorted(exit_.rank for exit_ in rest))
    text = f"{named(ranks)} alone did not die of the time-out, {_waited(ends, waiters)}{_last(rest[0])}"
    return _named(verdict, "not_joined", text, 0.5 if len(rest) == 1 else _FEW_SURE, ranks)


def _elsewhere(verdict: Verdict, ends: Sequence[_End]) -> Verdict | None:
    """Name the few whose watchdogs, which name no group, gave up an earlier call than all others did.

    The numbers may be those of another group: then they still were not where the others waited.
    """
    given = [(end.exit, given_up(text_of(end.exit))) for end in ends if end.timed_out]
    if len(given) < len(ends) or any(call is None or call.group or exit_.calls for exit_, call in given):
        return None
    if not all(is_of_one(text_of(exit_)) for exit_, _ in given):
        return None
    calls = [(exit_, call) for exit_, call in given if call is not None]
    (most, count), *_ = Counter((call.seq, call.function) for _, call in calls).most_common(1)
    rest = [(exit_, call) for exit_, call in calls if (call.seq, call.function) != most]
    is_few = rest and _MANY * len(rest) <= count and count > _FEWEST
    if not is_few or any(call.seq >= most[0] for _, call in rest):
        return None
    ranks = tuple(sorted(exit_.rank for exit_, _ in rest))
    text = f"{named(ranks)} waited in {rest[0][1].function or 'a call'} #{rest[0][1].seq} where {count} others waited "
    return _named(verdict, "not_joined", f"{text}in {most[1] or 'a call'} #{most[0]}", _FEW_SURE, ranks)


def _waited(ends: Sequence[_End], waiters: Sequence[int]) -> str:
    text = f"for which {named(sorted(waiters))} waited until the script's own time-out"
    for end in ends:
        match = _PATIENCE_MS.search(text_of(end.exit)) if end.timed_out else None
        if match is not None:
            return f"{text} of {int(match[1]) / 1e3:g} s"
    return text


def _last(exit_: RankExit) -> str:
    after = f" after step {exit_.step}" if exit_.step >= 0 else " before its first step"
    return f"; it was in phase {exit_.phase}{after}" if exit_.phase else ""


def _named(verdict: Verdict, fault: str, text: str, confidence: float, ranks: tuple[int, ...]) -> Verdict:
    return msgspec.structs.replace(
        verdict,
        fault=fault,
        reason=text,
        confidence=confidence,
        culprits=ranks,
        otherwise="its calls in its black box: `megascale-ops inspect` of the incident's folder shows them",
    )
