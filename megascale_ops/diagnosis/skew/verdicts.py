# SPDX-License-Identifier: Apache-2.0
"""What the arrival-skew engine has found, in words: verdicts with their evidence, and the table that people ask for.

Why a rank is slow is known from its host's view of its steps, where there is one (``causes``). When the host does
not work longer although the rank arrives late, its GPU does: then it is computing, or its clock was throttled. That
holds for collectives that the GPU timed; where the host timed them and works no longer, the rank is not late at all.

Pure: a report in, verdicts out.
"""

from collections.abc import Collection, Mapping, Sequence

from megascale_ops.diagnosis.skew.report import Culprit, SkewReport
from megascale_ops.diagnosis.skew.slow_links import SlowLink
from megascale_ops.diagnosis.stragglers.causes import MOST_OF_IT, NAMES, Parts, cause_of, parts_of
from megascale_ops.diagnosis.stragglers.detector import Watch
from megascale_ops.diagnosis.stragglers.peer_group import KEPT
from megascale_ops.schema.collectives import SkewLink, SkewRank, SkewView
from megascale_ops.schema.folding import named as called
from megascale_ops.schema.folding import ranges
from megascale_ops.schema.health import Finding, Verdict
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.wording import percent

_NAMES = {
    **NAMES,
    "gpu": "on its GPU, while its host works no longer than the others'",
    "throttled": "on its GPU, whose clock is throttled",
    "link": "moving data over one link",
    "network": "moving data in and out of it",
}
MOST_RANKS_SHOWN = 1024
# A quarter of what the collectives show: a host that timed them itself and works no longer than that contradicts it.
_LEAST_OF_IT = 0.25


def why(
    culprit: Culprit, steps: Watch, step_s: float, throttled: Mapping[int, float], *, host_timed: bool = False
) -> str | None:
    """Return the word for what a late rank does; "" where nothing is known, None where it is not late after all.

    Args:
        culprit: the rank.
        steps: the hosts' view of the steps.
        step_s: how long a step takes.
        throttled: for how much of the time a rank's GPU was throttled, where that is known.
        host_timed: its collectives are those that Python saw, by the host's clock. What it waits in others (DDP's own
            reduction) looks like own work then, and only the host's steps count it as waiting: theirs is the last word.
    """
    if throttled.get(culprit.rank, 0.0) >= MOST_OF_IT * culprit.excess:
        return "throttled"
    # Of the steps in which it was late alone: those before would halve what its host needs longer.
    window = KEPT if culprit.every or step_s <= 0 else min(KEPT, max(1, round(culprit.since_s / step_s)))
    excess = _host_excess(culprit.rank, steps, window)
    if excess is None:
        return ""
    late_s = culprit.jump_s if culprit.every else culprit.excess * step_s
    if excess.own >= (_LEAST_OF_IT if host_timed else MOST_OF_IT) * late_s:
        return cause_of(excess, steps.starved_of(culprit.rank) * step_s)
    if culprit.every:
        return ""  # a rare late start need not be among the few steps that are kept
    for cause, part_s in (("gc", excess.gc), ("input", excess.data)):
        if part_s >= MOST_OF_IT * late_s:
            return cause
    return None if host_timed else "gpu"


def standing(report: SkewReport, steps: Watch, step_s: float, host_timed: Collection[int]) -> list[tuple[Culprit, str]]:
    """Return the culprits that their hosts do not clear, with what they do; a cleared rank is no accomplice, either.

    Args:
        report: the pass.
        steps: the hosts' view of the steps.
        step_s: how long a step takes.
        host_timed: ranks whose collectives the host timed.
    """
    causes = {one.rank: why(one, steps, step_s, {}, host_timed=one.rank in host_timed) for one in report.culprits}
    return [
        (one._replace(together=tuple(rank for rank in one.together if causes[rank] is not None)), cause)
        for one in report.culprits
        if (cause := causes[one.rank]) is not None
    ]


def _host_excess(rank: int, steps: Watch, window: int) -> Parts | None:
    """Return where a rank's host needs longer than a typical equal's in the last ``window`` steps, seconds a step."""
    for group in steps.groups.values():
        place = group.places.get(rank)
        if place is None:
            continue
        mine = group.rows.works(place, window)
        rows = [
            parts_of(works)
            for other in group.sampled()
            if other != place and (works := group.rows.works(other, window))
        ]
        if not mine or not rows:
            continue
        typical = Parts(*(sorted(column)[len(column) // 2] for column in zip(*rows, strict=True)))
        return parts_of(mine) - typical
    return None


def calm(report: SkewReport, policy: JobPolicy) -> str:
    """Return the sentence about noise and false alarms."""
    days = 1.0 / max(policy.straggler_false_alarms_per_day, 1e-9)
    return (
        f"the run's own noise is {report.noise:.2%} of a step; at these thresholds one false name in {days:.0f} days "
        f"is expected; {report.matched:,} rows were matched, {report.unmatched:,} were not"
    )


def rank_verdict(
    culprit: Culprit, report: SkewReport, cause: str, node: str, policy: JobPolicy, round_: int
) -> Verdict:
    """Return the verdict on a rank that arrives late by its own doing."""
    hours = report.gpu_hours_a_day(culprit.cost)
    who = f"rank {culprit.rank}" + (f" on {node}" if node else "")
    mostly = f"mostly {_NAMES.get(cause, 'in nothing that is known')}"
    if culprit.every:
        how = (
            f"{who} comes late to its collectives in one step of {culprit.every:.0f}, by {culprit.jump_s * 1e3:.3g} ms "
            f"each time, {mostly}"
        )
    else:
        how = (
            f"{who} works {culprit.excess:.1%} of a step longer than its equals before it comes to its collectives, "
            f"{mostly}; a typical equal waits {culprit.waited:.1%} of the time"
        )
        if culprit.a_minute:
            how += f", and it grows by {culprit.a_minute:.1%} a minute"
    it = f"it and {called(culprit.together)} together" if culprit.together else "it"
    cost = round(min(1.0, max(0.0, culprit.cost)), 4)
    reason = f"{how}; fixing {it} saves {percent(cost)} of every step, {hours:,.1f} rank hours a day"
    late = (
        f"it came last in {culprit.last:.0%} of its collectives; in half of them it was "
        f"{culprit.late_p50_s * 1e3:.3g} ms or more behind the first"
    )
    certain = culprit.excess >= 2 * max(policy.straggler_share, culprit.noise)
    return Verdict(
        fault="straggler",
        reason=reason,
        confidence=0.95 if certain else 0.8,
        culprits=(culprit.rank,),
        nodes=(node,) if node else (),
        round=round_,
        evidence=(
            Finding(
                "own_work_between_collectives", how, "collectives", culprit.rank, node, culprit.excess, "of a step"
            ),
            Finding("lateness", late, "collectives", culprit.rank, node, culprit.late_p50_s, "s"),
            Finding("calibration", calm(report, policy), "collectives", value=report.noise, unit="of a step"),
        ),
        otherwise=(
            f"an excess below {policy.straggler_share:.1%} of a step, equals that do not wait, or less than "
            f"{policy.straggler_share / 2:.1%} for as long as it took to name it"
        ),
        cause=cause,
        cost=cost,
    )


def link_verdict(
    link: SlowLink, report: SkewReport, nodes: Mapping[int, str], policy: JobPolicy, round_: int
) -> Verdict:
    """Return the verdict on lines that move data slowly."""
    text = describe(link, nodes)
    hours = report.gpu_hours_a_day(link.cost)
    cost = round(min(1.0, max(0.0, link.cost)), 4)
    reason = f"{text}; fixing it saves up to {percent(cost)} of every step, {hours:,.1f} rank hours a day"
    findings = tuple(
        Finding(
            "transfer", f"{line.function} in {line.communicator} of ranks {ranges(line.ranks)}: {line.ratio:.2f} times "
            "its equals' transfer", "collectives", value=line.ratio,
        )
        for line in link.lines[:8]
    )  # fmt: skip
    return Verdict(
        fault="slow_link",
        reason=reason,
        confidence=link.confidence,
        # All ranks of a ring are suspects alike: none is a culprit.
        culprits=link.ranks if link.kind != "ring" else (),
        nodes=tuple(sorted({nodes[rank] for rank in link.ranks if rank in nodes}))
        if link.kind in ("rank", "node")
        else (),
        round=round_,
        evidence=(*findings, Finding("calibration", calm(report, policy), "collectives", value=report.noise)),
        otherwise="transfers less than a quarter above those of equal communicators, or late ranks instead",
        cause="network" if link.kind in ("rank", "node") else "link",
        cost=cost,
    )


def describe(link: SlowLink, nodes: Mapping[int, str]) -> str:
    """Return one sentence about slow data, without its cost."""
    where = f"ranks {ranges(link.ranks)}" if len(link.ranks) > 1 else f"rank {link.ranks[0]}"
    on = sorted({nodes[rank] for rank in link.ranks if rank in nodes})
    if len(on) == 1:
        where += f" on {on[0]}"
    lines = f"{len(link.lines)} communicators" if len(link.lines) > 1 else f"communicator {link.lines[0].communicator}"
    what = {
        "link": f"the link between {where} is slow",
        "rank": f"data moves slowly in and out of {where}",
        "node": f"data moves slowly in and out of {where}",
        "ring": f"one of the links among {where} is slow",
    }[link.kind]
    return f"{what}: {lines} take {link.ratio:.2f} times as long to move data as their equals, and nobody is late"


def view(
    job: str, report: SkewReport, verdicts: Sequence[Verdict], nodes: Mapping[int, str], policy: JobPolicy
) -> SkewView:
    """Return the table that people ask for: those that cost something first, then by own work beyond their equals'."""
    named = {one.culprits[0]: one for one in verdicts if one.fault == "straggler" and one.culprits}
    order = sorted(
        range(len(report.waiting)),
        key=lambda rank: (-(named[rank].cost if rank in named else -1.0), -float(report.excess[rank]), rank),
    )
    rows = [
        SkewRank(
            rank=rank,
            node=nodes.get(rank, ""),
            waiting=round(float(report.waiting[rank]), 5),
            excess=round(float(report.excess[rank]), 5),
            late_p50_s=round(float(report.late_p50_s[rank]), 7),
            late_p99_s=round(float(report.late_p99_s[rank]), 7),
            last=round(float(report.last[rank]), 4),
            cost=named[rank].cost if rank in named else 0.0,
            above=named[rank].excess if rank in named else 0.0,
            verdict=(named[rank].cause or "slow") if rank in named else "",
        )
        for rank in order[:MOST_RANKS_SHOWN]
    ]
    links = tuple(
        SkewLink(
            link.ranks, tuple(line.communicator for line in link.lines[:8]), round(link.ratio, 3), round(link.cost, 4),
            describe(link, nodes),
        )
        for link in report.links
    )  # fmt: skip
    return SkewView(
        job=job,
        state="watching",
        span_s=round(report.span_s, 3),
        matched=report.matched,
        unmatched=report.unmatched,
        noise=round(report.noise, 5),
        calm=calm(report, policy),
        ranks=tuple(rows),
        links=links,
        silent=report.silent[:MOST_RANKS_SHOWN],
    )
