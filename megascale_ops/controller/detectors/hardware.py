# SPDX-License-Identifier: Apache-2.0
"""Hardware findings of agents, taken in: remembered, warned of, quoted by verdicts that came before them.

An Xid is reported within 0.1 s, but a rank that dies of it is judged within milliseconds of its death; so evidence that
comes afterwards is added to the open incident, and changes nothing that was decided.
"""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from megascale_ops.controller.detectors.bad_hardware import BadBook
from megascale_ops.controller.job import diagnose, incidents
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.transitions import Journal, Transitions
from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.nodes.evidence import Accusation
from megascale_ops.schema.health import BadHardware, HardwareFinding
from megascale_ops.schema.messages import Heartbeat
from megascale_ops.schema.ranges import MOST_RANKS

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)

# 10 s: two looks at the GPUs. A small job is back in its next round by then, whose troubles are no evidence for what
# ended the one before; agents' clocks are accurate enough, since only evidence follows from it.
_LATE_S = 10.0
# Twice as many as the ranks that a job may have.
_MOST_GPUS = 2 * MOST_RANKS


class HardwareWatch:
    """The hardware of all nodes. Owned by the loop."""

    def __init__(self, journal: Journal, transitions: Transitions, jobs: "Mapping[str, Job]") -> None:
        self.book = BadBook()
        self._serials: dict[str, str] = {}  # by UUID
        self._journal = journal
        self._transitions = transitions
        self._jobs = jobs

    def restore(self, entries: Iterable[BadHardware]) -> None:
        """Take over what the journal remembers."""
        self.book = BadBook(entries)

    def ingest_heartbeat(self, heartbeat: Heartbeat, only_job: str = "") -> None:
        """Take in a heartbeat's hardware findings; the registry has them already.

        With ``only_job`` its agent reports for that job alone: it is quoted, and no GPU is remembered for all to avoid.
        """
        if len(heartbeat.serials) == len(heartbeat.gpus) and len(self._serials) < _MOST_GPUS:
            self._serials.update(zip(heartbeat.gpus, heartbeat.serials, strict=True))
        if heartbeat.gpus:
            for report in heartbeat.jobs:
                job = self._jobs.get(report.job)
                if job is not None and report.round == job.record.round:
                    self._warn_of_return(job, heartbeat, only_job)
        if heartbeat.findings:
            if not only_job:
                self._remember(heartbeat.node, heartbeat.findings)
            for job in self._jobs.values():
                if job.incident is not None and job.member(heartbeat.node) is not None:
                    self._quote_late(job)

    def mend(self, uuid: str) -> int:
        """Forget a GPU that a person has marked as mended or replaced; return how many reasons it had."""
        gone = self.book.mend(uuid, self._transitions.wall())
        if gone:
            self._write(gone)
            log.info("GPU %s was mended: %d reasons are forgotten", uuid, len(gone))
        return len(gone)

    def _remember(self, node: str, findings: Iterable[HardwareFinding]) -> None:
        changed = self.book.ingest_findings(node, findings, self._serials)
        if changed:
            self._write(changed)
        for one in changed:
            if one.count:
                log.warning("GPU %s of node %s is remembered as bad: %s", one.uuid, node, one.text,
                            extra={"node": node})  # fmt: skip
                text = f"GPU {one.uuid} is remembered as bad ({one.text})"
                self._transitions.nodes.accuse(Accusation(node, one.reason, one.last_wall_s, text, (one.text,)))

    def _write(self, entries: tuple[BadHardware, ...]) -> None:
        self._journal.submit(Batch(hardware=entries), _nothing)

    def _warn_of_return(self, job: Job, heartbeat: Heartbeat, only_job: str) -> None:
        """Warn that a job trains on a GPU that failed before, once for each round."""
        for one in self.book.of(heartbeat.gpus, heartbeat.serials):
            if one.uuid in job.round.bad_gpus_told:
                continue
            job.round.bad_gpus_told.add(one.uuid)
            times = "once" if one.count == 1 else f"{one.count} times"
            where = "" if one.node == heartbeat.node else f", then in {one.node}"
            text = (
                f"{heartbeat.node} has GPU {_named(one)}, which is remembered as bad ({one.text}; {times}{where}); "
                f"when it was mended: megascale-ops bad-hardware forget {one.uuid}"
            )
            log.warning("%s: %s", job.name, text, extra={"job": job.name, "node": heartbeat.node})
            said = Accusation(heartbeat.node, "remembered", one.last_wall_s, text, (one.text,), job.name)
            if not only_job:  # on the word of a job's own agent no node is kept from all others
                self._transitions.nodes.accuse(said)
            self._transitions.note(job, "bad_hardware", text, node=heartbeat.node)
            self._transitions.save(job)

    def _quote_late(self, job: Job) -> None:
        incident = job.incident
        if incident is None or incident.verdict is None:
            return
        until_wall_s = incident.marks.detected + _LATE_S
        verdict = diagnose.quote_hardware(self._transitions.registry, job, incident.verdict, until_wall_s=until_wall_s)
        if verdict.evidence != incident.verdict.evidence:
            self._transitions.put_incident(job, incidents.judge(incident, verdict))
            self._transitions.save(job)


def _named(one: BadHardware) -> str:
    return f"{one.uuid} (serial number {one.serial})" if one.serial else one.uuid


def _nothing() -> None:
    """Do nothing: no request waits for these entries to be safe."""
