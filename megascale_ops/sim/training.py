# SPDX-License-Identifier: Apache-2.0
"""One round of the job: ranks start, load, step together, save, evaluate, and stand still when one does not come."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np

from megascale_ops.schema.progress import CollectivePosition, Progress, RankReport, StepWork
from megascale_ops.sim.clock import Clock
from megascale_ops.sim.machine import GONE, RUNS, SLEEPS, Crew, Machine
from megascale_ops.sim.mesh import Layout, Wait
from megascale_ops.sim.settings import Settings
from megascale_ops.sim.steps import Made, StepModel

if TYPE_CHECKING:
    import numpy.typing as npt

# 24 collectives a step that a position counts: no judge looks at finer ones.
CALLS = 24
# A heartbeat has room for 32 steps; older ones are told no more.
KEPT_STEPS = 32
# A recorder's thread beats ten times a second.
BEAT_AGO_S = 0.05
# Where in a step each phase ends, as shares.
_PHASES = ((0.02, "data"), (0.32, "forward"), (0.94, "backward"), (1.0, "optimizer"))
_NONE: tuple[StepWork, ...] = ()


class Surroundings(Protocol):
    """What a round asks and tells (``world.World``)."""

    settings: Settings
    clock: Clock
    layout: Layout
    model: StepModel
    saved_step: int
    is_quiet: bool
    p50_s: float
    p99_s: float

    def at(self, when_s: float, what: Callable[[], None]) -> None:
        """Let something happen at a time."""

    def jitter(self) -> float:
        """Return a number in 0..1."""

    def note_begun(self, training: "Training") -> None:
        """A round makes steps."""

    def note_step(self, made: Made) -> None:
        """All ranks have finished a step."""

    def is_save_due(self) -> bool:
        """Return whether the next step saves a checkpoint."""

    def is_evaluation_due(self) -> bool:
        """Return whether an evaluation comes before the next step."""

    def loss_at(self, step: int) -> float:
        """Return the loss."""

    def slower_ranks(self, training: "Training") -> Mapping[int, float]:
        """Return which ranks are slow now, and by which share of their own work."""

    def give_up_on_loss(self, training: "Training") -> None:
        """The script checks its loss, and gives up on one that is no number."""


class Training:
    """The ranks of one round. Owned by the world."""

    def __init__(self, world: Surroundings, round_: int, nodes: int) -> None:
        self._world = world
        self._settings = world.settings
        self.layout = world.layout
        self._model = world.model
        self.round = round_
        self.crews: list[Crew | None] = [None] * nodes
        self.step = world.saved_step  # the last that was finished
        self.steps_seen = 0
        self.has_begun = False
        self.is_over = False
        self.absent: int | None = None  # the rank for which the others wait
        self.absent_s = 0.0  # since when it does not come
        self._in_reach: npt.NDArray[np.bool_]  # by node: a rank of it waits before this step ends
        self._waits: dict[int, Wait | None] = {}  # by rank: where it waits once it has come there
        self.hangs = ""  # what keeps it from coming: "gpu", "network" (all have come), "": it is elsewhere, or dead
        self._kept: deque[Made] = deque(maxlen=KEPT_STEPS)
        self._since_s = world.clock.passed_s  # when this step began, or whatever comes before the first
        self._until_s = 0.0  # when this step ends
        self._next: Made | None = None
        self._evaluates = False
        self._nan_left = -1  # steps until ranks give up on a loss that is no number

    @property
    def is_stepping(self) -> bool:
        """Steps are made."""
        return self.has_begun and not self.is_over and self.absent is None

    def enter(self, node_rank: int, machine: Machine) -> Crew:
        """Start a machine's ranks; once all are loaded, they step."""
        world, settings = self._world, self._settings
        jitter = 1.0 + 0.2 * world.jitter()
        loaded_s = world.clock.passed_s + settings.start_s * jitter
        loaded_s += settings.load_s * jitter if self.step >= 0 else 0.0
        crew = Crew(machine, self, node_rank * settings.ranks_per_node, settings.ranks_per_node, loaded_s)
        self.crews[node_rank] = machine.life.crew = crew
        if all(self.crews):
            begins_s = max(one.loaded_s for one in self.crews if one is not None)
            world.at(begins_s, self._begin)
        return crew

    def crew_of(self, rank: int) -> Crew:
        """Return the crew that a rank belongs to."""
        crew = self.crews[rank // self._settings.ranks_per_node]
        assert crew is not None
        return crew

    def end(self) -> None:
        """Ranks are being stopped."""
        self.is_over = True

    def miss(self, rank: int, hangs: str = "") -> None:
        """A rank does not come to its collectives any more: it hangs, or is dead; ``hangs``: see there."""
        if self.absent is None:
            self.absent, self.absent_s, self.hangs = rank, self._world.clock.passed_s, hangs
            reach = self.layout.in_reach_of_cut_network if hangs == "network" else self.layout.in_reach
            by_node = reach(rank).reshape(len(self.crews), -1)
            self._in_reach = np.logical_or.reduce(by_node, axis=1)

    def goes_on(self, first: "npt.NDArray[np.int64]", passed_s: float) -> "npt.NDArray[np.bool_]":
        """Return whose ranks tell what all tell while none is missing, though one does not come; by their first."""
        if self.absent is None:
            return first >= 0
        if passed_s >= self._until_s:
            return first < 0
        return ~self._in_reach[first // self._settings.ranks_per_node]

    def lose_loss(self) -> None:
        """Let the loss be no number from the next step on; after three such steps the script gives up."""
        self._nan_left = 3

    def _begin(self) -> None:
        if self.is_over or self.absent is not None:
            return
        self.has_begun = True
        self._model.place([crew.machine.number for crew in self.crews if crew is not None])
        self._world.note_begun(self)
        self._start_step(self._settings.first_step_s)

    def _start_step(self, extra_s: float = 0.0) -> None:
        world, now_s = self._world, self._world.clock.passed_s
        stall_s = self._settings.checkpoint_stall_s if world.is_save_due() else 0.0
        slower = world.slower_ranks(self)
        loss = None if self._nan_left >= 0 else world.loss_at(self.step + 1)
        self._next = self._model.make(self.step + 1, slower, stall_s, extra_s, loss)
        self._since_s = now_s
        self._until_s = now_s + self._next.wall_s
        world.at(self._until_s, self._end_step)

    def _end_step(self) -> None:
        made, now_s = self._next, self._world.clock.passed_s
        if self.is_over or self.absent is not None or made is None:
            return
        self.step, self.steps_seen = made.step, self.steps_seen + 1
        self._kept.append(made)
        self._world.note_step(made)
        if self._nan_left >= 0:
            self._nan_left -= 1
            if self._nan_left < 0:
                self._world.give_up_on_loss(self)
                return
        if self._world.is_evaluation_due():
            self._evaluates = True
            self._since_s, self._until_s = now_s, now_s + self._settings.evaluate_s
            self._next = None
            self._world.at(self._until_s, self._end_evaluation)
            return
        self._start_step()

    def _end_evaluation(self) -> None:
        if not self.is_over and self.absent is None:
            self._evaluates = False
            self._start_step()

    def wait_of(self, rank: int, passed_s: float) -> Wait | None:
        """Return where a rank waits by now for the one that does not come; None: it works, or is that one."""
        if self.absent is None:
            return None
        if rank not in self._waits:
            find = {"gpu": self.layout.wait_of_stuck_gpu, "network": self.layout.wait_of_cut_network}
            self._waits[rank] = find.get(self.hangs, self.layout.wait_of)(rank, self.absent)
        wait = self._waits[rank]
        return wait if wait is not None and passed_s >= self._waits_from_s(wait) else None

    def phase_at(self, passed_s: float) -> str:
        """Return the phase that ranks are in, or were when one did not come."""
        return self._phase(passed_s)[0]

    def calls_of(self, wait: Wait | None) -> int:
        """Return how many collectives a rank has finished."""
        done = max(0, self.step + 1) * CALLS
        if wait is None:
            return done
        # The other pipelines have come to the end of the step, where gradients are added up.
        return done + (CALLS - 2 if wait.function == "reduce_scatter" else 3)

    def _waits_from_s(self, wait: Wait) -> float:
        return self._until_s if wait.function == "reduce_scatter" else self.absent_s + 0.5

    def reports(self, crew: Crew, passed_s: float, mono_s: float, *, is_full: bool) -> tuple[RankReport, ...]:
        """Return what an agent tells of its ranks; nothing while nothing happens and it need not tell everything.

        Args:
            crew: its ranks.
            passed_s: now.
            mono_s: now, by its clock.
            is_full: all is told.
        """
        if crew.is_stopped:
            return ()
        told, crew.told = crew.told, self.step
        if not is_full and self._world.is_quiet and told == self.step:
            return ()
        new = [made for made in self._kept if made.step > told] if self.has_begun else []
        progress = self._progress(passed_s, mono_s)
        calls = self.calls_of(None)
        position = CollectivePosition(calls, calls, "") if self.has_begun else None
        first, meshes, gpus, round_ = crew.first, self.layout.meshes, crew.machine.gpus, self.round
        world_size = self._settings.ranks
        is_odd = self.absent is not None or bool(crew.gone)
        reports = []
        standing: dict[float, Progress] = {}  # by when ranks last moved
        for local, pid in enumerate(crew.pids):
            rank = first + local
            work = tuple([made.work(rank) for made in new]) if new else _NONE
            if is_odd:
                reports.append(self._odd(crew, local, passed_s, mono_s, work, standing))
                continue
            report = RankReport(
                rank, local, pid, round_, world_size, meshes[rank], progress, position, RUNS, work=work, gpu=gpus[local]
            )
            reports.append(report)
        # The last to wait are those that have ended their step.
        crew.stand(stands=is_odd and self.has_begun and passed_s >= max(self._until_s, self.absent_s + 0.5))
        return tuple(reports)

    def columns(self, told: int, ranks: "npt.NDArray[np.intp]") -> "list[npt.NDArray[np.float64]]":
        """Return the steps of some ranks since one, oldest first: (ranks, 12), the fields of ``StepWork``."""
        return [np.take(made.fields.T, ranks, axis=1).T for made in self._kept if made.step > told]

    def told_of_all(self, passed_s: float) -> tuple[Progress, CollectivePosition | None]:
        """Return what every rank tells while none is missing, points in time as seconds from now."""
        calls = self.calls_of(None)
        return self._progress(passed_s, 0.0), CollectivePosition(calls, calls, "") if self.has_begun else None

    def _odd(
        self,
        crew: Crew,
        local: int,
        passed_s: float,
        mono_s: float,
        work: tuple[StepWork, ...],
        standing: dict[float, Progress],
    ) -> RankReport:
        """Return the report of a rank while not all is well; ``standing``: what ranks of this crew tell that wait."""
        rank = crew.first + local
        wait = self.wait_of(rank, passed_s)
        moved_s = passed_s - 0.05
        if wait is not None:
            moved_s = self._waits_from_s(wait)
        elif rank == self.absent:
            moved_s = self.absent_s
        progress = standing.get(moved_s)
        if progress is None:
            progress = standing[moved_s] = self._progress(passed_s, mono_s, moved_s)
        calls = self.calls_of(wait)
        name = wait.group if wait is not None else ""
        is_gone = local in crew.gone
        return RankReport(
            rank=rank,
            local_rank=local,
            pid=crew.pids[local],
            round=self.round,
            world_size=self._settings.ranks,
            mesh=self.layout.meshes[rank],
            progress=progress,
            collective=CollectivePosition(calls + (wait is not None), calls, name) if self.has_begun else None,
            process=GONE if is_gone else SLEEPS if rank == self.absent and not self.hangs else RUNS,
            error=crew.errors.get(local),
            work=work,
            gpu=crew.machine.gpus[local],
        )

    def _progress(self, passed_s: float, mono_s: float, moved_s: float = -1.0) -> Progress:
        """Return how far ranks are; ``moved_s``: of one that stands still, when it last moved."""
        # Of what stands still every heartbeat tells the same moment, to the last digit.
        base_s = round(mono_s - passed_s, 6)
        moved_mono_s = base_s + (moved_s if moved_s >= 0.0 else passed_s - 0.05)
        phase, since_s = self._phase(passed_s)
        if not self.has_begun:
            return Progress(
                state="running", step=-1, phase="startup", phase_since_mono_s=base_s + since_s,
                moved_mono_s=moved_mono_s, beat_mono_s=mono_s - BEAT_AGO_S,
            )  # fmt: skip
        return Progress(
            state="running",
            step=self.step if self.steps_seen else -1,
            step_is_absolute=True,
            steps_seen=self.steps_seen,
            phase=phase,
            phase_since_mono_s=base_s + since_s,
            moved_mono_s=moved_mono_s,
            beat_mono_s=mono_s - BEAT_AGO_S,
            step_p50_s=self._world.p50_s,
            step_p99_s=self._world.p99_s,
        )

    def _phase(self, passed_s: float) -> tuple[str, float]:
        """Return the phase that ranks are in, and since when."""
        if not self.has_begun:
            return "startup", self._since_s
        if self._evaluates:
            return "eval", self._since_s
        assert self._next is not None
        if self.absent is not None:
            passed_s = min(passed_s, self.absent_s)
        works_s = self._next.wall_s - self._next.checkpoint_s
        share = (passed_s - self._since_s) / works_s if works_s else 1.0
        began = 0.0
        for end, name in _PHASES:
            if share < end:
                return name, self._since_s + began * works_s
            began = end
        if self._next.checkpoint_s:
            return "checkpoint", self._since_s + works_s
        return _PHASES[-1][1], self._since_s + _PHASES[-2][0] * works_s
