# SPDX-License-Identifier: Apache-2.0
"""What people and dashboards see of a job: plain functions from what the controller knows to the schema's views."""

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from megascale_ops.account import Account
from megascale_ops.controller.cluster.registry import Registry
from megascale_ops.controller.detectors.skew import STRAGGLER
from megascale_ops.controller.history.goodput import reckon_left
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.record.job_record import read_record
from megascale_ops.diagnosis.rank_view import RankView
from megascale_ops.schema.events import Incident, JobStatus, NodeStatus, RankStatus
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.history import History


def job_status(
    job: Job, registry: Registry | None, *, now_s: float, wall_s: float, goodput: Account | None = None
) -> JobStatus:
    """Return one job with its nodes and ranks; without a registry briefly: without them and their pace."""
    record = job.record
    found = registry.ranks(job.name, record.round, job.nodes, now_s) if registry is not None else ()
    ranks = sorted(found, key=lambda rank: rank.report.rank)
    unknown = job.round.step if registry is None else -1
    progress = [rank.report.progress for rank in ranks if rank.report.progress is not None]
    step_s = [one.step_p50_s for one in progress if one.step_p50_s > 0]
    blamed = _blamed(job)
    return JobStatus(
        job=job.name,
        state=job.told_state.value,
        round=record.round,
        world_size=record.world_size,
        step=job.furthest_step if job.is_over else min((one.step for one in progress), default=unknown),
        step_p50_s=statistics.median(step_s) if step_s else 0.0,
        restarts=record.restarts_in_all,
        since_wall_s=record.since_wall_s,
        nodes=_node_statuses(job, registry, now_s) if registry is not None else (),
        ranks=tuple(_rank_status(rank, job, now_s, blamed) for rank in ranks),
        incidents=record.incidents,
        useful_ratio=useful_ratio(job, wall_s),
        goodput=goodput.ratio if goodput is not None else -1.0,
        goodput_hour=goodput.ratio_hour if goodput is not None else -1.0,
        goodput_now=goodput.ratio_now if goodput is not None else -1.0,
        reason=_reason(job),
        stepped=sum(one.steps_seen > 0 for one in progress) if job.is_starting(now_s) else -1,
        start_s=record.start_s,
        start_age_s=max(0.0, wall_s - job.round.formed_wall_s)
        if job.round.formed_wall_s and job.is_starting(now_s)
        else -1.0,
        is_numbered=job.round.is_numbered,
    )


def left_status(
    name: str, raw: bytes, incidents: Sequence[Incident], history: History | None, without_word: str
) -> JobStatus:
    """Return a job as its controller would tell it, from what that has left.

    Args:
        name: the job.
        raw: its record, as the journal has it.
        incidents: all of the job's.
        history: of its steps; None: none was kept.
        without_word: the reason to tell where the record says that the job goes on.

    Raises:
        ValueError: the record can't be read.
    """
    record = read_record(name, raw)
    job = Job(record, 0.0, saved=record)
    account = reckon_left(job, history.facts, incidents) if history is not None else None
    told = job_status(job, Registry(), now_s=0.0, wall_s=record.since_wall_s, goodput=account)
    return msgspec.structs.replace(told, nodes=(), reason=told.reason if job.is_over else without_word)


def useful_ratio(job: Job, wall_s: float) -> float:
    """Return the share of the job's wall time that is covered by steps which were not lost; -1 when it is not known.

    It is not when the job was restarted and its script does not declare its own step numbers: what was lost is unknown.
    """
    record = job.record
    alive_s = (record.since_wall_s if job.is_over else wall_s) - record.started_wall_s
    if not record.started_wall_s or alive_s <= 0 or (record.restarts and not record.steps_are_absolute):
        return -1.0
    covered_s = record.useful_s + job.round.uncounted_s
    return min(1.0, covered_s / alive_s) if covered_s else -1.0


def _reason(job: Job) -> str:
    suspicion = job.told_suspicion
    if suspicion is not None:
        return suspicion.verdict.reason
    accused = _accused(job)
    return accused.reason if accused is not None else job.record.reason


def _accused(job: Job) -> Verdict | None:
    """Return what ends the round that is shown, once that is known."""
    incident = job.incident
    return incident.verdict if incident is not None and incident.round == job.record.round else None


def _node_statuses(job: Job, registry: Registry, now_s: float) -> tuple[NodeStatus, ...]:
    return tuple(_node_status(node, job, registry, now_s) for node in sorted({*job.nodes, *job.waiting}))


def _node_status(node: str, job: Job, registry: Registry, now_s: float) -> NodeStatus:
    view = registry.node(node, job.name)
    runner = job.runners.get(node)
    runner_age_s = -1.0
    if runner is not None:
        runner_age_s = 0.0 if runner.open_requests else max(0.0, now_s - runner.seen_s)
    return NodeStatus(
        node=node,
        agent_age_s=max(0.0, now_s - view.heard_s) if view is not None else -1.0,
        runner_age_s=runner_age_s,
        host=view.host if view is not None else None,
    )


def _starts(rank: RankView, job: Job, now_s: float) -> bool:
    progress, starts = rank.report.progress, job.unstepped(now_s)
    return starts.without_box if progress is None else starts.with_box and progress.steps_seen == 0


def _blamed(job: Job) -> dict[int, str]:
    """Return the ranks that are blamed, with the word for it; a hang may name all of a hundred thousand."""
    suspicion = job.told_suspicion
    if suspicion is not None:
        return dict.fromkeys(suspicion.verdict.culprits, "lost" if suspicion.lost else "suspect")
    accused = _accused(job)
    return dict.fromkeys(accused.culprits, "lost") if accused is not None else {}


def _rank_status(rank: RankView, job: Job, now_s: float, blamed: Mapping[int, str]) -> RankStatus:
    judged, cause, cost = "ok", "", 0.0
    warning = job.round.warnings.get(f"{STRAGGLER}{rank.report.rank}")
    if warning is not None and warning.verdict is not None:
        judged, cause, cost = "slow", warning.verdict.cause, warning.verdict.cost
    if rank.report.rank in blamed:
        judged = blamed[rank.report.rank]
    elif judged == "ok" and not rank.gone and _starts(rank, job, now_s):
        judged = "starting"
    silent_s = rank.silent_s if rank.report.progress is not None else -1.0
    return RankStatus(node=rank.node, report=rank.report, silent_s=silent_s, judged=judged, cause=cause, cost=cost)
