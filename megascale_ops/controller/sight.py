# SPDX-License-Identifier: Apache-2.0
"""What can be seen of a job now: its ranks, its runners, who lives, who waits, and what the judges make of it.

Nothing here moves a job; the driver and the losses ask and then act.
"""

from collections.abc import Sequence

from megascale_ops.controller import watchdog
from megascale_ops.controller.job import Job
from megascale_ops.controller.moves import Moves
from megascale_ops.controller.registry import RankView, Registry
from megascale_ops.controller.verdicts import Ended, judge_exits
from megascale_ops.schema.health import Verdict

# 10 s: agents send at least one heartbeat a second, and try again every two while the controller is away.
BLIND_S = 10.0
# A full judgement of 12,288 ranks takes some 20 ms: once a second for so many, ten times a second for few.
SCAN_EACH_RANK_S = 1.0 / 12_288
SCAN_S = 0.1
# 64 nodes are looked at whenever one joins; thousands joining at once would cost their number squared.
SMALL = 64


class Sight:
    """Questions about jobs, answered from the registry and from what runners have said."""

    def __init__(self, moves: Moves, registry: Registry) -> None:
        self._moves = moves
        self._registry = registry

    def judge_silence(self, job: Job, now_s: float) -> watchdog.Suspicion | None:
        """Return the job's suspicion, judged anew when the last judgement is old enough."""
        interval_s = max(SCAN_S, job.record.world_size * SCAN_EACH_RANK_S)
        if now_s - job.judged_s >= interval_s * 0.9 or job.judged_s == 0.0:
            job.judged_s = now_s
            job.odd = False
            job.suspicion = watchdog.judge(self.ranks(job, now_s), job.record.policy, self._moves.wall())
        return job.suspicion

    def ranks(self, job: Job, now_s: float) -> list[RankView]:
        """Return all ranks of the round that agents have reported."""
        return list(self._registry.ranks(job.name, job.record.round, job.nodes, now_s))

    def judge_exits(self, job: Job, now_s: float, missing: Sequence[str]) -> Verdict:
        """Return who ended the round, as far as exits and reports tell; ``missing`` are nodes that said nothing."""
        ended = [Ended(one.node, one.exit, max(0.0, now_s - one.ended_s)) for one in job.exits.values()]
        reports = {rank.report.rank: rank.report for rank in self.ranks(job, now_s)}
        hosts = {
            node: view.host
            for node in job.nodes
            if (view := self._registry.node(node)) is not None and view.host is not None
        }
        return judge_exits(
            ended,
            world_size=job.record.world_size,
            missing=missing,
            reports=reports,
            hosts=hosts,
            round_=job.record.round,
            wall_s=self._moves.wall(),
        )

    def not_stopped(self, job: Job, now_s: float) -> list[str]:
        """Return the nodes of the round that live and have not said that their ranks stopped."""
        return [
            node
            for node in job.nodes
            if node not in job.waiting and node not in job.left and self.is_alive(job, node, now_s)
        ]

    def is_alive(self, job: Job, node: str, now_s: float) -> bool:
        """Say whether a node shows signs of life: its runner's requests, or its agent speaking of ranks."""
        runner = job.runners.get(node)
        if runner is not None and runner.is_alive(now_s):
            return True
        if not self._moves.agent_is_fresh(node, now_s):
            return False
        return self.has_live_rank(job, node)

    def has_live_rank(self, job: Job, node: str) -> bool:
        """Say whether the node's agent has reported a living rank of the round."""
        share = self._registry.share(node, job.name, job.record.round)
        return share is not None and share.lives

    def joined(self, job: Job, now_s: float) -> dict[str, float]:
        """Return nodes whose runner waits for a round and is there, with the time it joined."""
        joined = {}
        for node, waiting in job.waiting.items():
            runner = job.runners.get(node)
            if runner is not None and runner.runner_id == waiting.join.runner_id and runner.is_alive(now_s):
                joined[node] = waiting.since_s
        return joined

    def is_blind(self, job: Job, now_s: float) -> bool:
        """Say whether this controller is too young to have heard of all nodes: no news is not a sign of life."""
        unheard = any(
            self._registry.share(member.node, job.name, job.record.round) is None for member in job.record.members
        )
        if not unheard or now_s - job.entered_s >= BLIND_S:
            return False
        job.judged_s = 0.0  # what was judged without news counts for nothing when they come
        return True

    def has_moved(self, job: Job) -> bool:
        """Say whether the end of a suspicion is the ranks' doing, not that of a controller whose clocks began anew."""
        return self._registry.has_moved(job.name, job.record.round, job.nodes)

    def may_scan_nodes(self, job: Job, now_s: float) -> bool:
        """Say whether to look at all nodes now: of few always, of many only when all are in or a tick has passed."""
        if len(job.waiting) <= SMALL or len(job.waiting) >= job.record.max_nodes:
            return True
        if now_s - job.scanned_s < SCAN_S * 0.9:
            return False
        job.scanned_s = now_s
        return True
