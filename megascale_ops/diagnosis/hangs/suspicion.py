# SPDX-License-Identifier: Apache-2.0
"""A suspicion: which ranks stand still, how long that is all right, and the evidence in words that people can check.

Pure: ranks' reports in, findings and sentences out.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megascale_ops.diagnosis.rank_view import RankView
from megascale_ops.schema.folding import listed, named, ranges
from megascale_ops.schema.health import Finding, Verdict

# 2 s: the recorder's heartbeat has 10 Hz; twenty missed ones while the process lives mean that the GIL is held.
STALE_BEAT_S = 2.0


class Suspicion(NamedTuple):
    """At least one rank stands still. ``lost``: patience is used up.

    ``base_s`` is what a step of these ranks may take; ``name_s`` is that, or more for a rank that seems to work: from
    then on it is reported, with evidence. ``patience_s`` is how long it is left alone: as long, where ``is_proven`` is
    set because waiting mends nothing (a stopped process, a rank that has ended), else at least the policy's
    ``absent_patience_s``. ``held``: others wait for the suspects inside a collective, so that it pays to gather
    evidence early. ``excused``: a rank has declared a long phase; then only ranks that contradict each other are acted
    upon before that phase has used up its time.
    """

    lost: bool
    verdict: Verdict
    age_s: float = 0.0
    patience_s: float = 0.0
    base_s: float = 0.0
    held: bool = False
    excused: bool = False
    name_s: float = 0.0
    is_proven: bool = False
    absent_s: float = 0.0  # the patience for a rank that may come back by itself in this case
    is_start: bool = False  # before steps flow, where a silence may take ``startup_patience_s``
    is_said: bool = False  # ``base_s`` is that, said by the policy and not learned from steps

    @property
    def is_told(self) -> bool:
        """The time is over in which it would be gone as it came."""
        return self.lost or self.age_s >= self.name_s


def rank_findings(rank: RankView) -> list[Finding]:
    """Return what is known of a rank that stands still: its last step, its collective, its process."""
    report, progress = rank.report, rank.report.progress
    findings = []
    if progress is not None:
        text = (
            f"rank {report.rank} last moved {rank.silent_s:.1f} s ago, after step {progress.step}, in phase "
            f"{progress.phase}; its p99 step takes {progress.step_p99_s:.3f} s"
        )
        findings.append(rank_finding("last_moved", text, "black box", rank, rank.silent_s, "s"))
        # Both ages are taken in the sender's clock: silent_s reaches from moved_mono_s to its last heartbeat.
        stale_s = rank.silent_s + progress.moved_mono_s - progress.beat_mono_s
        if progress.beat_mono_s and stale_s > STALE_BEAT_S:
            text = f"the recorder's own thread in rank {report.rank} is silent for {stale_s:.1f} s: the GIL is held"
            findings.append(rank_finding("gil_held", text, "black box", rank, stale_s, "s"))
    if report.collective is not None:
        text = (
            f"rank {report.rank} has enqueued {report.collective.enqueued} collectives and completed "
            f"{report.collective.completed} ({report.collective.name or 'no name'})"
        )
        findings.append(rank_finding("collective", text, "black box", rank, report.collective.enqueued, ""))
    state = report.process.state or "gone"
    text = f"process {report.pid} of rank {report.rank} is in state {state}, uses {report.process.cpu_busy:.2f} cores"
    findings.append(rank_finding("process", text, "process", rank, report.process.cpu_busy, "cores"))
    return findings


def rank_finding(name: str, text: str, source: str, rank: RankView, value: float, unit: str) -> Finding:
    """Return one fact of a rank."""
    return Finding(
        name=name, text=text, source=source, rank=rank.report.rank, node=rank.node, value=float(value), unit=unit
    )


def waiting_finding(waiting: Sequence[RankView]) -> Finding:
    """Return a finding on the ranks that wait in a collective meanwhile."""
    names = sorted({rank.report.collective.name for rank in waiting if rank.report.collective} - {""})
    inside = f" ({', '.join(names[:3])})" if names else ""
    peers = sorted({rank.report.tile_peer for rank in waiting} - {-1})
    inside += f" or for a tile of rank {', '.join(map(str, peers[:3]))}" if peers else ""
    who = f"{len(waiting)} rank{' waits' if len(waiting) == 1 else 's wait'}"
    return Finding(
        name="others_wait",
        text=f"{who} in a collective{inside}: {ranges(numbers_of(waiting))}",
        source="black box",
        value=float(len(waiting)),
        unit="ranks",
    )


def numbers_of(ranks: Sequence[RankView]) -> tuple[int, ...]:
    """Return the ranks' numbers, in order."""
    return tuple(sorted(rank.report.rank for rank in ranks))


def nodes_of(ranks: Sequence[RankView]) -> tuple[str, ...]:
    """Return the nodes that the ranks run on."""
    return tuple(sorted({rank.node for rank in ranks}))


def step_of(ranks: Sequence[RankView]) -> int:
    """Return the last step that all of the ranks have finished; -1 where none is known."""
    return min((rank.report.progress.step for rank in ranks if rank.report.progress is not None), default=-1)


def who(ranks: Sequence[RankView]) -> str:
    """Return the ranks and their nodes as a sentence begins."""
    if len(ranks) == 1:
        return f"rank {ranks[0].report.rank} on {ranks[0].node}"
    return f"each of the {named(numbers_of(ranks))} on {listed(nodes_of(ranks))}"
