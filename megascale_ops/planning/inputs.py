# SPDX-License-Identifier: Apache-2.0
"""What a plan rests on: how often what fails, and what each thing costs; with its source, checked once.

Every number is the job's own where it was measured, else a published one, else an assumption that says so.
"""

import math
from typing import NamedTuple

from megascale_ops.diagnosis.statistics.spares import DAY_S
from megascale_ops.errors import UsageError
from megascale_ops.sim.laws import LAWS, law_names

GIVEN = "given"  # the source of what a person has typed


class Given(NamedTuple):
    """One number and where it is from; ``is_bound``: nothing was seen yet, it is the most that this allows."""

    value: float
    source: str
    is_bound: bool = False


class Job(NamedTuple):
    """One job and what happens to it. Times in seconds, rates a day.

    Attributes:
        nodes: places of the job.
        failures: of a node and day, those that end the job's round or silence it.
        hang_share: of these, show as silence and are known by patience alone; 0..1.
        machine_share: of these, take their machine away for ``repair_s``; 0..1.
        hidden: of a node and day, faults that only a check finds: wrong results, silently.
        repair_s: a machine is away.
        stall_s, write_s: a checkpoint halts the training; it is written beside it after that.
        step_s: one step.
        restart_s: ranks stop, start again and load, up to the first new step.
        detect_s: a failure that is no silence is seen.
        silences: a day, of the whole job, times in which no rank moves although nothing is wrong and no phase says so.
        silence_s: how long these last in the mean.
        check_s: all nodes measure themselves, and the job waits.
    """

    nodes: float
    failures: float
    hang_share: float
    machine_share: float
    hidden: float
    repair_s: float
    stall_s: float
    write_s: float
    step_s: float
    restart_s: float
    detect_s: float
    silences: float
    silence_s: float
    check_s: float

    @property
    def failures_a_day(self) -> float:
        """Of the job as a whole."""
        return self.nodes * self.failures

    @property
    def between_failures_s(self) -> float:
        """The mean time between two failures of the job."""
        return DAY_S / self.failures_a_day


# What is taken where nothing is given, measured or published; each can be given.
ASSUMED: dict[str, tuple[float, str]] = {
    "repair_s": (DAY_S, "assumed: replaced by hand within a day"),
    "stall_s": (4.0, "assumed: copied to host memory, written beside the training"),
    "write_s": (60.0, "assumed"),
    "step_s": (6.34, "MegaScale, 12,288 GPUs (arXiv 2402.15627)"),
    "restart_s": (180.0, "assumed: processes, imports, groups, a checkpoint read"),
    "detect_s": (2.0, "a process that ends is seen with the next heartbeat"),
    "silences": (1.0, "assumed: one a day that no phase was declared for"),
    "silence_s": (60.0, "assumed"),
    "check_s": (30.0, "the most that a quick check of all nodes may take"),
}
_RANGES = {
    "nodes": (1.0, 1e6),
    "failures": (1e-9, 1e3),
    "hang_share": (0.0, 1.0),
    "machine_share": (0.0, 1.0),
    "hidden": (0.0, 1e3),
    "repair_s": (0.0, 1e8),
    "stall_s": (0.0, 1e5),
    "write_s": (0.0, 1e6),
    "step_s": (1e-3, 1e5),
    "restart_s": (0.0, 1e6),
    "detect_s": (0.0, 1e5),
    "silences": (0.0, 1e5),
    "silence_s": (1e-3, 1e6),
    "check_s": (0.0, 1e5),
}


def by_law(name: str, ranks_per_node: int) -> dict[str, Given]:
    """Return the rates of a law of faults, for a node of so many ranks.

    Raises:
        UsageError: there is no such law.
    """
    if name not in LAWS:
        raise UsageError(f"there is no law of faults {name!r}: take {law_names()}")
    law = LAWS[name]
    a_day = law.a_day if law.per_node else law.a_day * ranks_per_node
    total = sum(cause.weight for cause in law.causes)
    shown = [(cause, kind, share) for cause in law.causes for kind, share in cause.shows]
    hidden = sum(cause.weight * share for cause, kind, share in shown if kind == "nan")
    slow = sum(cause.weight * share for cause, kind, share in shown if kind == "slow")
    # Hangs of a GPU or of the network show more than silence: the patience that is chosen here is not what ends them.
    hangs = sum(cause.weight * share for cause, kind, share in shown if kind == "hang")
    ends = total - hidden - slow
    if ends <= 0.0:
        raise UsageError(f"the law {name} has no faults that end a job, so that nothing can be planned by it alone")
    machines = sum(
        cause.weight * share for cause, kind, share in shown if cause.repair_s and kind not in ("nan", "slow")
    )
    assumed = f"{law.source}; how causes show themselves is an assumption"
    return {
        "failures": Given(a_day * ends / total, law.source),
        "hang_share": Given(hangs / ends, assumed),
        "machine_share": Given(machines / ends, law.source),
        "hidden": Given(a_day * hidden / total, law.source),
    }


def job_of(given: dict[str, Given]) -> tuple[Job, dict[str, Given]]:
    """Return the job that is planned, and each of its numbers with its source.

    Raises:
        UsageError: one is missing, or none that a job could have.
    """
    known = {name: given.get(name) or _assumed(name) for name in Job._fields}
    for name, one in known.items():
        least, most = _RANGES[name]
        if not (math.isfinite(one.value) and least <= one.value <= most):
            option = name.removesuffix("_s").replace("_", "-")
            if one.source == GIVEN:
                raise UsageError(f"--{option} {one.value:g} can't be planned with: take {least:g} to {most:g}")
            raise UsageError(
                f"{option.replace('-', ' ')} {one.value:g} ({one.source}) can't be planned with: "
                f"give --{option} yourself, {least:g} to {most:g}"
            )
    return Job(**{name: one.value for name, one in known.items()}), known


def _assumed(name: str) -> Given:
    if name not in ASSUMED:
        raise UsageError(f"--{name} is not known: give it, or name a JOB whose record has it")
    return Given(*ASSUMED[name])
