# SPDX-License-Identifier: Apache-2.0
"""What a person asks of a job: a checkpoint now, and its end.

A checkpoint is asked for by SIGUSR1, which batch systems send before a job's time is up, so scripts that save on it are
common. The agents send it, to those ranks alone that have a handler: others would die of it. Nothing of this belongs to
an incident, so it is not journaled; the end of a job is a move like any other.
"""

from collections.abc import Iterable

from megascale_ops.controller.cluster.registry import Registry
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.transitions import Transitions
from megascale_ops.controller.record.state_machine import ACTIVE, EventKind
from megascale_ops.controller.recovery import stopping
from megascale_ops.errors import RefusedError
from megascale_ops.schema.messages import CheckpointView, Evidence, Order

KIND = "checkpoint"
# 128 + SIGINT: as a Ctrl-C at the runner ends it.
STOPPED_CODE = 130
_DEADLINE_S = 5.0
# 5 s: pods that are evicted together ask one after the other, and ranks need one signal.
_SAME_S = 5.0
_MOST_TEXT = 200


class _Asked:
    """The newest request for a checkpoint of one job."""

    def __init__(self, name: str, wall_s: float, round_: int) -> None:
        self.name = name
        self.wall_s = wall_s
        self.round = round_
        self.pending: set[str] = set()
        self.told: set[int] = set()
        self.refused: dict[str, str] = {}

    def stands_for(self, round_: int, wall_s: float, saved_wall_s: float) -> bool:
        """Return whether what is asked now was asked just before, and is not answered yet."""
        return self.round == round_ and wall_s - self.wall_s < _SAME_S and saved_wall_s <= self.wall_s


class ByHand:
    """Requests of people, of all jobs of one controller."""

    def __init__(self, transitions: Transitions, registry: Registry) -> None:
        self._transitions = transitions
        self._registry = registry
        self._asked: dict[str, _Asked] = {}

    def stop(self, job: Job, reason: str) -> None:
        """End a job in order: every runner stops its ranks as at the end of a round, and leaves.

        Raises:
            RefusedError: it is over already.
        """
        if job.is_over:
            raise RefusedError(f"job {job.name} is over already: it is {job.record.state}")
        stopping.end(self._transitions, job, EventKind.CANCELLED, reason or "stopped by hand", STOPPED_CODE)
        self._transitions.save(job)

    def ask_checkpoint(self, job: Job, saved_wall_s: float) -> CheckpointView:
        """Ask every rank that takes SIGUSR1 to save now.

        Raises:
            RefusedError: the job does not train now.
        """
        if job.state not in ACTIVE:
            raise RefusedError(f"job {job.name} does not train now: it is {job.record.state}")
        wall_s, now_s = self._transitions.wall(), self._transitions.clock()
        before = self._asked.get(job.name)
        if before is not None and before.stands_for(job.record.round, wall_s, saved_wall_s):
            return self.view(job, saved_wall_s)
        asked = self._asked[job.name] = _Asked(f"{KIND}-{wall_s:.3f}", wall_s, job.record.round)
        for node in job.nodes:
            if not self._registry.agent_is_fresh(job.name, node, now_s):
                asked.refused[node] = "its agent is not heard"
                continue
            order = Order(
                id=f"{asked.name}:{node}",
                job=job.name,
                node=node,
                kind=KIND,
                round=job.record.round,
                reason="a checkpoint is wanted now",
                deadline_s=_DEADLINE_S,
            )
            asked.pending.add(node)
            self._transitions.agent_orders.setdefault(node, {})[order.id] = order
        self._transitions.note(job, KIND, "a checkpoint was asked for by hand: SIGUSR1 to ranks that take it")
        self._transitions.save(job)
        return self.view(job, saved_wall_s)

    def view(self, job: Job, saved_wall_s: float) -> CheckpointView:
        """Return what has come of the newest request."""
        asked = self._asked.get(job.name)
        if asked is None:
            return CheckpointView(job.name, saved_wall_s=saved_wall_s)
        return CheckpointView(
            job.name,
            asked.wall_s,
            saved_wall_s,
            tuple(sorted(asked.told)),
            dict(asked.refused),
            tuple(sorted(asked.pending)),
        )

    def ingest_evidence(self, evidence: Evidence) -> bool:
        """Take an agent's answer; say whether it belongs to a request for a checkpoint."""
        name, _, node = evidence.order.rpartition(":")
        if evidence.incident or not name.startswith(f"{KIND}-"):
            return False
        asked = self._asked.get(evidence.job)
        if asked is None or asked.name != name or node != evidence.node or node not in asked.pending:
            return True  # of a request before, too late, or twice
        asked.pending.discard(node)
        for item in evidence.items:
            if item.ok and item.rank >= 0:
                asked.told.add(item.rank)
            else:
                asked.refused[str(item.rank) if item.rank >= 0 else node] = item.text[:_MOST_TEXT]
        return True

    def forget(self, node: str, ids: Iterable[str]) -> None:
        """Orders are done: they are not given again."""
        held = self._transitions.agent_orders.get(node, {})
        for order_id in ids:
            if order_id in held and held[order_id].kind == KIND:
                del held[order_id]
        if not held:
            self._transitions.agent_orders.pop(node, None)
