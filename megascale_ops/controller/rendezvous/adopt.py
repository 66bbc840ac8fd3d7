# SPDX-License-Identifier: Apache-2.0
"""Take over a round that runs and that this controller does not know of: its journal was lost, or the end of it.

A runner whose polls are answered with "not known" describes the round that it runs (``Resume`` is a join with cause
``resume``). When every node of that round has done so, the job is there again: same round, same order of nodes, the
policy that its runner was started with. No rank notices. What the journal still knew of the job is kept: habits, spent
budgets, changes of its policy. What it has lost is gone for good.

Nodes that disagree (another round, another number of nodes) belong to different stories; the newest round is believed.
A node of the round that never describes it is lost: after ``DESCRIBED_S`` the others are restarted without it.

A journal whose round is plainly alive, since its runners poll for it, is believed against any description.
"""

import msgspec

from megascale_ops.controller.job import incidents, terms
from megascale_ops.controller.job.job import Job, Runner
from megascale_ops.controller.job.transitions import Transitions
from megascale_ops.controller.record.job_record import JobRecord, Member, next_life
from megascale_ops.controller.record.state_machine import State
from megascale_ops.controller.recovery.failures import Failures
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import Join, JoinReply
from megascale_ops.schema.policy_settings import apply_settings

RESUME = "resume"
# 15 s: as long as a node may be silent by default; runners describe their round every half second.
DESCRIBED_S = 15.0


class Adopting:
    """Collects descriptions until they are complete."""

    def __init__(self, jobs: dict[str, Job], transitions: Transitions, losses: Failures) -> None:
        self._jobs = jobs
        self._transitions = transitions
        self._failures = losses
        self._known: dict[str, dict[int, Join]] = {}  # by job and node rank
        self._since_s: dict[str, float] = {}  # when the first of these came

    def resume(self, join: Join) -> JoinReply:
        """Take a description in; ``go`` once the job is known again, ``wait`` until then."""
        job = self._jobs.get(join.job)
        if job is None or self._is_outdated(job, join):
            job = self._adopt(job, join)
        member = job.member(join.node) if job is not None else None
        if job is None or member is None or member.join_id != join.join_id:
            return JoinReply(status="wait")
        return JoinReply(
            status="go",
            round=job.record.round,
            node_rank=job.round.places[join.node],
            nodes=len(job.record.members),
            job_id=job.record.job_id,
            incidents=job.record.incidents,
        )

    def _is_outdated(self, job: Job, join: Join) -> bool:
        """Return whether the journal knows less of the job than this runner: nothing, or an earlier round."""
        if not (job.record.members or job.waiting):
            return True
        if join.previous_round <= job.record.round:
            return False
        now_s = self._transitions.clock()
        polling = [runner for node in job.nodes if (runner := job.runners.get(node)) is not None]
        return not any(one.round == job.record.round and one.is_alive(now_s) for one in polling)

    def _adopt(self, before: Job | None, join: Join) -> Job | None:
        """Return the job when this description was the last one that was missing, or the others are late."""
        known = self._known.setdefault(join.job, {})
        newest = max((one.previous_round for one in known.values()), default=0)
        now_s = self._transitions.clock()
        if join.previous_round > newest:
            known.clear()
            self._since_s[join.job] = now_s
        if join.previous_round >= newest:
            known[join.node_rank] = join
        is_late = now_s - self._since_s[join.job] > DESCRIBED_S
        if {one.nodes for one in known.values()} != {join.nodes} or (len(known) < join.nodes and not is_late):
            return None
        joins = [known[rank] for rank in sorted(known)]
        del self._known[join.job], self._since_s[join.job]
        job = self._jobs[join.job] = self._take_over(before, joins)
        if len(joins) < join.nodes:
            self._lose_rest(before, job, joins)
        self._transitions.save(job)
        return job

    def _take_over(self, before: Job | None, joins: list[Join]) -> Job:
        """Return the job in the round that was described, with what the journal knew of it."""
        first, wall_s, now_s = joins[0], self._transitions.wall(), self._transitions.clock()
        base = before.record if before is not None else JobRecord(job=first.job)
        if before is not None and before.is_over:  # the journal has lost that a new life began, which inherits nothing
            base = next_life(base)
        record = msgspec.structs.replace(
            base,
            job_id=first.job_id or base.job_id,
            state=State.RESTARTING.value,
            round=first.previous_round,
            min_nodes=first.min_nodes,
            max_nodes=first.max_nodes,
            policy=apply_settings(first.policy, base.tuned),
            launch_policy=first.policy,
            run_dir=first.run_dir,
            members=tuple(
                Member(one.node, one.runner_id, one.join_id, one.nproc, one.addr, one.store_port) for one in joins
            ),
            runners=tuple({*base.runners, *(one.runner_id for one in joins)}),
            started_wall_s=base.started_wall_s or wall_s,
            since_wall_s=wall_s,
            reason="",
            exit_code=0,
            before="",
            verdict=None,
            incident="",
            incidents=max(base.incidents, first.previous_round),  # at least as many were given out
            ended_verdict=None,
            ended_incident="",
            orders=(),
            furthest=-1,
            decided=None,
            left_alone=None,
        )
        job = Job(record, now_s, before.saved if before is not None else None)
        job.runners = {one.node: Runner(one.runner_id, now_s) for one in joins}
        job.change()
        job.unsaved.must_last = True
        for one in joins:
            self._transitions.witness(job, round_=one.previous_round, incidents=one.incidents)
        text = f"nothing was known of round {record.round}, which runs on {len(joins)} nodes"
        if before is not None:
            self._close(before, job)
            text = f"the journal ends with round {base.round}, and round {record.round} runs on {len(joins)} nodes"
        self._transitions.note(job, "adopted", text)
        terms.tell_policies(job, record.policy if before is None else base.policy, joins, self._transitions)
        return job

    def _close(self, before: Job, job: Job) -> None:
        """End what was open in the round that the journal ends with, and wake the requests that wait for it."""
        self._transitions.witness(job, round_=before.heard_round, incidents=before.heard_incidents)
        self._transitions.withdraw(before, set(before.orders))
        for key in list(before.round.warnings):
            self._transitions.unwarn(before, key, "the journal had lost what followed")
        if before.incident is not None:
            self._transitions.put_incident(
                before, incidents.close(before.incident, "ended", "the journal had lost what followed")
            )
        job.unsaved.inherit(before.unsaved)
        before.wake()
        for runner in before.runners.values():
            runner.wake()

    def _lose_rest(self, before: Job | None, job: Job, joins: list[Join]) -> None:
        """Restart the nodes that have described their round without those that have not."""
        described = {one.node for one in joins}
        missing = tuple(node for node in (before.nodes if before is not None else ()) if node not in described)
        missing = missing[: joins[0].nodes - len(joins)]
        reason = (
            f"{joins[0].nodes - len(joins)} of {joins[0].nodes} nodes of round {job.record.round} have not told of it "
            f"within {DESCRIBED_S:.0f} s since the journal was found to have lost it"
        )
        verdict = Verdict(
            fault="node_lost",
            reason=reason,
            confidence=0.8,
            nodes=missing,
            since_wall_s=self._transitions.wall(),
            round=job.record.round,
            otherwise="a description of the round by their runners",
        )
        self._failures.lose_nodes(job, verdict)
