# SPDX-License-Identifier: Apache-2.0
"""What a simulated run comes to: numbers for programs, lines for people. The same seed gives the same bytes."""

from collections.abc import Iterator, Sequence
from statistics import median

import msgspec

from megascale_ops.ledger import ROWS
from megascale_ops.schema.wording import duration, printable
from megascale_ops.sim.kinds import KINDS
from megascale_ops.sim.laws import LAWS
from megascale_ops.sim.score import FaultLine, IncidentLine, Score

# 30 faults and 30 incidents are listed for people; --json has all.
MOST_LISTED = 30


class Report(msgspec.Struct, frozen=True):
    """One run.

    ``ratio`` and ``effective`` are the controller's own ledger's: the share of training, and of all steps that count;
    -1 where not known. ``true_effective`` is the simulator's: the time of all steps that were not lost later.
    ``timeline``: when the job changed its state, seconds; ``progress``: when it had finished which step.
    """

    ranks: int
    ranks_per_node: int
    spares: int
    hours: float
    seed: int
    laws: tuple[str, ...]
    policy: dict[str, str]
    state: str
    wall_s: float
    steps: int
    ratio: float
    effective: float
    true_effective: float
    rows: dict[str, float]
    restarts: int
    evictions: int
    heartbeats: int
    faults: tuple[FaultLine, ...]
    incidents: tuple[IncidentLine, ...]
    precision: float
    recall: float
    refused: tuple[str, ...]
    timeline: tuple[tuple[float, str], ...]
    progress: tuple[tuple[float, int], ...]
    coded: str = ""


class Choice(msgspec.Struct, frozen=True):
    """The same run under another policy."""

    setting: str
    ratio: float
    true_effective: float
    restarts: int
    evictions: int
    saved_s: float  # wall time that it would have saved against the run itself; negative: lost


class Answer(msgspec.Struct, frozen=True):
    """A run, and what other policies would have made of it."""

    run: Report
    choices: tuple[Choice, ...] = ()


def choice_of(setting: str, run: Report, other: Report) -> Choice:
    """Return what another policy would have cost or saved."""
    return Choice(
        setting=setting,
        ratio=other.ratio,
        true_effective=other.true_effective,
        restarts=other.restarts,
        evictions=other.evictions,
        saved_s=round((other.true_effective - run.true_effective) * run.wall_s, 1),
    )


def sentences(answer: Answer) -> Iterator[str]:
    """Yield the lines for people."""
    run = answer.run
    yield (
        f"{run.ranks:,} ranks on {run.ranks // run.ranks_per_node:,} nodes and {run.spares} spares, "
        f"{run.hours:g} hours, seed {run.seed}, faults: {', '.join(run.laws) or 'none'}"
    )
    for name in run.laws:
        yield f"  {name}: {LAWS[name].source}"
    if run.coded:
        yield (
            f"  coded: {printable(run.coded)}: replicas do the work of others, too, and steps do without the slowest. "
            "Ratios count steps for as long as they take: compare numbers of steps with a run without it"
        )
    yield ""
    yield (
        f"effective training time ratio {_percent(run.effective)} by the controller's ledger, "
        f"{_percent(run.true_effective)} by the simulator's own count; {run.steps:,} steps, the job is {run.state}"
    )
    for row, seconds in run.rows.items():
        if seconds:
            yield f"  {row:<11} {seconds / run.wall_s:8.3%} {duration(seconds):>10}  {ROWS[row]}"
    yield ""
    yield from _of_faults(run)
    if answer.choices:
        yield ""
        yield "the same faults under another policy:"
        for one in answer.choices:
            yield (
                f"  {printable(one.setting)}: {_percent(one.true_effective)} effective, {one.restarts} restarts, "
                f"{one.evictions} evictions; {_saved(one.saved_s)}"
            )


def _saved(saved_s: float) -> str:
    if not saved_s:
        return "no difference"
    return f"{duration(abs(saved_s))} of wall time {'saved' if saved_s > 0 else 'lost'}"


def _of_faults(run: Report) -> Iterator[str]:
    right = sum(fault.is_right for fault in run.faults)
    named = [one for one in run.incidents if one.is_named]
    yield (
        f"{len(run.faults)} faults, {right} named rightly (class and culprit); {len(run.incidents)} incidents, "
        f"{run.restarts} restarts, {run.evictions} evictions"
    )
    if named:
        hits = sum(one.is_right for one in named)
        yield f"  precision of verdicts {_percent(run.precision)} ({hits} of {len(named)})"
    if run.faults:
        counted = [fault for fault in run.faults if not fault.is_pending]
        yield f"  recall {_percent(run.recall)} ({right} of {len(counted)})"
    yield from _by_kind(run.faults)
    for fault in run.faults[:MOST_LISTED]:
        yield f"  {_at(fault.at_s)} {fault.kind} of rank {fault.rank} on {fault.node} ({fault.cause}): {_seen(fault)}"
    if len(run.faults) > MOST_LISTED:
        yield f"  and {len(run.faults) - MOST_LISTED} more: --json lists them"
    wrong = [one for one in run.incidents if not one.is_right]
    if wrong:
        yield "incidents that are about no fault, or name it wrongly:"
    for one in wrong[:MOST_LISTED]:
        yield f"  {_at(one.at_s)} {one.id} {one.fault} ({one.state}): {printable(one.reason)}"
    if len(wrong) > MOST_LISTED:
        yield f"  and {len(wrong) - MOST_LISTED} more: --json lists them"
    for text in run.refused[:3]:
        yield f"note: the controller refused something: {printable(text)}"


def _by_kind(faults: Sequence[FaultLine]) -> Iterator[str]:
    for name, kind in KINDS.items():
        mine = [fault for fault in faults if fault.kind == name]
        seen = [fault.detected_after_s for fault in mine if fault.incident]
        if mine:
            when = f", noticed after {duration(median(seen))} (median)" if seen else ""
            yield f"  {len(mine)} x {name} ({kind.what}): {sum(one.is_right for one in mine)} right{when}"


def _seen(fault: FaultLine) -> str:
    if not fault.incident:
        return "not noticed before the time was over" if fault.is_pending else "NOT NOTICED"
    word = "named rightly" if fault.is_right else "NOT NAMED RIGHTLY"
    return f"{word} by {fault.incident}, noticed after {duration(fault.detected_after_s)}"


def _at(seconds: float) -> str:
    minutes = int(seconds // 60)
    return f"{minutes // 60:3d}:{minutes % 60:02d}:{int(seconds % 60):02d}"


def _percent(share: float) -> str:
    return f"{share:.2%}" if share >= 0.0 else "not known"


def make_report(
    *,
    ranks: int,
    ranks_per_node: int,
    spares: int,
    hours: float,
    seed: int,
    laws: tuple[str, ...],
    policy: dict[str, str],
    coded: str,
    state: str,
    wall_s: float,
    step_walls: dict[int, float],
    ratio: float,
    effective: float,
    rows: dict[str, float],
    restarts: int,
    evictions: int,
    heartbeats: int,
    scored: Score,
    refused: Sequence[str],
    timeline: Sequence[tuple[float, str]],
    progress: Sequence[tuple[float, int]],
) -> Report:
    """Put a report together; steps count once, and those do not that were lost and not made again yet."""
    last = progress[-1][1] if progress else -1
    useful = [took_s for step, took_s in step_walls.items() if step <= last]
    return Report(
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        spares=spares,
        hours=hours,
        seed=seed,
        laws=laws,
        policy=policy,
        coded=coded,
        state=state,
        wall_s=round(wall_s, 1),
        steps=len(useful),
        ratio=ratio,
        effective=effective,
        true_effective=round(min(1.0, sum(useful) / wall_s), 4) if wall_s else -1.0,
        rows={row: round(seconds, 1) for row, seconds in rows.items()},
        restarts=restarts,
        evictions=evictions,
        heartbeats=heartbeats,
        faults=scored.faults,
        incidents=scored.incidents,
        precision=scored.precision,
        recall=scored.recall,
        refused=tuple(refused),
        timeline=tuple(timeline),
        progress=tuple(progress),
    )
