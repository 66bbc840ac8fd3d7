# SPDX-License-Identifier: Apache-2.0
"""The numbers of a plan, from options, from the record of a job, and from a published law, in this order."""

from typing import TYPE_CHECKING

from megascale_ops.checkpoint.interval import failures_seen
from megascale_ops.cli.sources.measured import Input, has_stopped_it, measure
from megascale_ops.errors import UsageError
from megascale_ops.planning.inputs import GIVEN, Given, by_law
from megascale_ops.schema.fault_classes import FAULTS, Hang
from megascale_ops.schema.wording import counted, duration

if TYPE_CHECKING:
    from megascale_ops.trace.report_facts import Report

_DAY_S = 86_400.0
# 5 failures: of fewer, shares say nothing yet.
_ENOUGH = 5


def numbers_of(
    options: dict[str, float | None], law: str, ranks_per_node: int, where: dict[str, str | None]
) -> dict[str, Given]:
    """Return each number that is known, with its source; what is not in it is assumed.

    Raises:
        UsageError: no such law, or the job shows no nodes.
    """
    found = by_law(law, ranks_per_node)
    if any(where.values()):
        found |= _measured(where)
    return found | {name: Given(value, GIVEN) for name, value in options.items() if value is not None}


def _measured(where: dict[str, str | None]) -> dict[str, Given]:
    from megascale_ops.cli.sources.locate import Wanted
    from megascale_ops.cli.sources.report import gather
    from megascale_ops.trace.report_facts import reckon

    wanted = Wanted(where["controller"] or "", where["job"] or "", where["run_dir"] or "")
    return of_report(reckon(gather(wanted, where["token_file"])))


def of_report(report: "Report") -> dict[str, Given]:
    """Return what the record of a job tells.

    Raises:
        UsageError: it has no nodes.
    """
    gathered = report.gathered
    places = gathered.history.facts.places if gathered.history is not None else ()
    nodes = len({place.node for place in places})
    if not nodes:
        raise UsageError(f"the record of {gathered.job} has no nodes: the job never began; give --nodes instead")
    found = {"nodes": Given(nodes, f"nodes of {gathered.job}")}
    observed_s = gathered.until_wall_s - gathered.began_wall_s
    faults = [told.incident.verdict for told in gathered.told if has_stopped_it(told.incident.marks)]
    if observed_s > 0.0:
        seen = failures_seen(observed_s, len(faults))
        what = counted(len(faults), "failure")
        source = f"{what} in {duration(observed_s)} on {counted(nodes, 'node')}" + (
            ", with 95 % no more" if seen.is_bound else ""
        )
        found["failures"] = Given(_DAY_S / seen.between_s / nodes, source, seen.is_bound)
    if len(faults) >= _ENOUGH:
        kinds = [FAULTS[verdict.fault] for verdict in faults if verdict is not None and verdict.fault in FAULTS]
        hangs = sum(kind.hang is not Hang.NO for kind in kinds)
        machines = sum(kind.is_machines for kind in kinds)
        found["hang_share"] = Given(hangs / len(faults), f"{hangs} of {len(faults)} failures")
        found["machine_share"] = Given(machines / len(faults), f"{machines} of {len(faults)} failures")
    measured = measure(report, ())
    costs = {"stall_s": measured.stall, "restart_s": measured.restart, "step_s": measured.step}
    return found | {name: _given(one) for name, one in costs.items() if one.seconds}


def _given(one: Input) -> Given:
    return Given(one.seconds or 0.0, one.source, one.is_bound)
