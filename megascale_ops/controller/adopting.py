# SPDX-License-Identifier: Apache-2.0
"""Take over a job that trains and that this controller knows nothing of: its journal was lost.

A runner whose polls are answered with "not known" describes the round that it runs (``Resume`` is a join with cause
``resume``). When every node of that round has done so, the job is there again: same round, same order of nodes, the
policy that its runner was started with. No rank notices. What is gone for good is history: incidents, spent budgets.

Nodes that disagree (another round, another number of nodes) belong to different stories; the newest round is believed.
"""

from megascale_ops.controller.job import Job, JobRecord, Member, Runner
from megascale_ops.controller.moves import Moves
from megascale_ops.controller.recovery import State
from megascale_ops.schema.messages import Join, JoinReply

RESUME = "resume"


class Adopting:
    """Collects descriptions until they are complete."""

    def __init__(self, jobs: dict[str, Job], moves: Moves) -> None:
        self._jobs = jobs
        self._moves = moves
        self._known: dict[str, dict[int, Join]] = {}  # by job and node rank

    def resume(self, join: Join) -> JoinReply:
        """Take a description in; ``go`` once the job is known again, ``wait`` until then."""
        job = self._jobs.get(join.job)
        if job is None or not (job.record.members or job.waiting):
            job = self._adopt(join)
        member = job.member(join.node) if job is not None else None
        if job is None or member is None or member.join_id != join.join_id:
            return JoinReply(status="wait")
        return JoinReply(
            status="go",
            round=job.record.round,
            node_rank=job.places[join.node],
            nodes=len(job.record.members),
            job_id=job.record.job_id,
        )

    def _adopt(self, join: Join) -> Job | None:
        """Return the job when this description was the last one that was missing."""
        known = self._known.setdefault(join.job, {})
        newest = max((one.previous_round for one in known.values()), default=0)
        if join.previous_round > newest:
            known.clear()
        if join.previous_round >= newest:
            known[join.node_rank] = join
        if len(known) < join.nodes or {one.nodes for one in known.values()} != {join.nodes}:
            return None
        joins = [known[rank] for rank in sorted(known)]
        del self._known[join.job]
        wall_s, now_s = self._moves.wall(), self._moves.clock()
        record = JobRecord(
            job=join.job,
            job_id=join.job_id,
            state=State.RESTARTING.value,
            round=join.previous_round,
            min_nodes=join.min_nodes,
            max_nodes=join.max_nodes,
            policy=join.policy,
            run_dir=joins[0].run_dir,
            members=tuple(
                Member(one.node, one.runner_id, one.join_id, one.nproc, one.addr, one.store_port) for one in joins
            ),
            runners=tuple(one.runner_id for one in joins),
            started_wall_s=wall_s,
            since_wall_s=wall_s,
            incidents=join.previous_round,  # at least as many were told of, and their folders are there
        )
        job = self._jobs[join.job] = Job(record, now_s)
        job.runners = {one.node: Runner(one.runner_id, now_s) for one in joins}
        job.change()
        self._moves.note(job, "adopted", f"nothing was known of round {record.round}, which runs on {len(joins)} nodes")
        self._moves.save(job)
        return job
