# SPDX-License-Identifier: Apache-2.0
"""What is simulated: the cluster, the job, its faults, how long; checked once, one clear sentence for what can't be."""

import math

import msgspec

from megascale_ops.errors import UsageError
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.ranges import MOST_RANKS
from megascale_ops.sim.laws import LAWS, law_names
from megascale_ops.sim.redundancy import read_code

# 90 days: the longest run that has published its faults; a seed is a whole number that numpy takes.
MOST_HOURS = 24.0 * 90
MOST_SEED = 2**63 - 1


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cluster, a job and its faults.

    Times are seconds. The defaults of a step are MegaScale's (NSDI'24: 175 billion parameters on 12,288 GPUs, 6.34 s a
    step); those of starts and checkpoints are assumptions, and settings for that reason.
    """

    ranks: int = 12_288
    hours: float = 24.0
    seed: int = 0
    faults: tuple[str, ...] = ("llama3",)
    ranks_per_node: int = 8
    spares: int = -1  # nodes that wait; -1: as many as fail in a day at most with 99 %, by the laws
    tp: int = 0  # ranks of a tensor parallel group; 0: those of a node
    pp: int = 0  # pipeline stages; 0: 8, or as many as fit
    step_s: float = 6.34
    noise: float = 0.01  # of each rank's own work, a step's standard deviation
    uneven: float = 0.005  # the same between machines, for good: legitimate
    checkpoint_every_s: float = 1800.0
    checkpoint_stall_s: float = 4.0  # ranks wait for it, then it is written beside the training
    checkpoint_write_s: float = 60.0
    start_s: float = 60.0  # processes, imports, groups; also of a restart
    load_s: float = 60.0  # a checkpoint is read
    stop_s: float = 5.0  # ranks are stopped
    evaluate_every_s: float = 0.0  # a declared evaluation in between; 0: none
    evaluate_s: float = 300.0
    first_step_s: float = 0.0  # by which the first step of a round takes longer, as a compilation does
    coded: str = ""  # a gradient code over the replicas, as s=1,kind=cyclic; "": none
    policy: JobPolicy = JobPolicy()
    columns: bool = True  # heartbeats that tell nothing but finished steps are handed in together, of 1,024 ranks on
    every_heartbeat: bool = False  # one a second also while nothing happens

    @property
    def nodes(self) -> int:
        """Nodes of the job."""
        return self.ranks // self.ranks_per_node

    @property
    def duration_s(self) -> float:
        """How long is simulated."""
        return self.hours * 3600.0


def checked(settings: Settings) -> Settings:
    """Return the settings with what was left open filled in.

    Raises:
        UsageError: one of them can't be.
    """
    _check_numbers(settings)
    for name in settings.faults:
        if name not in LAWS:
            raise UsageError(f"there is no law of faults {name!r}: take {law_names()}, several with commas, or none")
    per_node, ranks = settings.ranks_per_node, settings.ranks
    if ranks % per_node:
        raise UsageError(f"{ranks} ranks can't be spread over nodes of {per_node}: take a multiple of {per_node}")
    tp = settings.tp or per_node
    if ranks % tp:
        raise UsageError(f"{ranks} ranks can't be divided into tensor parallel groups of {tp}: take a multiple of {tp}")
    pp = settings.pp or max(stages for stages in (8, 4, 2, 1) if not ranks // tp % stages)
    if ranks // tp % pp:
        raise UsageError(f"{ranks} ranks in groups of {tp} make {ranks // tp} groups, which {pp} stages don't divide")
    read_code(settings.coded, ranks // tp // pp)
    spares = settings.spares if settings.spares >= 0 else spares_for(settings, 1.0)
    return msgspec.structs.replace(settings, tp=tp, pp=pp, spares=spares)


def _check_numbers(settings: Settings) -> None:
    """Refuse numbers that no cluster has."""
    least_most = {
        "ranks": (1, MOST_RANKS),
        "ranks_per_node": (1, 1024),
        "hours": (0.01, MOST_HOURS),
        "seed": (0, MOST_SEED),
        "spares": (-1, 4096),
        "tp": (0, MOST_RANKS),
        "pp": (0, MOST_RANKS),
        "step_s": (0.05, 3600.0),
        "noise": (0.0, 0.5),
        "uneven": (0.0, 0.5),
        "checkpoint_every_s": (1.0, 1e6),
        "checkpoint_stall_s": (0.0, 1e4),
        "checkpoint_write_s": (0.0, 1e5),
        "start_s": (0.0, 1e4),
        "load_s": (0.0, 1e4),
        "stop_s": (0.0, 60.0),
        "evaluate_every_s": (0.0, 1e6),
        "evaluate_s": (0.0, 1e5),
        "first_step_s": (0.0, 1e4),
    }
    for name, (least, most) in least_most.items():
        value = getattr(settings, name)
        if not (math.isfinite(value) and least <= value <= most):
            raise UsageError(f"{name.replace('_', '-')} {value:g} can't be simulated: take {least:g} to {most:g}")


def spares_for(settings: Settings, days: float) -> int:
    """Return the number of machines that break in so long at most, with 99 %: a Poisson quantile, at least one."""
    a_day = sum(LAWS[name].machines_a_day(settings.ranks, settings.ranks_per_node) for name in settings.faults)
    expected = a_day * days
    chance, total, spares = math.exp(-expected), math.exp(-expected), 0
    while total < 0.99 and spares < 4096:
        spares += 1
        chance *= expected / spares
        total += chance
    return max(1, spares)
