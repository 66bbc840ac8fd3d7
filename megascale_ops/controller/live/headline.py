# SPDX-License-Identifier: Apache-2.0
"""The headline of a job: one sentence for the engineer woken at night, and the command to type next.

The order in which a person asks: is it over; is something being judged or mended now; is something wrong that stops
nothing; and only when all of that is answered with no: all ranks make progress.

Pure: what the controller knows and the time in, the schema's words out.
"""

import itertools
from collections.abc import Iterable, Sequence

import msgspec

from megascale_ops.controller.cluster.registry import Registry
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.live.moved_again import moved_again
from megascale_ops.controller.live.words import MOST_NAMED, lower, what
from megascale_ops.controller.record.job_record import EVICTED_CODE
from megascale_ops.controller.record.state_machine import STARTING, State
from megascale_ops.schema.courses import course_words
from megascale_ops.schema.events import Incident
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.live import JUDGED, Headline, Pace, Place
from megascale_ops.schema.wording import DOING, duration, percent, start_time

# An hour: an engineer on call needs what happened in the shift before.
RECENT_S = 3600.0
# 10 s, or five steps: a job that makes steps is shown as making progress only as long as they come.
PAUSE_S = 10.0
PAUSE_STEPS = 5.0


def headline(job: Job, registry: Registry, mine: Sequence[Incident], pace: Pace, wall_s: float) -> Headline:
    """Return the headline of a job.

    Args:
        job: as the loop knows it.
        registry: where its ranks have reported on which GPU they are.
        mine: the job's incidents, the newest last.
        pace: how far it is, with its ranks counted.
        wall_s: now.
    """
    said = _say(job, mine, pace, wall_s)
    if not said.culprits:
        return said
    known = next((one.verdict for one in reversed(mine) if one.id == said.incident), None)
    if known is not None and known.round not in (0, job.record.round):
        return msgspec.structs.replace(said, places=_places_before(known))
    return msgspec.structs.replace(said, places=_places(job, registry, said.culprits))


def _say(job: Job, mine: Sequence[Incident], pace: Pace, wall_s: float) -> Headline:
    if job.is_over:
        return _over(job, mine)
    troubled = moved_again(job, mine, wall_s) or _troubled(job, mine, pace)
    if troubled is not None:
        return troubled
    if job.state is State.REPLACING:
        return _forming(job)
    worried = _worried(job)
    if worried is not None:
        return worried
    return _starting(job, pace) if pace.stepped >= 0 else _calm(job, mine, pace, wall_s)


def _worried(job: Job) -> Headline | None:
    """Return what may be wrong and stops nothing; None when nothing is."""
    suspicion = job.told_suspicion
    if suspicion is not None:
        return _of_verdict(job, suspicion.verdict, job.incident, "watch", "it may still move by itself")
    if job.round.warnings:
        worst = max(job.round.warnings.values(), key=lambda one: one.verdict.cost if one.verdict else 0.0)
        if worst.verdict is not None:
            return _of_verdict(job, worst.verdict, worst, "watch", _price(worst.verdict))
    return None


def _troubled(job: Job, mine: Sequence[Incident], pace: Pace) -> Headline | None:
    """Return what is being mended now, or stands and is left alone; None when nothing is."""
    doing = lower(_start_words(job, pace)) if pace.stepped >= 0 else DOING.get(job.state, "")
    if job.incident is not None and job.incident.verdict is not None:
        return _of_verdict(job, job.incident.verdict, job.incident, "act", doing)
    if job.suspicion is not None and job.suspicion.lost:
        return _of_verdict(job, job.suspicion.verdict, job.incident, "act", doing)
    if job.record.left_alone is not None:
        known = next((one for one in mine if one.id == job.record.left_alone.incident), None)
        if known is not None and known.verdict is not None:
            return _of_verdict(job, known.verdict, known, "act", "the policy leaves it alone")
    return None


def level_of(job: Job) -> str:
    """Return how urgently a job wants to be looked at: the level that its headline would have, but for pauses."""
    if job.is_over:
        return "act" if job.state is State.FAILED else "over"
    if job.incident is not None or job.record.left_alone is not None:
        return "act"
    suspicion = job.told_suspicion
    if suspicion is not None:
        return "act" if suspicion.lost else "watch"
    if job.state in (State.REPLACING, *STARTING) and not job.round.has_started:
        return "waiting"
    return "watch" if job.round.warnings else "waiting" if job.is_before_steps else "calm"


def _places_before(verdict: Verdict) -> tuple[Place, ...]:
    """Return where culprits of an earlier round were: other nodes may have their numbers now."""
    node = verdict.nodes[0] if len(verdict.nodes) == 1 else ""
    return tuple(Place(rank, node) for rank in verdict.culprits[:MOST_NAMED])


def _places(job: Job, registry: Registry, culprits: Iterable[int]) -> tuple[Place, ...]:
    """Return where the first few culprits are; between rounds the nodes of the round that ended are still known."""
    found = []
    for rank in itertools.islice(culprits, MOST_NAMED):
        node, local = _seat(job, rank)
        share = registry.share(node, job.name, job.record.round)
        report = share.ranks.get(rank) if share is not None else None
        found.append(Place(rank, node, local, report.gpu if report is not None else ""))
    return tuple(found)


def _over(job: Job, mine: Sequence[Incident]) -> Headline:
    record = job.record
    step = job.furthest_step
    if job.state is not State.FAILED:
        at = f" at step {step:,}" if step >= 0 else ""
        stopped = "was stopped" if record.exit_code == EVICTED_CODE else "was stopped by hand"
        text = f"The job {stopped if job.state is State.STOPPED else 'finished'}{at}."
        return Headline("over", text, record.reason, since_wall_s=record.since_wall_s, command=_list(job, mine))
    last = mine[-1] if mine and mine[-1].state == "ended" else None
    verdict = last.verdict if last is not None else record.ended_verdict
    if verdict is None:
        return Headline(
            "act", "The job failed.", record.reason, since_wall_s=record.since_wall_s, command=_list(job, mine)
        )
    return _of_verdict(job, verdict, last, "act", "the job failed")


def _of_verdict(job: Job, verdict: Verdict, incident: Incident | None, level: str, doing: str) -> Headline:
    others = sum(1 for one in job.round.warnings.values() if incident is None or one.id != incident.id)
    return Headline(
        level=level,
        sentence=f"{what(verdict)}; {doing}." if doing else f"{what(verdict)}.",
        reason=verdict.reason,
        fault=verdict.fault,
        culprits=verdict.culprits,
        since_wall_s=verdict.since_wall_s or (incident.marks.began if incident is not None else 0.0),
        confidence=verdict.confidence,
        sure_of=verdict.sure_of,
        incident=incident.id if incident is not None else "",
        done=incident.done if incident is not None else "",
        command=f"megascale-ops why {incident.id}" if incident is not None else _status(job),
        also=others,
    )


def _forming(job: Job) -> Headline:
    record = job.record
    joined = len(job.waiting)
    text = f"Waiting for nodes: {joined:,} of {record.max_nodes:,} {'has' if joined == 1 else 'have'} joined."
    return Headline("waiting", text, record.reason, since_wall_s=record.since_wall_s, command=_status(job))


def _starting(job: Job, pace: Pace) -> Headline:
    since_s = job.round.formed_wall_s or job.record.since_wall_s
    text = f"{_start_words(job, pace)}."
    return Headline("waiting", text, job.record.reason, since_wall_s=since_s, command=_status(job))


def _start_words(job: Job, pace: Pace) -> str:
    """Return how far a start is: until a rank has made a step the job does not train, whatever its process does."""
    again = " again" if job.record.round > 1 else ""
    verb = "has" if 1 in (pace.stepped, pace.world_size) else "have"
    stepped = f"{pace.stepped:,} of {pace.world_size:,} {verb} made a step"
    return f"Ranks are starting{again}: {stepped}{start_time(pace.start_age_s, pace.start_s)}"


def _calm(job: Job, mine: Sequence[Incident], pace: Pace, wall_s: float) -> Headline:
    level, text, since_s = _standing(job, pace)
    last = next((one for one in reversed(mine) if one.verdict is not None), None)
    if last is None or wall_s - last.marks.detected > RECENT_S:
        return Headline(level, text, since_wall_s=since_s, command="" if level == "calm" else _status(job))
    command = f"megascale-ops why {last.id}" if level == "calm" else _status(job)
    return Headline(level, text, _last_words(last), since_wall_s=since_s, incident=last.id, command=command)


def _standing(job: Job, pace: Pace) -> tuple[str, str, float]:
    """Return the state of a job without suspicion: level, sentence, since when."""
    record = job.record
    counts = dict(zip(JUDGED, pace.counts, strict=False))
    absent = counts.get("unheard", 0) + counts.get("gone", 0)
    if absent:
        here = pace.world_size - absent
        text = f"{here:,} of {pace.world_size:,} ranks are heard; {absent:,} {'is' if absent == 1 else 'are'} not."
        return "watch", text, record.since_wall_s
    if counts.get("starting", 0) and pace.step >= 0:
        late = counts["starting"]
        text = f"{pace.world_size - late:,} of {pace.world_size:,} ranks make progress; {late:,} made no step yet."
        return "waiting", text, record.since_wall_s
    ranks, verb = (f"All {pace.world_size:,} ranks", "") if pace.world_size > 1 else ("The only rank", "s")
    if pace.step < 0:
        return "waiting", f"{ranks} live{verb}; no step has ended yet.", record.since_wall_s
    if pace.stepped_age_s > max(PAUSE_S, PAUSE_STEPS * pace.step_s):
        return "watch", f"{ranks} live{verb}, but no step ends.", job.round.last_step_wall_s
    short = f", on {len(record.members):,} of {_nodes(record.max_nodes)}" if job.state is State.DEGRADED else ""
    return "calm", f"{ranks} make{verb} progress{short}.", record.since_wall_s


def _last_words(incident: Incident) -> str:
    """Return what happened last in one sentence."""
    assert incident.verdict is not None
    marks = incident.marks
    began = marks.began or marks.detected
    happened = lower(what(incident.verdict, past=True))
    if incident.state == "recovered" and marks.stepped:
        return f"Before: {happened}; training was back after {duration(marks.stepped - began)}."
    went = course_words(incident.course, began) if incident.course is not None else ""
    return f"Before: {happened}; it {went}." if went else f"Before: {happened} ({incident.state})."


def _price(verdict: Verdict) -> str:
    return f"that costs {percent(verdict.cost)} of every step" if verdict.cost > 0 else "nothing is stopped for it"


def _seat(job: Job, rank: int) -> tuple[str, int]:
    first = 0
    for member in job.record.members:
        if rank < first + member.nproc:
            return member.node, rank - first
        first += member.nproc
    return "", -1


def _nodes(count: int) -> str:
    return f"{count:,} {'node' if count == 1 else 'nodes'}"


def _status(job: Job) -> str:
    return f"megascale-ops status --job {job.name}"


def _list(job: Job, mine: Sequence[Incident]) -> str:
    return f"megascale-ops why {mine[-1].id}" if mine else f"megascale-ops report {job.name}"
