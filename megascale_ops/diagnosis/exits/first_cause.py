# SPDX-License-Identifier: Apache-2.0
"""From how the ranks of a round ended to the culprits: first causes and consequences.

When one rank dies, its peers die of it within milliseconds. Those are victims (``classify`` knows them by their
words), what remains are causes. Of several causes the hard ones (signals, memory, disk, GPU) come before exceptions,
because an exception can be a consequence whose text is not known yet, and a killed process with gigabytes of memory
is seen to end *after* its victims (64 ms for each touched GB).

Pure: how everything ended in, a verdict and its evidence out.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from megascale_ops.diagnosis.exits import tile_timeouts
from megascale_ops.diagnosis.exits.absentees import blame_absent
from megascale_ops.diagnosis.exits.classify import SURE, Ended, Judged, classify, text_of
from megascale_ops.diagnosis.exits.error_records import age_s, ended_it, error_of, sentence
from megascale_ops.diagnosis.exits.exit_status import ASKED, signal_name, signal_of
from megascale_ops.diagnosis.exits.last_calls import blame_caller
from megascale_ops.diagnosis.exits.last_traceback import with_error
from megascale_ops.diagnosis.exits.last_words import row_of_error
from megascale_ops.diagnosis.exits.observers import excuse, excuse_lost_connections, excuse_wrapped
from megascale_ops.diagnosis.exits.signature import signature
from megascale_ops.diagnosis.exits.victims_words import (
    Told,
    blame_named,
    blame_quoted,
    blame_reporter,
    blame_uncounted,
    blame_version,
)
from megascale_ops.diagnosis.exits.watchdog_words import with_positions
from megascale_ops.diagnosis.exits.word_table import RENDEZVOUS_CLOSED
from megascale_ops.schema.fault_classes import FAULTS, Blames
from megascale_ops.schema.folding import listed
from megascale_ops.schema.health import Finding, HostReading, Verdict
from megascale_ops.schema.messages import RankExit
from megascale_ops.schema.progress import RankReport

# Faults of which the rank that died is a victim, and nothing in its end names the cause.
_NOBODYS = frozenset({"collective_mismatch"})
_CHECKED = "checked_mismatch"  # the row of libraries that compared what ranks brought: their words are better

# Which class wins when several ranks have causes of their own; equal ranks are ordered by time. Any other class of
# fault stands with exceptions.
_ORDER = {
    "out_of_memory": 0,
    "segfault": 0,
    "killed": 0,
    "disk_full": 0,
    "cuda_error": 0,
    "aborted": 1,
    "collective_mismatch": 1,
    "exit_code": 5,
    "nccl_error": 5,
}
_AS_EXCEPTIONS = 2
# SIGTERM and its like are how launchers and batch systems stop the ranks that another one's fault has left.
_ASKED_TO_GO = 4
# Slurm's word that it has ended a job or a step as a whole, and no reason of its own (a preemption, a time limit).
_CANCELLED = re.compile(r"error: \*\*\* (?:JOB|STEP) [^\n]{0,120}CANCELLED(?![^\n]{0,80}DUE TO)")
# The reason for stopping them: a rank that had ended before all of them, with only an exit code.
_BEFORE_ASKED = 3
# 30 s: the kernel needs 64 ms for each touched GB of a killed process, so it may be seen to end so long after others.
_LINGER_S = 30.0
# 1 s: which of two ends came first is certain beyond it; clocks, runners and heartbeats are that far apart at most.
_APART_S = 1.0
# 0.1 s: on one node one runner sees all ends, and looks for them every 0.02 s.
_APART_ON_A_NODE_S = 0.1
# 0.5: that the launcher stopped the rest for it is certain, but not who had closed the rendezvous before.
_CLOSED = 0.5
# 0.6: another rank's end could as well have been the first; 0.4: an NCCL error of several is often one more rank's.
_RIVALLED, _SHARED_NCCL = 0.6, 0.4
# 2 s: ends further apart than this do not belong together.
_TOGETHER_S = 2.0
# 8 older exceptions: a thread that dies in all ranks is reported as often as a person reads it.
_MOST_SURVIVED = 8


def judge_exits(
    ended: Sequence[Ended],
    *,
    world_size: int,
    missing: Sequence[str],
    reports: Mapping[int, RankReport],
    hosts: Mapping[str, HostReading],
    round_: int,
    wall_s: float,
) -> Verdict:
    """Return the verdict on how the round ended.

    Args:
        ended: all exits that are known.
        world_size: how many ranks the round had.
        missing: nodes of the round that have not answered.
        reports: the last heartbeat's report of each rank.
        hosts: the last heartbeat's reading of each host.
        round_: which round.
        wall_s: the time now.
    """
    exits = with_positions([with_error(one.exit) for one in ended])
    ended = [one._replace(exit=exit_) for one, exit_ in zip(ended, exits, strict=True)]
    judged = excuse([classify(one, reports.get(one.exit.rank), hosts.get(one.node)) for one in ended], missing)
    judged = excuse_wrapped(excuse_lost_connections(judged))
    causes = [one for one in judged if one.fault in FAULTS and one.fault != "unknown"]
    victims = [one for one in judged if one.fault == "peer"]
    closed = _found_closed(victims, causes)
    if closed or _were_stopped_for(victims, causes):
        causes = []
    verdict = _blame(causes, victims, world_size) if causes else _without_cause(judged, victims, missing, reports)
    if verdict.fault == "unknown" and closed:
        verdict = _blame_closed(closed, victims, len(judged))
    verdict = _named_by_words(verdict, ended, judged, reports, world_size)
    evidence = (*_evidence(judged, missing), *_survived(ended, reports))
    return _with_times(verdict, ended, reports, round_, wall_s, evidence)


def _named_by_words(
    verdict: Verdict,
    ended: Sequence[Ended],
    judged: Sequence[Judged],
    reports: Mapping[int, RankReport],
    world_size: int,
) -> Verdict:
    """Return the verdict with the culprit that the ranks' own words name, where how they ended does not tell it.

    The order is from the most exact words to the least: the tile that timed out, NCCL's versions, the call that no
    other rank made, quoted ranks, ranks that never came, ranks that the victims name.
    """
    told = [Told(one.node, one.exit.rank, text_of(one.exit)) for one in ended]
    errors = {one.exit.rank: error for one in ended if (error := error_of(one.exit, reports.get(one.exit.rank)))}
    verdict = tile_timeouts.blame(verdict, [one.exit for one in ended], errors)
    if verdict.fault == "nccl_error" and len(verdict.culprits) > 1:
        verdict = blame_version(verdict, told)
    if verdict.fault == "exit_code" and len(verdict.culprits) > 1:
        verdict = blame_reporter(verdict, told)
    if verdict.fault in {*_NOBODYS, "unknown"}:
        verdict = blame_caller(verdict, [(one.node, one.exit) for one in ended])
        verdict = blame_quoted(verdict, told) if not verdict.culprits else verdict
    if verdict.fault == "unknown":
        verdict = _who_is_missing(verdict, judged, told, world_size)
    return verdict


def _with_times(
    verdict: Verdict,
    ended: Sequence[Ended],
    reports: Mapping[int, RankReport],
    round_: int,
    wall_s: float,
    evidence: tuple[Finding, ...],
) -> Verdict:
    """Return the verdict with its round, its evidence, and since when and on which nodes the culprits ended."""
    blamed = frozenset(verdict.culprits)  # all of 100,000, where one error is everywhere
    guilty = [one for one in ended if one.exit.rank in blamed]
    return Verdict(
        fault=verdict.fault,
        reason=verdict.reason,
        confidence=verdict.confidence,
        culprits=verdict.culprits,
        nodes=verdict.nodes or tuple(sorted({one.node for one in guilty} - {""})),
        otherwise=verdict.otherwise,
        since_wall_s=wall_s - max((one.age_s for one in guilty), default=0.0),
        since_step=min((_step_of(one.exit, reports.get(one.exit.rank)) for one in guilty), default=verdict.since_step),
        round=round_,
        evidence=evidence,
    )


def _who_is_missing(verdict: Verdict, judged: Sequence[Judged], told: Sequence[Told], world_size: int) -> Verdict:
    """Return the verdict by calls, by a store's count or by what victims say; the same one where none of them tells."""
    lost = {one.ended.exit.rank for one in judged if one.fault == "peer"}
    verdict = blame_absent(verdict, judged, world_size)
    if verdict.fault == "unknown":
        verdict = blame_uncounted(verdict, told, lost, world_size)
    if verdict.fault == "unknown":
        verdict = blame_named(verdict, [one for one in told if one.rank in lost], world_size)
    return verdict


def _blame(causes: Sequence[Judged], victims: Sequence[Judged], world_size: int) -> Verdict:
    """Choose the first among the causes, with all that fell over the same thing at the same time."""
    earliest_s = max(one.ended.age_s for one in causes)
    near = [one for one in causes if earliest_s - one.ended.age_s <= _LINGER_S]
    early = _ended_before_the_asked(near)
    count = Counter(signature(one.ended.exit) for one in near)
    first = min(
        near,
        key=lambda one: (
            _BEFORE_ASKED if one in early else _rank_of(one),
            -one.ended.age_s,
            # Without times the few come before the many, who may have died of them in words that are not known.
            0 if one.ended.has_time else count[signature(one.ended.exit)],
        ),
    )
    alike, was_asked = signature(first.ended.exit), _rank_of(first) == _ASKED_TO_GO
    together: list[Judged] = []
    rivals: list[Judged] = []
    for one in causes:
        is_same = (
            one.fault == first.fault
            # Who was asked to go did not fall over what killed another one.
            and (_rank_of(one) == _ASKED_TO_GO) is was_asked
            and signature(one.ended.exit) == alike
            and abs(one.ended.age_s - first.ended.age_s) <= _TOGETHER_S
        )
        (together if is_same else rivals).append(one)
    culprits = tuple(sorted(one.ended.exit.rank for one in together))
    fault = first.fault
    if fault in _NOBODYS:
        return _blame_nobody(first, culprits)
    if fault == "exception" and len(culprits) == world_size and world_size > 1:
        fault = "exception_everywhere"
    if FAULTS[fault].blames is Blames.JOB:
        culprits = ()
    sure = _confidence(first, culprits, rivals)
    if all(_rank_of(one) == _ASKED_TO_GO for one in causes) and _earlier_s(victims, causes) > 0:
        sure = min(sure, _RIVALLED)
    on = f" on {first.ended.node}" if first.ended.node else ""
    who = f"rank {culprits[0]}{on}" if len(culprits) == 1 else f"ranks {listed(culprits)}" if culprits else "the job"
    exit_ = first.ended.exit
    where = f" in phase {exit_.phase}" if exit_.phase else ""
    after = f" after step {exit_.step}" if exit_.step >= 0 else ""
    follow = f"; {len(victims)} others only reported a lost peer" if victims else ""
    return Verdict(
        fault=fault,
        reason=f"{who}: {first.why}{after}{where}{follow}",
        confidence=sure,
        culprits=culprits,
        nodes=tuple(sorted({one.ended.node for one in together} - {""})) if culprits else (),
        otherwise=_rivals(rivals) or "an earlier end of another rank that speaks of no lost peer",
    )


def _ended_before_the_asked(causes: Sequence[Judged]) -> list[Judged]:
    """Return the ranks that left with an exit code before others were asked to go: the reason why they were asked.

    As many or more that left so are scripts that answer SIGTERM with a code of their own.
    """
    asked = [one.ended.age_s for one in causes if _rank_of(one) == _ASKED_TO_GO]
    early = [one for one in causes if one.fault == "exit_code" and asked and one.ended.age_s > max(asked)]
    return early if len(early) < len(asked) else []


def _were_stopped_for(victims: Sequence[Judged], causes: Sequence[Judged]) -> bool:
    """Return whether all causes are ranks that were asked to go when others had lost a peer, by their launcher.

    Those whom a batch system takes away end before their peers do. Within a second the order is not sure; there a
    batch system's word that it has ended the whole step tells that the signal was meant for no rank of its own, and so
    it does where no times are known.
    """
    if not victims or not causes or any(_rank_of(one) != _ASKED_TO_GO for one in causes):
        return False
    earlier_s = _earlier_s(victims, causes)
    of_the_step = all(_CANCELLED.search(text_of(one.ended.exit)) for one in causes)
    is_behind = earlier_s > 0 or (earlier_s == 0 and not any(one.ended.has_time for one in causes))
    return (of_the_step and is_behind) or earlier_s > _APART_S


def _earlier_s(victims: Sequence[Judged], causes: Sequence[Judged]) -> float:
    """Return by how much the first of the victims ended before the first of the causes; no victims ended never."""
    return max((one.ended.age_s for one in victims), default=-math.inf) - max(one.ended.age_s for one in causes)


def _found_closed(victims: Sequence[Judged], causes: Sequence[Judged]) -> list[Judged]:
    """Return those that found their rendezvous closed before all causes, which were asked to go: [] where any did not.

    torch's agent closes it at every end but one by a signal, so none of those asked did. An agent whose worker was
    asked to go does close it, but the others find that afterwards: on one node that order is certain, and across nodes
    beyond ``_APART_S``.
    """
    found = [one for one in victims if _says_closed(one)]
    if not found or not causes or any(_rank_of(one) != _ASKED_TO_GO for one in causes):
        return []
    first = max(found, key=lambda one: one.ended.age_s)
    return found if all(_is_before(first, one) for one in causes) else []


def _says_closed(one: Judged) -> bool:
    """Return whether a rank's words, or the exception in its black box, are of a rendezvous that was closed."""
    error = one.ended.exit.error
    raised = row_of_error(error.type, error.message).name if error is not None else ""
    return RENDEZVOUS_CLOSED in (*one.said, raised)


def _is_before(one: Judged, other: Judged) -> bool:
    """Return whether one rank is known to have ended before another one."""
    is_one_node = bool(one.ended.node) and one.ended.node == other.ended.node
    return one.ended.age_s - other.ended.age_s > (_APART_ON_A_NODE_S if is_one_node else _APART_S)


def _blame_closed(closed: Sequence[Judged], victims: Sequence[Judged], ended: int) -> Verdict:
    """Name those that found their rendezvous closed as why the rest was asked to go; no rank, where others fell too."""
    ranks = tuple(sorted(one.ended.exit.rank for one in closed))
    why = f"rank {listed(ranks)} found the rendezvous closed"
    if len(closed) < len(victims) or 2 * len(closed) > ended:
        why += "; who closed it, no end of a rank tells"
        return Verdict(fault="unknown", reason=why, confidence=0.2, otherwise="the log of the agent that closed it")
    return Verdict(
        fault="exception",
        reason=f"{why} and ended; its launcher then asked {ended - len(closed)} others to go",
        confidence=_CLOSED,
        culprits=ranks,
        nodes=tuple(sorted({one.ended.node for one in closed} - {""})),
        otherwise="the log of the agent that closed it",
    )


def _rank_of(one: Judged) -> int:
    """Return which cause comes first by its class, lower first."""
    is_asked = one.fault == "killed" and (one.was_asked or signal_of(one.ended.exit.code) in ASKED)
    return _ASKED_TO_GO if is_asked else _ORDER.get(one.fault, _AS_EXCEPTIONS)


def _confidence(first: Judged, culprits: Sequence[int], rivals: Sequence[Judged]) -> float:
    """Return how sure it is that this one was first, and that its words mean what they seem to."""
    sure = min(first.sure, _SHARED_NCCL) if first.fault == "nccl_error" and len(culprits) > 1 else first.sure
    ours, age_s = _rank_of(first), first.ended.age_s
    for rival in rivals:
        earlier_s = rival.ended.age_s - age_s
        is_equal = _rank_of(rival) <= ours and earlier_s > -_APART_S
        # What the kernel tears down for long may be seen to end after its victims; anything else is ordered by time.
        is_before = ours > 0 and earlier_s > _APART_S
        if is_equal or is_before:
            sure = min(sure, _RIVALLED)
    return min(sure, SURE)


def _blame_nobody(first: Judged, died: Sequence[int]) -> Verdict:
    """Name the fault and no rank: those that died of it were sent what they did not expect."""
    exit_ = first.ended.exit
    after = f" after step {exit_.step}" if exit_.step >= 0 else ""
    was_checked = _CHECKED in first.said
    met = first.why if was_checked else "was sent data of another size than it expected and died of it"
    return Verdict(
        fault=first.fault,
        reason=(
            f"{FAULTS[first.fault].meaning}: rank {listed(died)} {met}{after}; which rank called otherwise, its end "
            "does not tell"
        ),
        confidence=0.9,
        since_step=exit_.step,
        otherwise="the black boxes of that round: `megascale-ops inspect` of the incident's folder shows every call",
    )


def _rivals(rivals: Sequence[Judged]) -> str:
    if not rivals:
        return ""
    named = "; ".join(f"rank {one.ended.exit.rank}: {one.why[:100]}" for one in rivals[:3])
    return f"had these been first: {named}"


def _without_cause(
    judged: Sequence[Judged], victims: Sequence[Judged], missing: Sequence[str], reports: Mapping[int, RankReport]
) -> Verdict:
    """Judge a round of which only consequences are known."""
    known = {one.ended.exit.rank for one in judged}
    normal = [one for one in judged if one.fault == "normal"]
    if victims and normal:
        culprits = tuple(sorted(one.ended.exit.rank for one in normal))
        return Verdict(
            fault="exited_early",
            reason=f"rank {listed(culprits)} ended without error; {len(victims)} others then lost their peer",
            confidence=0.85,
            culprits=culprits,
            nodes=tuple(sorted({one.ended.node for one in normal})),
            otherwise="an error in what those ranks left behind",
        )
    if missing:
        lost = tuple(sorted(rank for rank in reports if rank not in known))
        return Verdict(
            fault="node_lost",
            reason=f"{', '.join(missing)}: no answer; {len(victims)} ranks elsewhere lost their peer",
            confidence=0.7,
            culprits=lost,
            nodes=tuple(missing),
            otherwise="an answer of that node with the exit statuses of its ranks",
        )
    stopped = all(one.fault == "by_us" for one in judged)
    return Verdict(
        fault="unknown",
        reason=(
            "every rank was stopped by its runner and none had failed"
            if stopped
            else _of_nobody(judged)
            or f"{len(victims)} ranks lost a peer, but no rank is known to have ended before them"
        ),
        confidence=0.2,
        otherwise="the exit of the rank that the others lost",
    )


def _of_nobody(judged: Sequence[Judged]) -> str:
    """Return the words of ranks that ended without naming a cause, "" without such ranks."""
    same = [one for one in judged if one.fault == "unknown"]
    ranks = sorted(one.ended.exit.rank for one in same)
    return f"rank {listed(ranks)} {same[0].why}" if same else ""


def _evidence(judged: Sequence[Judged], missing: Sequence[str]) -> tuple[Finding, ...]:
    """Return one finding for each end, causes first; long lists of the same are cut."""
    rank_of = {"unknown": 6, "peer": 8, "by_us": 9, "normal": 7}
    ordered = sorted(judged, key=lambda one: (rank_of.get(one.fault, 0), -one.ended.age_s))
    findings = [
        Finding(
            name=f"ended_{one.fault}",
            text=f"rank {one.ended.exit.rank}{_seen_of(one.ended)}: {one.why}",
            source=_source(one.ended.exit) if one.ended.has_status else "log",
            rank=one.ended.exit.rank,
            node=one.ended.node,
            value=float(one.ended.exit.code) if one.ended.has_status else 0.0,
        )
        for one in ordered[:32]
        if one.ended.has_status or one.fault != "by_us"
    ]
    findings += [
        Finding(name="no_answer", text=f"{node} has not said how its ranks ended", source="heartbeat", node=node)
        for node in missing[:32]
    ]
    return tuple(findings)


def _seen_of(ended: Ended) -> str:
    """Return what was seen of an end, in brackets: its status, and how long ago it was."""
    status = [_status(ended.exit.code)] if ended.has_status else []
    age = [f"{ended.age_s:.3f} s ago"] if ended.has_time else []
    return f" ({', '.join(status + age)})" if status or age else ""


def _source(exit_: RankExit) -> str:
    """Return where that which ended a rank is known from."""
    if exit_.error is None or not ended_it(exit_, exit_.error):
        return "exit status"
    return "black box" if exit_.phase else "stderr"


def _survived(ended: Sequence[Ended], reports: Mapping[int, RankReport]) -> list[Finding]:
    """Return one finding for each exception that a rank had met and that did not end it."""
    found = []
    for one in ended:
        exit_, report = one.exit, reports.get(one.exit.rank)
        last = error_of(exit_, report)
        before = report.error if report is not None else None
        for error in dict.fromkeys((before, last)):
            if error is None or not error.type or (error == last and ended_it(exit_, error)):
                continue
            if error == last or error.thread:
                text = sentence(exit_.rank, error, age_s(exit_, error))
                value = float(error.step)
                found.append(Finding("older_error", text, "black box", exit_.rank, one.node, value, "step"))
    return found[:_MOST_SURVIVED]


def _step_of(exit_: RankExit, report: RankReport | None) -> int:
    if exit_.step >= 0 or report is None or report.progress is None:
        return exit_.step
    return report.progress.step


def _status(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal_name(-code)
