# SPDX-License-Identifier: Apache-2.0
"""A job that stands still: its ranks as heartbeats show them, what evidence says of them, and the judgement.

All jobs train in steps of 50 ms; patience for a step is 5 s, and silence has lasted 3 s unless a test says otherwise.
"""

from collections.abc import Sequence

import msgspec

from megascale_ops.diagnosis import watchdog
from megascale_ops.diagnosis.hangs.evidence import gather
from megascale_ops.diagnosis.hangs.verdict import Judgement, judge
from megascale_ops.diagnosis.rank_view import RankView
from megascale_ops.schema.messages import CollectiveFact, EvidenceItem
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import CollectivePosition, ProcessReading, Progress, RankReport

# Eager: silence is acted upon as soon as evidence is clear. How long it is left alone otherwise has tests of its own.
POLICY = JobPolicy(absent_patience_s=0.0)


def rank_view(
    rank: int,
    *,
    waits: bool = True,
    silent_s: float = 3.0,
    busy: float = 0.0,
    state: str = "S",
    phase: str = "forward",
    phase_s: float = 3.0,
    step: int = 20,
    known: bool = True,
    node: str = "",
    beat_age_s: float = 0.0,
    seen: int = 100,
    wandered: int = 0,
    wandered_ago_s: float = 0.0,
) -> RankView:
    """One rank as its heartbeat shows it: in collective 41 of group 0, or between 40 and 41."""
    progress = Progress(
        state="running",
        step=step,
        steps_seen=seen,
        phase=phase,
        moved_mono_s=100.0 - silent_s,
        beat_mono_s=100.0 - beat_age_s,
        step_p50_s=0.05,
        step_p99_s=0.06,
        wandered=wandered,
        wandered_mono_s=100.0 - wandered_ago_s if wandered else 0.0,
    )
    position = CollectivePosition(41 if waits else 40, 40, "pg 0") if known else None
    process = ProcessReading(state=state, cpu_busy=busy)
    report = RankReport(rank, rank, 50 + rank, 1, 8, progress=progress, collective=position, process=process)
    return RankView(node or f"node{rank // 4}", report, silent_s, 0.0, phase_s, 0.0)


def made_calls(
    *names: str, last: int = 41, done: bool = False, group: str = "0", source: str = "flight_recorder"
) -> EvidenceItem:
    """Evidence of collectives that end with number ``last``, not finished; "name:sizes:dtype" each."""
    facts = []
    for place, text in enumerate(names):
        function, sizes, dtype = (*text.split(":"), "", "")[:3]
        seq = last - len(names) + 1 + place
        over = done or place < len(names) - 1
        facts.append(CollectiveFact(group, seq, function, sizes or "[[8]]", dtype or "float", done=over))
    return EvidenceItem(kind=source, ok=True, collectives=tuple(facts))


def said_of(rank: int, *items: EvidenceItem) -> list[EvidenceItem]:
    """The same evidence, said of a rank."""
    return [msgspec.structs.replace(item, rank=rank) for item in items]


def stack_of(*marks: str, frames: tuple[str, ...] = (), kind: str = "stacks") -> EvidenceItem:
    """Evidence of a stack."""
    return EvidenceItem(kind=kind, ok=True, marks=marks, frames=frames)


WAITING = made_calls("all_reduce", "all_gather", "all_reduce")
ABSENT = made_calls("all_reduce", "all_gather", last=40, done=True)


def judge_job(
    views: Sequence[RankView], evidence: Sequence[EvidenceItem], world_size: int = 0, policy: JobPolicy = POLICY
) -> Judgement:
    """Suspect the ranks, and judge them by the evidence."""
    suspicion = watchdog.judge(views, policy, 1e6)
    assert suspicion is not None
    return judge(suspicion, views, gather(evidence), world_size or len(views), policy)


def one_absent(*items: EvidenceItem, size: int = 4, culprit: int = 1, **view: object) -> Judgement:
    """All others wait in all_reduce #41; the culprit has not entered it, and ``items`` are what is known of it."""
    views = [rank_view(rank) if rank != culprit else rank_view(rank, waits=False, **view) for rank in range(size)]  # type: ignore[arg-type]  # fields of rank_view
    evidence = [
        item for rank in range(size) if rank != culprit for item in said_of(rank, WAITING, stack_of("in_collective"))
    ]
    return judge_job(views, [*evidence, *said_of(culprit, *items)])


def everybody(
    *, odd: EvidenceItem, size: int = 4, culprit: int = 1, right: EvidenceItem = WAITING, ahead: int = 0
) -> Judgement:
    """All ranks wait in a collective; one has called something else than the others."""
    views = [rank_view(rank, step=20 + (ahead if rank == culprit else 0)) for rank in range(size)]
    evidence = [item for rank in range(size) for item in said_of(rank, odd if rank == culprit else right)]
    return judge_job(views, evidence)
