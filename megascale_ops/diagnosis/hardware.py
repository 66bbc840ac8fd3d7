# SPDX-License-Identifier: Apache-2.0
"""Let a verdict quote the hardware findings of its nodes.

A rank that died of a CUDA error on a GPU with Xid 79 is no bug, and a straggler whose GPU lowers its clocks needs no
profiler. A rank's own GPU is quoted first; what concerns the whole node (adapters, memory, disks) is quoted as well;
the other GPUs of the node are not, unless it is not known which one is the rank's. Quoting adds evidence and narrows a
cause down. It changes a class in one case only: a rank that was killed, and the kernel's log has its process as killed
for memory.

Pure: a verdict and what is seen in, the verdict with its evidence out.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from megascale_ops.schema.health import Finding, HardwareFinding, Verdict

SOURCE = "hardware"
MOST_QUOTED = 12
_SLOW = ("straggler", "slow")
# These causes explain themselves where the time goes; a warm GPU beside them is no cause.
_OWN_CAUSES = ("input", "gc")
_ORDER = {"fail": 0, "warn": 1, "note": 2}
# 60 s: a GPU fails before its rank is silent, or up to a minute after (the driver gives up on it, clocks differ).
_AROUND_S = 60.0
# A rank that is seen to work, or goes on, is not silent because of its GPU.
_AT_WORK = ("busy", "slow")


class RankPlace(NamedTuple):
    """A rank that a verdict names."""

    rank: int
    pid: int
    gpu: str  # UUID, "" where it is not known


class NodeHardware(NamedTuple):
    """One node's hardware findings, and the ranks there that the verdict names."""

    node: str
    findings: tuple[HardwareFinding, ...]
    ranks: tuple[RankPlace, ...]


class _Quote(NamedTuple):
    node: str
    rank: int  # -1: of the whole node
    said: HardwareFinding


def quote(verdict: Verdict, nodes: Iterable[NodeHardware], *, late: bool = False) -> Verdict:
    """Return the verdict with hardware findings as evidence.

    Args:
        verdict: May have been quoted for before; the former quotes are replaced.
        nodes: Those that the verdict is about.
        late: It has been acted upon already: evidence is added, nothing else is touched.
    """
    quotes = sorted(_quotes(nodes), key=lambda one: (one.rank < 0, _ORDER.get(one.said.severity, 3), one.said.name))
    findings = tuple(_finding(one) for one in quotes[:MOST_QUOTED])
    if late:
        known = {(one.name, one.node) for one in verdict.evidence}
        more = tuple(one for one in findings if (one.name, one.node) not in known)
        return msgspec.structs.replace(verdict, evidence=verdict.evidence + more) if more else verdict
    evidence = tuple(one for one in verdict.evidence if one.source != SOURCE)
    if not quotes and len(evidence) == len(verdict.evidence):
        return verdict
    verdict = msgspec.structs.replace(verdict, evidence=evidence + findings)
    for one in quotes:
        if verdict.fault == "killed" and one.said.name == "oom_kill" and one.rank >= 0:
            verdict = msgspec.structs.replace(verdict, fault="out_of_memory")
        is_own_gpu = one.rank >= 0 and one.said.gpu and one.said.severity != "note"
        if is_own_gpu and verdict.fault in _SLOW and verdict.cause not in _OWN_CAUSES:
            cause = "throttled" if one.said.name.startswith("throttled") else "gpu"
            verdict = msgspec.structs.replace(verdict, cause=cause)
            break
    own = next((one.said.text for one in quotes if one.rank >= 0 and one.said.severity != "note"), "")
    if own and own not in verdict.reason:
        verdict = msgspec.structs.replace(verdict, reason=f"{verdict.reason}; {own}")
    return verdict


def explained(verdict: Verdict, nodes: Iterable[NodeHardware]) -> Verdict | None:
    """Return the verdict on a silence whose reason is a GPU that failed as it began; None where none did.

    No wait of a healthy job brings such a finding, so it is no silence that may end by itself. Where all ranks wait and
    no rank is to blame, one whose GPU failed is.

    Args:
        verdict: On ranks that stand still.
        nodes: With the ranks to blame, or all of the node where the verdict names none.
    """
    if verdict.fault in _AT_WORK:
        return None
    failed = [one for one in _quotes(nodes) if one.rank >= 0 and _failed_about(one.said, verdict.since_wall_s)]
    if not failed:
        return None
    texts = "; ".join(dict.fromkeys(one.said.text for one in failed))
    verdict = msgspec.structs.replace(verdict, reason=f"{verdict.reason}; {texts}", sure_of="")
    if verdict.culprits:
        return verdict
    ranks, names = tuple(sorted({one.rank for one in failed})), tuple(sorted({one.node for one in failed}))
    return msgspec.structs.replace(verdict, fault="gpu_stuck", culprits=ranks, nodes=names, confidence=0.9)


def _failed_about(said: HardwareFinding, wall_s: float) -> bool:
    """Return whether a GPU failed around then: what was wrong with it long before has not brought this silence."""
    return bool(said.gpu) and said.severity == "fail" and max(said.since_wall_s, said.last_wall_s) >= wall_s - _AROUND_S


def _quotes(nodes: Iterable[NodeHardware]) -> Iterable[_Quote]:
    for node in nodes:
        by_gpu: Mapping[str, RankPlace] = {rank.gpu: rank for rank in node.ranks if rank.gpu}
        by_pid: Mapping[int, RankPlace] = {rank.pid: rank for rank in node.ranks if rank.pid}
        all_known = all(rank.gpu for rank in node.ranks) and bool(node.ranks)
        for said in node.findings:
            mine = by_gpu.get(said.gpu) or next((by_pid[pid] for pid in said.pids if pid in by_pid), None)
            if mine is not None:
                yield _Quote(node.node, mine.rank, said)
            elif said.severity != "note" and not (said.gpu and all_known):
                yield _Quote(node.node, -1, said)


def _finding(one: _Quote) -> Finding:
    said = one.said
    return Finding(
        name=f"{SOURCE}_{said.name}",
        text=f"{one.node}: {said.text}",
        source=SOURCE,
        rank=one.rank,
        node=one.node,
        value=float(said.count),
    )
