# SPDX-License-Identifier: Apache-2.0
"""Which nodes are lost: neither agent nor runner answers, or the runner is gone and its ranks with it.

Pure: ages in, a verdict that carries its numbers, or None, out.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megascale_ops.diagnosis.rank_view import Reached
from megascale_ops.schema.folding import listed
from megascale_ops.schema.health import Finding, Verdict
from megascale_ops.schema.policy import JobPolicy


class NodeSigns(NamedTuple):
    """When a node was last heard, as ages in seconds; infinite where it never was."""

    node: str
    agent_age_s: float
    runner_age_s: float
    ranks_gone: bool  # its agent reports that every rank's process is gone
    polling: bool  # the runner's request is open
    excused_s: float = 0.0  # of both ages: while no node of the job reported, which is no fault of this node


def judge_nodes(
    nodes: Sequence[NodeSigns], policy: JobPolicy, *, lag_s: float, round_: int, wall_s: float
) -> Verdict | None:
    """Return which nodes are lost: neither agent nor runner answers, or the runner is gone and its ranks with it.

    ``lag_s`` is how late the controller itself was of late; it is added to every patience.
    """
    patience = policy.node_lost_s + lag_s
    lost = []
    only_runner = True
    for signs in nodes:
        agent_silent = signs.agent_age_s - signs.excused_s > patience
        runner_silent = signs.runner_age_s - signs.excused_s > patience
        if runner_silent and (agent_silent or (signs.ranks_gone and not signs.polling)):
            lost.append(signs)
            only_runner &= not agent_silent
    if not lost:
        return None
    since_s = min(min(signs.agent_age_s, signs.runner_age_s) for signs in lost)
    names = tuple(signs.node for signs in lost)
    what = "the runner is gone and its ranks with it" if only_runner else "neither agent nor runner answers"
    findings = tuple(_sign_finding(signs) for signs in lost[:16])
    return Verdict(
        fault="runner_lost" if only_runner else "node_lost",
        reason=f"{listed(names)}: {what} for {since_s:.1f} s; patience is {patience:.1f} s",
        confidence=0.9,
        nodes=names,
        since_wall_s=wall_s - since_s,
        round=round_,
        evidence=findings,
        otherwise=f"nothing, had one heartbeat or one request of the runner come within {patience:.1f} s",
    )


def _sign_finding(signs: NodeSigns) -> Finding:
    def ago(age_s: float) -> str:
        return "never" if age_s == float("inf") else f"{age_s:.1f} s ago"

    text = (
        f"{signs.node}: last heartbeat {ago(signs.agent_age_s)}, last request of its runner {ago(signs.runner_age_s)}"
    )
    return Finding(
        name="node_silent", text=text, source="heartbeat", node=signs.node, value=min(signs.runner_age_s, 1e9), unit="s"
    )


class Together(NamedTuple):
    """How far the others were when they were last seen to step while nodes were silent; ``seen_s`` is 0 for never."""

    silent: tuple[str, ...]
    reached: dict[int, Reached]
    seen_s: float
