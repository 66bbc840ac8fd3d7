# SPDX-License-Identifier: Apache-2.0
"""One machine: what its agent says and what its ranks are, as far as it can be seen from outside."""

import asyncio
from typing import Protocol

from megascale_ops.schema.health import HardwareFinding
from megascale_ops.schema.messages import Heartbeat, JobReport, RankExit
from megascale_ops.schema.progress import ProcessReading, RankError, RankReport
from megascale_ops.sim.beats import Beats
from megascale_ops.sim.mesh import Layout, Wait

JOB = "simulated"
RUN_DIR = "/simulated"
# What happened once stands for ten minutes, as with real agents.
HELD_S = 600.0
# 45 s: the driver waits so long for a GPU's system processor before it writes Xid 119.
GSP_S = 45.0
# 64: more orders than are out for one node at a time.
MOST_TAKEN = 64
GONE = ProcessReading(state="")
RUNS = ProcessReading(state="R", cpu_busy=1.0)
SLEEPS = ProcessReading(state="S", cpu_busy=0.0)


class RoundOfRanks(Protocol):
    """What a machine knows of the round that its ranks are in (``training.Training``)."""

    round: int
    step: int
    steps_seen: int
    has_begun: bool
    absent: int | None
    hangs: str
    layout: Layout

    def wait_of(self, rank: int, passed_s: float) -> Wait | None:
        """Return where a rank waits by now for the one that does not come."""

    def phase_at(self, passed_s: float) -> str:
        """Return the phase that ranks are in, or were when one did not come."""

    def end(self) -> None:
        """Ranks are being stopped."""

    def reports(self, crew: "Crew", passed_s: float, mono_s: float, *, is_full: bool) -> tuple[RankReport, ...]:
        """Return what an agent tells of its ranks."""


class Crew:
    """The ranks of one machine in one round. Owned by its training."""

    __slots__ = (
        "errors", "failed", "first", "gone", "is_stopped", "loaded_s", "machine", "pids", "training",
    )  # fmt: skip

    def __init__(self, machine: "Machine", training: RoundOfRanks, first: int, count: int, loaded_s: float) -> None:
        self.machine = machine
        self.training = training
        self.first = first  # rank
        self.pids = tuple(machine.next_pid + local for local in range(count))
        machine.next_pid += count
        self.loaded_s = loaded_s  # when its ranks wait for the others to make a step
        self.gone: dict[int, int] = {}  # exit codes by local rank, of those that died
        self.errors: dict[int, RankError] = {}
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_stopped = False
        machine.beats.begin(machine.number, first, training.step)

    @property
    def told(self) -> int:
        """The last step that a heartbeat told of."""
        return self.machine.beats.told.item(self.machine.number)

    @told.setter
    def told(self, step: int) -> None:
        self.machine.beats.told[self.machine.number] = step

    def stand(self, *, stands: bool) -> None:
        """Note whether a heartbeat has told where all its ranks wait, or hang."""
        self.machine.beats.stands[self.machine.number] = stands

    def die(self, local: int, code: int, error: RankError | None) -> None:
        """Let a rank's process end; its runner sees that."""
        self.gone[local] = code
        self.machine.touch()
        if error is not None:
            self.errors[local] = error
        if not self.failed.done():
            self.failed.set_result(None)

    def exits(self, mono_s: float) -> tuple[RankExit, ...]:
        """Return how the ranks have ended, now that all have: those that did not die were stopped."""
        training = self.training
        return tuple(
            RankExit(
                rank=self.first + local,
                local_rank=local,
                pid=pid,
                code=self.gone.get(local, -15),
                seen_mono_s=max(0.0, mono_s - (1.0 if local in self.gone else 0.0)),
                by_us=local not in self.gone,
                step=training.step if training.has_begun else -1,
                phase="backward" if training.has_begun else "startup",
                steps_seen=training.steps_seen,
                error=self.errors.get(local),
            )
            for local, pid in enumerate(self.pids)
        )


class Life:
    """What a machine has since it was started: agent, runner, ranks."""

    def __init__(self, number: int, machine: str) -> None:
        self.number = number
        self.agent_id = f"{machine}.{number}"
        self.is_on = True
        self.crew: Crew | None = None
        self.wants_full = True
        self.told: tuple[HardwareFinding, ...] | None = None  # findings
        self.done: list[str] = []  # orders that were executed
        self.taken: dict[str, None] = {}  # orders that were begun

    def take(self, order: str) -> None:
        """Note that an order was begun: it is repeated until it is known to be executed."""
        self.taken[order] = None
        while len(self.taken) > MOST_TAKEN:
            del self.taken[next(iter(self.taken))]


class Machine:
    """A node with its agent. Its runner is a coroutine of its own (``runner``)."""

    def __init__(self, number: int, count: int, beats: Beats) -> None:
        self.number = number
        self.beats = beats
        self.name = f"node-{number:05d}"
        self.count = count  # GPUs
        self.gpus = tuple(f"GPU-{number:05d}-{local}" for local in range(count))
        self.next_pid = 1000
        self.offset_s = float(number % 97) * 1000.0  # its clock against ours: it was started at another time
        self.life = Life(1, self.name)
        beats.add(number, self.name, self.life.agent_id, self.offset_s)
        self.bad_until_s = 0.0
        self.bad_gpu = 0
        self.slower: dict[int, tuple[float, float]] = {}  # by GPU: the share, and until when
        self.findings: tuple[HardwareFinding, ...] = ()
        self.found_until_s = 0.0

    def restart(self) -> None:
        """Come back after a reboot: its agent and its runner are new."""
        self.life = Life(self.life.number + 1, self.name)
        self.beats.add(self.number, self.name, self.life.agent_id, self.offset_s)

    def lose(self) -> None:
        """Die without a word."""
        self.life.is_on = self.beats.is_on[self.number] = False

    def touch(self) -> None:
        """Something changes of what its agent has to tell."""
        self.beats.touch(self.number)

    def find(self, finding: HardwareFinding, until_s: float) -> None:
        """Let the agent find something wrong with the hardware."""
        self.findings = (*(one for one in self.findings if one.name != finding.name), finding)
        self.found_until_s = until_s
        self.touch()

    def lose_gsp(self, local: int, wall_s: float, now_s: float) -> None:
        """Find that a GPU's system processor has not answered its driver."""
        text = f"GPU {local}: Xid 119: the GPU's system processor did not answer"
        self.find(
            HardwareFinding("xid_119", text, "kernel_log", "fail", self.gpus[local], wall_s, wall_s, is_bad=True),
            now_s + HELD_S,
        )

    def only_goes_on(self, passed_s: float) -> bool:
        """Return whether all that its agent has to tell now is that its ranks went on."""
        crew = self.life.crew
        return crew is not None and not (crew.is_stopped or crew.gone) and not self._has_news(passed_s)

    def is_idle(self, passed_s: float) -> bool:
        """Return whether all that its agent has to tell now is that it is there, and no rank of it."""
        return self.life.crew is None and not self._has_news(passed_s)

    def _has_news(self, passed_s: float) -> bool:
        """Return whether something is to be told beside its ranks, or everything."""
        life = self.life
        return (
            life.wants_full
            or bool(life.done)
            or life.told != self.findings
            or bool(self.findings and passed_s > self.found_until_s)
        )

    def heartbeat(self, passed_s: float, mono_s: float, wall_s: float) -> Heartbeat:
        """Return what the agent says now."""
        life = self.life
        seq = self.beats.next(self.number)
        is_full, life.wants_full = life.wants_full, False
        if self.findings and passed_s > self.found_until_s:
            self.findings = ()
        found = self.findings if is_full or self.findings != life.told else None
        life.told = self.findings
        done, life.done = tuple(life.done), []
        jobs: tuple[JobReport, ...] = ()
        if life.crew is not None:
            ranks = life.crew.training.reports(life.crew, passed_s, mono_s + self.offset_s, is_full=is_full)
            if ranks:
                jobs = (JobReport(JOB, life.crew.training.round, RUN_DIR, ranks),)
        return Heartbeat(
            node=self.name,
            agent_id=life.agent_id,
            seq=seq,
            mono_s=mono_s + self.offset_s,
            wall_s=wall_s,
            full=is_full,
            jobs=jobs,
            done_orders=done,
            findings=found,
            gpus=self.gpus if is_full else (),
        )
