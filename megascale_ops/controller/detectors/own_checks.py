# SPDX-License-Identifier: Apache-2.0
"""Warnings of what checks inside ranks have found, kept true: opened, followed and ended as the ranks tell it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megascale_ops.controller.job import diagnose
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.transitions import Transitions
from megascale_ops.diagnosis import own_checks
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import JobReport

if TYPE_CHECKING:
    from megascale_ops.schema.progress import RankFinding

KEY = "own_check:"  # with the class: the key of a warning


class OwnChecks:
    """What ranks of all jobs have found in their present rounds. Owned by the loop."""

    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions
        self._told: dict[str, tuple[int, dict[int, tuple[str, tuple[RankFinding, ...]]]]] = {}

    def ingest_report(self, job: Job, node: str, report: JobReport) -> None:
        """Take a node's report of its ranks, of the job's present round."""
        found = {rank.rank: (node, rank.findings) for rank in report.ranks if rank.findings}
        if not found and job.name not in self._told:  # nearly always
            return
        round_, before = self._told.get(job.name, (report.round, {}))
        kept = {} if round_ != report.round else before
        of_report = {rank.rank for rank in report.ranks}
        told = {rank: one for rank, one in kept.items() if rank not in of_report} | found
        self._told[job.name] = (report.round, told)
        if told != before:
            self._keep(job, own_checks.verdicts(told, report.round))
        if not told:
            del self._told[job.name]

    def has_findings(self, job: str) -> bool:
        """Return whether ranks of a job have told any."""
        return job in self._told

    def _keep(self, job: Job, wanted: Mapping[str, Verdict]) -> None:
        for fault, verdict in wanted.items():
            quoted = diagnose.quote_hardware(self._transitions.registry, job, verdict)
            self._transitions.warn(job, KEY + fault, quoted)
        for key in [key for key in job.round.warnings if key.startswith(KEY) and key.removeprefix(KEY) not in wanted]:
            self._transitions.unwarn(job, key, "a later checkpoint found nothing of the kind")
        self._transitions.save(job)
