# SPDX-License-Identifier: Apache-2.0
"""The world: machines, runners, one job's rounds, and time, around one real controller.

Time goes in tenths of a second, as the controller's own ticks do. While nothing happens (steps are made, no order is
out, no fault is due within seconds) it goes in seconds, and agents speak once in four instead of each: heartbeats that
tell nothing new are left out, those that tell of finished steps are not. Whatever happens begins in small steps again,
ten seconds before, so that no judge sees a difference.
"""

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from megascale_ops.controller.embedded import TICK_EVERY_S as TICK_S
from megascale_ops.controller.embedded import Embedded
from megascale_ops.errors import MegascaleError
from megascale_ops.schema.health import HardwareFinding
from megascale_ops.schema.messages import Evidence, HeartbeatReply, JoinReply, Order
from megascale_ops.schema.progress import RankError
from megascale_ops.sim.beats import Beats
from megascale_ops.sim.chorus import Chorus, speak
from megascale_ops.sim.clock import Clock
from megascale_ops.sim.evidence import ANSWER_S, TAKES_S, answer
from megascale_ops.sim.faults import Fault, Truth
from megascale_ops.sim.laws import GSP
from megascale_ops.sim.machine import GSP_S, HELD_S, JOB, Crew, Machine
from megascale_ops.sim.mesh import Layout
from megascale_ops.sim.runner import Runner
from megascale_ops.sim.settings import Settings
from megascale_ops.sim.steps import Made, StepModel
from megascale_ops.sim.training import Training
from megascale_ops.sim.wire import Wire

HEARTBEAT_S = 1.0
# 4 s: a node that has not been heard for five is looked at more closely (a third of ``node_lost_s``).
QUIET_HEARTBEAT_S = 4.0
QUIET_TICK_S = 1.0
# 10 s: the controller's own lag, which begins with a tick of a second, has worn off by then (0.9 a tick).
AHEAD_S = 10.0
# 1,024 ranks: of fewer, the controller looks at each report.
LEAST_COLUMNS = 1_024
# A minute after anything has happened: what follows from it comes within that.
LOUD_S = 60.0
# A fault that is due while ranks are starting comes when they step again.
POSTPONED_S = 30.0
_MINUTE_TICKS = 600
# Turns of the event loop without anything, until everything that could run has run.
_IDLE_TURNS = 4
# How long it takes until a bad GPU fails again that was taken into a round: the mean.
AGAIN_MEAN_S = 900.0
_CUDA = "CUDA error: uncorrectable ECC error encountered"
_NCCL = (
    "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error, ncclSystemError: Call to ibv_modify_qp failed "
    "with error No such device"
)


class _LostLoss(NamedTuple):
    """A loss that is no number since a moment ago: no step that has it was finished yet."""

    fault: Fault
    rank: int
    node: str
    round: int


class World:
    """All that is simulated, and the one controller that is not."""

    def __init__(
        self,
        settings: Settings,
        faults: Sequence[Fault],
        controller: Embedded,
        clock: Clock,
        ends_early: Callable[[], bool] | None = None,
    ) -> None:
        self.settings = settings
        self.until_s = settings.duration_s
        self._ends_early = ends_early
        self.clock = clock
        self.controller = controller
        self.wire = Wire()
        seeds = np.random.SeedSequence(settings.seed).spawn(3)
        self.layout = Layout(settings)
        self.model = StepModel(settings, self.layout, np.random.default_rng(seeds[1]))
        self._chance = np.random.default_rng(seeds[2])
        self.beats = Beats(settings.nodes + settings.spares, settings.ranks_per_node)
        self.machines = [
            Machine(number, settings.ranks_per_node, self.beats) for number in range(settings.nodes + settings.spares)
        ]
        self._by_name = {machine.name: machine for machine in self.machines}
        self.stirs = 0
        self.is_quiet = False
        self.saved_step = -1
        self.truths: list[Truth] = []
        self.refused: list[str] = []
        self.step_walls: dict[int, float] = {}  # by step, of the first time that it was made
        self.progress: list[tuple[float, int]] = []  # when which step was finished
        self.heartbeats = 0
        self.p50_s = self.p99_s = 0.0
        self._lately: deque[float] = deque(maxlen=128)
        self._saved_s = self._evaluated_s = 0.0
        self._loud_until_s = LOUD_S
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._has_columns = settings.columns and settings.ranks >= LEAST_COLUMNS
        self._chorus = Chorus(self.beats, self.machines, controller, clock, self.wire)
        self._training: Training | None = None
        self._lost_loss: _LostLoss | None = None
        self._runners: dict[str, asyncio.Task[None]] = {}
        self._broken: list[BaseException] = []  # what ended a runner that should not have ended
        self._faults: list[float] = []  # times of those that are still to come
        for fault in faults:
            self._schedule(fault.at_s, fault)

    def at(self, when_s: float, what: Callable[[], None]) -> None:
        """Let something happen at a time."""
        heapq.heappush(self._events, (when_s, next(self._numbers), what))

    def be_loud(self) -> None:
        """Something happens: time goes in small steps for a while."""
        self._loud_until_s = self.clock.passed_s + LOUD_S

    def jitter(self) -> float:
        """Return a number in 0..1."""
        return float(self._chance.random())

    # What rounds ask and tell.

    def enter(self, reply: JoinReply, machine: Machine) -> Crew:
        """Start a node's ranks in a round that was formed."""
        self.be_loud()
        training = self._training
        if training is None or training.round != reply.round:
            if training is not None:
                training.end()
            self._lose_later()
            training = self._training = Training(self, reply.round, reply.nodes)
            self.beats.only_goes_on[:] = False
        return training.enter(reply.node_rank, machine)

    def _lose_later(self) -> None:
        """A round ended in the step in which its loss was lost: no step shows that, and it comes again."""
        lost, self._lost_loss = self._lost_loss, None
        if lost is not None:
            self._schedule(self.clock.passed_s + POSTPONED_S, lost.fault)

    def note_begun(self, training: Training) -> None:
        """A round makes steps: what a bad GPU in it does follows."""
        self.be_loud()
        now_s = self.clock.passed_s
        self._saved_s = self._evaluated_s = now_s
        for crew in training.crews:
            if crew is not None and crew.machine.bad_until_s > now_s:
                machine = crew.machine
                place = (crew.first + machine.bad_gpu + 0.5) / self.settings.ranks
                left_s = machine.bad_until_s - now_s
                again_s = now_s + float(self._chance.exponential(AGAIN_MEAN_S))
                self._schedule(again_s, Fault(again_s, "gpu_error", "bad GPU again", "", place, left_s), machine)
        self._place_truths(training)

    def _place_truths(self, training: Training) -> None:
        """Note which ranks faults that last have in a new round."""
        for truth in self.truths:
            crew = self._by_name[truth.node].life.crew
            lasts = truth.at_s + truth.fault.lasts_s > self.clock.passed_s
            if lasts and crew is not None and crew.training is training:
                truth.ranks[training.round] = crew.first + truth.rank % self.settings.ranks_per_node

    def note_step(self, made: Made) -> None:
        """All ranks have finished a step."""
        lost = self._lost_loss
        if lost is not None and made.loss is None:  # from now on it can be seen
            self.truths.append(Truth(lost.fault, self.clock.passed_s, lost.rank, lost.node, made.step, lost.round))
            self._lost_loss = None
        self.step_walls.setdefault(made.step, made.wall_s)
        self.progress.append((self.clock.passed_s, made.step))
        self._lately.append(made.wall_s)
        ordered = sorted(self._lately)
        self.p50_s, self.p99_s = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
        if made.checkpoint_s:
            step = made.step
            self._saved_s = self.clock.passed_s
            self.at(self.clock.passed_s + self.settings.checkpoint_write_s, lambda: self._save(step))

    def _save(self, step: int) -> None:
        self.saved_step = max(self.saved_step, step)

    def is_save_due(self) -> bool:
        """Return whether the next step saves a checkpoint."""
        return self.clock.passed_s - self._saved_s >= self.settings.checkpoint_every_s

    def is_evaluation_due(self) -> bool:
        """Return whether an evaluation comes before the next step."""
        every_s = self.settings.evaluate_every_s
        if not every_s or self.clock.passed_s - self._evaluated_s < every_s:
            return False
        self._evaluated_s = self.clock.passed_s
        return True

    def loss_at(self, step: int) -> float:
        """Return the loss, which falls and is noisy."""
        return round(1.8 + 9.0 / math.sqrt(step + 4.0) + 0.01 * float(self._chance.standard_normal()), 6)

    def slower_ranks(self, training: Training) -> dict[int, float]:
        """Return which ranks are slow now, and by which share of their own work."""
        found = {}
        for crew in training.crews:
            if crew is not None and crew.machine.slower:
                for local, (share, until_s) in list(crew.machine.slower.items()):
                    if until_s <= self.clock.passed_s:
                        del crew.machine.slower[local]
                    else:
                        found[crew.first + local] = share
        return found

    # Faults.

    def _schedule(self, when_s: float, fault: Fault, only: Machine | None = None) -> None:
        heapq.heappush(self._faults, when_s)
        self.at(when_s, lambda: self._strike(fault, only))

    def _strike(self, fault: Fault, only: Machine | None) -> None:
        """Let a fault happen now, or later where no steps are made; ``only``: on this machine, or never."""
        heapq.heappop(self._faults)
        training, now_s = self._training, self.clock.passed_s
        if only is not None and only.bad_until_s <= now_s:
            return
        if training is None or not training.is_stepping:
            if only is None:
                self._schedule(now_s + POSTPONED_S, fault)
            return
        rank = fault.rank_of(self.settings.ranks)
        crew = training.crew_of(rank)
        if only is not None and crew.machine is not only:
            if only.life.crew is None or only.life.crew.training is not training:
                return
            crew = only.life.crew
            rank = crew.first + only.bad_gpu
        self.be_loud()
        if fault.kind != "nan":
            self.truths.append(Truth(fault, now_s, rank, crew.machine.name, training.step, training.round))
        if fault.repair_s and fault.kind != "host_lost":
            crew.machine.bad_until_s = max(crew.machine.bad_until_s, now_s + fault.repair_s)
            crew.machine.bad_gpu = rank - crew.first
        getattr(self, f"_do_{fault.kind}")(fault, training, crew, rank)

    def _die(self, training: Training, crew: Crew, rank: int, code: int, kind: str = "", text: str = "") -> None:
        error = None
        if text:
            where = "train.py:118 train_step"
            error = RankError(
                kind, text, where, training.step, raised_mono_s=self.clock.mono_s() + crew.machine.offset_s
            )
        training.miss(rank)
        crew.die(rank - crew.first, code, error)

    def _do_gpu_error(self, fault: Fault, training: Training, crew: Crew, rank: int) -> None:
        machine, local, wall_s = crew.machine, rank - crew.first, self.clock.wall_s()
        text = f"GPU {local}: Xid 94 (contained ECC error): {fault.cause}"
        finding = HardwareFinding(
            "xid_94", text, "kernel_log", "fail", machine.gpus[local], wall_s, wall_s, is_bad=True
        )
        machine.find(finding, self.clock.passed_s + HELD_S)
        self._die(training, crew, rank, 1, "torch.AcceleratorError", _CUDA)

    def _do_segfault(self, fault: Fault, training: Training, crew: Crew, rank: int) -> None:
        del fault
        self._die(training, crew, rank, -11)

    def _do_killed(self, fault: Fault, training: Training, crew: Crew, rank: int) -> None:
        del fault
        self._die(training, crew, rank, -9)

    def _do_exception(self, fault: Fault, training: Training, crew: Crew, rank: int) -> None:
        text = f"rank {rank} has met {fault.cause or 'a fault'}: sample {training.step * 131 + rank} can't be read"
        self._die(training, crew, rank, 1, "RuntimeError", text)

    def _do_exception_everywhere(self, fault: Fault, training: Training, crew: Crew, rank: int) -> None:
        del fault, crew, rank
        self._fail_all(training, "KeyError", f"'schedule at {training.step}'")

    def _do_nan(self, fault: Fault, training: Training, crew: Crew, rank: int) -> None:
        training.lose_loss()
        self._lost_loss = _LostLoss(fault, rank, crew.machine.name, training.round)

    def give_up_on_loss(self, training: Training) -> None:
        """The script checks its loss, and gives up on one that is no number."""
        self._fail_all(training, "FloatingPointError", "the loss is nan")

    def _fail_all(self, training: Training, kind: str, text: str) -> None:
        for crew in training.crews:
            if crew is not None:
                for rank in range(crew.first, crew.first + crew.machine.count):
                    self._die(training, crew, rank, 1, kind, text)

    def _do_network_error(self, fault: Fault, training: Training, crew: Crew, rank: int) -> None:
        del fault
        self._die(training, crew, rank, 1, "torch.distributed.DistBackendError", _NCCL)

    def _do_hang(self, fault: Fault, training: Training, crew: Crew, rank: int) -> None:
        training.miss(rank, fault.kind.removesuffix("hang").rstrip("_"))
        if fault.cause == GSP:
            machine, told_s, wall_s = crew.machine, self.clock.passed_s + GSP_S, self.clock.wall_s() + GSP_S
            self.at(told_s, lambda: machine.lose_gsp(rank - crew.first, wall_s, told_s))

    _do_gpu_hang = _do_network_hang = _do_hang

    def _do_slow(self, fault: Fault, training: Training, crew: Crew, rank: int) -> None:
        del training
        crew.machine.slower[rank - crew.first] = fault.slower, self.clock.passed_s + fault.lasts_s

    def _do_host_lost(self, fault: Fault, training: Training, crew: Crew, rank: int) -> None:
        machine = crew.machine
        training.miss(rank)
        machine.lose()
        self.at(self.clock.passed_s + (fault.repair_s or POSTPONED_S), lambda: self._reboot(machine))

    def _reboot(self, machine: Machine) -> None:
        self.be_loud()
        self._runners[machine.name].cancel()
        machine.restart()
        self.beats.speaks_s[machine.number] = self.clock.passed_s
        self._start_runner(machine)

    def _start_runner(self, machine: Machine) -> None:
        task = self._runners[machine.name] = asyncio.create_task(Runner(self, machine).run())
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken.append(error)

    # Time.

    async def run(self) -> None:
        """Simulate until the time is over, or the job is."""
        try:
            for machine in self.machines:
                self._start_runner(machine)
            await self._settle()
            ticks = minutes = 0
            while self.clock.passed_s < self.until_s and not self.controller.is_over(JOB):
                self.is_quiet = self._may_be_quiet()
                ticks += round((QUIET_TICK_S if self.is_quiet else TICK_S) / TICK_S)
                self._pass(min(self.until_s, round(ticks * TICK_S, 1)))
                if ticks // _MINUTE_TICKS > minutes:
                    minutes = ticks // _MINUTE_TICKS
                    if self._ends_early is not None and self._ends_early():
                        self.until_s = self.clock.passed_s
                self._speak()
                self.controller.tick()
                if self._broken:
                    raise self._broken[0]
                await self._settle()
        finally:
            for task in self._runners.values():
                task.cancel()
            await asyncio.gather(*self._runners.values(), return_exceptions=True)

    def _may_be_quiet(self) -> bool:
        now_s, training = self.clock.passed_s, self._training
        if self.settings.every_heartbeat or training is None or not training.is_stepping or now_s < self._loud_until_s:
            return False
        return not self._faults or self._faults[0] - now_s > AHEAD_S

    def _pass(self, until_s: float) -> None:
        """Let time pass, and happen what is due meanwhile, each at its own moment."""
        with_timers = not self.is_quiet
        while self._events and self._events[0][0] <= until_s:
            when_s, _, what = heapq.heappop(self._events)
            self.clock.advance(max(when_s, self.clock.passed_s), with_timers=with_timers)
            what()
        self.clock.advance(until_s, with_timers=with_timers)

    def _speak(self) -> None:
        """Let the agents speak whose time has come."""
        due = self.beats.due(self.clock.passed_s, QUIET_HEARTBEAT_S if self.is_quiet else HEARTBEAT_S)
        self.heartbeats += len(due)
        if self._has_columns:
            due = speak(self._chorus, due, self._training, is_quiet=self.is_quiet)
        for number in due.tolist():
            self._say(self.machines[number])

    def _say(self, machine: Machine) -> None:
        """Let an agent send its heartbeat."""
        now_s, mono_s, wall_s = self.clock.passed_s, self.clock.mono_s(), self.clock.wall_s()
        reply = self.controller.heartbeat(self.wire.heartbeat(machine.heartbeat(now_s, mono_s, wall_s)))
        if reply.send_full or reply.orders or reply.again_s:
            self._obey(machine, reply)

    def _obey(self, machine: Machine, reply: HeartbeatReply) -> None:
        """Do what the answer to a heartbeat asks for."""
        self.be_loud()
        now_s = self.clock.passed_s
        machine.life.wants_full = machine.life.wants_full or reply.send_full
        machine.touch()
        if reply.again_s:
            self.beats.hasten(machine.number, round(now_s + reply.again_s, 1))
        for order in reply.orders:
            if order.id in machine.life.taken:
                continue
            machine.life.take(order.id)
            self.at(now_s + TAKES_S.get(order.kind, ANSWER_S), lambda order=order: self._answer(machine, order))  # type: ignore[misc]  # bound now

    def _answer(self, machine: Machine, order: Order) -> None:
        if not machine.life.is_on:
            return
        machine.life.done.append(order.id)
        machine.touch()
        evidence = answer(machine, order, self.clock.passed_s)
        if evidence is None:
            return
        try:
            self.controller.evidence(self.wire.checked(evidence, Evidence))
        except MegascaleError as error:
            self.note_refused(f"evidence of {machine.name}", error)

    def note_refused(self, what: str, error: MegascaleError) -> None:
        """The controller has refused something; a real sender would log it."""
        if len(self.refused) < 100:
            self.refused.append(f"{self.clock.passed_s:.1f} s: {what}: {error}")

    async def _settle(self) -> None:
        """Let everything run that can, until nothing does."""
        idle = 0
        while idle < _IDLE_TURNS:
            before = self.stirs
            await asyncio.sleep(0)
            idle = 0 if self.controller.settle() or self.stirs != before else idle + 1
