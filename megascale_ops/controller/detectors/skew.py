# SPDX-License-Identifier: Apache-2.0
"""The arrival-skew engine of all jobs: fed by heartbeats, asked for verdicts when they are due, and by people.

A job whose agents report no collectives has no engine.
"""

from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING

import msgspec

from megascale_ops.diagnosis.skew.unseen import Unseen
from megascale_ops.diagnosis.skew.window import SkewWatch
from megascale_ops.schema.collectives import CollectiveSample, SkewView

if TYPE_CHECKING:
    from megascale_ops.controller.job.job import Job
    from megascale_ops.diagnosis.skew.report import SkewReport
    from megascale_ops.diagnosis.statistics.cooperative import Pieces
    from megascale_ops.diagnosis.stragglers.detector import Watch
    from megascale_ops.schema.health import Verdict
    from megascale_ops.schema.progress import CollectivePosition, RankReport

SLOW_LINK = "slow_link:"  # with the ranks: the key of a warning
STRAGGLER = "straggler:"  # with the rank
WAITING = "waiting: no collectives have been told yet"


class Skewing:
    """What is known of every job's collectives.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._watches: dict[str, SkewWatch] = {}
        self._verdicts: dict[str, dict[str, Verdict]] = {}
        self._unseen: dict[str, Unseen] = {}

    def ingest_samples(self, job: "Job", node: str, samples: Sequence[CollectiveSample]) -> None:
        """Take a node's samples of a job's collectives."""
        unseen = self._unseen.setdefault(job.name, Unseen())
        for sample in samples:
            unseen.ingest_sample(sample)
        watch = self._watches.get(job.name)
        if watch is None:
            watch = self._watches[job.name] = SkewWatch(job.record.world_size)
        watch.ingest_samples(node, samples)

    def know(self, job: "Job", node: str, reports: "Sequence[RankReport]") -> None:
        """Note where ranks and their groups are, and which were late for a good reason: they wrote a checkpoint."""
        unseen, watch = self._unseen.get(job.name), self._watches.get(job.name)
        if unseen is None:
            unseen = self._unseen[job.name] = Unseen()
        for report in reports:
            unseen.know(report.rank, report.collective)
            if watch is None:
                continue
            watch.know(report.rank, node, report.mesh)
            for work in report.work:
                if work.checkpoint_s > 0:
                    watch.skew.late_starts.excuse(report.rank, work.checkpoint_s)

    def has_samples(self, job: str) -> bool:
        """Return whether collectives of a job have been told in this round."""
        return job in self._watches

    def go_on(self, job: str, ranks: "Container[int]", position: "CollectivePosition | None") -> None:
        """Do what :meth:`know` does of ranks that are all equally far, of a job without samples."""
        unseen = self._unseen.get(job)
        if unseen is not None:
            unseen.go_on(ranks, position)

    def pieces(self, job: "Job", steps: "Watch") -> "Pieces[dict[str, Verdict]]":
        """Return the verdicts that hold now, by the keys of warnings; makes a pass, piece by piece, when it is time.

        Args:
            job: the job.
            steps: its hosts' view of their steps.
        """
        watch = self._watches.get(job.name)
        if watch is None:
            return {}
        policy = job.record.policy
        step_s = max((group.step_s for group in steps.groups.values()), default=0.0)
        report = yield from watch.pieces(self._clock(), step_s, policy, self._clock)
        if self._watches.get(job.name) is not watch:
            return {}  # the round has ended since
        if report is None:
            return self._verdicts.get(job.name, {})
        from megascale_ops.diagnosis.skew.verdicts import link_verdict, rank_verdict, standing

        nodes, round_ = watch.nodes, job.record.round
        found = {}
        for culprit, cause in standing(report, steps, step_s or report.block_s, watch.host_timed):
            node = nodes.get(culprit.rank, "")
            found[f"{STRAGGLER}{culprit.rank}"] = rank_verdict(culprit, report, cause, node, policy, round_)
        for link in report.links:
            key = f"{SLOW_LINK}{','.join(map(str, link.ranks[:8]))}"
            found[key] = link_verdict(link, report, nodes, policy, round_)
        self._verdicts[job.name] = found
        return found

    def report(self, job: str) -> "SkewReport | None":
        """Return what the last pass over a job's collectives has found, None before the first."""
        watch = self._watches.get(job)
        return watch.report if watch is not None else None

    def view(self, job: "Job") -> SkewView:
        """Return what people see of a job's collectives."""
        watch = self._watches.get(job.name)
        unseen = self._unseen[job.name].sentence() if job.name in self._unseen else ""
        if watch is None or watch.report is None:
            return SkewView(job.name, WAITING, unseen=unseen)
        from megascale_ops.diagnosis.skew.verdicts import view

        # What stands as a warning, so that a rank has the same numbers here as in its card.
        found_here = self._verdicts.get(job.name, {})
        standing = {key: one.verdict for key, one in job.round.warnings.items() if one.verdict is not None}
        verdicts = list({**found_here, **standing}.values())
        found = view(job.name, watch.report, verdicts, watch.nodes, job.record.policy)
        return msgspec.structs.replace(found, unseen=unseen)

    def end(self, job: "Job") -> None:
        """Forget a round."""
        self._watches.pop(job.name, None)
        self._unseen.pop(job.name, None)
        self._verdicts.pop(job.name, None)
