# SPDX-License-Identifier: Apache-2.0
"""Death and loss: a runner reports failed ranks, or a node falls silent. Both end the round at once.

Dead ranks are reported by their runner, with exit statuses, when it asks for the next round. A node that is gone
reports nothing; it is noticed by the silence of both its agent and its runner.
"""

from collections.abc import Sequence

import msgspec

from megascale_ops.controller import watchdog
from megascale_ops.controller.job import Job, Member
from megascale_ops.controller.moves import Moves
from megascale_ops.controller.recovery import ACTIVE, EventKind, State
from megascale_ops.controller.registry import Registry
from megascale_ops.controller.sight import Sight
from megascale_ops.controller.watchdog import NodeSigns
from megascale_ops.schema.health import Verdict

_replace = msgspec.structs.replace

# Each tick looks at a tenth of the nodes, so that 12,500 of them never hold a request up for more than a millisecond.
NODE_PARTS = 10


class Losses:
    """Moves jobs to their stop when ranks have failed or nodes are gone."""

    def __init__(self, moves: Moves, registry: Registry, sight: Sight) -> None:
        self._moves = moves
        self._registry = registry
        self._sight = sight

    def fail(self, job: Job, node: str) -> None:
        """A runner says that a rank of its own has failed: name who it was as far as is known, and stop all others."""
        if job.state not in ACTIVE:
            return
        now_s = self._moves.clock()
        verdict = self._sight.judge_exits(job, now_s, missing=())
        watched = job.record.verdict if job.state is State.CONFIRMING else None
        if job.incident is None or job.state is not State.CONFIRMING:
            self._moves.open_incident(job, watched or verdict, detected=self._moves.wall())
        self._moves.mark(job, "ordered")
        self._moves.move(job, EventKind.RANK_FAILED, f"{node} reports: {verdict.reason}", verdict=watched)

    def lose_nodes(self, job: Job, verdict: Verdict) -> None:
        """Nodes of the round are gone: stop the others."""
        if job.state not in ACTIVE:
            return
        ranks = [
            rank
            for node in verdict.nodes
            if (share := self._registry.share(node, job.name, job.record.round)) is not None
            for rank in share.ranks
        ]
        verdict = _replace(verdict, culprits=tuple(sorted(ranks)), since_step=job.step)
        self._moves.open_incident(job, verdict, detected=self._moves.wall())
        self._moves.mark(job, "ordered")
        self._moves.move(job, EventKind.NODE_LOST, verdict.reason, verdict=verdict)

    def check_nodes(self, job: Job, now_s: float, lag_s: float, part: int) -> None:
        """Look for nodes of which nothing is heard; each call looks at every tenth member, from ``part`` on."""
        if job.state not in ACTIVE:
            return
        verdict = self._judge_nodes(job, job.record.members[part::NODE_PARTS], now_s, lag_s)
        if verdict is None:
            return
        verdict = self._judge_nodes(job, job.record.members, now_s, lag_s) or verdict
        self.lose_nodes(job, verdict)

    def _judge_nodes(self, job: Job, members: Sequence[Member], now_s: float, lag_s: float) -> Verdict | None:
        record = job.record
        late_s = record.policy.node_lost_s / 3
        lives, name, round_, since_s = self._registry.lives, job.name, record.round, now_s - late_s
        signs = []
        for member in members:
            node = member.node
            if lives(node, name, round_, since_s):
                continue  # nearly always, so this comes first and costs little
            view = self._registry.node(node)
            agent_age_s = now_s - view.heard_s if view is not None else float("inf")
            gone = not self._sight.has_live_rank(job, node)
            runner = job.runners.get(node)
            if runner is None or node in job.left or node in job.waiting:
                continue
            polling = runner.open_requests > 0
            if polling and now_s - runner.seen_s > late_s:
                runner.nudge()
            signs.append(NodeSigns(node, agent_age_s, now_s - runner.seen_s, gone, polling))
        if not signs:
            return None
        wall_s = self._moves.wall()
        return watchdog.judge_nodes(signs, record.policy, lag_s=lag_s, round_=round_, wall_s=wall_s)
