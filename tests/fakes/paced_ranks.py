# SPDX-License-Identifier: Apache-2.0
"""Ranks of a synchronous job, made up: each works for some time in every step, and then waits for the slowest."""

import random
from collections.abc import Callable

from megascale_ops.diagnosis.stragglers.detector import Watch
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import StepWork

# (step, rank, seconds of work so far) -> what else the step has, by field of StepWork; "other" lies between the parts.
Fault = Callable[[int, int], dict[str, float]]
MORE = {"data_s", "forward_s", "backward_s", "cpu_s", "gc_s", "checkpoint_s", "other_s"}
# What is random in a step's own work, in seconds: (step, rank, random) -> seconds.
Noise = Callable[[int, int, random.Random], float]


def gaussian(spread_s: float) -> Noise:
    """White noise."""
    return lambda _step, _rank, order: order.gauss(0.0, spread_s)


def no_fault(_step: int, _rank: int) -> dict[str, float]:
    """Nothing happens."""
    return {}


class PacedRanks:
    """A job and the watch that judges it."""

    def __init__(
        self,
        seed: int,
        *,
        ranks: int = 4,
        step_s: float = 0.05,
        noise: Noise | None = None,
        policy: JobPolicy | None = None,
    ) -> None:
        self.order = random.Random(seed)  # noqa: S311  no secret
        self.ranks = ranks
        self.step_s = step_s
        self.noise = noise or gaussian(0.02 * step_s)
        self.policy = policy or JobPolicy()
        self.watch = Watch()
        self.step = 0

    def works(self, fault: Fault = no_fault) -> list[StepWork]:
        """Make one step of all ranks."""
        step, step_s, noise, order = self.step, self.step_s, self.noise, self.order
        usual = (0.02 * step_s, 0.3 * step_s, 0.03 * step_s, 0.5 * step_s)  # data, backward, optimizer, CPU
        rows = []
        slowest_s = 0.0
        for rank in range(self.ranks):
            more = fault(step, rank)
            forward_s = max(0.0, 0.6 * step_s + noise(step, rank, order))
            data_s, backward_s, optimizer_s, cpu_s = usual
            gc_s = checkpoint_s = other_s = 0.0
            if more:
                assert more.keys() <= MORE, more
                data_s += more.get("data_s", 0.0)
                forward_s += more.get("forward_s", 0.0)
                backward_s += more.get("backward_s", 0.0)
                cpu_s += more.get("cpu_s", 0.0)
                gc_s, checkpoint_s = more.get("gc_s", 0.0), more.get("checkpoint_s", 0.0)
                other_s = more.get("other_s", 0.0)
            own_s = data_s + forward_s + backward_s + optimizer_s + other_s
            slowest_s = max(slowest_s, own_s + checkpoint_s)
            rows.append((own_s, (data_s, forward_s, backward_s, optimizer_s, checkpoint_s, gc_s, cpu_s)))
        wall_s = slowest_s + 0.05 * step_s
        return [StepWork(step, wall_s, max(0.0, wall_s - own_s - parts[4]), *parts) for own_s, parts in rows]

    def run(self, steps: int, fault: Fault = no_fault) -> set[int]:
        """Let the job make steps; return every rank that was named at any time."""
        named = set()
        for _ in range(steps):
            self.one(fault)
            named |= self.named()
        return named

    def one(self, fault: Fault = no_fault) -> None:
        """Let the job make one step."""
        for rank, work in enumerate(self.works(fault)):
            self.watch.ingest_steps(rank, f"node-{rank}", Mesh(), (work,))
        self.watch.advance(self.policy, self.ranks)
        self.step += 1

    def until_named(self, fault: Fault, most: int) -> tuple[int, set[int]]:
        """Return after how many steps a rank was named, and which; (-1, none) if that took more than ``most``."""
        for count in range(1, most + 1):
            self.one(fault)
            if self.named():
                return count, self.named()
        return -1, set()

    def named(self) -> set[int]:
        """Return who is named now."""
        return {rank.rank for _, rank, _ in self.watch.held()}
