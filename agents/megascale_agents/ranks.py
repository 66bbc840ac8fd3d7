# SPDX-License-Identifier: Apache-2.0
"""One rank as the agent sees it: its process, its black box, its stderr, put together into a report.

Usually the process that the runner started is the one that trains. Behind a shell script or another launcher it is
not: then the black box names the process that trains, and that is the one to watch, as long as it lives.
"""

import msgspec

from megascale_agents.blackboxes import Pulse
from megascale_agents.collectors.process import ProcessCollector
from megascale_agents.log_scanner import LogScanner
from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.schema.identity import RankProcess
from megascale_ops.schema.progress import Progress, RankReport


class RankWatch:
    """Looks at one rank of one round.

    Args:
        rank: Global rank.
        round_: Round it belongs to.
        started: What the runner started for it; None for a rank of a launcher, which only its box names.
    """

    def __init__(self, rank: int, round_: int, started: RankProcess | None) -> None:
        self.rank = rank
        self.round = round_
        self.started = started
        self.box: BoxReader | None = None
        self.process = ProcessCollector(started.pid, started.start_ticks) if started else ProcessCollector(0)
        self.log = LogScanner(started.stderr_path if started else "")
        self.progress: Progress | None = None
        self._pulse: Pulse | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether the process was in state T at the last look."""
        return self.process.stat.state == "T"

    @property
    def is_gone(self) -> bool:
        """Whether there is no process any more."""
        return not self.process.stat.state

    def set_box(self, box: BoxReader, pulse: Pulse) -> None:
        """Take over a black box (the shelf that opened it also closes it)."""
        self.box, self._pulse = box, pulse
        identity = box.identity()
        if identity.pid and identity.pid != self.process.pid:
            process = ProcessCollector(identity.pid, identity.start_ticks)
            if process.stat.state:
                self.process.close()
                self.process = process
            else:
                process.close()

    def look_at_process(self, now_s: float) -> str:
        """Look at the process; answer why that is urgent, "" when it is not."""
        urgent = self.process.look(now_s)
        if self.is_gone and self.started is not None and self.started.pid != self.process.pid:
            launcher = ProcessCollector(self.started.pid, self.started.start_ticks)
            if launcher.stat.state:
                self.process = launcher
            else:
                launcher.close()
        if not urgent:
            return ""
        return {"": "process is gone", "T": "process is stopped"}.get(self.process.stat.state, "process goes on")

    def look_at_box(self) -> str:
        """Look at the box's pulse; answer why what it says is urgent, "" when it is not.

        All of it is read when the state changed and until the first step of the round is seen, then only for reports.
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

    def report(self, now_s: float) -> RankReport:
        """Put everything known into the form that travels."""
        identity = self.box.identity() if self.box is not None else None
        started = self.started
        local_rank = started.local_rank if started else identity.local_rank if identity else self.rank
        report = RankReport(
            rank=self.rank,
            local_rank=local_rank,
            pid=self.process.pid,
            round=self.round,
            process=self.process.reading(now_s),
            last_words=self.log.last_words,
        )
        if self.box is None or identity is None:
            return report
        self.progress = self.box.progress()
        return msgspec.structs.replace(
            report,
            world_size=identity.world_size,
            mesh=identity.mesh,
            progress=self.progress,
            collective=self.box.collective(),
            error=self.box.error(),
        )

    def close(self) -> None:
        """Let go of the process and the log."""
        self.process.close()
        self.log.close()
