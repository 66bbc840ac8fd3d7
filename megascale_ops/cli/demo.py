# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops demo``: train a small GPT on this machine, break it twice for real, and watch it come back.

Four ranks train on the processor. One is SIGKILLed, later one is frozen with SIGSTOP; nothing else is arranged: the
run is an ordinary ``megascale-ops run`` of ``examples/train_gpt.py``, and everything printed here comes from its
controller, as ``status``, ``incidents`` and ``why`` would print it. Exits non-zero when a verdict names the wrong
rank or class, when a recovery does not come, or when the loss does not go on falling.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from megascale_ops.cli.interrupt import CtrlC, ctrl_c_noted
from megascale_ops.cli.options import log_options
from megascale_ops.errors import MegascaleError

if TYPE_CHECKING:
    from megascale_ops.cli.demo_report import Report
    from megascale_ops.cli.demo_stage import Stage

RANKS = 4
# 25 steps: enough for patience to be learned and for one checkpoint (every 10 steps) to be sealed.
CALM_STEPS = 25
# 90 s for one recovery that takes five: a loaded machine. The demo then fails, and says where it waited.
DEADLINE_S = 90.0


class Act(NamedTuple):
    """One thing that is done to the run."""

    title: str
    rank: int
    number: signal.Signals
    fault: str  # the class that the verdict must carry


ACTS = (
    Act("SIGKILL to rank 2, as the kernel's out-of-memory killer would", 2, signal.SIGKILL, "killed"),
    Act("SIGSTOP to rank 1: the process lives, but does nothing any more", 1, signal.SIGSTOP, "frozen"),
)


@click.command("demo")
@click.option("--keep", is_flag=True, help="Keep the run folder and say where it is.")
@log_options
def demo(*, keep: bool) -> int:
    """Train on this machine, break it, and watch it recover (about a minute, processor only)."""
    from megascale_ops.cli.demo_report import Report

    script = find_script()
    with ctrl_c_noted() as ctrl_c, run_folder(keep=keep) as folder:
        report = Report(folder=Path(folder))
        with started(script, Path(folder), ctrl_c) as stage:
            play(stage, report)
        code = report.close()
        click.echo(
            f"the run folder is kept: {folder}"
            if keep
            else "the run folder is gone now: `megascale-ops demo --keep` keeps it for the commands above"
        )
    return code


@contextmanager
def run_folder(*, keep: bool) -> Iterator[str]:
    """Make a folder that goes with the demo, unless it is to be kept."""
    if keep:
        yield tempfile.mkdtemp(prefix="megascale-demo-")
    else:
        with tempfile.TemporaryDirectory(prefix="megascale-demo-") as folder:
            yield folder


def find_script() -> Path:
    """Return ``train_gpt.py``: from the wheel, or from the checkout beside an editable install.

    Raises:
        MegascaleError: it is in neither place.
    """
    package = Path(__file__).parents[1]
    for path in (package / "examples" / "train_gpt.py", package.parent / "examples" / "train_gpt.py"):
        if path.is_file():
            return path
    raise MegascaleError("examples/train_gpt.py is missing from this installation: install megascale-ops again")


@contextmanager
def started(script: Path, folder: Path, ctrl_c: CtrlC) -> Iterator["Stage"]:
    """Start the run; stop it at the end whatever happens."""
    from megascale_ops.cli.demo_stage import Stage

    log = (folder / "run.log").open("wb")
    command = [
        *(sys.executable, "-m", "megascale_ops.cli.main", "run"),
        *("--job=demo", f"--nproc-per-node={RANKS}", f"--run-dir={folder / 'run'}", "--quiet"),
        *("--", str(script), "--steps=100000", "--checkpoint-every=10", "--log-every=5", "--evaluate-every=40"),
    ]
    env = {**os.environ, "MEGASCALE_BOX_ROOT": f"/dev/shm/megascale-demo-{os.getpid()}"}  # noqa: S108  tmpfs is the point
    proc = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env, start_new_session=True)
    stage = Stage(proc, folder, Path(env["MEGASCALE_BOX_ROOT"]), ctrl_c)
    try:
        yield stage
    finally:
        stage.stop()
        log.close()


def play(stage: "Stage", report: "Report") -> None:
    """Let it train, break it, wait for it to recover, and show each verdict."""
    report.say(f"starting {RANKS} ranks of a small GPT (each imports torch first) ...")
    stage.wait(_reached(stage, CALM_STEPS), "the first steps", DEADLINE_S, report.progress)
    for number, act in enumerate(ACTS, 1):
        report.say(f"\n{act.title} (step {stage.step()})")
        broken_at = time.time()
        os.kill(stage.pid(act.rank), act.number)
        incident = stage.wait(_recovered(stage, number), f"recovery from {act.fault}", DEADLINE_S, report.progress)
        report.show(act.fault, act.rank, broken_at, incident)
        stage.wait(_reached(stage, stage.step() + CALM_STEPS), "training to go on", DEADLINE_S, report.progress)
    report.finish(stage.losses(), stage.useful_ratio())


def _reached(stage: "Stage", step: int) -> Callable[[], bool]:
    return lambda: stage.step() >= step


def _recovered(stage: "Stage", number: int) -> Callable[[], object]:
    def look() -> object:
        incidents = stage.incidents()
        recovered = len(incidents) >= number and incidents[number - 1].state == "recovered"
        return incidents[number - 1] if recovered else None

    return look
