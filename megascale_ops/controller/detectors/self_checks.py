# SPDX-License-Identifier: Apache-2.0
"""Self-checks of nodes through their agents: asked for by people, and of a GPU that a verdict speaks of.

A person's check is refused where a job trains on the node, unless it may disturb it. A verdict "slow, by the GPU"
(cause gpu or throttled) owes its GPU a check: it is made in the next pause, when the ranks of that node are gone and
its runner waits for the next round, which is held up for it; or at once, beside the training, where the job's policy
says so (``check_preempts``). What comes of it is written into the incident, whether or not that is over by then, and
held against the node where it is bad. A GPU that did not come to its collective, which ended the round, owes one, too
(``recovery/checks``). Other verdicts owe nothing.

No node is measured twice in one pause, nor by two at once: where its runner measures it (``recovery/checks``), which is
more than a GPU, that is the check that was owed; and while an agent measures, no runner is asked to.

A check ends in any case: with the agent's answer, with the agent's own deadline, or ``SLACK_S`` later here. The newest
result of each node is kept with its life (``controller.nodes.newest_checks``).
"""

import secrets
from collections.abc import Callable, Iterable, Mapping

from megascale_ops.controller.job import incidents
from megascale_ops.controller.job.diagnose import gpu_of
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.owed_checks import GPU_CHECKS, OwedCheck
from megascale_ops.controller.job.transitions import Transitions
from megascale_ops.controller.nodes.evidence import Accusation
from megascale_ops.controller.nodes.life import NodeState
from megascale_ops.controller.record.state_machine import ACTIVE, FINAL, State
from megascale_ops.errors import NotFoundError, RefusedError
from megascale_ops.schema.events import Incident
from megascale_ops.schema.health import DEADLINES_S, CheckAsk, NodeCheck, SelfCheck, SelfCheckView, Verdict
from megascale_ops.schema.messages import DIAGNOSE, SELF_CHECK, Evidence, EvidenceItem, Order
from megascale_ops.schema.wording import duration

# 5 s: a heartbeat takes the order to the agent within 1, and its answer is on its way at once.
SLACK_S = 5.0
# 60 s: those checks take 15 s with torch's import, and a round waits for them.
GPU_CHECK_S = 60.0
# An hour: what is owed for longer was about another state of the machine.
OWED_S = 3600.0
MOST_SAID = 3  # of a check's findings, in the history of a node
_SLOW_GPU = ("gpu", "throttled")
_PREFIX = f"{SELF_CHECK}-"


class _Asked:
    """One check that is asked for and not answered."""

    def __init__(self, order: Order, until_s: float, wall_s: float, owed: OwedCheck | None) -> None:
        self.order = order
        self.until_s = until_s
        self.wall_s = wall_s
        self.owed = owed


class SelfChecks:
    """The checks of all nodes.

    Args:
        transitions: holds the orders that agents are given, the registry and the clocks.
        jobs: all jobs, by name.
        book: the newest incidents of all jobs.
        measures_itself: whether the runner of a job's node measures it in this pause.
    """

    def __init__(
        self,
        transitions: Transitions,
        jobs: Mapping[str, Job],
        book: Mapping[str, Incident],
        measures_itself: Callable[[Transitions, Job, str], bool],
    ) -> None:
        self._transitions = transitions
        self._jobs = jobs
        self._book = book
        self._measures_itself = measures_itself
        self._asked: dict[str, _Asked] = {}  # by node

    def begin(self, node: str, ask: CheckAsk, reason: str) -> SelfCheckView:
        """Ask a node's agent for a check, for a person.

        Raises:
            NotFoundError: no agent of such a node was ever heard.
            RefusedError: it is not heard, a check is being made already, or a job trains there.
        """
        if self._transitions.registry.node(node) is None:
            known = sorted({view.node for view in self._transitions.registry.nodes()})
            some = ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")
            raise NotFoundError(f"no agent of a node {node!r} was heard; heard of: {some or 'none'}")
        if not self._is_heard(node):
            raise RefusedError(
                f"the agent of node {node} is not heard, so it can't be checked from here: run `megascale-ops "
                "diagnose` on that node"
            )
        if node in self._asked:
            raise RefusedError(f"node {node} is being checked already ({self._asked[node].order.reason})")
        life = self._transitions.nodes.book.life(node)
        if life.state == NodeState.UNDER_CHECK:
            raise RefusedError(f"node {node} is measured by its runner right now ({life.reason})")
        job = next((one for one in self._jobs.values() if one.state in ACTIVE and node in one.nodes), None)
        if job is not None and not ask.preempt:
            raise RefusedError(
                f"job {job.name} trains on node {node}: --preempt checks it all the same, and training is slower "
                "meanwhile"
            )
        self._order(node, ask, reason, DEADLINES_S[ask.depth])
        return self.view(node)

    def view(self, node: str) -> SelfCheckView:
        """Return what is known of a node's newest check."""
        asked = self._asked.get(node)
        if asked is not None:
            return SelfCheckView(node, "waiting", asked.order.id, asked.wall_s, asked.order.reason)
        return self._transitions.nodes.checks.of(node)

    def ingest_evidence(self, evidence: Evidence) -> bool:
        """Take an agent's answer; say whether it is one to such an order, also to one that is given up."""
        if evidence.incident or not evidence.order.startswith(_PREFIX):
            return False
        asked = self._asked.get(evidence.node)
        if asked is None or asked.order.id != evidence.order or not evidence.items:
            return True
        item = evidence.items[0]
        if item.check is None:  # an older one refuses an order that it does not know
            self._end(asked, _without(asked.order, f"the agent of node {evidence.node} is too old for it: update it"))
        else:
            self._end(asked, item.check)
        return True

    def forget(self, node: str, ids: Iterable[str]) -> None:
        """Orders are taken: they are not given again, and answered later."""
        held = self._transitions.agent_orders.get(node, {})
        for order_id in ids:
            if order_id in held and held[order_id].kind == DIAGNOSE:
                del held[order_id]
        if not held:
            self._transitions.agent_orders.pop(node, None)

    def poll(self) -> None:
        """Let time pass: end what has no answer, note what is owed, begin what can be begun."""
        now_s = self._transitions.clock()
        for asked in [one for one in self._asked.values() if now_s >= one.until_s]:
            text = f"the agent of node {asked.order.node} has not answered within {duration(now_s - _begun_s(asked))}"
            self._end(asked, _without(asked.order, text))
        for job in self._jobs.values():
            self._note_owed(job, now_s)
            for owed in list(job.owed_checks.values()):
                self._poll_owed(job, owed, now_s)

    def _note_owed(self, job: Job, now_s: float) -> None:
        """Note what the warnings that hold owe: a check for each that calls a GPU slow."""
        for incident in list(job.round.warnings.values()):
            verdict = incident.verdict
            if verdict is None or not is_slow_gpu(verdict) or incident.id in job.checks_noted:
                continue
            job.checks_noted.add(incident.id)
            node, rank = verdict.nodes[0], verdict.culprits[0]
            for owed in [one for one in job.owed_checks.values() if (one.node, one.rank) == (node, rank)]:
                if not owed.begun:  # told, over and told again without a pause: one check for the newest
                    del job.owed_checks[owed.incident]
            gpu = gpu_of(self._transitions.registry, job, node, rank)
            job.owed_checks[incident.id] = OwedCheck(incident.id, node, rank, gpu, now_s)
            at_once = job.record.policy.check_preempts
            when = "at once, beside the training" if at_once else "when the job pauses next"
            self._tell(job, incident.id, f"{job.owed_checks[incident.id].who} is checked {when}")

    def _poll_owed(self, job: Job, owed: OwedCheck, now_s: float) -> None:
        if owed.begun:
            return
        if owed.instead is not None:
            self._take_instead(job, owed, owed.instead)
            return
        if job.state in ACTIVE:
            owed.until_s = 0.0
        if now_s - owed.since_s > OWED_S:
            self._give_up(job, owed, f"there was no pause within {duration(OWED_S)}")
            return
        in_pause = (job.state is State.REPLACING and owed.node in job.waiting) or job.state in FINAL
        if not (in_pause or (job.record.policy.check_preempts and job.state in ACTIVE)):
            return
        is_taken = owed.node in self._asked  # by a person's check: its turn comes
        if in_pause and not is_taken and self._measures_itself(self._transitions, job, owed.node):
            return
        others = in_pause and bool(self._transitions.nodes.runs_on(owed.node))
        # Another job's ranks there are no pause of the node, and no round waits for their end.
        owed.until_s = owed.until_s or (now_s if others else now_s + GPU_CHECK_S + SLACK_S)
        is_late = job.state is State.REPLACING and now_s >= owed.until_s  # the round is formed: in the next pause
        if not self._is_heard(owed.node):
            self._give_up(job, owed, f"the agent of node {owed.node} is not heard")
        elif not (is_taken or others or is_late):
            owed.begun = True
            reason = f"incident {owed.incident}: {owed.why}"
            ask = CheckAsk(checks=GPU_CHECKS, preempt=not in_pause)
            self._order(owed.node, ask, reason, GPU_CHECK_S, owed, job.name)

    def _take_instead(self, job: Job, owed: OwedCheck, check: NodeCheck) -> None:
        """What the runner has measured is the check; the node's life has taken it in already."""
        del job.owed_checks[owed.incident]
        said = {"good": "finds nothing bad", "bad": f"finds: {check.text}"}
        what = said.get(check.outcome, f"could not be made: {check.text}")
        where = f"; the report is {check.path} on {owed.node}" if check.path else ""
        text = f"the self-check of node {owed.node}, {duration(check.seconds)}, for {owed.who}, {what}{where}"
        ok = check.outcome in said
        self._write(job, owed, EvidenceItem(SELF_CHECK, ok=ok, rank=owed.rank, text=text, took_s=check.seconds))

    def _give_up(self, job: Job, owed: OwedCheck, why: str) -> None:
        del job.owed_checks[owed.incident]
        self._write(job, owed, EvidenceItem(SELF_CHECK, ok=False, rank=owed.rank, text=f"not checked: {why}"))

    def _order(
        self, node: str, ask: CheckAsk, reason: str, deadline_s: float, owed: OwedCheck | None = None, job: str = ""
    ) -> None:
        order = Order(
            id=f"{_PREFIX}{secrets.token_hex(8)}",
            job=job,
            node=node,
            kind=DIAGNOSE,
            round=0,
            reason=reason,
            deadline_s=deadline_s,
            ask=ask,
        )
        until_s = self._transitions.clock() + deadline_s + SLACK_S
        self._asked[node] = _Asked(order, until_s, self._transitions.wall(), owed)
        self._transitions.nodes.by_agent.add(node)
        self._transitions.agent_orders.setdefault(node, {})[order.id] = order

    def _end(self, asked: _Asked, found: SelfCheck) -> None:
        """Keep what came of a check, and write it where it belongs."""
        order = asked.order
        del self._asked[order.node]
        self._transitions.nodes.by_agent.discard(order.node)
        self.forget(order.node, (order.id,))
        view = SelfCheckView(order.node, "done", order.id, asked.wall_s, order.reason, found)
        self._transitions.nodes.keep_check(view)
        job = self._jobs.get(order.job)
        if asked.owed is None or job is None:
            return
        job.owed_checks.pop(asked.owed.incident, None)
        text = told(asked.owed, found, is_shared=job.state in ACTIVE)
        item = EvidenceItem(
            SELF_CHECK, ok=not found.trouble, rank=asked.owed.rank, text=text, took_s=found.seconds, check=found
        )
        self._write(job, asked.owed, item)
        self._accuse(job, asked.owed, found, text)

    def _accuse(self, job: Job, owed: OwedCheck, found: SelfCheck, text: str) -> None:
        """Hold a bad check against its node; not one that was killed: it has measured nothing."""
        bad = tuple(one.text for one in found.findings if one.severity == "bad")
        view = self._transitions.registry.node(owed.node, job.name)
        # On the word of a job's own agent no node is kept from all others.
        if found.trouble or not bad or view is None or view.only_job:
            return
        said = (f"incident {owed.incident}", *bad[:MOST_SAID])
        wall_s = self._transitions.wall()
        move = self._transitions.nodes.accuse(Accusation(owed.node, "check", wall_s, text, said, job.name))
        if move is not None and job.state is State.REPLACING:
            job.checks.accused.add(owed.node)

    def _write(self, job: Job, owed: OwedCheck, item: EvidenceItem) -> None:
        """Write what came of an owed check into its incident and the journal."""
        incident = self._book.get(owed.incident)
        if incident is not None:
            incident = incidents.add_evidence(incident, (item,))
            for key, one in job.round.warnings.items():
                if one.id == incident.id:
                    job.round.warnings[key] = incident
                    break
            self._transitions.put_incident(job, incident)
        self._tell(job, owed.incident, item.text)

    def _tell(self, job: Job, incident: str, text: str) -> None:
        self._transitions.note(job, SELF_CHECK, f"{incident}: {text}")
        self._transitions.save(job)

    def _is_heard(self, node: str) -> bool:
        view = self._transitions.registry.node(node)
        return view is not None and self._transitions.clock() - view.heard_s <= view.fresh_s


def is_slow_gpu(verdict: Verdict) -> bool:
    """Return whether a verdict says that a rank is slow by its GPU."""
    return (
        verdict.fault == "straggler"
        and verdict.cause in _SLOW_GPU
        and len(verdict.culprits) == 1
        and bool(verdict.nodes)
    )


def told(owed: OwedCheck, found: SelfCheck, *, is_shared: bool) -> str:
    """Return what a check says of the GPU that a verdict speaks of, one sentence with its numbers.

    Args:
        owed: whose check it was.
        found: what came of it.
        is_shared: it was made beside the training, so that its figures are of a GPU that others used.
    """
    who = owed.who
    if found.trouble:
        return f"{who}: {found.trouble}"
    label = next((label for label, uuid in found.gpus.items() if _same(uuid, owed.gpu)), "")
    mine = [one for one in found.findings if one.severity != "note" and label and one.of == label]
    others = [one for one in found.findings if one.severity != "note" and one not in mine]
    shared = " (beside the training)" if is_shared else ""
    head = f"the self-check of {who}{shared}, {duration(found.seconds)},"
    if mine:
        return f"{head} finds: {'; '.join(one.text for one in mine[:2])}"
    if found.status == "unmeasured":
        return f"{head} could measure nothing: {'; '.join(found.unmeasured[:2]) or 'no reason was given'}"
    if not label:
        rest = f"; of the node it finds: {others[0].text}" if others else ""
        return f"{head} does not know which GPU the rank had{rest}"
    rates = [one.text for one in found.figures if one.name in ("gemm_bf16", "hbm_copy")]
    also = f"; of the node: {others[0].text}" if others else ""
    measured = f" ({'; '.join(rates)})" if rates else ""
    return f"{head} finds nothing against {label}{measured}{also}"


def _same(one: str, other: str) -> bool:
    """Return whether two UUIDs of GPUs are the same; torch leaves NVML's prefix out."""
    return bool(other) and one.removeprefix("GPU-") == other.removeprefix("GPU-")


def _begun_s(asked: _Asked) -> float:
    return asked.until_s - asked.order.deadline_s - SLACK_S


def _without(order: Order, trouble: str) -> SelfCheck:
    depth = order.ask.depth if order.ask is not None else "quick"
    return SelfCheck(order.node, depth, "unmeasured", trouble=trouble)
