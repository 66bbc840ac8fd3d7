# SPDX-License-Identifier: Apache-2.0
"""A long run under load, faults and bad inputs at once, of which nothing may be lost.

One controller serves a real training job (two ranks of ``examples/train_gpt.py``) and a healthy job of made-up ranks.
Every ``--every`` seconds something drawn is done to the training job or to a part of ours; meanwhile nonsense arrives
at the controller's port and lies in the folders that programs read. After each fault the job must train again, and
where a rank or a runner fell there must be an incident. At the end every sealed checkpoint that was not damaged on
purpose verifies, the healthy job has never been touched, and nobody of ours is left.

    python benchmarks/stress.py --minutes 30 > benchmarks/results/stress.txt
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import psutil
import stress_load

from megascale_ops.checkpoint import latest, storage
from megascale_ops.errors import MegascaleError
from megascale_ops.link import BlockingLink
from megascale_ops.runner.processes import marked_processes
from megascale_ops.schema.events import JobStatus
from megascale_ops.schema.identity import RoundFile

ROOT = Path(__file__).parents[1]
OURS = [sys.executable, "-m", "megascale_ops.cli.main"]
JOB = "stressed"
# 120 s for a recovery that takes ten: two cores may be busy with much else.
PATIENCE_S = 120.0
SECOND_WRITER = """
import sys
from megascale_ops.checkpoint import CheckpointManager
from megascale_ops.errors import CheckpointError
try:
    CheckpointManager(sys.argv[1]).save(10**9, {"a": 1})
except CheckpointError as error:
    sys.exit("refused: " + str(error))
"""
T = TypeVar("T")


class Done(NamedTuple):
    """One fault, and what came of it; ``problem`` is empty when it was survived."""

    kind: str
    after_s: float  # from the fault to the first new step after it
    problem: str = ""


class Stage:
    """The programs of one stress run, and where they live."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.box_root = Path("/dev/shm") / f"megascale-stress-{uuid.uuid4().hex[:8]}"  # noqa: S108  black boxes live there
        self.checkpoints = folder / "run" / "checkpoints"
        self.damaged: set[str] = set()
        self.runs = 0
        self._env = {key: value for key, value in os.environ.items() if not key.startswith("MEGASCALE_")}
        self._env |= {"XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}
        self.run_ids: set[str] = set()
        self._listen = "127.0.0.1:0"
        self.start_controller()
        self.url = f"http://{self._listen}"
        self.link = BlockingLink(self.url)

    def start_controller(self) -> None:
        """Start it, the next times at the same address with the same journal."""
        port_file = self.folder / "port"
        port_file.unlink(missing_ok=True)
        store = f"--store=sqlite:///{self.folder / 'journal.db'}"
        options = (f"--listen={self._listen}", f"--port-file={port_file}", f"--run-dir={self.folder / 'ops'}", store)
        self.controller = self._spawn([*OURS, "controller", *options], "controller.log")
        until(port_file.exists, "the controller to serve")
        self._listen = f"127.0.0.1:{int(port_file.read_text())}"

    def start_run(self) -> None:
        """Start the training job, the next times as a user would after its runner was killed."""
        self.runs += 1
        command = [*OURS, "run", f"--job={JOB}", "--nproc-per-node=2", f"--controller={self.url}", "--quiet"]
        command += [f"--run-dir={self.folder / 'run'}", f"--box-root={self.box_root}"]
        for setting in ("restarts_per_hour", "restarts_per_cause_per_hour", "fruitless_restarts"):
            command += ["--policy", f"{setting}=100000"]
        script = [str(ROOT / "examples" / "train_gpt.py"), "--steps=100000000", "--checkpoint-every=20"]
        self.runner = self._spawn([*command, "--", *script, "--evaluate-every=0"], "run.log")

    def _spawn(self, command: list[str], log: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as out:
            return subprocess.Popen(
                command, env=self._env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def status(self) -> JobStatus | None:
        """The job as the controller sees it now; None while there is neither."""
        try:
            return next(iter(self.link.status(JOB).jobs), None)
        except MegascaleError:
            return None

    def incidents(self, job: str = JOB) -> int:
        """How many incidents a job has had."""
        return len(self.link.incidents(job).incidents)

    def round_file(self) -> RoundFile:
        """Who runs now."""
        path = self.box_root / JOB / f"{os.uname().nodename}.round.json"
        found = msgspec.json.decode(path.read_bytes(), type=RoundFile)
        self.run_ids.add(found.run_id)
        return found

    def good(self) -> list[Path]:
        """The checkpoints that nobody has damaged on purpose, newest first."""
        return [path for path in storage.candidates(self.checkpoints) if str(path) not in self.damaged]

    def trains(self, round_: int, patience_s: float = PATIENCE_S) -> JobStatus:
        """Wait until this round or a later one runs and makes steps."""
        first: list[int] = []

        def moves() -> JobStatus | None:
            status = self.status()
            if status is None or status.round < round_ or status.state != "running" or status.step < 0:
                first.clear()  # a step of -1: a controller that has just come back has no step yet
                return None
            first.append(status.step)
            return status if status.step > first[0] else None

        return until(moves, f"round {round_} of {JOB} to make a step", patience_s)

    def end(self) -> list[int]:
        """End everything; the processes that were left over."""
        self.link.close()
        for proc, number in ((self.runner, signal.SIGINT), (self.controller, signal.SIGTERM)):
            proc.send_signal(number)
            try:
                proc.wait(60)
            except subprocess.TimeoutExpired:
                proc.kill()
                proc.wait(10)
        time.sleep(1.0)
        left = [pid for run_id in self.run_ids for pid in marked_processes(run_id)]
        shutil.rmtree(self.box_root, ignore_errors=True)  # with what was littered there
        return left


def until(answer: Callable[[], T | None], what: str, patience_s: float = PATIENCE_S) -> T:
    """The first true answer.

    Raises:
        MegascaleError: none came in time.
    """
    end_s = time.monotonic() + patience_s
    while time.monotonic() < end_s:
        if found := answer():
            return found
        time.sleep(0.1)
    raise MegascaleError(f"waited {patience_s:g} s in vain for {what}")


def rank_killed(stage: Stage, dice: random.Random) -> None:
    """SIGKILL for a rank."""
    os.kill(dice.choice(stage.round_file().ranks).pid, signal.SIGKILL)


def rank_frozen(stage: Stage, dice: random.Random) -> None:
    """SIGSTOP for a rank."""
    os.kill(dice.choice(stage.round_file().ranks).pid, signal.SIGSTOP)


def damaged_and_killed(stage: Stage, dice: random.Random) -> None:
    """A byte of the newest checkpoint is flipped and a rank killed: the one before must be taken."""
    newest = stage.good()[0]
    stage.damaged.add(str(newest))
    shard = newest / "__0_0.tensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    rank_killed(stage, dice)


def runner_killed(stage: Stage, _: random.Random) -> None:
    """SIGKILL for the runner, which is started again."""
    stage.runner.kill()
    stage.runner.wait(10)
    stage.start_run()


def controller_killed(stage: Stage, dice: random.Random) -> None:
    """SIGKILL for the controller, which is started again a moment later."""
    stage.controller.kill()
    stage.controller.wait(10)
    time.sleep(dice.uniform(0.0, 3.0))
    stage.start_controller()


def agent_killed(stage: Stage, _: random.Random) -> None:
    """SIGKILL for the agent, which its runner starts again."""
    os.kill(stage.round_file().agent_pid, signal.SIGKILL)


def second_writer(stage: Stage, _: random.Random) -> None:
    """Another process saves into the same folder."""
    command = [sys.executable, "-c", SECOND_WRITER, str(stage.checkpoints)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if "writes there" not in done.stderr:
        raise MegascaleError(f"a second writer was not refused: {done.stderr.strip()[-300:]}")


# What is done, and whether a new round with an incident of its own must follow.
FAULTS: dict[Callable[[Stage, random.Random], None], bool] = {
    rank_killed: True,
    rank_frozen: True,
    damaged_and_killed: True,
    runner_killed: True,
    controller_killed: False,
    agent_killed: False,
    second_writer: False,
}


def strike(stage: Stage, fault: Callable[[Stage, random.Random], None], dice: random.Random) -> Done:
    """Do it, and wait until the job trains again."""
    began_s = time.monotonic()
    try:
        before = stage.trains(0)
        incidents, began_s = stage.incidents(), time.monotonic()
        fault(stage, dice)
        stage.trains(before.round + FAULTS[fault])
        after_s = time.monotonic() - began_s
        if FAULTS[fault]:
            until(lambda: stage.incidents() > incidents, f"an incident of {fault.__name__}", 30.0)
        elif (now := stage.status()) is not None and now.round != before.round:
            return Done(fault.__name__, after_s, f"round {before.round} was ended, which had nothing to do with it")
    except (MegascaleError, OSError, ValueError) as error:
        return Done(fault.__name__, time.monotonic() - began_s, str(error) or type(error).__name__)
    return Done(fault.__name__, after_s)


def litter(stage: Stage) -> int:
    """Put files that are none of ours where programs look; how many."""
    job = stage.box_root / JOB
    (job / "77.box").write_bytes(os.urandom(100_000))
    os.mkfifo(job / "78.box")
    (job / "79.box").symlink_to("/dev/zero")
    (job / "stranger.round.json").write_bytes(b'{"job": "\xff"')
    endless = storage.final_folder(stage.checkpoints, 10**9)
    endless.mkdir()
    (endless / "manifest.json").symlink_to("/dev/zero")
    stage.damaged.add(str(endless))
    return 5


def table(done: list[Done]) -> list[str]:
    """One row a kind of fault."""
    rows = ["| fault | times | survived | to the next step, median | worst |", "|---|---|---|---|---|"]
    for kind in sorted({one.kind for one in done}):
        of_kind = [one for one in done if one.kind == kind]
        took = sorted(one.after_s for one in of_kind)
        survived = sum(not one.problem for one in of_kind)
        rows.append(f"| {kind} | {len(of_kind)} | {survived} | {took[len(took) // 2]:.1f} s | {took[-1]:.1f} s |")
    return rows


def losses(stage: Stage, held: stress_load.Held, answers: Counter[str], healthy: int) -> list[str]:
    """Everything that was lost, in sentences; nothing when all is well."""
    reports = latest.verify(stage.checkpoints)
    lost = [report.sentence() for report in reports if not report.ok and report.path not in stage.damaged]
    if not any(report.ok for report in reports):
        lost.append("no checkpoint verifies")
    if held.refused:
        lost.append(f"{held.refused} heartbeats of a healthy job were refused")
    if healthy or held.orders:
        lost.append(f"the healthy job had {healthy} incidents and {held.orders} orders")
    if answers["hung"] or answers["5xx"]:
        lost.append(f"bad inputs: {answers['hung']} were never answered, {answers['5xx']} with an error of ours")
    return lost


def main() -> int:
    """Run it and print the table; 1 when something was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between a recovery and the next fault")
    parser.add_argument("--nodes", type=int, default=64, help="nodes of the healthy job, of 8 ranks each")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)))
    options = parser.parse_args()
    dice = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="megascale-stress-") as scratch:
        stage = Stage(Path(scratch))
        load, nonsense = stress_load.Load(stage.url, options.nodes), stress_load.Nonsense(stage.url, options.seed)
        done: list[Done] = []
        lost: list[str] = []
        stage.start_run()
        try:
            load.start()
            stage.trains(0)
            until(lambda: len(stage.good()) > 1, "two checkpoints")
            files = litter(stage)
            nonsense.start()
            end_s = time.monotonic() + options.minutes * 60
            kinds: list[Callable[[Stage, random.Random], None]] = []
            while time.monotonic() < end_s:
                kinds = kinds or dice.sample(list(FAULTS), len(FAULTS))
                done.append(strike(stage, kinds.pop(), dice))
                print(
                    f"# {done[-1].kind}: {done[-1].problem or 'survived'} ({done[-1].after_s:.1f} s)", file=sys.stderr
                )
                time.sleep(options.every)
            last, healthy = stage.trains(0), stage.incidents(stress_load.JOB)
            memory_mb = psutil.Process(stage.controller.pid).memory_info().rss >> 20
            held, answers = load.end(), nonsense.end()
            lost += [f"{one.kind}: {one.problem}" for one in done if one.problem]
            lost += losses(stage, held, answers, healthy)
        finally:
            left = stage.end()
        lost += [f"process {pid} was left over" for pid in left]
    print(f"{options.minutes:g} minutes, seed {options.seed}, {os.cpu_count()} cores\n")
    print("\n".join(table(done)))
    print(f"\nthe job: {last.round} rounds, {stage.runs} runners, at step {last.step} in the end")
    print(
        f"the load: {options.nodes * 8} healthy ranks; {held.sent:,} heartbeats answered "
        f"(99 % within {held.p99_ms:.0f} ms, the worst {held.worst_ms:.0f} ms), {held.away} while the controller was "
        f"away; the controller's memory in the end: {memory_mb} MB"
    )
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(answers.items()))
    print(f"bad inputs: {sum(answers.values()):,} requests ({told}), {files} files")
    print("lost: " + ("; ".join(lost) or "nothing"))
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
