# SPDX-License-Identifier: Apache-2.0
"""From a suspicion and its evidence to a verdict: which class of hang, which ranks, how sure.

The watchdog knows which ranks are silent. Evidence shows what each rank does: its process, its stack, its collectives.
Here both become one verdict, by the first of these questions that has an answer:

1. Do two nodes claim the same rank?  Is the suspect stopped, or has it ended?
2. Have collectives gone on meanwhile, or between dumps left as files?         (slow: no hang)
3. Does what ranks send each other get no acknowledgement?                    (the network is cut)
4. Do ranks that wait in one group's collectives disagree about them?         (skipped, order, mismatch)
   Do pairs of them, in an all_to_all, in sends and receives?                 (mismatch, order)
5. Do ranks wait for tiles of others?                                         (the end of the chain)
6. Do some ranks form a process group that others stay away from?             (group never formed)
7. Which ranks are waited for and wait for none?                              (the roots; by what they do)
8. Has the GPU of a few not begun what the GPUs of others wait in?            (the GPU is stuck)
9. Do all wait, and does the data of a few not leave them?                    (the network is cut)
10. Do groups wait for each other in a circle, as called or as queued? Has all of a group but a few finished?
11. Does no rank wait at all?                                                 (idle, or what the silent ones do)

A rank that waits where the majority waits is never named. An answer that is not there is no reason to name no rank: a
rank that is missing in a collective is known from those that wait in it. What the evidence does not show stays as the
watchdog saw it, with low confidence.

Pure: everything known in, a verdict and how long silence must have lasted before it is acted upon out.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

import msgspec

from megascale_ops.diagnosis.hangs import partition, questions, tile_hangs, wait_graph
from megascale_ops.diagnosis.hangs.causes import Patience
from megascale_ops.diagnosis.hangs.evidence import Look
from megascale_ops.diagnosis.hangs.habits import place_of, standing_in
from megascale_ops.diagnosis.hangs.membership import with_members
from megascale_ops.diagnosis.hangs.patience import CONTRADICTED, busy_patience_s, is_leaving
from megascale_ops.diagnosis.hangs.questions import CLEAR, MOST_TOLD, Answer, finding_of
from megascale_ops.diagnosis.hangs.rank_wait import RankWait
from megascale_ops.diagnosis.hangs.suspicion import Suspicion
from megascale_ops.diagnosis.rank_view import RankView
from megascale_ops.schema.folding import fold
from megascale_ops.schema.health import Finding, Verdict
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.wording import PLACE

# Shares of what a step may take. 0.9: two looks have seen nothing move; what is left is the doubt about a slow step. 2:
# as long again for a rank that may be computing in one line, and for a network that flaps.
_SHARES = {
    Patience.NONE: CONTRADICTED,
    Patience.HALTED: 0.9,
    Patience.NETWORK: 2.0,
    Patience.STUCK: 2.0,
    Patience.SILENT: 0.9,
    Patience.SPINNING: 2.0,
}
# What waiting does not mend: acted upon at once. What no wait looked like that ended by itself is given a minute
# (``stuck_patience_s``). All else may come back by itself, and is given an absentee's time.
_PROVEN = frozenset({Patience.NONE, Patience.HALTED, Patience.NETWORK})
# 3 s: as long a heartbeat from after a look is awaited; an agent that has died must not keep a hang from being
# resolved.
UNHEARD_S = 3.0
# 4 groups in calls of one name and number are shown apart; of a thousand tensor parallel groups the line has the
# number.
MOST_GROUPS = 4
_PLACES = {
    "no_answer": "no answer",
    "stopped": "stopped",
    "gil_held": "GIL held",
    "in_rendezvous": "rendezvous",
    "in_data_loader": "DataLoader",
    "in_storage": "storage",
    "in_collective": "a collective",
    "in_syscall": "a system call",
}


class Judgement(NamedTuple):
    """A verdict, and how long silence must last before it is acted upon.

    ``is_proven``: waiting mends nothing. ``is_outrun``: not known yet that no rank has moved since the evidence was
    taken, or known that one has; then it is not acted upon. ``is_unseen``: a rank that is named was asked what it does,
    and no answer came in time: on a busy machine the next look has it.
    """

    verdict: Verdict
    patience_s: float
    is_proven: bool = False
    is_outrun: bool = False
    is_unseen: bool = False


def judge(
    suspicion: Suspicion, ranks: Sequence[RankView], looks: Mapping[int, Look], world_size: int, policy: JobPolicy
) -> Judgement:
    """Return what the suspicion is worth now that evidence is in.

    Args:
        suspicion: the watchdog's newest.
        ranks: all ranks of the round that have been reported, in any order.
        looks: the evidence on each rank; those that are missing gave none.
        world_size: how many ranks there should be.
        policy: how patient to be.
    """
    stands = [wait_graph.stand_of(view, looks) for view in ranks if not (view.gone or is_leaving(view))]
    stands.sort(key=itemgetter(0))  # by rank; a third of what an attribute costs
    stands = with_members(stands)
    answer = _first_answer(suspicion, ranks, stands, world_size)
    seen = suspicion.verdict
    shown = (_folded(stands), *_told(stands, answer.culprits if answer else seen.culprits, looks))
    if answer is None:
        place = _place_of(suspicion.verdict.culprits, stands, looks)
        verdict = msgspec.structs.replace(seen, evidence=(*seen.evidence, *shown), place=place)
        return Judgement(verdict, suspicion.patience_s, suspicion.is_proven)
    culprits = tuple(sorted(set(answer.culprits)))
    named_ranks = frozenset(culprits)
    nodes = tuple(sorted({view.node for view in ranks if view.report.rank in named_ranks}))
    others = tuple(finding for finding in seen.evidence if finding.rank < 0 or finding.rank in named_ranks)
    proven = answer.patience in _PROVEN or (answer.patience is None and suspicion.is_proven)
    verdict = msgspec.structs.replace(
        seen,
        fault=answer.fault,
        reason=f"{answer.why}; silent for {suspicion.age_s:.1f} s",
        confidence=answer.confidence,
        culprits=culprits,
        nodes=nodes,
        evidence=(*answer.findings[:3], *shown, *answer.findings[3:], *others),
        otherwise=answer.otherwise,
        place=_place_of(culprits, stands, looks),
        sure_of="" if proven or answer.patience is Patience.STUCK or answer.fault == "slow" else PLACE,
    )
    outrun = _is_outrun(stands, named_ranks)
    unseen = not proven and any(stand.rank in named_ranks and _is_unseen(stand, looks) for stand in stands)
    return Judgement(verdict, _patience_s(answer, suspicion, stands, policy), proven, outrun, unseen)


def _is_unseen(stand: RankWait, looks: Mapping[int, Look]) -> bool:
    """Return whether a rank has not answered what it does."""
    return stand.rank not in looks or ("no_answer" in stand.look.marks and not stand.look.frames)


def _is_outrun(stands: Sequence[RankWait], blamed: frozenset[int]) -> bool:
    """Return whether a rank that is blamed or waits may have moved since it was looked at.

    A wait that ends while evidence is gathered shows ranks in calls that do not fit: one is looked at before it went
    on, the other after. So each look needs a heartbeat from after it that shows no movement since.
    """
    for stand in stands:
        progress, seen_s = stand.view.report.progress, stand.look.seen_mono_s
        if progress is None or not seen_s or not (stand.waits or stand.rank in blamed):
            continue
        told_s = progress.moved_mono_s + stand.view.silent_s
        if progress.moved_mono_s > seen_s or (told_s < seen_s and stand.view.heard_age_s < UNHEARD_S):
            return True
    return False


def _patience_s(answer: Answer, suspicion: Suspicion, stands: Sequence[RankWait], policy: JobPolicy) -> float:
    """Return how long silence must last; only a clear answer makes it shorter than what the watchdog grants."""
    patience, base_s = answer.patience, suspicion.base_s
    if patience is None:
        return suspicion.patience_s
    if patience is Patience.MOVING:
        return max(suspicion.patience_s, policy.phase_patience_s)
    if suspicion.excused and patience is not Patience.NONE:
        return suspicion.patience_s
    if patience is Patience.WORKING:
        wanted_s = max(suspicion.patience_s, busy_patience_s(base_s, policy))
    else:
        # What a step may take is learned, and may be short by half; what a start may take is said.
        wanted_s = base_s * (min(1.0, _SHARES[patience]) if suspicion.is_said else _SHARES[patience])
        if suspicion.is_start:
            wanted_s = max(wanted_s, base_s if patience in _PROVEN else suspicion.name_s)
        elif answer.confidence < CLEAR:
            wanted_s = max(wanted_s, suspicion.name_s)
    if patience in _PROVEN:
        return wanted_s
    if patience is Patience.STUCK:
        if answer.fault == "gpu_stuck" and (suspicion.is_start or suspicion.is_said):
            # Compilers and tuners run before a host gives its GPU what others' GPUs wait in: those ranks are absent.
            wanted_s = min(wanted_s, max(policy.absent_patience_s, policy.stuck_patience_s))
        # A host that waits for its GPU in a collective may burn CPU all the while: that is no work.
        absent = [stand for stand in stands if not stand.waits]
        return max(wanted_s, _worked_s(answer.culprits, absent) + min(policy.stuck_patience_s, suspicion.absent_s))
    worked_s = _worked_s(answer.culprits, stands) if patience is Patience.SILENT else 0.0
    return max(wanted_s, worked_s + suspicion.absent_s)


def _worked_s(culprits: Sequence[int], stands: Sequence[RankWait]) -> float:
    """Return how long after its last movement a culprit was last seen to get something done; 0 where none was."""
    blamed = frozenset(culprits)
    found = [0.0]
    for stand in stands:
        progress = stand.view.report.progress
        if stand.rank in blamed and progress is not None and stand.look.worked_mono_s:
            found.append(stand.look.worked_mono_s - progress.moved_mono_s)
    return max(found)


def _place_of(culprits: Sequence[int], stands: Sequence[RankWait], looks: Mapping[int, Look]) -> str:
    """Return where the silence is: the script's line of the first culprit, and the group in which the others wait."""
    frames = next((looks[rank].frames for rank in sorted(culprits) if rank in looks and looks[rank].frames), ())
    groups = Counter(stand.inside.group for stand in stands if stand.inside is not None)
    return place_of(frames, groups.most_common(1)[0][0] if groups else "")


def _first_answer(
    suspicion: Suspicion, ranks: Sequence[RankView], stands: Sequence[RankWait], world_size: int
) -> Answer | None:
    twice = questions.claimed_twice(ranks)
    if twice is not None or suspicion.verdict.fault in ("frozen", "exited_early", "duplicate_rank"):
        return twice
    return (
        questions.gone_on(stands)
        or questions.apart(stands)
        or partition.cut(stands)
        or questions.disagreement(stands)
        or questions.exchange(stands)
        or tile_hangs.tile_waits(stands)
        or questions.rendezvous(stands, world_size)
        or questions.missing(stands)
        or questions.gpu(stands)
        or partition.unsent(stands)
        or questions.all_wait(stands, world_size)
        or questions.nobody_waits(stands, frozenset(suspicion.verdict.culprits))
    )


def _told(stands: Sequence[RankWait], culprits: Sequence[int], looks: Mapping[int, Look]) -> list[Finding]:
    """Return what evidence shows of the culprits."""
    blamed = frozenset(culprits)
    found = []
    for stand in [stand for stand in stands if stand.rank in blamed][:MOST_TOLD]:
        if _is_unseen(stand, looks):
            text = f"rank {stand.rank} gave no evidence of its own: what is known of it comes from the others"
            found.append(finding_of("no_answer", text, "stacks", stand))
        if stand.look.frames:
            alike = stand.look.alike
            often = "at one look" if alike == 1 else f"the same place in {alike} looks"
            text = f"rank {stand.rank} is in {standing_in(stand.look.frames)}, {often}"
            found.append(finding_of("stack", text, "stacks", stand, alike))
    return found


def _folded(stands: Sequence[RankWait]) -> Finding:
    """Return where all ranks are, in one line."""
    inside: dict[tuple[str, int], set[str]] = {}
    for stand in stands:
        if stand.inside is not None:
            inside.setdefault((stand.inside.function, stand.inside.seq), set()).add(stand.inside.group)
    known: dict[tuple[str, int, str], str] = {}  # nearly all ranks share a handful of places
    labels: dict[int, str] = {}
    for stand in stands:
        fact = stand.inside
        if fact is None:
            labels[stand.rank] = _place(stand)
            continue
        place = (fact.function, fact.seq, fact.group)
        if place not in known:
            many = len(inside[fact.function, fact.seq])
            which = f" of group {fact.group}" if many <= MOST_GROUPS else f" of {many} groups"
            known[place] = _place(stand) + (which if many > 1 else "")
        labels[stand.rank] = known[place]
    text = fold(labels)
    return Finding(name="places", text=text, source="stacks", value=float(len(stands)), unit="ranks")


def _place(stand: RankWait) -> str:
    """Return where a rank is, in a few words."""
    fact, look = stand.inside, stand.look
    if fact is not None:
        return f"{fact.function or 'collective'} #{fact.seq}"
    if stand.waits and look.peer_call is not None:
        return f"{look.peer_call.function} of group {look.peer_call.group}"
    for mark, words in _PLACES.items():
        if mark in look.marks and not (look.frames and mark in ("no_answer", "in_syscall")):
            return words
    return look.frames[0] if look.frames else "not in a collective" if stand.positions else "not known"
