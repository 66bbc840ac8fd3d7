# SPDX-License-Identifier: Apache-2.0
"""A cluster that exists only in its heartbeats: many nodes of one job, told to the controller's real loop.

Every node really joins, so each heartbeat is judged as part of a running round. Steps come with their times; the
arrival-skew engine's findings are put in its place, since a sample of 12,288 ranks' collectives is its own benchmark.
"""

import asyncio
import time
from collections.abc import Iterator

import numpy as np

from megascale_ops.controller.loop import Loop
from megascale_ops.diagnosis.skew.report import SkewReport
from megascale_ops.diagnosis.skew.window import SkewWatch
from megascale_ops.schema.health import HostReading, Verdict
from megascale_ops.schema.messages import Heartbeat, JobPolicy, JobReport, Join
from megascale_ops.schema.progress import CollectivePosition, ProcessReading, Progress, RankReport, StepWork

JOB = "gpt"
STEP_S = 1.0


class Cluster:
    """Nodes of one job.

    Args:
        loop: the controller's.
        nodes: how many.
        nproc: ranks of each.
        port: of the agents' metrics: node n is at an address of its own below 127.1.0.0; 0: none are told.
    """

    def __init__(self, loop: Loop, nodes: int, nproc: int = 8, port: int = 0) -> None:
        self.loop = loop
        self.nodes = nodes
        self.nproc = nproc
        self.port = port
        self.step = -1
        self._seq = 0

    @staticmethod
    def name(node: int) -> str:
        """Return a node's name."""
        return f"node-{node:04d}"

    @staticmethod
    def host(node: int) -> str:
        """Return the loopback address that stands for a node."""
        return f"127.1.{node // 250}.{node % 250 + 1}"

    async def form(self) -> None:
        """Let every node join, and wait until the round is formed."""
        policy = JobPolicy(node_lost_s=3600.0)  # no runner polls for orders here
        joins = [
            Join(JOB, self.name(node), f"r{node}", f"j{node}", self.nproc, self.nodes, self.nodes, "127.0.0.1", 29500,
                 time.monotonic(), policy=policy)
            for node in range(self.nodes)
        ]  # fmt: skip
        replies = await asyncio.gather(*(self.loop.joining.join(join, 60.0) for join in joins))
        assert {reply.status for reply in replies} == {"go"}

    def turn(self) -> Iterator[int]:
        """Let every rank finish a step; yield each node when it has told that."""
        self._seq += 1
        self.step += 1
        for node in range(self.nodes):
            self.loop.heartbeat(self.heartbeat(node))
            yield node

    def beat(self) -> None:
        """Let every rank finish a step, and every node tell it."""
        for _ in self.turn():
            pass

    def heartbeat(self, node: int) -> Heartbeat:
        """Return a node's next heartbeat."""
        now_s = time.monotonic()
        first = node * self.nproc
        ranks = tuple(self._report(first + local, local, now_s) for local in range(self.nproc))
        return Heartbeat(
            node=self.name(node),
            agent_id=f"a{node}",
            seq=self._seq,
            mono_s=now_s,
            wall_s=time.time(),
            full=self._seq == 1,
            host=HostReading(cpu_busy=0.5),
            jobs=(JobReport(JOB, 1, "/run", ranks),),
            metrics=f"{self.host(node)}:{self.port}" if self.port and self._seq == 1 else "",
        )

    def _report(self, rank: int, local: int, now_s: float) -> RankReport:
        progress = Progress(
            state="running", step=self.step, steps_seen=self.step + 1, phase="backward", phase_since_mono_s=now_s - 0.1,
            moved_mono_s=now_s - 0.05, beat_mono_s=now_s - 0.01, step_p50_s=STEP_S, step_p99_s=STEP_S * 1.1,
        )  # fmt: skip
        return RankReport(
            rank=rank,
            local_rank=local,
            pid=1000 + rank,
            round=1,
            progress=progress,
            process=ProcessReading(state="R", cpu_s=now_s, cpu_busy=0.98, rss_bytes=8 << 30, threads=64),
            collective=CollectivePosition(enqueued=self.step * 20 + 3, completed=self.step * 20 + 2, name="all_reduce"),
            work=(StepWork(self.step, STEP_S, waiting_s=0.1 + 0.001 * (rank % 10)),),
        )

    def judge(self, stragglers: int = 25) -> None:
        """Let the skew engine have seen every rank, and some of them be slow."""
        job = self.loop.jobs[JOB]
        ranks = job.record.world_size
        late_s = np.linspace(1e-5, 2e-3, ranks, dtype=np.float32)
        zeros = np.zeros(ranks)
        watch = self.loop.slowness.skewing._watches[JOB] = SkewWatch(ranks)
        watch.report = SkewReport(
            10.0, 1.0, zeros + 0.123456789, late_s, late_s, late_s, zeros, (), (), (), 9_999, 1, 0.01
        )
        for rank in range(stragglers):
            verdict = Verdict("straggler", "slow", 0.9, culprits=(rank,), cause="gpu", cost=0.01 * rank, round=1)
            self.loop.transitions.warn(job, f"straggler:{rank}", verdict)
