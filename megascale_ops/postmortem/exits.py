# SPDX-License-Identifier: Apache-2.0
"""From logs to how ranks ended, where no runner has seen it: by their last words, and by what launchers say.

What a launcher of others wrote of ends counts (``launched``); without it a rank whose words speak for an end is taken
to have ended with an error, and one whose words do not to have been stopped by its launcher, which is how most ranks of
a failed job end. A traceback in a merged log that no line gives a rank to is of the rank that the launcher saw fail
first; without a launcher's word it is of a rank that can't be told, and none is named.
"""

import re
from collections.abc import Mapping, Sequence

import msgspec

from megascale_ops.diagnosis.exits.classify import Ended, classify, is_interrupt
from megascale_ops.diagnosis.exits.exit_status import SIGNAL_FAULTS, signal_of
from megascale_ops.diagnosis.exits.first_cause import judge_exits
from megascale_ops.diagnosis.exits.general_rows import LOADER_ASKED, NO_THREADS
from megascale_ops.diagnosis.exits.last_traceback import with_error
from megascale_ops.diagnosis.exits.last_words import RAISED_ALIKE, STALE_LINES, end_of, heard_in, weight_of
from megascale_ops.diagnosis.exits.named_ranks import named_in
from megascale_ops.diagnosis.exits.prefixes import TRACEBACK_BEGINS, without_prefixes
from megascale_ops.diagnosis.exits.victims_words import Told, blame_named
from megascale_ops.diagnosis.exits.watchdog_words import is_of_one
from megascale_ops.diagnosis.exits.word_rows import CAUSE
from megascale_ops.postmortem import homes, kernel, launched
from megascale_ops.postmortem.good_ends import good_end
from megascale_ops.postmortem.last_lines import complaint, odd_ones, raising_line
from megascale_ops.schema.fault_classes import FAULTS
from megascale_ops.schema.folding import named
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import RankExit

# As much as a runner reads of stderr, and as much as its end is looked for in.
_TAIL, _SOUGHT = 4000, 64_000
# 2 s: the rank that a launcher has seen fail first.
_EARLIER_S = 2.0
_NOTHING_SAID = "exit_code"
_BOX = "black box"
_DUMPS = (
    "what each rank called: dumps of the flight recorder, which the next hang leaves with "
    "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1"
)
_CANCELLED = "cancelled"
# 0.8: a local rank is the rank of a job of one node, which nothing shows; 0.5: the kernel's log alone.
_LOCAL_SURE, _KERNEL_SURE = 0.8, 0.5
_OF_WHO_FOLLOWS = (1, -6)
_TRACEBACK = re.compile(re.escape(TRACEBACK_BEGINS))
_MOST_TRACEBACKS = 64
# What those that lost a peer say, too.
_ALSO_OF_VICTIMS = ("nccl_error", "aborted", "killed")
_DOUBTFUL = 0.6
# 0.5: who was asked to go was asked for a reason, which may stand in no log.
_ASKED_SURE = 0.5
# 3: of fewer ranks more than one may have printed nothing.
_FEWEST_BESIDE = 3
_ANY_SIZE = 1 << 30
# 0.65: a line that raises may have been caught, and its traceback is not there to tell.
_LAST_LINE_SURE = 0.65
_SOMEBODY = "a rank that nothing names"
# Of a shard or a swap file; places in parallel groups have another word before it.
_OF_A_PATH = re.compile(r"(?<![\w.-])(?:\S{0,200}[/\\])?(?:global_)?rank[_-]?(\d{1,6})[/\\][\w./-]")
_A_RANK = re.compile(r"\branks? \d{1,9}(?:, \d{1,9})*(?=: | is | was | has )")


def judge_logs(
    logs: Mapping[int, str], launchers: str = "", faults: Sequence[str] = (), *, is_merged: bool = False
) -> Verdict:
    """Return the verdict on how ranks ended.

    Args:
        logs: what each rank printed.
        launchers: what was printed by no rank, or by one that nothing names.
        faults: lines of the kernel's log.
        is_merged: whether one log has what all ranks printed, so that a number which is missing there is a rank that
            has printed nothing.
    """
    own = kernel.without_other_pods(without_prefixes(launchers.splitlines()))
    launchers = launched.last_attempt("\n".join(own))
    # What a rank's own log quotes is of a launcher below it, which counts ranks of its own.
    told = launched.told_in(launchers)
    if not any(told.codes.values()) and (sentence := good_end({-1: launchers, **logs})):
        return _ended_well(sentence)
    faults = kernel.without_strangers(faults, logs, told.pids)
    of_kernel = kernel.of_ranks(faults, logs, launchers, told.pids)
    owners = [rank for rank in told.first if rank not in logs]
    texts = _texts(logs, told, owners, launchers)
    for rank, lines in of_kernel.items():
        if rank >= 0:
            texts[rank] = "\n".join([texts.get(rank, ""), *lines])
    ended = [_ended(rank, text, told) for rank, text in sorted(texts.items())]
    verdict = _judged(ended) if ended else None
    if verdict is not None and verdict.fault == "cuda_error":
        verdict = _by_first_hit(verdict, kernel.first_hit(of_kernel, verdict.culprits))
    if verdict is not None:
        verdict = _with_last_lines(verdict, ended, texts)
    if is_merged and verdict is not None and verdict.fault == "unknown" and (silent := _silent_in(texts)) >= 0:
        verdict = _judged([*ended, Ended("", _stopped(silent), 0.1, has_status=False, has_time=False)])
    if verdict is None or verdict.fault == "unknown":
        somebody = _of_somebody("" if owners else launchers, of_kernel.get(-1, []), has_ranks=bool(logs))
        verdict = _better(verdict, somebody, texts, launchers)
    verdict = _by_who_ended_all(verdict, texts, launchers)
    verdict = _by_a_host(verdict, logs, launchers)
    if told.is_local and owners and verdict.culprits == told.first:
        verdict = msgspec.structs.replace(verdict, confidence=min(verdict.confidence, _LOCAL_SURE))
    return verdict


def _by_who_ended_all(verdict: Verdict, texts: Mapping[int, str], launchers: str) -> Verdict:
    """Return the verdict by what a batch system or a launcher tells of the whole job, where that says more."""
    # Where others lost them, the ranks that were taken away are the reason.
    is_all = verdict.fault == "killed" and set(verdict.culprits) == set(texts)
    own = "".join(texts[rank] for rank in verdict.culprits) if is_all else ""
    if (line := launched.why_ended(launchers) or launched.why_ended(own)) and verdict.fault in ("killed", "unknown"):
        verdict = _by_a_batch_system(verdict, line)
    if verdict.fault == "unknown" and (nodes := launched.lost_nodes(launchers)):
        verdict = _by_a_lost_node(nodes)
    return verdict


def _ended_well(sentence: str) -> Verdict:
    return Verdict(
        fault="unknown",
        reason=f'the job ended well, and what its logs tell of before that was survived: "{sentence}"',
        confidence=0.2,
        otherwise="a rank that failed before that and has no log here",
    )


def _by_first_hit(verdict: Verdict, ranks: tuple[int, ...]) -> Verdict:
    """Return a verdict with those alone whose GPU failed by the kernel's log, where the others only felt it."""
    if not ranks:
        return verdict
    why = f"the kernel's log has a fault of the GPU of {named(ranks)}, and of the others that it followed one"
    return msgspec.structs.replace(verdict, culprits=ranks, reason=f"{named(ranks)}: {why}: {verdict.reason}")


def _silent_in(texts: Mapping[int, str]) -> int:
    """Return the only number that is missing among ranks, which count from 0; -1 where there are several or none.

    Nor where a number is that of several processes: then all of them are places in some group.
    """
    missing = set(range(max(texts, default=0))) - set(texts)
    is_sure = len(missing) == 1 and len(texts) >= _FEWEST_BESIDE and all(map(is_of_one, texts.values()))
    return missing.pop() if is_sure else -1


def _texts(logs: Mapping[int, str], told: launched.Told, owners: Sequence[int], launchers: str) -> dict[int, str]:
    """Return the end of what each rank said, and of what was said of it.

    What no rank is known to have said is of those that a launcher saw fail first and that have no log.
    """
    texts = {rank: text[-_SOUGHT:] for rank, text in logs.items()}
    for rank, line in told.lines.items():
        if rank not in logs:
            before = _own_part(_unsaid(launchers)) if rank in owners else ""
            is_others = SIGNAL_FAULTS.get(signal_of(told.codes[rank])) == "segfault" and not _speaks(before)
            texts[rank] = line if is_others else before.strip("\n") or line
    return texts


def _unsaid(launchers: str) -> str:
    """Return what no rank is known to have said, without a launcher's own words of a lost node or a cancelled step."""
    return launched.without_lost_daemons(launched.before_the_cancel(launchers))[-_SOUGHT:]


def _by_a_lost_node(nodes: tuple[str, ...]) -> Verdict:
    return Verdict(
        fault="node_lost",
        reason=f"a launcher lost {', '.join(nodes)}, and no rank's end before that is told of",
        confidence=_DOUBTFUL,
        nodes=nodes,
        otherwise="what that node says of itself, if it comes back: its own log, or its console's",
    )


def _by_a_host(verdict: Verdict, logs: Mapping[int, str], launchers: str) -> Verdict:
    """Return a verdict that names no rank with those of the host that a batch system or all others have lost."""
    if verdict.culprits:
        return verdict
    if verdict.fault == "node_lost":
        return _with_their_ranks(verdict, homes.ranks_on(launched.lost_nodes(launchers), logs, launchers))
    gone = homes.gone(logs, launchers) if verdict.fault == "unknown" and len(logs) >= _FEWEST_BESIDE else None
    return _by_a_gone_host(gone) if gone is not None else verdict


def _with_their_ranks(verdict: Verdict, ranks: tuple[int, ...]) -> Verdict:
    """Return a verdict on a lost node with the ranks that ran there."""
    if not ranks:
        return verdict
    return msgspec.structs.replace(
        verdict, culprits=ranks, confidence=_LOCAL_SURE, reason=f"{named(ranks)} ran on it: {verdict.reason}"
    )


def _by_a_gone_host(gone: homes.Gone) -> Verdict:
    """Return a verdict on a host that all others lost: its ranks alone said nothing."""
    why = f', and its cloud took it away: "{gone.notice}"' if gone.notice else ", and say nothing themselves"
    return Verdict(
        fault="node_lost",
        reason=f"{named(gone.ranks)} ran on {gone.host}, which the others lost{why}",
        confidence=_LOCAL_SURE if gone.notice else _DOUBTFUL,
        culprits=gone.ranks,
        nodes=(gone.host,),
        otherwise="what that node says of itself: its own log, or its console's; the network of that one may be cut",
    )


def _by_a_batch_system(verdict: Verdict, line: str) -> Verdict:
    if launched.LOST_NODE in line:
        return msgspec.structs.replace(
            verdict, fault="node_lost", culprits=(), nodes=(), confidence=_DOUBTFUL,
            reason=f'the batch system lost a node and ended the rest: "{line}"',
            otherwise="what that node says of itself, if it comes back: its own log, or its console's",
        )  # fmt: skip
    return msgspec.structs.replace(
        verdict, fault="killed", culprits=(), nodes=(), confidence=0.5,
        reason=f'the batch system ended the job, and no rank failed before that is told of: "{line}"',
        otherwise="an error in the log of a rank before that time",
    )  # fmt: skip


def _ended(rank: int, text: str, told: launched.Told) -> Ended:
    """Return how a rank ended, by a launcher's word or by its own."""
    tail = end_of(text, _TAIL)
    has_status = rank in told.codes
    exit_ = RankExit(rank, rank, 1 + rank, told.codes.get(rank, 1), 0.0, stderr_tail=tail)
    one = Ended("", exit_, _EARLIER_S if rank in told.first else 0.1, has_status=has_status, has_time=False)
    if has_status:
        # A launcher lists all that failed; who was not first and left no signal of its own has followed.
        is_late = bool(told.first) and rank not in told.first and one.exit.code in (*_OF_WHO_FOLLOWS, *launched.ASKED)
        was_asked = one.exit.code in launched.ASKED
        says_so = all(was_asked and heard.row.name == _CANCELLED for heard in heard_in(tail))
        return one._replace(exit=_stopped(rank)) if is_late and says_so else one
    judged = classify(one, None, None)
    # What a table calls harmless has ended a rank all the same where its log ends with the traceback of it.
    error = with_error(exit_).error if judged.fault == _NOTHING_SAID else None
    has_raised = error is not None and (not is_interrupt(error) or NO_THREADS.name in judged.said)
    if (judged.fault == _NOTHING_SAID and not has_raised) or LOADER_ASKED in judged.said:
        return one._replace(exit=_stopped(rank))
    if judged.fault == "killed" and _CANCELLED in judged.said:
        return one._replace(exit=msgspec.structs.replace(exit_, code=-15))
    return one


def _with_last_lines(verdict: Verdict, ended: Sequence[Ended], texts: Mapping[int, str]) -> Verdict:
    """Return the verdict by last lines where it names no rank, or says less of the same rank than its complaint does.

    Who complained and is the one that others waited for did not join for that; and beside ranks that were asked to go
    without any other reason it is the reason.
    """
    if verdict.fault == "unknown":
        return _by_last_lines(verdict, ended, texts)
    was_asked = verdict.fault == "killed" and verdict.confidence <= _ASKED_SURE
    if verdict.fault != "not_joined" and not was_asked:
        return verdict
    said = _by_last_lines(verdict, ended, texts)
    is_more = {*said.culprits}.isdisjoint(verdict.culprits) if was_asked else said.culprits == verdict.culprits
    return said if is_more else verdict


def _by_last_lines(verdict: Verdict, ended: Sequence[Ended], texts: Mapping[int, str]) -> Verdict:
    """Return the verdict by last lines: those that raise and lack their tracebacks, and complaints of any program.

    The words of those that lost a peer may be new: so half of the ranks at most, and only where others have lost them;
    else nothing tells that the line ended its rank.
    """
    stopped = [one for one in ended if one.exit.by_us]
    lines = {one.exit.rank: raising_line(texts[one.exit.rank]) for one in stopped}
    raised = [
        one._replace(exit=RankExit(rank, rank, 0, 1, 0.0, stderr_tail=f"{TRACEBACK_BEGINS}\n{lines[rank]}"))
        for one in stopped
        if lines[rank := one.exit.rank]
    ]
    lost = any(told.row.consequence for text in texts.values() for told in heard_in(text[-_TAIL:]))
    if not lost and len(odd := odd_ones({rank: complaint(text[-_SOUGHT:]) for rank, text in texts.items()})):
        return _of_odd_ones(verdict, odd)
    own = [any(told.row.role == CAUSE for told in heard_in(one.exit.stderr_tail)) for one in raised]
    if raised and lost and all(own) and 2 * len(raised) <= len(ended):
        known = {one.exit.rank: one for one in raised}
        again = _judged([known.get(one.exit.rank, one) for one in ended])
        return msgspec.structs.replace(again, confidence=min(again.confidence, _LAST_LINE_SURE))
    complaints = {one.exit.rank: said for one in stopped if (said := complaint(texts[one.exit.rank][-_SOUGHT:]))}
    if not complaints or not (lost or verdict.fault == "killed") or 2 * len(complaints) > len(ended):
        return verdict
    who = named(sorted(complaints))
    how = "were asked to go" if verdict.fault == "killed" else "lost a peer"
    words = f'ended with a complaint, and {len(ended) - len(stopped)} others {how}: "{complaints[min(complaints)]}"'
    fault = "exception" if all(map(RAISED_ALIKE.match, complaints.values())) else "exit_code"
    return msgspec.structs.replace(
        verdict, fault=fault, culprits=tuple(sorted(complaints)), confidence=_LAST_LINE_SURE,
        reason=f"{who} {words}",
        otherwise="an error in the log of another rank, for which these were stopped",
    )  # fmt: skip


def _of_odd_ones(verdict: Verdict, odd: Mapping[int, str]) -> Verdict:
    """Return a verdict on those that end with another complaint than all others do."""
    is_raised = all(map(RAISED_ALIKE.match, odd.values()))
    return msgspec.structs.replace(
        verdict, fault="exception" if is_raised else "exit_code", culprits=tuple(sorted(odd)), confidence=_DOUBTFUL,
        reason=f'{named(sorted(odd))} ended with another complaint than all others: "{odd[min(odd)]}"',
        otherwise="that what all others complain of came first",
    )  # fmt: skip


def _stopped(rank: int) -> RankExit:
    return RankExit(rank, rank, 1 + rank, -15, 0.0, by_us=True)


def _own_part(text: str) -> str:
    """Return a text of several ranks up to the first traceback in it that speaks for a cause of its own.

    What follows is of those that lost a peer. A text whose end speaks for a cause, or that has none, stays whole, and
    what came long before its end was survived.
    """
    begins = [found.start() for found in _TRACEBACK.finditer(text)][-_MOST_TRACEBACKS:]
    if _speaks(text):
        return text
    late = (at for at in begins[1:] if sum(map(weight_of, text[at:].splitlines())) <= STALE_LINES)
    return next((text[:at] for at in late if _speaks(text[:at])), text)


def _speaks(text: str) -> bool:
    one = _ended(0, text, launched.Told({}, {}))
    fault = classify(one._replace(exit=with_error(one.exit)), None, None).fault
    return not one.exit.by_us and fault in FAULTS and fault not in ("unknown", *_ALSO_OF_VICTIMS)


def _judged(ended: Sequence[Ended]) -> Verdict:
    size = 1 + max(one.exit.rank for one in ended)
    verdict = judge_exits(ended, world_size=size, missing=(), reports={}, hosts={}, round_=0, wall_s=0.0)
    if _BOX in verdict.otherwise:  # there was none
        verdict = msgspec.structs.replace(verdict, otherwise=_DUMPS)
    asked = verdict.fault == "killed" and all(one.exit.code == -15 for one in ended if not one.exit.by_us)
    if asked:
        return msgspec.structs.replace(verdict, confidence=min(verdict.confidence, _ASKED_SURE))
    if verdict.fault == "unknown" and all(one.exit.by_us for one in ended):
        return msgspec.structs.replace(verdict, reason="no log tells why its rank ended", nodes=())
    return verdict


def _of_somebody(rest: str, kernels: Sequence[str], *, has_ranks: bool) -> Verdict | None:
    """Return what words say that no rank can be given to: a class without a rank; None where they say nothing."""
    for text, sure in ((_own_part(rest[-_SOUGHT:]), 1.0), ("\n".join(kernels[-200:]), _KERNEL_SURE)):
        one = _ended(0, text, launched.Told({}, {}))
        judged = classify(one._replace(exit=with_error(one.exit)), None, None)
        if one.exit.by_us or judged.fault not in FAULTS or judged.fault == "unknown":
            continue
        if has_ranks and judged.fault in _ALSO_OF_VICTIMS:
            continue
        verdict = unnamed(_judged([one]), {0: _SOMEBODY})
        most = min(sure, _LOCAL_SURE) if has_ranks else sure  # of the ranks that have logs none tells of it
        verdict = msgspec.structs.replace(verdict, confidence=min(verdict.confidence, most))
        return verdict if has_ranks else _by_a_path(verdict, text)
    return None


def _by_a_path(verdict: Verdict, text: str) -> Verdict:
    """Return a verdict of an unknown rank with the one that a path of a file names in its last words, or beside them.

    A rank has opened its own files, but rank 0 may have opened those of all.
    """
    lines = text.splitlines()
    said = [one.line for one in heard_in(text) if one.row.role == CAUSE]
    near = [at for at, line in enumerate(lines) if any(own and own in line for own in said)]
    told = {int(rank) for at in near for line in lines[max(0, at - 1) : at + 2] for rank in _OF_A_PATH.findall(line)}
    if len(told) != 1:
        return verdict
    return msgspec.structs.replace(
        verdict, culprits=tuple(told), confidence=min(verdict.confidence, _DOUBTFUL),
        reason=verdict.reason.replace(_SOMEBODY, f"rank {min(told)}, by the path of a file that it names"),
        otherwise="a rank that opened a file of that one; a log with a tag for each rank tells",
    )  # fmt: skip


def _better(verdict: Verdict | None, somebody: Verdict | None, texts: Mapping[int, str], launchers: str) -> Verdict:
    """Return the best of a verdict without a cause, words that name ranks, and words of an unknown rank."""
    nothing = verdict or Verdict(
        fault="unknown", reason="no log tells why its rank ended", confidence=0.2, otherwise="a log for each rank"
    )
    told = [Told("", rank, text) for rank, text in ((-1, launchers), *texts.items())]
    found = [(one, words) for one in told if (words := named_in(one.text)) is not None]
    is_doubtful = any(words.sure < _DOUBTFUL for _, words in found)  # its numbers may be those of a group
    size = 1 + max(texts, default=-1) if is_doubtful else _ANY_SIZE
    named = blame_named(nothing, [one for one, _ in found], size)
    if named.culprits:
        return named
    return somebody if somebody is not None else nothing


def unnamed(verdict: Verdict, names: Mapping[int, str]) -> Verdict:
    """Return a verdict whose ranks are numbers that we have made up, by their names and without numbers."""
    who = ", ".join(names[rank] for rank in verdict.culprits if rank in names)
    reason = f"{who}: {_A_RANK.sub('', verdict.reason, count=1).removeprefix(': ')}" if who else verdict.reason
    evidence = tuple(
        msgspec.structs.replace(
            one, rank=-1, text=f"{names.get(one.rank, '')}: {_A_RANK.sub('', one.text, count=1).removeprefix(': ')}"
        )
        for one in verdict.evidence
    )
    return msgspec.structs.replace(verdict, culprits=(), nodes=(), reason=reason, evidence=evidence)
