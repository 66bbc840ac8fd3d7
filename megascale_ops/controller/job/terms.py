# SPDX-License-Identifier: Apache-2.0
"""The terms that all nodes of a job agree on: how many nodes, and which policy.

A job is judged by one policy. So a runner that joins a job that others are in brings the same ``--nnodes`` and the same
``--policy``, or is refused with every setting that differs; otherwise the order of the members would decide by which
rules the next round is judged. What ``policy set`` has changed since may stand in a launch line or not: it holds either
way.

A runner that comes alone (the first one, the next life of the name, or one started again by hand while no other runner
of the job lives) has none to disagree with: its policy holds from then on, and an event names what it changes.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.transitions import Transitions
from megascale_ops.errors import RefusedError
from megascale_ops.schema.messages import Join
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.policy_settings import DEFAULT_WORDS, Difference, apply_settings, differences, show_settings

POLICY_CHANGED = "policy_changed"
# 40: every setting there is with a few actions. A forged join can bring 256 made-up ones.
_MOST_NAMED = 40


def launched_with(job: Job) -> JobPolicy:
    """Return the policy that the job was started with, without what was changed by hand since."""
    return job.record.launch_policy or job.record.policy


def take_policy(job: Job, policy: JobPolicy, transitions: Transitions, why: str) -> None:
    """Let the job live under the policy of a runner that comes alone; if it had another, journal what changes.

    Args:
        job: the job.
        policy: as the runner was started with.
        transitions: what journals the event.
        why: its runner, for the event.
    """
    record = job.record
    now = apply_settings(policy, record.tuned)
    changed = differences(record.policy, now) if record.started_wall_s else ()
    job.change(policy=now, launch_policy=policy)
    if changed:
        transitions.note(job, POLICY_CHANGED, f"{why}: {_changes(changed)}")


def check_agreement(job: Job, join: Join, transitions: Transitions) -> None:
    """Hold a join against the terms of a job that others are in, or were.

    Raises:
        RefusedError: it wants other terms than a runner that is there.
    """
    record = job.record
    if (join.min_nodes, join.max_nodes) != (record.min_nodes, record.max_nodes):
        raise RefusedError(
            f"node {join.node} wants {join.min_nodes}:{join.max_nodes} nodes, but job {job.name} was started with "
            f"{record.min_nodes}:{record.max_nodes}: give every node the same --nnodes"
        )
    differing = _disagreements(job, join.policy)
    if not differing:
        return
    if _is_alone(job, join.node, transitions.clock()):
        take_policy(job, join.policy, transitions, f"the runner of {join.node} was started again with another policy")
        return
    raise RefusedError(
        f"node {join.node} wants {_and(f'{one.name}={one.after}' for one in differing)}, but job {job.name} was "
        f"started with {_and(f'{one.name}={one.before}' for one in differing)}: give every node the same --policy and "
        f"--max-restarts, or change the job that runs with `megascale-ops policy set {job.name} NAME=VALUE`"
    )


def tell_policies(job: Job, before: JobPolicy, joins: Sequence[Join], transitions: Transitions) -> None:
    """Journal what an adopted round, described by its runners, changes in the policy, and which runners disagree."""
    if changed := differences(before, job.record.policy):
        transitions.note(job, POLICY_CHANGED, f"the round that runs was started with {_changes(changed)}")
    for join in joins[1:]:
        if differing := _disagreements(job, join.policy):
            held = f"that of {joins[0].node} holds"
            transitions.note(
                job, POLICY_CHANGED, f"{join.node} was started with another policy, {held}: {_changes(differing)}"
            )


def _disagreements(job: Job, policy: JobPolicy) -> tuple[Difference, ...]:
    """Return what differs from the policy that the job was started with; a value that is in force by hand does not."""
    launched = launched_with(job)
    if policy == launched:  # nearly always, and 12,500 nodes join within seconds
        return ()
    in_force = show_settings(job.record.policy)
    return tuple(one for one in differences(launched, policy) if one.after != in_force.get(one.name, DEFAULT_WORDS))


def _is_alone(job: Job, node: str, now_s: float) -> bool:
    """Return whether no other node's runner lives, by its requests."""
    # A controller that was just restarted counts the members in its journal as seen when it began.
    return not any(
        runner.is_alive(now_s) for other, runner in job.runners.items() if other != node and other not in job.round.left
    )


def _changes(differences: Sequence[Difference]) -> str:
    return "; ".join(f"{one.name} from {one.before} to {one.after}" for one in differences[:_MOST_NAMED])


def _and(words: Iterable[str]) -> str:
    *most, last = list(islice(words, _MOST_NAMED))
    return f"{', '.join(most)} and {last}" if most else last
