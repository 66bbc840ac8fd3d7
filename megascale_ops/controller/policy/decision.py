# SPDX-License-Identifier: Apache-2.0
"""What a decision is made of: a question that carries all its inputs, and an answer with its reason.

Every decision of the controller is written into its journal as an event of kind "decision" with the whole question in
it. So it can be asked again later, of the same functions, with the same policy or another one: nothing that a judge
reads comes from anywhere but the question.

Pure: structs, and the way into the journal and back.
"""

from collections import Counter

import msgspec

from megascale_ops.foreign import UNREADABLE
from megascale_ops.schema.events import Event
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.policy import JobPolicy

HOUR_S = 3600.0
EVENT_KIND = "decision"
# 20: four times as many as the guard against fruitless restarts looks back at, and what the budget of an hour allows.
# Each decision is journaled with them; those before are counted, by cause and node, as long as the hour lasts.
MOST_OLD_RESTARTS = 20


class Restart(msgspec.Struct, frozen=True, omit_defaults=True):
    """One restart of the past, for budgets and guards."""

    wall_s: float
    cause: str
    node: str = ""  # the one that was to blame; "" for none or more than one
    progressed: bool = True  # the round that it ended had made steps that none had made before
    place: str = ""  # of a silence that nothing had proven: a second one there was not cured by this restart
    waited_s: float = 0.0  # before it, for a service
    outage_wall_s: float = 0.0  # since when that is away


class Eviction(msgspec.Struct, frozen=True, omit_defaults=True):
    """One node that a job went on without, and until when it is not taken back while others suffice."""

    node: str
    wall_s: float
    until_wall_s: float
    reason: str = ""


class Failure(msgspec.Struct, frozen=True):
    """What the script fell over: the same words at the same step in two incidents mean the same failure."""

    signature: str
    step: int
    times: int = 1  # in a row, with this one
    of_service: bool = False  # over a service outside of the job that does not answer

    def after(self, before: "Failure | None") -> "Failure":
        """Return it as what followed the failure of the round before: counted on where that was the same."""
        is_again = before is not None and (before.signature, before.step) == (self.signature, self.step)
        return msgspec.structs.replace(self, times=before.times + 1 if before is not None and is_again else 1)


class StateFailure(msgspec.Struct, frozen=True):
    """A failure that what was restored may explain: what it was, at which step, and which step had been restored."""

    cause: str  # the failure's signature, or a class of fault; the same words mean the same
    at: int  # the last step that was made before it
    restored: int = -1  # -1: nothing was, the round began at its first step


class Tab(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a warning has cost so far, as a bar keeps it: until it is worth a restart."""

    since_wall_s: float  # it holds without a break since then
    seen_wall_s: float
    paid_s: float = 0.0
    step: int = -1  # paid up to this one
    acted: int = 0  # how often something was done about it: each time it must cost twice as much as before


class Question(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that a decision depends on. ``kind``: end (of a round), hang (may it be stopped?), warning."""

    kind: str
    wall_s: float
    verdict: Verdict  # without its evidence
    policy: JobPolicy
    restarts: tuple[Restart, ...] = ()
    older: dict[str, int] = {}  # restarts of the last hour that are not among these, by "cause@node"
    restarts_in_all: int = 0
    evictions: tuple[Eviction, ...] = ()
    failure: Failure | None = None
    failure_before: Failure | None = None
    progressed: bool = True
    counts_anew: bool = False  # each round counts its steps from its own start
    members: int = 1  # nodes of the round
    min_nodes: int = 1
    share: float = 1.0  # of all ranks that run on the node to blame, in 0..1
    spares: int = 0  # nodes that wait for a place
    tab: Tab | None = None
    prices_s: tuple[float, ...] = ()  # what this job's restarts have cost
    cut_before: tuple[str, ...] = ()  # nodes that were cut off in the round before, and this one has made no step
    start_s: float = 0.0  # what the last start took, until every rank had made a step; 0: not known
    since_saved_s: float = -1.0  # for how long steps were made that no checkpoint holds; -1: saves can't be seen
    first_node: str = ""  # the one that holds rank 0
    state_failure: StateFailure | None = None
    state_failure_before: StateFailure | None = None  # of the round before
    restore_before: int = -1  # no checkpoint of this step or later is restored: the job has gone one back already


class Decision(msgspec.Struct, frozen=True, omit_defaults=True):
    """What to do, and the sentence with the reason. ``fault`` may sharpen the verdict's class."""

    action: str  # ignore, warn (both: the job goes on as it is), restart, evict (restart without ``nodes``), stop
    reason: str
    fault: str
    rule: str  # the rule that decided, one word
    counted: bool = True  # uses up a budget
    nodes: tuple[str, ...] = ()
    dry_run: bool = False  # it is only reported, not done
    restore_before: int = -1  # from now on no checkpoint of this step or a later one is restored; -1: as it was
    wait_s: float = 0.0  # until the next round may begin
    outage_wall_s: float = 0.0  # since when the service is away that is waited for

    @property
    def acts(self) -> bool:
        """Something is to be done, and may be."""
        return self.action in ("restart", "evict", "stop") and not self.dry_run


def remembered(restarts: tuple[Restart, ...], wall_s: float) -> tuple[tuple[Restart, ...], dict[str, int]]:
    """Return the restarts that rules look at one by one, and how many more of the last hour there are, as ``older``."""
    newest = len(restarts) - MOST_OLD_RESTARTS
    # A silence that a restart did not cure is identified by its place, however long ago.
    at_places = {one.place: at for at, one in enumerate(restarts) if one.place}.values()
    chosen = {*at_places, *range(max(0, newest), len(restarts))}
    older = Counter(
        f"{one.cause}@{one.node}"
        for at, one in enumerate(restarts[: max(0, newest)])
        if at not in chosen and wall_s - one.wall_s < HOUR_S
    )
    return tuple(restarts[at] for at in sorted(chosen)), dict(older)


def blamed_node(verdict: Verdict) -> str:
    """Return the one node that a verdict blames, or ""."""
    return verdict.nodes[0] if len(verdict.nodes) == 1 else ""


def would(decision: Decision) -> str:
    """Return what a dry run did not do, for people."""
    without = f" without {', '.join(decision.nodes)}" if decision.nodes else ""
    words = {"restart": "restarted", "evict": f"restarted{without}", "stop": "stopped the job"}
    return f"dry run: would have {words.get(decision.action, 'done nothing')}: {decision.reason}"


def to_event(question: Question, decision: Decision, *, job: str, round_: int, incident: str) -> Event:
    """Return a decision as the journal keeps it: a sentence, numbers for a quick look, and all of its inputs."""
    verdict = question.verdict
    text = would(decision) if decision.dry_run else f"{decision.action}: {decision.reason}"
    return Event(
        wall_s=question.wall_s,
        job=job,
        kind=EVENT_KIND,
        text=text,
        round=round_,
        node=blamed_node(verdict),
        rank=verdict.culprits[0] if verdict.culprits else -1,
        incident=incident,
        data={
            "about": question.kind,
            "fault": decision.fault,
            "action": decision.action,
            "rule": decision.rule,
            "dry_run": int(decision.dry_run),
            "cost": verdict.cost,
            "paid_s": question.tab.paid_s if question.tab is not None else 0.0,
            "restarts_last_hour": sum(question.wall_s - one.wall_s < HOUR_S for one in question.restarts),
            "question": msgspec.json.encode(question).decode(),
            "decision": msgspec.json.encode(decision).decode(),
        },
    )


def from_event(event: Event) -> tuple[Question, Decision] | None:
    """Return what was asked and answered, or None for an event of another kind or of a version that is unknown here."""
    if event.kind != EVENT_KIND:
        return None
    try:
        question = msgspec.json.decode(str(event.data.get("question", "")), type=Question)
        decision = msgspec.json.decode(str(event.data.get("decision", "")), type=Decision)
    except UNREADABLE:
        return None
    return question, decision
