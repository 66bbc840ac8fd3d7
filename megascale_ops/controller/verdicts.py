# SPDX-License-Identifier: Apache-2.0
"""From how the ranks of a round ended to who is to blame: first causes and consequences.

When one rank dies, its peers die of it within milliseconds: Gloo says "Connection closed by peer", NCCL "remote
process exited". Those are victims. What remains are causes; of several causes the hard ones (signals, memory, disk,
GPU) come before exceptions, because an exception can be a consequence whose text nobody has met yet, and a killed
process with gigabytes of memory is seen to end *after* its victims (64 ms for each touched GB).

Pure: told how everything ended, answers with a verdict and its evidence.
"""

import re
import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megascale_ops.controller.last_calls import blame_caller
from megascale_ops.controller.policy import signature
from megascale_ops.schema.health import FAULTS, Finding, HostReading, Verdict
from megascale_ops.schema.messages import RankExit
from megascale_ops.schema.progress import RankReport

# What peers of a dead rank report, in the text of an exception (Gloo, TCPStore, NCCL; measured with torch 2.13).
_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Read error|Broken pipe|Timed out waiting|Connection refused"
    r"|connectFullMesh|Socket Timeout|ncclRemoteError|remote process exited|NCCL communicator was aborted"
    r"|collective operation timeout|recvValue failed|Failed to recv|failed to connect|wait timeout|DistNetworkError"
    r"|DistStoreError|ProcessGroup.*(?:aborted|shut ?down)",
    re.IGNORECASE,
)
_MEMORY = re.compile(r"MemoryError|out of memory|OutOfMemoryError|Cannot allocate memory|bad_alloc", re.IGNORECASE)
_DISK = re.compile(r"No space left on device|Errno 28\b|Disk quota exceeded", re.IGNORECASE)
_MISMATCH = re.compile(r"op\.preamble\.length <= op\.nbytes|Received data size doesn't match expected size")
_CUDA = re.compile(r"CUDA error|cuda(?:Error|_ERROR)|CUBLAS_STATUS|CUDNN_STATUS|device-side assert", re.IGNORECASE)
_NCCL = re.compile(r"NCCL error|nccl\w*Error|DistBackendError", re.IGNORECASE)

# Names of the agent's patterns of last words, and the class each speaks for. "peer" is a consequence.
PATTERN_FAULTS: dict[str, str] = {
    "gloo_peer_closed": "peer",
    "gloo_mismatch": "collective_mismatch",
    "gloo_timeout": "peer",
    "gloo_connect": "peer",
    "nccl_remote": "peer",
    "nccl_timeout": "peer",
    "nccl_aborted": "peer",
    "store_lost": "peer",
    "cuda_out_of_memory": "out_of_memory",
    "host_out_of_memory": "out_of_memory",
    "oom_killer": "out_of_memory",
    "shm_full": "out_of_memory",
    "xid": "cuda_error",
    "cuda_error": "cuda_error",
    "nccl_error": "nccl_error",
    "disk_full": "disk_full",
    "segfault": "segfault",
    "aborted": "aborted",
    "killed": "killed",
    "assertion": "exception",
    "exception": "exception",
}
# Faults of which the rank that died is a victim, and nothing in its end tells whose.
_NOBODYS = frozenset({"collective_mismatch"})
_GENERAL = frozenset({"exception", "aborted", "nccl_error"})  # what a victim may say too while it goes down

# Any other signal came from outside.
_SIGNAL_FAULTS = {
    int(signal.SIGSEGV): "segfault",
    int(signal.SIGBUS): "segfault",
    int(signal.SIGILL): "segfault",
    int(signal.SIGABRT): "aborted",
}
# How a rank goes down when its runner asks it to: no exception of the script's own.
_STOPPED_BY = ("KeyboardInterrupt", "SystemExit", "SignalException")
# Which class wins when several ranks have causes of their own; equal ranks are told apart by time.
_ORDER = {
    "out_of_memory": 0,
    "segfault": 0,
    "killed": 0,
    "disk_full": 0,
    "cuda_error": 0,
    "aborted": 1,
    "collective_mismatch": 1,
    "exception": 2,
    "nccl_error": 3,
    "exit_code": 4,
}
# 2 s: ends further apart than this do not belong together.
_TOGETHER_S = 2.0
# 0.97 of the host's memory in use: a SIGKILL then is nearly always the kernel's out-of-memory killer.
_MEMORY_FULL = 0.97


class Ended(NamedTuple):
    """How one rank ended: as its runner reported it, ``age_s`` before now."""

    node: str
    exit: RankExit
    age_s: float


class _Judged(NamedTuple):
    ended: Ended
    fault: str  # a class of FAULTS, or "peer", "by_us", "normal"
    why: str


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
    """Return who ended the round.

    Args:
        ended: all exits that are known.
        world_size: how many ranks the round had.
        missing: nodes of the round that have not answered.
        reports: what the last heartbeat said of each rank.
        hosts: what the last heartbeat said of each host.
        round_: which round.
        wall_s: the time now.
    """
    judged = [_classify(one, reports.get(one.exit.rank), hosts.get(one.node)) for one in ended]
    causes = [one for one in judged if one.fault in _ORDER]
    victims = [one for one in judged if one.fault == "peer"]
    evidence = _evidence(judged, missing)
    verdict = _blame(causes, victims, world_size) if causes else _without_cause(judged, victims, missing, reports)
    if verdict.fault in {*_NOBODYS, "unknown"}:
        verdict = blame_caller(verdict, [(one.node, one.exit) for one in ended])
    since_s = max((one.age_s for one in ended if one.exit.rank in verdict.culprits), default=0.0)
    steps = [_step_of(one.exit, reports.get(one.exit.rank)) for one in ended if one.exit.rank in verdict.culprits]
    return Verdict(
        fault=verdict.fault,
        reason=verdict.reason,
        confidence=verdict.confidence,
        culprits=verdict.culprits,
        nodes=verdict.nodes,
        otherwise=verdict.otherwise,
        since_wall_s=wall_s - since_s,
        since_step=min(steps, default=verdict.since_step),
        round=round_,
        evidence=evidence,
    )


def _classify(one: Ended, report: RankReport | None, host: HostReading | None) -> _Judged:
    """Say what a rank's end speaks for."""
    exit_ = one.exit
    error = exit_.error or (report.error if report is not None else None)
    words = list(exit_.last_words) + [word.pattern for word in (report.last_words if report is not None else ())]
    if error is not None and error.type and not (exit_.by_us and error.type in _STOPPED_BY):
        fault = _class_of_text(f"{error.type}: {error.message}")
        return _Judged(one, fault, f"{error.type}: {error.message[:300]}{f' at {error.where}' if error.where else ''}")
    if exit_.by_us:
        return _Judged(one, "by_us", "stopped by its runner")
    if exit_.code == 0:
        return _Judged(one, "normal", "ended normally")
    classes = [PATTERN_FAULTS[word] for word in words if word in PATTERN_FAULTS]
    own = [fault for fault in classes if fault != "peer"]
    if _MISMATCH.search(exit_.stderr_tail):
        own.append("collective_mismatch")
    if "peer" in classes and all(fault in _GENERAL for fault in own) and exit_.code != -signal.SIGKILL:
        return _Judged(one, "peer", f"its last words are of a lost peer ({', '.join(words)})")
    return _by_status(one, own, host)


def _by_status(one: Ended, own: Sequence[str], host: HostReading | None) -> _Judged:
    """Say what a rank's exit status speaks for, when it left no exception; ``own`` is what its last words speak for."""
    code = one.exit.code
    if code == -signal.SIGKILL:
        return _killed(one, own, host)
    said = next((fault for fault in own if fault not in _GENERAL), "")
    if said:
        return _Judged(one, said, f"its last words speak for: {FAULTS[said]}")
    if code < 0:
        fault = _SIGNAL_FAULTS.get(-code, "killed")
        return _Judged(one, fault, f"died of {_signal_name(-code)}: {FAULTS[fault]}")
    if own:
        return _Judged(one, own[0], f"exit code {code}, its last words speak for: {FAULTS[own[0]]}")
    return _Judged(one, "exit_code", f"exit code {code}, no exception seen")


def _killed(one: Ended, own: Sequence[str], host: HostReading | None) -> _Judged:
    """Tell the kernel's out-of-memory killer from any other sender of SIGKILL."""
    if "out_of_memory" in own:
        return _Judged(one, "out_of_memory", "SIGKILL, and its last words are of memory")
    if host is not None and host.memory_used > _MEMORY_FULL:
        return _Judged(one, "out_of_memory", f"SIGKILL while {host.memory_used:.0%} of the host's memory was used")
    return _Judged(one, "killed", "killed by SIGKILL from outside")


def _class_of_text(text: str) -> str:
    """Return the class that an exception's text speaks for."""
    first = (("out_of_memory", _MEMORY), ("disk_full", _DISK), ("collective_mismatch", _MISMATCH))
    for fault, pattern in first:
        if pattern.search(text):
            return fault
    if _PEER.search(text):
        return "peer"
    for fault, pattern in (("cuda_error", _CUDA), ("nccl_error", _NCCL)):
        if pattern.search(text):
            return fault
    return "exception"


def _blame(causes: Sequence[_Judged], victims: Sequence[_Judged], world_size: int) -> Verdict:
    """Choose the first among the causes, with all that fell over the same thing at the same time."""
    first = min(causes, key=lambda one: (_ORDER[one.fault], -one.ended.age_s))
    together = [
        one
        for one in causes
        if one.fault == first.fault
        and signature(one.ended.exit) == signature(first.ended.exit)
        and abs(one.ended.age_s - first.ended.age_s) <= _TOGETHER_S
    ]
    culprits = tuple(sorted(one.ended.exit.rank for one in together))
    fault = first.fault
    if fault in _NOBODYS:
        return _blame_nobody(first, culprits)
    if fault == "exception" and len(culprits) == world_size and world_size > 1:
        fault = "exception_everywhere"
    who = f"rank {culprits[0]} on {first.ended.node}" if len(culprits) == 1 else f"ranks {_list(culprits)}"
    exit_ = first.ended.exit
    where = f" in phase {exit_.phase}" if exit_.phase else ""
    after = f" after step {exit_.step}" if exit_.step >= 0 else ""
    follow = f"; {len(victims)} others only reported a lost peer" if victims else ""
    rivals = [one for one in causes if one not in together]
    ours = _ORDER[first.fault]
    clear = not any(_ORDER[one.fault] == ours for one in rivals)
    return Verdict(
        fault=fault,
        reason=f"{who}: {first.why}{after}{where}{follow}",
        confidence=0.95 if clear else 0.6,
        culprits=culprits,
        nodes=tuple(sorted({one.ended.node for one in together})),
        otherwise=_rivals(rivals) or "an earlier end of another rank that speaks of no lost peer",
    )


def _blame_nobody(first: _Judged, died: Sequence[int]) -> Verdict:
    """Name the fault and no rank: those that died of it were sent what they did not expect."""
    exit_ = first.ended.exit
    after = f" after step {exit_.step}" if exit_.step >= 0 else ""
    return Verdict(
        fault=first.fault,
        reason=(
            f"{FAULTS[first.fault]}: rank {_list(died)} was sent data of another size than it expected and died of "
            f"it{after}; which rank called otherwise, its end does not tell"
        ),
        confidence=0.9,
        since_step=exit_.step,
        otherwise="the black boxes of that round: `megascale-ops inspect` of the incident's folder shows every call",
    )


def _rivals(rivals: Sequence[_Judged]) -> str:
    if not rivals:
        return ""
    named = "; ".join(f"rank {one.ended.exit.rank}: {one.why[:100]}" for one in rivals[:3])
    return f"had these been first: {named}"


def _without_cause(
    judged: Sequence[_Judged], victims: Sequence[_Judged], missing: Sequence[str], reports: Mapping[int, RankReport]
) -> Verdict:
    """Judge a round of which only consequences are known."""
    known = {one.ended.exit.rank for one in judged}
    normal = [one for one in judged if one.fault == "normal"]
    if victims and normal:
        culprits = tuple(sorted(one.ended.exit.rank for one in normal))
        return Verdict(
            fault="exited_early",
            reason=f"rank {_list(culprits)} ended without error; {len(victims)} others then lost their peer",
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
            else f"{len(victims)} ranks lost a peer, but no rank is known to have ended before them"
        ),
        confidence=0.2,
        otherwise="the exit of the rank that the others lost",
    )


def _evidence(judged: Sequence[_Judged], missing: Sequence[str]) -> tuple[Finding, ...]:
    """Return one finding for each end, causes first; long lists of the same are cut."""
    rank_of = {"peer": 8, "by_us": 9, "normal": 7}
    ordered = sorted(judged, key=lambda one: (rank_of.get(one.fault, 0), -one.ended.age_s))
    findings = [
        Finding(
            name=f"ended_{one.fault}",
            text=f"rank {one.ended.exit.rank} ({_status(one.ended.exit.code)}, {one.ended.age_s:.3f} s ago): {one.why}",
            source="black box" if one.ended.exit.error is not None else "exit status",
            rank=one.ended.exit.rank,
            node=one.ended.node,
            value=float(one.ended.exit.code),
        )
        for one in ordered[:32]
    ]
    findings += [
        Finding(name="no_answer", text=f"{node} has not said how its ranks ended", source="heartbeat", node=node)
        for node in missing[:32]
    ]
    return tuple(findings)


def _step_of(exit_: RankExit, report: RankReport | None) -> int:
    if exit_.step >= 0 or report is None or report.progress is None:
        return exit_.step
    return report.progress.step


def _status(code: int) -> str:
    return f"exit code {code}" if code >= 0 else _signal_name(-code)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _list(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
