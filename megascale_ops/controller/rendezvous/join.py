# SPDX-License-Identifier: Apache-2.0
"""Where runners join: they ask for a place in the next round, and wait until there is one.

Every request may come twice (a lost answer, a restarted controller), so each is looked up before it is taken in: a
join by its ``join_id``, a runner by its ``runner_id``. One node of a job has one runner. Of two, the first is asked
whether it still lives (its waiting request is answered with nothing; a living runner asks again at once), and only a
dead one gives way.
"""

import uuid

from megascale_ops.controller.job import diagnose, terms
from megascale_ops.controller.job.job import Job, Runner, Waiting, wait_in
from megascale_ops.controller.job.owed_checks import GPU_CHECKS
from megascale_ops.controller.job.own_faults import OwnFaults
from megascale_ops.controller.job.transitions import Transitions
from megascale_ops.controller.nodes.life import NodeState
from megascale_ops.controller.record.job_record import JobRecord, next_life
from megascale_ops.controller.record.state_machine import ACTIVE, FINAL, EventKind
from megascale_ops.controller.recovery import checks, decide, failures
from megascale_ops.controller.recovery.driver import advance
from megascale_ops.controller.rendezvous.adopt import RESUME, Adopting
from megascale_ops.controller.rendezvous.poll import MOST_WAIT_S, open_request
from megascale_ops.errors import RefusedError, UsageError
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.identity import check_name
from megascale_ops.schema.messages import Join, JoinReply
from megascale_ops.schema.policy_settings import check_policy
from megascale_ops.schema.ranges import MOST_RANKS
from megascale_ops.schema.version import MESSAGE_VERSION, check_version

# 2.5 s: a live runner polls again within milliseconds; a machine under load may take two seconds.
RIVAL_S = 2.5
MOST_NODES = 65_536


class Joining:
    """The joins of all jobs."""

    def __init__(self, jobs: dict[str, Job], transitions: Transitions, faults: OwnFaults) -> None:
        self._jobs = jobs
        self._transitions = transitions
        self._faults = faults
        self._adopting = Adopting(jobs, transitions)
        self.highest: dict[str, int] = {}  # the number that the newest incident of a job is known to have had
        self._clock = transitions.clock

    async def join(self, join: Join, wait_s: float) -> JoinReply:
        """Take a join in and wait for its answer, at most ``wait_s``.

        Raises:
            UsageError: it can't be taken as it is.
            RefusedError: another runner serves this node.
        """
        _check_join(join)
        if join.cause == RESUME:
            return self._adopting.resume(join)
        job = self._jobs.get(join.job)
        if job is None:
            job = self._jobs[join.job] = Job(JobRecord(job=join.job), self._clock())
            self._transitions.witness(job, incidents=self.highest.get(join.job, 0))
        await self._give_way(job, join)
        is_repeated = self._is_repeated(job, join)
        job = self._register(job, join)
        runner = job.runners[join.node]
        deadline_s = self._clock() + min(wait_s, MOST_WAIT_S)
        async with open_request(job, runner, self._clock):
            nudges = runner.nudges
            job.joining.add(runner)
            if not is_repeated:
                advance(self._transitions, self._faults, job)
            while True:
                if job.saves == 0 and (reply := self._answer(job, join)) is not None:
                    return reply
                left_s = deadline_s - self._clock()
                if left_s <= 0 or runner.nudges != nudges or self._must_be_told(job, join):
                    return JoinReply(status="wait", reason=self._why_out(job, join.node))
                await wait_in(runner.waiters, left_s)

    def _is_repeated(self, job: Job, join: Join) -> bool:
        """Return whether nothing is new in a join: its runner waits already, lives as it did, and has no result.

        While a round of thousands of nodes waits for one of them, all others ask again every 20 s, and a look at all
        nodes for each would cost their number squared. Of few each is looked at.
        """
        waiting, runner = job.waiting.get(join.node), job.runners.get(join.node)
        return (
            len(job.waiting) > diagnose.SMALL
            and waiting is not None
            and waiting.join.join_id == join.join_id
            and join.check is None
            and runner is not None
            and runner.runner_id == join.runner_id
            and runner.is_alive(self._clock())
        )

    async def _give_way(self, job: Job, join: Join) -> None:
        """Make sure that no other living runner serves the node."""
        if join.runner_id in job.superseded:
            raise RefusedError(f"node {join.node} of job {job.name} is served by another runner now")
        rival = job.runners.get(join.node)
        if rival is None or rival.runner_id == join.runner_id or job.state in FINAL or join.node in job.round.left:
            return
        if rival.is_alive(self._clock()) and await self._answers(rival):
            raise RefusedError(
                f"job {job.name} already has a living runner on node {join.node}: stop it first, or give this one "
                "another --job or --node name"
            )
        if job.runners.get(join.node) is not rival:
            await self._give_way(job, join)

    async def _answers(self, runner: Runner) -> bool:
        """Ask a runner whether it lives, and wait for its next request."""
        before = runner.requests
        runner.nudge()
        deadline_s = self._clock() + RIVAL_S
        while runner.requests == before and (left_s := deadline_s - self._clock()) > 0:
            await wait_in(runner.watchers, left_s)
        return runner.requests != before

    def _register(self, job: Job, join: Join) -> Job:
        """Take the join in and return the life of the job it belongs to; what follows from it is the driver's."""
        now_s = self._clock()
        self._transitions.witness(job, round_=join.previous_round, incidents=join.incidents)
        if job.state in FINAL:
            if join.runner_id in job.known_runners:
                self._keep_runner(job, join, now_s)
                return job
            job = self._start_again(job)
        if not job.record.members and not job.waiting:
            if join.previous_round > job.record.round:
                # The journal was lost: go on counting, since agents and folders use the numbers given before.
                job.change(round=join.previous_round, incidents=max(job.record.incidents, join.previous_round))
            terms.take_policy(
                job, join.policy, self._transitions, f"{join.node} starts the job with another policy than before"
            )
            job.change(
                job_id=job.record.job_id or join.job_id or uuid.uuid4().hex,
                min_nodes=join.min_nodes,
                max_nodes=join.max_nodes,
                run_dir=join.run_dir,
                started_wall_s=job.record.started_wall_s or self._transitions.wall(),
                since_wall_s=self._transitions.wall(),
            )
            job.entered_s = now_s
        else:
            terms.check_agreement(job, join, self._transitions)
        _check_size(job, join)
        member = job.member(join.node)
        replaced = member is not None and member.runner_id != join.runner_id
        self._keep_runner(job, join, now_s)
        checks.take_result(self._transitions, job, join)
        if member is not None and member.join_id == join.join_id:
            return job  # its answer was lost
        waiting = job.waiting.get(join.node)
        if waiting is not None and waiting.join.join_id == join.join_id:
            return job
        job.waiting[join.node] = Waiting(join, now_s)
        if member is not None and job.state in ACTIVE:
            self._end_round(job, join, replaced=replaced)
        elif member is not None and join.previous_round == job.record.round:
            self._take_word(job, join)
        return job

    def _end_round(self, job: Job, join: Join, *, replaced: bool) -> None:
        """A node of the running round asks for the next one: its ranks are gone."""
        if not replaced:
            self._take_word(job, join)
            failures.fail(self._transitions, job, join.node)
            return
        verdict = Verdict(
            fault="runner_lost",
            reason=f"{join.node}: its runner was started again, the one before is gone and its ranks with it",
            confidence=0.95,
            nodes=(join.node,),
            since_wall_s=self._transitions.wall(),
            round=job.record.round,
            otherwise="a request of the runner before",
        )
        failures.lose_nodes(self._transitions, job, verdict)

    def _take_word(self, job: Job, join: Join) -> None:
        """Take in a node's report of the round that is over for it."""
        failures.take_exits(job, join.node, join.exits, join.mono_s, self._clock())
        # Thousands join at once, and hardly any has missed a node: all are not listed for each.
        nodes = list(job.nodes) if join.unmet else []
        job.round.unmet[join.node] = tuple(nodes[place] for place in join.unmet if 0 <= place < len(nodes))

    def _keep_runner(self, job: Job, join: Join, now_s: float) -> None:
        runner = job.runners.get(join.node)
        if runner is None or runner.runner_id != join.runner_id:
            if runner is not None:
                job.superseded.add(runner.runner_id)
                runner.wake()
            job.runners[join.node] = Runner(join.runner_id, now_s)
        job.known_runners.add(join.runner_id)

    def _start_again(self, over: Job) -> Job:
        """A job that was over begins a new life: rounds and incidents count on, what happened before is forgiven.

        Runners of the life that is over keep the old object and get its end as the answer.
        """
        self._transitions.withdraw(over, set(over.orders))
        job = self._jobs[over.name] = Job(next_life(over.record), self._clock(), saved=over.saved)
        self._transitions.witness(job, round_=over.heard_round, incidents=over.heard_incidents)
        text = f"life {job.record.life} begins"
        self._transitions.move(job, EventKind.STARTED_AGAIN, text, started_wall_s=self._transitions.wall())
        return job

    def _answer(self, job: Job, join: Join) -> JoinReply | None:
        """Return the answer to a join, None while there is none."""
        record = job.record
        if job.state in FINAL:
            return JoinReply(
                status="stop",
                round=record.round,
                reason=record.reason,
                exit_code=record.exit_code,
                incident=record.ended_incident,
                verdict=record.ended_verdict,
                incidents=record.incidents,
            )
        member = job.member(join.node)
        if member is not None and member.join_id == join.join_id:
            master = record.members[0]
            return JoinReply(
                status="go",
                round=record.round,
                node_rank=job.round.places[join.node],
                nodes=len(record.members),
                master_addr=master.addr,
                master_port=master.store_port,
                incident=record.ended_incident,
                verdict=record.ended_verdict,
                job_id=record.job_id,
                incidents=record.incidents,
                restore_before=record.restore_before,
            )
        if job.runners[join.node].runner_id != join.runner_id:
            raise RefusedError(f"node {join.node} of job {job.name} is served by another runner now")
        life = self._transitions.nodes.book.life(join.node)
        if life.state == NodeState.UNDER_CHECK and join.can_check and join.check is None:
            which = GPU_CHECKS if join.node in job.checks.gpus_only else ()
            return JoinReply(status="check", reason=life.reason, checks=which)
        return None

    def _why_out(self, job: Job, node: str) -> str:
        return decide.why_out(self._transitions, job, node, self._transitions.wall())

    def _must_be_told(self, job: Job, join: Join) -> bool:
        """Return whether a runner waits outside of a round and does not know it yet; once for each join."""
        waiting = job.waiting.get(join.node)
        if waiting is None or waiting.told or not self._why_out(job, join.node):
            return False
        waiting.told = True
        return True


def _check_size(job: Job, join: Join) -> None:
    """Refuse a node with which the job would have more ranks than can be judged."""
    # Nodes of one job have equally many ranks: adding them up anew for each of 12,500 joins would take 8 s.
    if join.nproc * (len(job.waiting) + 1) <= MOST_RANKS:
        return
    others = sum(waiting.join.nproc for node, waiting in job.waiting.items() if node != join.node)
    if others + join.nproc > MOST_RANKS:
        raise UsageError(
            f"node {join.node} offers {join.nproc} ranks beside {others} of other nodes: a job has at most {MOST_RANKS}"
        )


def _check_join(join: Join) -> None:
    check_version(f"the join of node {join.node}", join.version, MESSAGE_VERSION)
    check_name("job", join.job)
    check_name("node", join.node)
    if not join.runner_id or not join.join_id:
        raise UsageError("a join needs a runner_id and a join_id")
    if join.nproc < 1:
        raise UsageError(f"node {join.node} offers {join.nproc} ranks: at least 1 is needed")
    if not 1 <= join.min_nodes <= join.max_nodes <= MOST_NODES:
        raise UsageError(f"nodes {join.min_nodes}:{join.max_nodes} can't be: 1 <= MIN <= MAX <= {MOST_NODES}")
    if not 1 <= join.store_port <= 65535:
        raise UsageError(f"store port {join.store_port} can't be: 1 to 65535")
    if join.previous_round:
        return  # a job that runs does not end for a word: what is no action leaves the table's in force
    try:
        check_policy(join.policy)
    except UsageError as error:
        raise UsageError(f"node {join.node} brings a policy that can't be used: {error}") from None
