# SPDX-License-Identifier: Apache-2.0
"""One rank as the agent sees it: its process, its black box, its stderr, put together into a report.

Usually the process that the runner started is the one that trains. Behind a shell script or another launcher it is
not: then the black box names the process that trains, and that is the one to watch, as long as it lives.
"""

import math
from collections import deque

from megascale_agents.collectors.process import ProcessCollector
from megascale_agents.ownership.processes import Bounds, may_be_read
from megascale_agents.ownership.rights import myself
from megascale_agents.ranks.blackboxes import Pulse
from megascale_agents.ranks.stderr_scanner import LogScanner
from megascale_agents.ranks.step_change import StepHabit
from megascale_agents.ranks.tile_looks import TileLooks
from megascale_agents.ranks.work_meter import WorkMeter
from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import StepRecord
from megascale_ops.schema.identity import RankProcess
from megascale_ops.schema.progress import MOST_WORK, Progress, RankReport, StepWork
from megascale_ops.schema.tiles import TileFact

# 30 years: a longer step is garbage in a box, and in microseconds it might be no number any more.
_MOST_S = 1e9
# 2 s: no silence is looked at sooner than after 2.5 s, and a rank with steps of seconds need not be read all the time.
QUIET_S = 2.0


class _OfBox:
    """What was read and told of one black box: another box of the rank begins with nothing."""

    __slots__ = ("fresh", "habit", "told_steps")

    def __init__(self) -> None:
        self.told_steps = 0
        self.fresh: deque[StepWork] = deque(maxlen=MOST_WORK)  # read and not yet sent
        self.habit = StepHabit()


class RankWatch:
    """Looks at one rank of one round.

    Args:
        rank: Global rank.
        round_: Round it belongs to.
        started: What the runner started for it; None for a rank of a launcher, which only its box names.
        bounds: Whose files and processes it may be; ours when not given.
        tiles: Finds the boards of its overlapped kernels; None looks for none.
    """

    def __init__(
        self,
        rank: int,
        round_: int,
        started: RankProcess | None,
        bounds: Bounds | None = None,
        tiles: TileLooks | None = None,
    ) -> None:
        self.rank = rank
        self.round = round_
        self.started = started
        self.box: BoxReader | None = None
        self.bounds = bounds or Bounds(myself())
        self.process = self._find(started.pid, started.start_ticks) if started else ProcessCollector(0)
        self.log = LogScanner(started.stderr_path if started else "", self.bounds.owner, self._steps_seen)
        self.progress: Progress | None = None
        self.sending = -1.0  # as in RankReport; the daemon looks at all ranks' connections together
        self.sending_to = ""  # same
        self.work = WorkMeter()  # read only for evidence
        self.gpu = ""  # as in RankReport; kept after the process has ended, since it is needed then
        self._tiles = tiles
        self._pulse: Pulse | None = None
        self._of_box = _OfBox()
        self._trains = False  # self.process is the one that has the box, not only what the runner started
        self._rivals: list[ProcessCollector] = []

    @property
    def is_stopped(self) -> bool:
        """Whether the process was in state T at the last look."""
        return self.process.state == "T"

    @property
    def is_gone(self) -> bool:
        """Whether there is no process any more."""
        return not self.process.state

    def set_box(self, box: BoxReader, pulse: Pulse) -> None:
        """Take over a black box (the shelf that opened it also closes it)."""
        self.box, self._pulse, self._of_box = box, pulse, _OfBox()
        identity = box.identity()
        if identity.pid and identity.pid != self.process.pid:
            process = self._find(identity.pid, identity.start_ticks)
            if process.state:
                if self._trains:
                    self._rivals.append(self.process)
                else:
                    self.process.close()
                self.process, self._trains = process, True
            else:
                process.close()
        self._trains = self._trains or identity.pid == self.process.pid

    @property
    def may_be_read(self) -> bool:
        """Whether there is a process, and it is still the owner's: it may have become a program of another user."""
        return bool(self.process.state) and may_be_read(self.process.pid, self.bounds.uid)

    def _find(self, pid: int, start_ticks: int) -> ProcessCollector:
        """Return a collector for a named process; another user's process counts as gone."""
        return ProcessCollector(pid, start_ticks, self.bounds.uid)

    def _living_rivals(self) -> tuple[int, ...]:
        """Return the processes that had a box of this rank before, and live on beside the one that has it now."""
        for rival in list(self._rivals):
            rival.poll_process(0.0)
            if not rival.state:
                self._rivals.remove(rival)
                rival.close()
        return tuple(rival.pid for rival in self._rivals if rival.pid != self.process.pid)

    def look_at_process(self, now_s: float) -> str:
        """Look at the process; answer why that is urgent, "" when it is not."""
        urgent = self.process.poll_process(now_s)
        if not self.process.state and self.started is not None and self.started.pid != self.process.pid:
            launcher = self._find(self.started.pid, self.started.start_ticks)
            if launcher.state:
                self.process = launcher
            else:
                launcher.close()
        if not urgent:
            return ""
        return {"": "process is gone", "T": "process is stopped"}.get(self.process.state, "process goes on")

    def look_at_box(self) -> str:
        """Read the box's pulse; return why its change is urgent, "" when it is not.

        The whole progress is read when the state changed and until the first step of the round is seen, then only for
        reports.
        """
        if self.box is None or self._pulse is None:
            return ""
        before = self.progress
        if not self._pulse.state_changed() and before is not None and before.steps_seen > 0:
            return ""
        self.progress = self.box.progress()
        if before is None or before.state != self.progress.state:
            return f"rank is {self.progress.state}"
        if before.steps_seen == 0 and self.progress.steps_seen > 0:
            return "first step of the round"
        return ""

    def _steps_seen(self) -> int:
        """Return how many steps it has finished; -1 without a black box."""
        return self._pulse.steps_seen() if self._pulse is not None else -1

    def untold_steps(self) -> int:
        """Return how many steps were finished since the last report that included any."""
        return self._pulse.steps_seen() - self._of_box.told_steps if self._pulse is not None else 0

    def unread_steps(self) -> int:
        """Return how many steps were finished since they were last read."""
        return self._pulse.steps_seen() - self.box.steps_read if self._pulse is not None and self.box else 0

    def steps_are_news(self) -> bool:
        """Read the steps since the last call, for the next report; return whether they can't wait for it."""
        return self._of_box.habit.is_news(self._read_steps())

    @property
    def is_changing(self) -> bool:
        """Whether its last steps were unlike those before."""
        return self._of_box.habit.is_changing

    def _read_steps(self, *, look: bool = True) -> list[StepWork]:
        """Read on; without ``look`` take those that the box's progress has brought."""
        fresh = [_work(record) for record in self.box.take_fresh_steps(look=look)] if self.box is not None else []
        self._of_box.fresh.extend(fresh)
        return fresh

    def report(self, now_s: float, most_work: int = 0) -> RankReport:
        """Put everything known into the form that travels.

        Args:
            now_s: Monotonic clock now.
            most_work: Include up to so many steps finished since the report before, the newest; 0 leaves them
                to the next report.
        """
        box = self.box
        identity = box.identity() if box is not None else None
        started = self.started
        local_rank = started.local_rank if started else identity.local_rank if identity else -1
        local_rank = local_rank if local_rank >= 0 else self.rank  # spawned by a launcher that sets none
        process = self.process.reading(now_s)
        words, gpu = self.log.last_words, self.gpu
        if box is None or identity is None:
            return RankReport(
                self.rank, local_rank, self.process.pid, self.round,
                process=process, last_words=words, sending=self.sending, gpu=gpu,
                sending_to=self.sending_to,
            )  # fmt: skip
        self.progress = box.progress()
        work: tuple[StepWork, ...] = ()
        if most_work:
            self._read_steps(look=False)
            work = tuple(self._of_box.fresh)[-most_work:]
            self._of_box.fresh.clear()
            self._of_box.told_steps = self.progress.steps_seen
        return RankReport(
            self.rank, local_rank, self.process.pid, self.round,
            world_size=identity.world_size, mesh=identity.mesh, progress=self.progress,
            collective=box.collective(look=False), process=process, error=box.error(), last_words=words,
            sending=self.sending, sending_to=self.sending_to,
            rivals=self._living_rivals() if self._rivals else (), work=work, gpu=gpu, tile_peer=self._tile_peer(now_s),
            findings=box.findings(),
        )  # fmt: skip

    def tiles(self, *, everywhere: bool = True) -> tuple[TileFact, ...]:
        """Return where its overlapped kernels are now, one fact for each workspace (``TileLooks.of``)."""
        if self._tiles is None or self.box is None:
            return ()
        process = self.process
        size = self.box.identity().world_size
        return self._tiles.of(process.pid, process.start_ticks, self.bounds.uid, size, everywhere=everywhere)

    def board_copies(self) -> list[bytes]:
        """Return the boards of its overlapped kernels as they are, to be kept."""
        if self._tiles is None or self.box is None:
            return []
        identity = self.box.identity()
        return self._tiles.copies(identity.pid, identity.start_ticks, self.bounds.uid)

    def _tile_peer(self, now_s: float) -> int:
        """Return the rank for whose tile most of its thread blocks wait, -1 for none; a rank that moves is not asked.

        A stopped process waits for no peer: its board shows what it had been at.
        """
        progress = self.progress
        if progress is None or self.is_stopped or now_s - progress.moved_mono_s < QUIET_S:
            return -1
        waits = [wait for fact in self.tiles(everywhere=False) for wait in fact.waiting]
        return max(waits, key=lambda wait: (wait.ctas, -wait.peer)).peer if waits else -1

    def close(self) -> None:
        """Let go of the process and the log."""
        for process in (self.process, *self._rivals):
            process.close()
        self.log.close()


def _work(record: StepRecord) -> StepWork:
    """Return a finished step as it travels: to the microsecond, a third of the digits."""
    loss = record.loss
    is_finite = loss is None or math.isfinite(loss)
    return StepWork(
        record.step,
        _to_us(record.wall_s),
        _to_us(record.waiting_s),
        _to_us(record.data_s),
        _to_us(record.forward_s),
        _to_us(record.backward_s),
        _to_us(record.optimizer_s),
        _to_us(record.checkpoint_s),
        _to_us(record.gc_s),
        _to_us(record.cpu_s),
        loss if is_finite else None,
        is_finite,
    )


def _to_us(time_s: float) -> float:
    """Round to the microsecond: 1,440 times a second for 8 ranks, at half of what ``round(time_s, 6)`` takes."""
    return round(time_s * 1e6) / 1e6 if -_MOST_S < time_s < _MOST_S else time_s
