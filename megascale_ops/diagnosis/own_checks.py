# SPDX-License-Identifier: Apache-2.0
"""What checks inside ranks have found, as verdicts: a checkpoint's replicas that differ, weights that do not move.

The ranks have judged already, for they alone have the bytes. Here their findings become one verdict a class of fault:
who tells it is who it is about, or tells for the job.

Pure: findings in, verdicts out.
"""

from collections import defaultdict
from collections.abc import Mapping

from megascale_ops.schema.fault_classes import FAULTS, Blames
from megascale_ops.schema.health import Finding, Verdict
from megascale_ops.schema.progress import RankFinding

# 0.95: a digest errs once in 2**32; that the others are right is a majority's word.
_CONFIDENCE = 0.95
# 16 ranks are quoted, as other judges do.
_MOST_QUOTED = 16


def verdicts(told: Mapping[int, tuple[str, tuple[RankFinding, ...]]], round_: int) -> dict[str, Verdict]:
    """Return what ranks have found and is not over, by class of fault.

    Args:
        told: by rank, its node and its findings.
        round_: the round they are of.
    """
    by_fault: defaultdict[str, list[tuple[int, str, RankFinding]]] = defaultdict(list)
    for rank, (node, findings) in sorted(told.items()):
        for one in findings:
            if one.fault in FAULTS:
                by_fault[one.fault].append((rank, node, one))
    return {fault: _verdict(fault, found, round_) for fault, found in by_fault.items()}


def _verdict(fault: str, found: list[tuple[int, str, RankFinding]], round_: int) -> Verdict:
    texts = dict.fromkeys(one.text for _, _, one in found)
    is_job = FAULTS[fault].blames is Blames.JOB and len(found) == 1  # one rank that speaks for all
    return Verdict(
        fault=fault,
        reason="; ".join(texts),
        confidence=_CONFIDENCE,
        culprits=() if is_job else tuple(rank for rank, _, _ in found),
        nodes=() if is_job else tuple(sorted({node for _, node, _ in found})),
        since_step=min(one.step for _, _, one in found),
        round=round_,
        evidence=tuple(
            Finding(fault, one.text, "checkpoint", rank, node, one.step, "step")
            for rank, node, one in found[:_MOST_QUOTED]
        ),
        otherwise="the next checkpoint, had it found nothing of the kind",
    )
