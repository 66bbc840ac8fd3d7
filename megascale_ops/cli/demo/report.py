# SPDX-License-Identifier: Apache-2.0
"""What the demo shows: live progress, a card for each verdict, a closing table, and whether it all came true."""

import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megascale_ops.cards import plain_incident
from megascale_ops.cli.demo.stage import Loss, Stage
from megascale_ops.cli.terminal.incident_panel import render_incident
from megascale_ops.schema.events import Incident
from megascale_ops.schema.wording import duration, percent

# 4 lines of rank 0 at either end: the loss of one small batch jumps about, their mean does not.
_MEAN_OF = 4


class Report:
    """Prints as the demo goes, and keeps what must come true."""

    def __init__(self, folder: Path, console: Console | None = None, *, is_kept: bool = True) -> None:
        self._folder = folder
        self._is_kept = is_kept  # else cards don't point into a folder that goes with the demo
        self._began_s = time.monotonic()
        self._console = console or Console()
        self._live: Live | None = None
        self._rows: list[tuple[str, ...]] = []
        self._wrong: list[str] = []

    def say(self, text: str) -> None:
        """Print one line."""
        self._end_progress()
        self._console.print(Text(text, style="bold"))

    def progress(self, stage: Stage) -> None:
        """Show where training is; on a terminal only."""
        if not self._console.is_terminal:
            return
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=5, transient=True)
            self._live.start()
        self._live.update(self._line(stage))

    def _line(self, stage: Stage) -> Text:
        status, losses = stage.status, stage.losses()
        if status is None:
            return Text("  waiting for the controller ...", style="dim")
        loss = f"loss {losses[-1].value:.3f}" if losses else "loss -"
        ranks = " ".join(f"{rank.report.rank}:{rank.judged}" for rank in status.ranks)
        return Text(f"  {status.state:<12} round {status.round}  step {status.step:>5}  {loss}  {ranks}", style="cyan")

    def _end_progress(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, faults: tuple[str, ...], rank: int, broken_at_wall_s: float, incident: object) -> None:
        """Print the card of an incident and hold its verdict against what was done: any of ``faults``, this rank."""
        self._end_progress()
        assert isinstance(incident, Incident)
        if self._console.is_terminal:
            self._console.print(render_incident(incident, leads_on=self._is_kept))
        else:
            self._console.print(Text(plain_incident(incident, leads_on=self._is_kept)), soft_wrap=True)
        verdict = incident.verdict
        named = (verdict.fault, verdict.culprits) if verdict is not None else ("nothing", ())
        if named[0] not in faults or named[1] != (rank,):
            wanted = f"{' or '.join(faults)} of rank {rank}"
            self._wrong.append(f"it was {wanted}, but the verdict says {named[0]} of ranks {list(named[1])}")
        marks = incident.marks
        times = [
            duration(max(0.0, mark - broken_at_wall_s)) if mark else "-"
            for mark in (marks.detected, marks.named, marks.stepped)
        ]
        lost = str(max(0, incident.step_before - incident.step_after)) if incident.step_after >= 0 else "-"
        self._rows.append((f"rank {rank} {named[0]}", *times, lost))

    def finish(self, losses: list[Loss], useful_ratio: float) -> None:
        """Print the closing table and look at the loss."""
        self._end_progress()
        table = Table(title="what it cost", title_justify="left", title_style="bold")
        for name in ("fault", "to detect", "to name", "to first new step", "steps lost"):
            table.add_column(name, justify="left" if name == "fault" else "right", no_wrap=name == "fault")
        for row in self._rows:
            table.add_row(*row)
        self._console.print(table)
        first, last = mean(losses[:_MEAN_OF]), mean(losses[-_MEAN_OF:])
        self._console.print(
            f"loss {first:.3f} -> {last:.3f} over {losses[-1].step if losses else 0} steps and "
            f"{losses[-1].round if losses else 0} rounds; "
            f"{percent(useful_ratio)} of the wall time was useful (start-up and {len(self._rows)} faults within "
            f"{duration(time.monotonic() - self._began_s)})",
            soft_wrap=True,
        )
        if not last < first:
            self._wrong.append(f"the loss did not go on falling: {first:.3f} at first, {last:.3f} at the end")

    def close(self) -> int:
        """Return whether all came true, and return the exit code."""
        self._end_progress()
        for sentence in self._wrong:
            self._console.print(Text(f"WRONG: {sentence}", style="bold red"))
        if not self._wrong:
            self._console.print(Text("every verdict named the right rank, and the loss went on falling", style="green"))
        return 1 if self._wrong else 0


def mean(losses: list[Loss]) -> float:
    """Return the mean loss; infinite for none, so that nothing falls by saying nothing."""
    return sum(loss.value for loss in losses) / len(losses) if losses else float("inf")
