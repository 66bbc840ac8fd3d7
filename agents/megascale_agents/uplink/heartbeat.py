# SPDX-License-Identifier: Apache-2.0
"""Compose heartbeats: everything in a full one, otherwise only what changed since the one before.

Pure of I/O: the time and the observations are arguments. A full heartbeat is sent first, every 30 s, when a round began
or ended, and when the controller asks for it.
"""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from megascale_agents.ranks.rank_watch import RankWatch
from megascale_agents.ranks.rounds import RoundWatch
from megascale_agents.uplink.job_budget import fitted
from megascale_ops.schema.health import HardwareFinding, HostReading
from megascale_ops.schema.messages import Heartbeat, JobReport
from megascale_ops.schema.progress import MOST_WORK

if TYPE_CHECKING:
    from megascale_agents.collectives.sample import CollectiveFeed
    from megascale_agents.collectives.sums import CollectiveSums
    from megascale_ops.blackbox.reader import BoxReader
    from megascale_ops.schema.collectives import CollectiveSample
    from megascale_ops.schema.progress import RankReport

log = logging.getLogger(__name__)

# 100 jobs: a user may create any number of names.
_MOST_COMPLAINTS = 100
# 30 s: bounds how long a controller can be wrong about what it missed; one in thirty costs no bandwidth.
_FULL_EVERY_S = 30.0
# 5 s: memory and disks fill slowly; a heartbeat that is sent at once carries the host as well.
_HOST_EVERY_S = 5.0
# 640 steps of 160 bytes are 100 KB, well below what a controller takes: 64 ranks send ten steps each.
_MOST_WORK_OF_ALL = 640


class Composer:
    """Builds one heartbeat after the other and remembers what the last one said.

    Args:
        node: This node's name.
        agent_id: New at every start of an agent.
        serves: Whose black boxes it sees; the same over its restarts.
        every_s: Between two heartbeats, unless something is urgent.

    Attributes:
        metrics: Where /metrics is served, HOST:PORT as others reach it; "" for nowhere.
    """

    def __init__(self, node: str, agent_id: str, serves: str = "", every_s: float = 1.0) -> None:
        self._node, self._every_s = node, every_s
        self._serves = serves
        self._agent_id = agent_id
        self._seq = 0
        self._want_full = True
        self._full_at_s = 0.0
        self._host_at_s = 0.0
        self._said: dict[tuple[str, int], RankReport] = {}
        self._said_hardware: tuple[tuple[HardwareFinding, ...], tuple[str, ...]] = ((), ())
        self._collectives: CollectiveFeed | None = None
        self._cut: dict[str, int] = {}  # jobs whose values were cut, and the round in which that was logged
        self.metrics = ""

    @property
    def collective_sums(self) -> "CollectiveSums":
        """Of what the ranks have finished, counted whenever a heartbeat is composed."""
        return self._feed().sums

    def _feed(self) -> "CollectiveFeed":
        if self._collectives is None:
            from megascale_agents.collectives.sample import CollectiveFeed  # 50 ms: not before the first heartbeat

            self._collectives = CollectiveFeed()
        return self._collectives

    def want_full(self) -> None:
        """The next heartbeat has everything in it."""
        self._want_full = True

    def compose(
        self,
        ranks: Iterable[tuple[RoundWatch, RankWatch]],
        host: HostReading | None,
        clocks_s: tuple[float, float],
        done_orders: tuple[str, ...] = (),
        *,
        urgent: bool = False,
        hardware: tuple[tuple[HardwareFinding, ...], tuple[str, ...]] = ((), ()),
        serials: tuple[str, ...] = (),
    ) -> Heartbeat:
        """Build the next heartbeat.

        Args:
            ranks: All ranks of the rounds that run.
            host: The last look at the host.
            clocks_s: Monotonic clock and wall clock now.
            done_orders: Orders done and not yet reported.
            urgent: Sent out of turn; the host comes along.
            hardware: What is wrong with it now, and the GPUs' UUIDs.
            serials: The GPUs' serial numbers, in the order of these.
        """
        now_s, wall_s = clocks_s
        full = self._want_full or now_s - self._full_at_s >= _FULL_EVERY_S
        with_host = full or urgent or now_s - self._host_at_s >= _HOST_EVERY_S
        before, self._said = self._said, {}
        ranks = list(ranks)
        most_work = most_work_of(len(ranks))
        jobs: dict[str, tuple[RoundWatch, list[RankReport]]] = {}
        for round_watch, rank_watch in ranks:
            report = rank_watch.report(now_s, most_work)
            key = (round_watch.job, rank_watch.rank)
            self._said[key] = report
            # A report with steps has changed anyway; having none is no change in itself.
            if full or report.work or not _is_known(before.get(key), report):
                jobs.setdefault(round_watch.job, (round_watch, []))[1].append(report)
        told = self._tell_collectives(ranks, jobs, now_s) if self._seq else {}
        findings, gpus = self._tell_hardware(hardware, full=full)
        self._seq += 1
        if full:
            self._want_full, self._full_at_s = False, now_s
        if with_host and host is not None:
            self._host_at_s = now_s
        return Heartbeat(
            node=self._node,
            agent_id=self._agent_id,
            seq=self._seq,
            mono_s=now_s,
            wall_s=wall_s,
            full=full,
            host=host if with_host else None,
            jobs=self._fitted(jobs, told),
            done_orders=done_orders,
            findings=findings,
            gpus=gpus,
            serials=serials if gpus and any(serials) else (),
            metrics=self.metrics if full else "",
            serves=self._serves,
            every_s=self._every_s,
        )

    def _fitted(
        self,
        jobs: "dict[str, tuple[RoundWatch, list[RankReport]]]",
        told: "dict[str, tuple[CollectiveSample, ...]]",
    ) -> tuple[JobReport, ...]:
        """Return each job's report; what has no room in a heartbeat of all jobs is cut."""
        whole = {
            job: JobReport(job, watch.round, watch.file.run_dir, tuple(reports), told.get(job, ()))
            for job, (watch, reports) in jobs.items()
        }
        kept = fitted(whole, {job: watch.bounds.owner.uid for job, (watch, _) in jobs.items()})
        gone = whole.keys() - {report.job for report in kept}
        for job in gone.union(report.job for report in kept if report.cut):
            for rank in whole[job].ranks:  # what was not sent counts as changed still
                self._said.pop((job, rank.rank), None)
            self._complain(job, whole[job].round)
        return tuple(kept)

    def _complain(self, job: str, round_: int) -> None:
        if self._cut.get(job) == round_ or len(self._cut) >= _MOST_COMPLAINTS:
            return
        self._cut[job] = round_
        log.warning("job %s tells more than a heartbeat has room for beside other jobs: values of its ranks are cut",
                    job, extra={"node": self._node, "job": job})  # fmt: skip

    def _tell_hardware(
        self, hardware: tuple[tuple[HardwareFinding, ...], tuple[str, ...]], *, full: bool
    ) -> tuple[tuple[HardwareFinding, ...] | None, tuple[str, ...]]:
        """Return findings and GPUs for the heartbeat: all of them, or only what has changed."""
        (findings, gpus), (said_findings, said_gpus) = hardware, self._said_hardware
        self._said_hardware = hardware
        return findings if full or findings != said_findings else None, gpus if full or gpus != said_gpus else ()

    def _tell_collectives(
        self,
        ranks: "Iterable[tuple[RoundWatch, RankWatch]]",
        jobs: "dict[str, tuple[RoundWatch, list[RankReport]]]",
        now_s: float,
    ) -> "dict[str, tuple[CollectiveSample, ...]]":
        """Return the samples of finished collectives, by job; a job with nothing else to report is added."""
        boxes: dict[str, tuple[RoundWatch, dict[int, BoxReader]]] = {}
        for round_watch, rank_watch in ranks:
            if rank_watch.box is not None:
                boxes.setdefault(round_watch.job, (round_watch, {}))[1][rank_watch.rank] = rank_watch.box
        feed = self._feed()
        feed.forget(boxes)
        told = {}
        for job, (round_watch, of_ranks) in boxes.items():
            samples = feed.drain_sample(job, of_ranks, now_s)
            if samples:
                told[job] = samples
                jobs.setdefault(job, (round_watch, []))
        return told


def most_work_of(ranks: int) -> int:
    """Return how many steps of each rank fit into a heartbeat of so many ranks."""
    return max(1, min(MOST_WORK, _MOST_WORK_OF_ALL // max(1, ranks)))


def _is_known(before: "RankReport | None", report: "RankReport") -> bool:
    """Return whether a report without steps has nothing new; CPU starvation of a rank that stands still is not new."""
    if before is None:
        return False
    process = msgspec.structs.replace(before.process, starved=report.process.starved)
    return msgspec.structs.replace(before, work=(), process=process) == report
