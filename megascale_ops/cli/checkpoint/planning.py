# SPDX-License-Identifier: Apache-2.0
"""The inputs of ``checkpoint plan``, from options and from a job, and what is said of the outcome."""

from typing import Any, NamedTuple

from megascale_ops.checkpoint import deletion, storage
from megascale_ops.checkpoint.interval import Costs, Plan, lost_share, plan
from megascale_ops.cli.sources.measured import Input, Measured, measure
from megascale_ops.errors import ControllerUnreachableError, UsageError

# The inputs by the option that sets each.
OPTIONS = {
    "stall": "stall_s",
    "write": "write_s",
    "between-failures": "between_failures_s",
    "restart": "restart_s",
    "step": "step_s",
}
_GIVEN = "given"


class Planned(NamedTuple):
    """The inputs by option, the plan that follows, and the interval of now, as a job has it."""

    inputs: dict[str, Input]
    costs: Costs
    plan: Plan
    now: Input


def plan_for(given: dict[str, float | None], where: dict[str, str | None]) -> Planned:
    """Return when to save, by what was given and, for the rest, by what a job's record says.

    Raises:
        UsageError: the stall or the time between failures is neither given nor known.
    """
    has_place = any(where.values())
    needs = [name for name in ("stall", "between-failures") if given[name] is None]
    measured = _measured(where, needs) if has_place or needs else None
    inputs = {name: _input(name, given[name], measured) for name in OPTIONS}
    missing = [name for name in ("stall", "between-failures") if inputs[name].seconds is None]
    if missing:
        told = "; ".join(f"--{name} SECONDS ({inputs[name].source})" for name in missing)
        raise UsageError(f"what a plan needs is not known: give {told}")
    costs = Costs(**{field: inputs[name].seconds or 0.0 for name, field in OPTIONS.items()})
    return Planned(inputs, costs, plan(costs), measured.now if measured is not None else Input(None, "not known"))


def _measured(where: dict[str, str | None], needs: list[str]) -> Measured:
    from megascale_ops.cli.sources.locate import Wanted
    from megascale_ops.cli.sources.report import gather
    from megascale_ops.trace.report_facts import reckon

    wanted = Wanted(where["controller"] or "", where["job"] or "", where["run_dir"] or "")
    try:
        report = reckon(gather(wanted, where["token_file"]))
    except ControllerUnreachableError as error:
        if any(where.values()):
            raise
        options = " and ".join(f"--{name} SECONDS" for name in needs)
        raise UsageError(f"give {options}, or a JOB: no run of this machine shows them ({error})") from error
    return measure(report, _saved_s(where, report.gathered.job))


def _saved_s(where: dict[str, str | None], job: str) -> list[float]:
    """Return when the checkpoints of a run's own folder were saved, in the order of their steps."""
    from megascale_ops.cli.sources.locate import Wanted, run_folders

    if where["controller"]:
        return []
    for folder in run_folders(Wanted("", job, where["run_dir"] or "")):
        try:
            seen = [deletion.glance(one) for one in reversed(storage.candidates(folder / "checkpoints"))]
        except OSError:
            return []
        return [one.manifest.written_wall_s for one in seen if one.manifest is not None]
    return []


def _input(name: str, given: float | None, measured: Measured | None) -> Input:
    if given is not None:
        return Input(given, _GIVEN)
    if name == "write":
        return Input(0.0, "not given: on disk when training goes on")
    unknown = Input(None, "not given")
    found = {
        "stall": measured.stall if measured is not None else unknown,
        "between-failures": measured.between_failures if measured is not None else unknown,
        "restart": measured.restart if measured is not None else unknown,
        "step": measured.step if measured is not None else unknown,
    }[name]
    is_left_out = name == "restart" and found.seconds is None
    return found._replace(source=f"{found.source}: counts as 0") if is_left_out else found


def shares(planned: Planned) -> dict[str, float]:
    """Return what is lost at other intervals, by their name."""
    costs, interval_s = planned.costs, planned.plan.interval_s
    found = {}
    if interval_s / 2 >= max(costs.write_s, costs.step_s):  # else it can't be done
        found["half of it"] = lost_share(costs, interval_s / 2)
    found["twice"] = lost_share(costs, interval_s * 2)
    if planned.now.seconds:
        found["as it saves now"] = lost_share(costs, planned.now.seconds)
    return found


def numbers(planned: Planned) -> dict[str, Any]:
    """Return all of it for programs."""
    return {
        "inputs": {
            name.replace("-", "_"): {"seconds": one.seconds, "source": one.source, "is_bound": one.is_bound}
            for name, one in planned.inputs.items()
        },
        "plan": planned.plan._asdict(),
        "now_s": planned.now.seconds,
        "lost_share_at": {name.replace(" ", "_"): share for name, share in shares(planned).items()},
    }
