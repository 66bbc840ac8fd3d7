# SPDX-License-Identifier: Apache-2.0
"""Simulate a cluster around the real controller, from settings to what came of it."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from megascale_ops.controller.embedded import Embedded
from megascale_ops.errors import UsageError
from megascale_ops.schema.events import Event
from megascale_ops.schema.policy import SETTINGS, JobPolicy, text_of
from megascale_ops.schema.policy_settings import read_settings, values_of
from megascale_ops.sim.clock import START_WALL_S, Clock, on_virtual_time
from megascale_ops.sim.faults import Fault, draw
from megascale_ops.sim.folder import journal_folder
from megascale_ops.sim.machine import JOB
from megascale_ops.sim.report import Answer, Report, choice_of, make_report
from megascale_ops.sim.score import score
from megascale_ops.sim.settings import Settings, checked
from megascale_ops.sim.world import World

# 2,000 points: more than a picture has columns.
MOST_POINTS = 2000


def simulate(
    settings: Settings, named: Sequence[Fault] = (), *, ends_early: Callable[[], bool] | None = None
) -> Report:
    """Run a simulation to its end.

    Args:
        settings: what is simulated.
        named: faults beside those that the laws draw.
        ends_early: asked after each simulated minute whether it is enough; the report tells of as many hours as were
            simulated by then.

    Raises:
        UsageError: that can't be simulated.
    """
    settings = checked(settings)
    for one in named:
        if one.at_s >= settings.duration_s:
            raise UsageError(
                f"fault {one.kind}@{one.at_s / 3600:g} would come after the end: {settings.hours:g} hours are simulated"
            )
    chance = np.random.default_rng(np.random.SeedSequence(settings.seed).spawn(1)[0])
    faults = sorted([*draw(settings, chance), *named])
    with journal_folder() as folder:
        clock = Clock()
        controller = Embedded(f"sqlite:///{folder / 'ops.db'}", clock=clock.mono_s, wall=clock.wall_s)
        try:
            world = World(settings, faults, controller, clock, ends_early)
            with on_virtual_time(clock) as runner:
                runner.run(world.run())
            return _report(world, controller)
        finally:
            controller.close()


def compare(settings: Settings, named: Sequence[Fault], policies: Sequence[str]) -> Answer:
    """Run a simulation, and the same again under each of these settings of the policy, ``NAME=VALUE``.

    Raises:
        UsageError: one of them can't be.
    """
    others = [(text, _with_policy(settings, text)) for text in policies]
    run = simulate(settings, named)
    return Answer(run, tuple(choice_of(text, run, simulate(other, named)) for text, other in others))


def _with_policy(settings: Settings, text: str) -> Settings:
    values = values_of(read_settings([text]))
    if "actions" in values:
        values["actions"] = {**settings.policy.actions, **values["actions"]}
    return msgspec.structs.replace(settings, policy=msgspec.structs.replace(settings.policy, **values))


def _changed(policy: JobPolicy) -> dict[str, str]:
    """Return what of a policy is not as it comes."""
    changed = {name: text_of(value) for name in SETTINGS if (value := getattr(policy, name)) != SETTINGS[name]}
    return changed | policy.actions


def _report(world: World, controller: Embedded) -> Report:
    settings, account = world.settings, controller.account(JOB)
    costs = {name: sum(rows.values()) for name, rows in account.incidents.items()} if account is not None else {}
    events = controller.events(JOB)
    return make_report(
        ranks=settings.ranks,
        ranks_per_node=settings.ranks_per_node,
        spares=settings.spares,
        hours=round(world.until_s / 3600.0, 3),
        seed=settings.seed,
        laws=settings.faults,
        policy=_changed(settings.policy),
        coded=settings.coded,
        state=controller.status(JOB).state,
        wall_s=world.clock.passed_s,
        step_walls=world.step_walls,
        ratio=account.ratio if account is not None else -1.0,
        effective=account.effective if account is not None else -1.0,
        rows=account.rows if account is not None else {},
        restarts=sum(event.kind == "verdict_restart" for event in events),
        evictions=sum(event.kind == "decision" and event.text.startswith("evict:") for event in events),
        heartbeats=world.heartbeats,
        scored=score(world.truths, controller.incidents(JOB), costs, world.until_s),
        refused=world.refused,
        timeline=_timeline(events),
        progress=_thinned(world.progress),
    )


def _timeline(events: Sequence[Event]) -> list[tuple[float, str]]:
    """Return when the job changed its state."""
    found: list[tuple[float, str]] = [(0.0, "replacing")]
    for event in events:
        state = str(event.data.get("state", ""))
        if state and state != found[-1][1]:
            found.append((round(event.wall_s - START_WALL_S, 1), state))
    return found


def _thinned(points: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return at most MOST_POINTS of these, and each at which a step was made again."""
    every = max(1, len(points) // MOST_POINTS + 1)
    return [
        (round(at_s, 1), step)
        for number, (at_s, step) in enumerate(points)
        if number % every == 0 or number == len(points) - 1 or step <= points[number - 1][1]
    ]
