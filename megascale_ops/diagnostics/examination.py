# SPDX-License-Identifier: Apache-2.0
"""Make the checks of this node, in an order in which none disturbs another, and put their results together.

First GPUs are asked what they are: that decides which checks can be made at all. Then the processes are started, so
that torch is loaded meanwhile; checks that only read are made side by side. When all are ready, those that measure a
rate are made one after the other, with nothing else of ours on the machine. Checks of GPUs share a process, since
each process takes a third of a second a GPU to come to it: 8 GPUs and seven checks would be 17 s.
"""

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from megascale_ops.diagnostics.check import Check, CheckModule, Reading, Task
from megascale_ops.diagnostics.children import Child, Outcome, Planned, await_ready, end_all, run_together
from megascale_ops.diagnostics.host import paths as folders
from megascale_ops.diagnostics.judgement import result_of, troubled, unmeasured
from megascale_ops.diagnostics.report import VERSION, CheckFinding, CheckResult, NodeReport
from megascale_ops.diagnostics.table import INVENTORY, modules

# Seconds for all of it: on a node where several checks hang their deadlines would add up to three and eighteen minutes.
# A quick one must be over while the runner and the agent still wait for it (two minutes).
_QUICK_S, _FULL_S = 105.0, 600.0
_NO_TIME = "those before it took the time of all: --check NAME makes one alone"


class Plan(NamedTuple):
    """What is to be examined.

    Attributes:
        node: The name of this node in the report.
        thorough: ``--full``.
        paths: Folders whose disks and file systems are looked at.
        names: Only these checks; empty: all of them.
        program: Name and version of this program.
    """

    node: str
    thorough: bool
    paths: tuple[str, ...]
    names: tuple[str, ...]
    program: str


class Progress(NamedTuple):
    """Who is told: what is being measured, and each result."""

    begun: Callable[[Sequence[str]], object]
    done: Callable[[CheckResult], object]


def examine(plan: Plan, progress: Progress) -> NodeReport:
    """Examine this node."""
    began_wall_s, began_s = time.time(), time.monotonic()
    found: dict[str, list[CheckResult]] = {}
    for result in _results(plan, progress, began_s):
        progress.done(result)
        found.setdefault(result.check, []).append(result)
    ordered = tuple(result for name in modules() for result in found.get(name, ()))
    return NodeReport(
        VERSION,
        plan.program,
        plan.node,
        "full" if plan.thorough else "quick",
        round(began_wall_s, 3),
        round(time.monotonic() - began_s, 2),
        ordered,
    )


def look_at(paths: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return each folder's state (``host/paths.py``) and disk; of one that does not answer, two empty texts."""
    tasks = [Task(paths=(path,), deadline_s=folders.CHECK.quick_s) for path in paths]
    planned = [Planned(folders.__name__, folders.CHECK, task) for task in tasks]
    children = [Child() for _ in planned]
    found: dict[str, tuple[str, str]] = {}
    try:
        for one, outcome in run_together(children, planned):
            reading = outcome.answer.reading if outcome.answer else None
            facts = {fact.name: fact.value for fact in reading.facts} if reading else {}
            found[one.task.paths[0]] = (facts.get("path_state", ""), facts.get("path_disk", ""))
    finally:
        end_all(children)
    return found


def _results(plan: Plan, progress: Progress, began_s: float) -> Iterator[CheckResult]:
    wanted = {name: one for name, one in modules().items() if not plan.names or name in plan.names}
    gpus, why = 0, ""
    if any("gpu" in need for _, one in wanted.values() for need in one.CHECK.needs) or INVENTORY in wanted:
        progress.begun([INVENTORY])
        module, inventory = modules()[INVENTORY]
        result = _only(Planned(module, inventory.CHECK, _task(plan, inventory.CHECK)))
        gpus = sum(fact.name == "uuid" for fact in result.facts)
        why = result.unmeasured[0] if result.unmeasured else "no GPU answers"
        if INVENTORY in wanted:
            yield result
    makeable: list[Planned] = []
    for module, one in wanted.values():
        check = one.CHECK
        if check.name == INVENTORY:
            continue
        lacks = lacking(check, gpus, why, has_torch=importlib.util.find_spec("torch") is not None)
        if lacks:
            yield unmeasured(check, lacks)
        elif plan.thorough or check.quick_s:
            makeable += [Planned(module, check, task) for task in _tasks(plan, check)]
    yield from _made(makeable, progress, began_s)


def lacking(check: Check, gpus: int, why: str, *, has_torch: bool) -> str:
    """Return what a check needs and this machine has not; "" when it can be made.

    Args:
        check: The check.
        gpus: How many GPUs there are.
        why: Why there is none.
        has_torch: Whether torch is installed.
    """
    if ("gpu" in check.needs or "gpus" in check.needs) and not gpus:
        return why
    if "gpus" in check.needs and gpus < 2:
        return "one GPU alone has no links to others"
    if "torch" in check.needs and not has_torch:
        return "torch is not installed: pip install 'megascale-ops[train]'"
    return ""


def _task(plan: Plan, check: Check, paths: tuple[str, ...] = ()) -> Task:
    return Task(plan.thorough, paths or plan.paths, check.full_s if plan.thorough else check.quick_s)


def _tasks(plan: Plan, check: Check) -> list[Task]:
    if check.a_path:
        return [_task(plan, check, (path,)) for path in plan.paths]
    return [_task(plan, check)]


def _made(planned: Sequence[Planned], progress: Progress, began_s: float) -> Iterator[CheckResult]:
    together = [one for one in planned if not one.check.alone]
    alone = [one for one in planned if one.check.alone]
    children: list[Child] = []
    # By the process that a check is made in: those that share one by its name, all others by themselves.
    kept: dict[str, Child] = {}
    try:
        for one in alone:
            if _process_of(one) not in kept:
                kept[_process_of(one)] = Child(_loads(one))
        children += [Child(_loads(one)) for one in together]
        if together:
            progress.begun([one.check.name for one in together])
            for one, outcome in run_together(children, together):
                yield judged_outcome(one, outcome)
            end_all(children)
        await_ready([*kept.values()])
        for at, (one, has_time) in enumerate(in_time(alone, lambda: time.monotonic() - began_s)):
            if has_time:
                progress.begun([one.check.name])
                yield _alone(one, kept)
            else:
                yield unmeasured(one.check, _NO_TIME)
            if _process_of(one) not in map(_process_of, alone[at + 1 :]):
                kept.pop(_process_of(one)).end()  # it may hold memory of GPUs
    finally:
        end_all([*children, *kept.values()])


def in_time(planned: Sequence[Planned], spent: Callable[[], float]) -> Iterator[tuple[Planned, bool]]:
    """Yield each check, and whether it may still be begun: its deadline ends within the time for all of them.

    None is cut short for want of time, which would be held against the node as a check that hung.

    Args:
        planned: Checks that are made in this order, each before the next is asked for.
        spent: Seconds since the examination began.
    """
    for one in planned:
        most_s = _FULL_S if one.task.thorough else _QUICK_S
        yield one, spent() + one.task.deadline_s <= most_s


def _process_of(planned: Planned) -> str:
    return planned.check.process or " ".join((planned.module, *planned.task.paths))


def _loads(planned: Planned) -> tuple[str, ...]:
    return ("torch",) if "torch" in planned.check.needs else ()


def _alone(planned: Planned, kept: dict[str, Child]) -> CheckResult:
    """Make one check, in the process that is kept for it, or in a new one where that has failed."""
    name = _process_of(planned)
    child = kept.get(name)
    if child is None or (child.is_ready and not child.is_usable):
        if child is not None:
            child.end()
        child = kept[name] = Child(_loads(planned))
    return next(judged_outcome(one, outcome) for one, outcome in run_together([child], [planned]))


def _only(planned: Planned) -> CheckResult:
    """Make one check in a process that is gone afterwards."""
    kept: dict[str, Child] = {}
    try:
        return _alone(planned, kept)
    finally:
        end_all(kept.values())


def judged_outcome(planned: Planned, outcome: Outcome) -> CheckResult:
    """Return the result of a check whose outcome is known."""
    check, seconds, answer = planned.check, round(outcome.seconds, 3), outcome.answer
    if answer is None:
        return troubled(check, outcome.trouble, seconds)
    if answer.error:
        return troubled(check, f"failed: {answer.error}", seconds)
    if answer.reading is None:
        return unmeasured(check, answer.unmeasured or "nothing was measured", seconds)
    return result_of(check, answer.reading, _judge_of(planned.module), seconds)


def _judge_of(name: str) -> Callable[[Reading], Sequence[CheckFinding]]:
    module: CheckModule = next(one for known, one in modules().values() if known == name)
    return module.judge
