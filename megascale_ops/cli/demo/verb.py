# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops demo``: train a small GPT on this machine, break it for real, and watch it come back.

Four ranks train on the processor. One gets too little of it, one is SIGKILLed, one is frozen with SIGSTOP, and one
leaves a collective out (``script`` has that bug). Nothing else is arranged: the run is an ordinary ``megascale-ops
run`` of ``examples/train_gpt.py``, and everything printed here comes from its controller, as ``status``, ``incidents``
and ``why`` would print it. Exits non-zero when a verdict names the wrong rank or class, when a recovery does not come,
or when the loss does not go on falling.
"""

import itertools
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from megascale_ops.cli.terminal.interrupt import CtrlC, ctrl_c_noted
from megascale_ops.cli.terminal.options import log_options
from megascale_ops.shipped import shipped

if TYPE_CHECKING:
    from megascale_ops.cli.demo.report import Report
    from megascale_ops.cli.demo.stage import Stage

RANKS = 4
# 25 steps: enough for patience to be learned and for one checkpoint (every 10 steps) to be sealed.
CALM_STEPS = 25
# 90 s for one recovery that takes five: a loaded machine. The demo then fails, and names where it waited.
DEADLINE_S = 90.0


class Act(NamedTuple):
    """One thing that is done to the run."""

    title: str
    rank: int
    do: Callable[["Stage", int], AbstractContextManager[None]]  # done until its verdict is there
    faults: tuple[str, ...]  # the classes that the verdict may carry
    recovers: bool = True  # False: nothing is restarted, and a warning is the verdict


def _signal(number: signal.Signals) -> Callable[["Stage", int], AbstractContextManager[None]]:
    """Return what sends a signal to a rank."""

    def send(stage: "Stage", rank: int) -> AbstractContextManager[None]:
        os.kill(stage.pid(rank), number)
        return nullcontext()

    return send


@contextmanager
def _starved(stage: "Stage", rank: int) -> Iterator[None]:
    """Take half of the processor from a rank: it is stopped and let go again, some twelve times a second."""
    pid, done = stage.pid(rank), threading.Event()
    thread = threading.Thread(target=_stop_and_go, args=(pid, done), name="starving", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(5.0)


def _stop_and_go(pid: int, done: threading.Event) -> None:
    # Never in step with the agent's samples, ten a second, or it would seem to be stopped all the time.
    pauses = itertools.cycle((0.043, 0.037, 0.051, 0.029))
    with suppress(ProcessLookupError):
        while not done.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(next(pauses))
            os.kill(pid, signal.SIGCONT)
            done.wait(next(pauses))


def _skipping(stage: "Stage", _rank: int) -> AbstractContextManager[None]:
    """Wake the bug."""
    stage.wake.touch()
    return nullcontext()


BUGGY = 3
ACTS = (
    Act("rank 0 gets half of the processor time that it needs", 0, _starved, ("straggler",), recovers=False),
    Act("SIGKILL to rank 2, as the kernel's out-of-memory killer would", 2, _signal(signal.SIGKILL), ("killed",)),
    Act("SIGSTOP to rank 1: the process lives, but does nothing any more", 1, _signal(signal.SIGSTOP), ("frozen",)),
    Act(
        f"a bug wakes up: rank {BUGGY} leaves one all_reduce out",
        BUGGY,
        _skipping,
        ("not_joined", "collective_order", "collective_mismatch"),
    ),
)


@click.command("demo")
@click.option("--keep", is_flag=True, help="Keep the run folder and say where it is.")
@log_options
def demo(*, keep: bool) -> int:
    """Train on this machine, break it in four ways, and see it recover (half a minute on a quiet machine)."""
    from megascale_ops.cli.demo.report import Report
    from megascale_ops.cli.terminal.needs import need

    need("torch", "numpy")
    script = find_script()
    with ctrl_c_noted() as ctrl_c, run_folder(keep=keep) as folder:
        report = Report(folder=Path(folder), is_kept=keep)
        with started(script, Path(folder), ctrl_c) as stage:
            play(stage, report)
        code = report.close()
        click.echo(
            f"the run folder is kept: {folder}"
            if keep
            else "the run folder is gone now: `megascale-ops demo --keep` keeps it, with the evidence of each verdict"
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
    """Return ``train_gpt.py``."""
    return shipped("examples") / "train_gpt.py"


@contextmanager
def started(script: Path, folder: Path, ctrl_c: CtrlC) -> Iterator["Stage"]:
    """Start the run; stop it at the end whatever happens."""
    from megascale_ops.cli.demo.stage import Stage

    log = (folder / "run.log").open("wb")
    command = [
        *(sys.executable, "-m", "megascale_ops.cli.main", "run"),
        *("--job=demo", f"--nproc-per-node={RANKS}", f"--run-dir={folder / 'run'}", "--quiet"),
        *("-m", "--", "megascale_ops.cli.demo.script", str(BUGGY), str(folder / "wake"), str(script)),
        *("--steps=100000", "--checkpoint-every=10", "--log-every=5", "--evaluate-every=40"),
    ]
    env = {**os.environ, "MEGASCALE_BOX_ROOT": f"/dev/shm/megascale-demo-{os.getpid()}-{secrets.token_hex(4)}"}  # noqa: S108  tmpfs is the point
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
    for act in ACTS:
        report.say(f"\n{act.title} (step {stage.step()})")
        before = {incident.id for incident in stage.incidents()}
        broken_at = time.time()
        with act.do(stage, act.rank):
            wanted = "recovery" if act.recovers else "the verdict"
            incident = stage.wait(
                _answered(stage, act, before), f"{wanted} from {act.faults[0]}", DEADLINE_S, report.progress
            )
        report.show(act.faults, act.rank, broken_at, incident)
        stage.wait(_reached(stage, stage.step() + CALM_STEPS), "training to go on", DEADLINE_S, report.progress)
    report.finish(stage.losses(), stage.useful_ratio())


def _reached(stage: "Stage", step: int) -> Callable[[], bool]:
    return lambda: stage.step() >= step


def _answered(stage: "Stage", act: Act, before: set[str]) -> Callable[[], object]:
    """Return what looks for the first incident since ``before`` that is not harmless and has got its answer."""
    states = ("recovered",) if act.recovers else ("watching", "over")

    def look() -> object:
        found = [each for each in stage.incidents() if each.id not in before and each.state != "harmless"]
        return next((each for each in found if each.state in states and each.verdict is not None), None)

    return look
