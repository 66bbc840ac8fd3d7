# SPDX-License-Identifier: Apache-2.0
"""Drive one job along the recovery table: look at what is known, ask the judges, move.

Each state has one function that looks whether it can be left; ``advance`` calls them until nothing moves any more and
saves. It is called when something has happened (a join, a leave, evidence, an odd heartbeat), so a crash is answered
at once, and ten times a second, for everything that happens by time passing.
"""

from collections.abc import Iterable, Sequence

import msgspec

from megascale_ops.controller import incidents, pace, policy, ski_rental, tuning
from megascale_ops.controller.confirming import Confirming, harmless, is_left_running
from megascale_ops.controller.deciding import Deciding
from megascale_ops.controller.decisions import Decision, would
from megascale_ops.controller.forming import form
from megascale_ops.controller.job import Job, Member
from megascale_ops.controller.moves import Moves
from megascale_ops.controller.recovery import EventKind, State
from megascale_ops.controller.registry import RankView
from megascale_ops.controller.sight import SCAN_EACH_RANK_S, Sight
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import Order

_replace = msgspec.structs.replace

# 10 s: a frozen rank costs its runner a SIGKILL, gigabytes of memory cost 64 ms each; then the others go on without.
STOP_DEADLINE_S = 10.0
# 5 s: a node whose agent never spoke can't tell that its ranks are up; its runner's polls must do.
NO_AGENT_S = 5.0
# 3 s after all processes are up without a black box among them: it is no torch script, there is nothing to wait for.
NO_BOX_S = 3.0
_MOVED = {
    State.RUNNING: EventKind.MOVED,
    State.DEGRADED: EventKind.MOVED_SHORT,
    State.CATCHING_UP: EventKind.MOVED_EARLY,
}


class Driver:
    """Moves jobs; the only thing it remembers is in the jobs themselves."""

    def __init__(self, moves: Moves, sight: Sight) -> None:
        self._moves = moves
        self._sight = sight
        self.deciding = Deciding(moves, sight)
        self._confirm = Confirming(moves, sight)
        self._leave_state = {
            State.REPLACING: self._replacing,
            State.RESTARTING: self._restarting,
            State.CATCHING_UP: self._catching_up,
            State.RUNNING: self._running,
            State.DEGRADED: self._degraded,
            State.SUSPECT: self._suspect,
            State.CONFIRMING: self._confirming,
            State.STOPPING: self._stopping,
            State.DIAGNOSING: self._diagnosing,
        }

    def advance(self, job: Job) -> None:
        """Move as far as what is known allows, and journal it."""
        now_s = self._moves.clock()
        self._moves.save(job)
        while (leave := self._leave_state.get(job.state)) is not None and leave(job, now_s):
            self._moves.save(job)  # each state of its own, so that a crash between any two finds its place again
        self._moves.save(job)

    def end(self, job: Job, event: EventKind, text: str, exit_code: int) -> None:
        """The job is over: finished, cancelled or given up."""
        self._close_round(job)
        if job.incident is not None:
            # Ranks that finish while they are still looked at were slow to leave, and nothing was stopped.
            left_alone = event is EventKind.RANKS_FINISHED and job.state is State.CONFIRMING
            state = "harmless" if left_alone else "ended"
            self._moves.put_incident(job, incidents.close(job.incident, state, text))
        self._moves.move(job, event, text, reason=text, exit_code=exit_code, incident="", verdict=None)
        job.suspicion = None

    # One function for each state: can it be left?

    def _running(self, job: Job, now_s: float) -> bool:
        """Has somebody fallen silent, and is a warning worth a restart by now?"""
        return self._watch(job, now_s) or self.deciding.weigh_warnings(job, now_s)

    def _watch(self, job: Job, now_s: float) -> bool:
        """Has somebody fallen silent of whom that is not known yet?"""
        if self.deciding.is_left_alone(job, now_s) or not job.odd:
            return False
        suspicion = self._sight.judge_silence(job, now_s)
        if suspicion is None:
            return False
        job.suspect_wall_s = self._moves.wall()
        self._moves.move(job, EventKind.SILENCE, suspicion.verdict.reason, before=job.record.state)
        return True

    def _degraded(self, job: Job, now_s: float) -> bool:
        """As running; and is there a node more?"""
        if self._running(job, now_s):
            return True
        offered = self.deciding.spares(job)
        if not offered:
            return False
        verdict = Verdict(
            fault="membership",
            reason=f"{', '.join(offered)} can join {len(job.record.members)} nodes of {job.record.max_nodes}",
            confidence=1.0,
            nodes=tuple(offered),
            since_wall_s=self._moves.wall(),
            since_step=job.step,
            round=job.record.round,
        )
        if self.deciding.leave_offer(job, verdict):
            return False
        self._moves.open_incident(job, verdict, detected=self._moves.wall())
        self._moves.mark(job, "ordered")
        self._moves.move(job, EventKind.NODE_OFFERED, verdict.reason, verdict=verdict)
        return True

    def _suspect(self, job: Job, now_s: float) -> bool:
        """Does it move again, or is patience used up?"""
        if self._sight.is_blind(job, now_s):
            return False
        suspicion = self._sight.judge_silence(job, now_s)
        if suspicion is None and self._sight.has_moved(job):
            self._moved(job, "the suspects move again")
            return True
        return suspicion is not None and self._confirm.begin(job, suspicion)

    def _confirming(self, job: Job, now_s: float) -> bool:
        """Is the evidence in (or its time over) and what does it say, or was it a false alarm?"""
        if self._sight.is_blind(job, now_s):
            return False
        suspicion = self._sight.judge_silence(job, now_s)
        if suspicion is None and self._sight.has_moved(job):
            return self._end_harmless(job, job.record.verdict)
        if (missing := self._confirm.unanswered(job, now_s)) is None:
            return False
        verdict = self._confirm.weigh(job, suspicion, now_s) if suspicion is not None else job.record.verdict
        if verdict is None:
            return False
        if is_left_running(job, verdict):
            return self._end_harmless(job, verdict)
        self._act_upon(job, verdict, missing)
        return True

    def _act_upon(self, job: Job, verdict: Verdict, missing: Sequence[Order]) -> None:
        """Stop the suspects, unless the policy leaves them alone."""
        verdict = self._sight.quote_hardware(job, verdict)
        job.change(verdict=verdict)
        if self.deciding.leave_alone(job):
            return
        self._moves.mark(job, "ordered")
        text = f"evidence: {len(missing)} orders without answer" if missing else "all evidence is in"
        self._moves.move(job, EventKind.EVIDENCE_COMPLETE, f"{text}: {verdict.reason}")

    def _end_harmless(self, job: Job, verdict: Verdict | None) -> bool:
        """The suspects are not stuck: go on as before, and remember how long they were silent."""
        if job.incident is not None:
            self._moves.put_incident(job, incidents.close(job.incident, "harmless", harmless(verdict)))
        self._moves.withdraw(job, job.evidence_wanted)
        self._confirm.learn(job)
        text = (
            "the suspects are slow" if verdict is not None and verdict.fault == "slow" else "the suspects moved again"
        )
        self._moved(job, f"a false alarm: {text} while evidence was gathered", incident="")
        return True

    def _stopping(self, job: Job, now_s: float) -> bool:
        """Has every node that lives stopped its ranks?"""
        if not self._sight.may_scan_nodes(job, now_s):
            return False
        missing = self._sight.not_stopped(job, now_s)
        if missing and now_s - job.entered_s < STOP_DEADLINE_S:
            return False
        self._moves.mark(job, "stopped")
        text = f"no answer from {', '.join(missing)} in {STOP_DEADLINE_S:g} s" if missing else "all ranks have stopped"
        self._moves.move(job, EventKind.ALL_STOPPED, text)
        return True

    def _diagnosing(self, job: Job, now_s: float) -> bool:
        """Give the verdict on the round, and decide what follows; at once, unless the controller was restarted here."""
        missing = self._sight.not_stopped(job, now_s)
        if missing and now_s - job.entered_s < STOP_DEADLINE_S:
            return False  # the runners repeat their joins
        wall_s = self._moves.wall()
        silent = [node for node in job.nodes if node not in job.waiting and node not in job.left]
        verdict = job.record.verdict or self._sight.judge_exits(job, now_s, missing=silent)
        verdict = self._sight.quote_hardware(job, verdict)
        job.step = max([job.step, *(exit_.exit.step for exit_ in job.exits.values())])
        failure = policy.failure_of(verdict, tuple(exit_.exit for exit_ in job.exits.values()))
        question, decision = self.deciding.ask(job, "end", verdict, failure=failure)
        decision = job.record.decided or decision
        stop = decision.action == "stop" or decision.dry_run
        verdict = _replace(verdict, fault=decision.fault, action="none" if decision.dry_run else decision.action)
        if job.incident is None:
            self._moves.open_incident(job, verdict, detected=wall_s)
        incident = _replace(incidents.judge(job.incident, verdict), step_before=job.step) if job.incident else None
        if incident is not None:
            closed = incidents.close(incident, "ended" if stop else "open", _done(decision))
            self._moves.put_incident(job, closed)
        if job.record.decided is None:
            self.deciding.tell(job, question, decision, job.record.incident)
        changes = self.deciding.after(job, verdict, decision)
        self._close_round(job)
        ended = {"ended_verdict": verdict, "ended_incident": job.record.incident, "failure": failure, "verdict": None}
        if stop:
            why = _done(decision) if decision.dry_run else decision.reason
            reason = why if decision.fault == "script_bug" else f"{verdict.reason}. {why}"
            self._moves.move(
                job, EventKind.VERDICT_STOP, reason, reason=reason, exit_code=1, incident="", decided=None, **ended
            )
            return True
        self._moves.move(job, EventKind.VERDICT_RESTART, verdict.reason, **changes, **ended)
        return True

    def _replacing(self, job: Job, now_s: float) -> bool:
        """Can a round be formed?"""
        if not self._sight.may_scan_nodes(job, now_s):
            return False
        record = job.record
        joined = self._sight.joined(job, now_s)
        before = [node for node in job.nodes if node not in job.left]
        formation = form(
            joined,
            min_nodes=record.min_nodes,
            max_nodes=record.max_nodes,
            before=before,
            alive=[node for node in before if self._sight.is_alive(job, node, now_s)],
            now_s=now_s,
            waiting_since_s=job.entered_s,
            last_call_s=record.policy.last_call_s,
            straggler_s=record.policy.node_lost_s,
            evicted=self.deciding.evicted(job),
        )
        if formation.nodes:
            self._form(job, formation.nodes, formation.reason)
            return True
        succeeded = [node for node, leave in job.left.items() if leave.outcome == "succeeded"]
        hopeless = bool(succeeded) and not any(
            self._sight.is_alive(job, node, now_s) for node in before if node not in joined
        )
        waited_s = now_s - job.entered_s
        if waited_s < record.policy.join_timeout_s and not hopeless:
            return False
        text = f"{formation.reason} after {waited_s:.0f} s"
        if hopeless:
            text = f"{', '.join(succeeded)} finished and left, and {formation.reason}"
        self._close_incident_as_ended(job, text)
        self._moves.move(job, EventKind.TIMED_OUT, text, reason=text, exit_code=1, incident="")
        return True

    def _form(self, job: Job, nodes: tuple[str, ...], why: str) -> None:
        """Begin a round of these nodes, in this order."""
        joins = [job.waiting.pop(node).join for node in nodes]
        members = tuple(
            Member(join.node, join.runner_id, join.join_id, join.nproc, join.addr, join.store_port) for join in joins
        )
        void = {order.id for order in job.orders.values() if order.kind != "preserve"}
        self._moves.withdraw(job, void)
        best = max(job.record.best_step, job.record.furthest, job.step)
        self._moves.mark(job, "formed")
        text = f"round {job.record.round + 1} on {', '.join(nodes[:8])}{'...' if len(nodes) > 8 else ''}: {why}"
        self._moves.move(
            job,
            EventKind.NODES_READY,
            text,
            round=job.record.round + 1,
            members=members,
            policy=tuning.apply(joins[0].policy, job.record.tuned),
            launch_policy=joins[0].policy,
            left_alone=None,
            run_dir=job.record.run_dir or joins[0].run_dir,
            best_step=best,
            furthest=-1,
        )
        job.exits.clear()
        job.left.clear()
        job.paces = {}
        job.suspicion = None
        job.odd = False
        job.step = -1
        job.formed_wall_s = self._moves.wall()
        job.steps_began_wall_s = job.last_step_wall_s = 0.0

    def look_at_pace(self, job: Job, node: str, ranks: Iterable[RankView]) -> None:
        """Note how far a node is, from its heartbeat; needed only until the job has caught up."""
        job.paces[node] = pace.look(ranks, job.record.best_step, self._moves.wall())

    def _restarting(self, job: Job, now_s: float) -> bool:
        """Are all ranks up?"""
        record = job.record
        waited_s = now_s - job.entered_s
        if len(job.paces) < len(record.members) and waited_s < NO_AGENT_S:
            return False
        if not all(self._is_up(job, member, now_s) for member in record.members):
            return False
        self._moves.move(job, EventKind.RANKS_UP, f"all {record.world_size} ranks are up")
        return True

    def _is_up(self, job: Job, member: Member, now_s: float) -> bool:
        """Say whether a node's ranks are up: its agent says so, or there is none and its runner polls."""
        known = job.paces.get(member.node)
        if known is not None and known.reported >= member.nproc:
            return True
        runner = job.runners.get(member.node)
        polls = runner is not None and runner.round == job.record.round
        return polls and not self._moves.agent_is_fresh(member.node, now_s)

    def _catching_up(self, job: Job, now_s: float) -> bool:
        """Has every rank stepped, and as far as the round before?"""
        if self._watch(job, now_s):
            return True
        if now_s - job.scanned_s < job.record.world_size * SCAN_EACH_RANK_S:
            return False
        job.scanned_s = now_s
        now = pace.total(job.paces)
        if now.boxes == 0 and not job.record.had_boxes:
            if now_s - job.entered_s < NO_BOX_S:
                return False
            self._recovered(job, self._moves.wall(), "all ranks are up; no black box tells of their steps")
            return True
        return now.reported > 0 and self._has_stepped(job, now)

    def _has_stepped(self, job: Job, now: pace.Pace) -> bool:
        """Note first steps, and leave catching up when every rank is as far as the round before."""
        if now.stepped < max(now.reported, job.record.world_size):
            return False
        self._moves.mark(job, "stepped", now.first_step_wall_s)
        self._account_resumed(job, now)
        if now.caught_up < now.stepped:
            return False
        job.change(had_boxes=True, step_s=now.step_s, steps_are_absolute=now.is_absolute)
        best = f" and have passed step {job.record.best_step}" if job.record.best_step >= 0 else ""
        self._recovered(job, now.caught_up_wall_s, f"all {job.record.world_size} ranks step{best}")
        return True

    def _recovered(self, job: Job, wall_s: float, text: str) -> None:
        self._moves.mark(job, "caught_up", wall_s)
        if job.incident is not None:
            price_s = ski_rental.price_of(job.incident, job.record.step_s)
            if price_s:
                job.change(prices_s=(*job.record.prices_s, price_s)[-ski_rental.MOST_PRICES :])
            self._moves.put_incident(job, incidents.close(job.incident, "recovered"))
        job.paces = {}
        short = len(job.record.members) < job.record.max_nodes
        self._moves.move(job, EventKind.CAUGHT_UP_SHORT if short else EventKind.CAUGHT_UP, text, incident="")

    # What they share.

    def _moved(self, job: Job, text: str, **changes: object) -> None:
        event = _MOVED.get(State(job.record.before or State.RUNNING), EventKind.MOVED)
        self._moves.move(job, event, text, verdict=None, before="", **changes)
        job.suspicion = None
        job.evidence_wanted = set()

    def _close_incident_as_ended(self, job: Job, text: str) -> None:
        if job.incident is not None:
            self._moves.put_incident(job, incidents.close(job.incident, "ended", text))

    def _close_round(self, job: Job) -> None:
        """Add what the round's steps covered to the job's useful time."""
        if job.steps_began_wall_s:
            covered_s = max(0.0, job.last_step_wall_s - job.steps_began_wall_s)
            job.change(useful_s=job.record.useful_s + covered_s)
            job.steps_began_wall_s = 0.0
        # A round that was broken before it had caught up for the first time has shown its boxes all the same.
        had_boxes = job.record.had_boxes or job.step >= 0
        job.change(best_step=max(job.record.best_step, job.record.furthest, job.step), had_boxes=had_boxes)

    def _account_resumed(self, job: Job, now: pace.Pace) -> None:
        """Take the steps that must be made again out of the useful time; once for each incident."""
        if job.incident is None or job.incident.step_after >= 0 or not now.is_absolute:
            return
        lost = max(0, job.record.best_step - now.resumed_at + 1)
        job.change(useful_s=max(0.0, job.record.useful_s - lost * now.step_s), steps_are_absolute=True)
        self._moves.put_incident(job, _replace(job.incident, step_after=now.resumed_at))


def _done(decision: Decision) -> str:
    """Return what follows the end of a round, for the incident."""
    if decision.dry_run:
        return f"{would(decision)}; without a restart the job ends, as it would have without supervision"
    if decision.action == "stop":
        return f"not started again: {decision.reason}"
    without = f" without {', '.join(decision.nodes)}" if decision.nodes else ""
    return f"restarted{without}: {decision.reason}"
