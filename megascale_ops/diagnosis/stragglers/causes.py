# SPDX-License-Identifier: Apache-2.0
"""Explain a slow rank: by how much, in what, and what all the others lose by it.

The cause is where the excess over the equals lies:

    gc        the garbage collector took at least half of it
    input     waiting for the data loader
    launch    between the parts that are known: what comes before a collective is launched late
    compute   forward, backward or optimizer, and the process burned CPU for it
    host      the same, but without CPU: it slept, or waited for a device
    starved   the same, and the kernel shows that it wanted a core meanwhile, which other processes had

The cost is what all ranks would gain if this one were as fast as the next slowest, as a share of a step; never more
than what a typical other rank waits. Among thousands of equals some rank is slow by chance in every step, and one that
is no slower than that costs nothing, however often it is slow.

Pure: what is known of the ranks in, a verdict out.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megascale_ops.diagnosis.statistics import false_alarms
from megascale_ops.diagnosis.stragglers.own_work import Held, Rank, intermittent_steps, own_work_s
from megascale_ops.diagnosis.stragglers.peer_group import SAMPLED, Group
from megascale_ops.schema.health import Finding, Verdict
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import StepWork
from megascale_ops.schema.wording import percent

# Half: the largest cause, and no second one can be as large.
MOST_OF_IT = 0.5
# A quarter of the excess: the figure shown beside the alarm's is another one then.
_OTHER = 0.25
NAMES = {
    "input": "waiting for data",
    "compute": "computing",
    "host": "without CPU: starved of it, or asleep",
    "starved": "starved by other processes",
    "gc": "collecting garbage",
    "launch": "between the parts of a step, so that its collectives are launched late",
}


class Parts(NamedTuple):
    """Seconds a step, of one rank or the difference of two."""

    own: float
    data: float
    forward: float
    backward: float
    optimizer: float
    other: float
    gc: float
    cpu: float

    def __sub__(self, other: "Parts") -> "Parts":
        """Return part by part how much more this is."""
        return Parts(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


def parts_of(works: Sequence[StepWork]) -> Parts:
    """Return where a typical step's time goes."""
    rows = []
    for work in works:
        own = own_work_s(work)
        known = work.data_s + work.forward_s + work.backward_s + work.optimizer_s
        rows.append(
            Parts(
                own, work.data_s, work.forward_s, work.backward_s, work.optimizer_s, max(0.0, own - known),
                work.gc_s, work.cpu_s,
            )
        )  # fmt: skip
    return Parts(*(sum(column) / len(rows) for column in zip(*rows, strict=True))) if rows else Parts(*[0.0] * 8)


def cause_of(excess: Parts, starved_s: float = 0.0) -> str:
    """Return the word for where a rank's excess lies; ``starved_s`` of a step it wanted a core in vain."""
    half = MOST_OF_IT * excess.own
    if excess.own <= 0:
        return ""
    if excess.gc >= half:
        return "gc"
    if excess.data >= half:
        return "input"
    if excess.cpu < half <= starved_s:
        return "starved"
    if excess.other >= half:
        return "launch"
    return "compute" if excess.cpu >= half else "host"


class Figures(NamedTuple):
    """What a slow rank and its equals need a step, and what that costs all ranks, as a share of it."""

    mine: Parts
    typical: Parts
    cost: float
    starved: float = 0.0  # share of the time in which it was runnable without a core, beyond that of its equals

    @property
    def share(self) -> float:
        """By how much the rank works longer than its equals."""
        return (self.mine.own - self.typical.own) / self.typical.own if self.typical.own else 0.0


def figures_of(group: Group, rank: Rank, held: Held, *, alarm: bool = False) -> Figures:
    """Return the figures of a rank that is named, since it is slow; with ``alarm`` those by which it was named."""
    last = max(1, group.count - held.named_at + held.window)
    first = max(1, held.window) if alarm else last
    mine = parts_of(group.rows.works(rank.place, last)[:first])
    typical, slowest = _others(group, rank, last, first)
    if alarm:  # of a long alarm only the newest steps are known part by part, and by what all of them showed it rose
        excess_s = false_alarms.trimmed_mean(group.rows.excesses_s(rank.place)[-last:][:first])
        mine = mine._replace(own=typical.own + excess_s)
    lost_s = min(max(0.0, mine.own - slowest), group.waited_s(rank.place, last))
    if len(group) > 2 * SAMPLED:  # a sample does not have the slowest, and of many another one is slow in each step
        lost_s = min(lost_s, group.gained_s(rank.place, last, held.share))
    # The group's step follows slowly: in a window in which this rank worked for longer, the steps took as long.
    return Figures(mine, typical, lost_s / max(group.step_s, mine.own))


def verdict_of(
    group: Group, rank: Rank, held: Held, policy: JobPolicy, round_: int, alarm: Figures | None = None
) -> Verdict:
    """Return the verdict on a rank that is named.

    Args:
        group: its equals.
        rank: the rank.
        held: why it is named.
        policy: what is worth a name.
        round_: which round.
        alarm: the figures by which it was named, which the card goes on to show; what it costs is what it costs now.
    """
    if held.intermittent:
        return _intermittent(group, rank, held, policy, round_)
    now = figures_of(group, rank, held)
    shown = alarm or now
    excess = shown.mine - shown.typical
    cause = cause_of(excess, shown.starved * max(group.step_s, shown.mine.own))
    differs = abs(now.share - shown.share) > _OTHER * abs(shown.share)
    late = f"of late it is {now.share * 100:+.1f} %, and " if differs else ""
    reason = (
        f"rank {rank.rank} on {rank.node} works {_ms(shown.mine.own)} in a step where its equals work "
        f"{_ms(shown.typical.own)} (+{percent(_told(shown.share))}) since step {held.since_step}, mostly "
        f"{NAMES.get(cause, 'in nothing that is known')}; {late}that costs {percent(_told(now.cost))} of every step"
    )
    return _verdict(
        group, rank, held, policy, round_, reason, cause, now.cost, excess, (now if differs else shown).share
    )


def _intermittent(group: Group, rank: Rank, held: Held, policy: JobPolicy, round_: int) -> Verdict:
    jumps = list(group.jumps[rank.place])
    every = intermittent_steps(jumps, group.count) / len(jumps)
    sums = [parts_of([jump.work]) - parts_of([jump.equal]) for jump in jumps]
    excess = Parts(*(sum(column) / len(sums) for column in zip(*sums, strict=True)))
    cause = cause_of(excess)
    mean_s = sum(jump.excess_s for jump in jumps) / len(jumps)
    cost = min(1.0, mean_s / (every * group.step_s + mean_s))
    reason = (
        f"rank {rank.rank} on {rank.node} is slow in one step of {every:.0f}, by {_ms(mean_s)} each time "
        f"({len(jumps)} times since step {held.since_step}), mostly {NAMES.get(cause, 'in nothing that is known')}; "
        f"that costs {percent(_told(cost))} of every step"
    )
    typical_s = sum(own_work_s(jump.equal) for jump in jumps) / len(jumps)
    share = mean_s / every / typical_s if typical_s else 0.0
    return _verdict(group, rank, held, policy, round_, reason, cause, cost, excess, share)


def _verdict(
    group: Group,
    rank: Rank,
    held: Held,
    policy: JobPolicy,
    round_: int,
    reason: str,
    cause: str,
    cost: float,
    excess: Parts,
    share: float,
) -> Verdict:
    days = 1.0 / max(policy.straggler_false_alarms_per_day, 1e-9)
    calm = (
        f"the run's own noise is {_ms(group.noise_s)} a step; at this threshold one false name in {days:.0f} days is "
        f"expected; {group.names} named in {group.count:,} steps of {len(group)} ranks so far"
    )
    findings = [
        Finding("own_work", reason, "black box", rank.rank, rank.node, excess.own, "s"),
        Finding("calibration", calm, "heartbeat", value=group.noise_s, unit="s"),
    ]
    findings += [
        Finding(f"excess_{name}", f"{name}: {_ms(abs(value))} {'more' if value > 0 else 'less'} than its equals",
                "black box", rank.rank, rank.node, value, "s")
        for name, value in excess._asdict().items()
        if name != "own" and abs(value) >= 0.1 * excess.own
    ]  # fmt: skip
    worth = policy.straggler_share
    certain = excess.own >= 2 * max(worth * group.step_s, group.noise_s)
    return Verdict(
        fault="straggler",
        reason=reason,
        confidence=0.95 if certain else 0.8,
        culprits=(rank.rank,),
        nodes=(rank.node,),
        since_step=held.since_step,
        round=round_,
        evidence=tuple(findings),
        otherwise=(
            f"an excess below {worth:.1%} of a step ({_ms(worth * group.step_s)}), equals that do not wait, or less "
            f"than {_ms(worth * group.step_s / 2)} for {max(20, held.window)} steps now"
        ),
        cause=cause,
        cost=min(1.0, _told(cost)),
        excess=_told(share),
    )


def _others(group: Group, rank: Rank, last: int, first: int) -> tuple[Parts, float]:
    """Return a typical other rank's parts, and the own work of the slowest that is not named itself."""
    rows = {
        place: parts_of(works[:first])
        for place in group.sampled()
        if place != rank.place and (works := group.rows.works(place, last))
    }
    typical = Parts(*(sorted(column)[len(column) // 2] for column in zip(*rows.values(), strict=True)))
    fast = [row.own for place, row in rows.items() if place not in group.held]
    return typical, max(fast, default=typical.own)


def _told(share: float) -> float:
    """Return a share with as many digits as a verdict has: it is printed alike everywhere."""
    return round(max(0.0, share), 4)


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{seconds * 1e3:.3g} ms"
