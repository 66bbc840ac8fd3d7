# SPDX-License-Identifier: Apache-2.0
"""Where the seconds of a GPU restart go: SIGKILL of one of two ranks to the first new step, stage by stage.

Two ranks on one machine over NCCL (Gloo where there are no GPUs), AdamW, a checkpoint of three times the weights. A
bare launcher inside this benchmark, which knows of the death at once and stops nothing that it need not, shows what
each way could be at best; ``run``, ``run --warm`` and NVIDIA's tools, where they are installed, show what launchers
take.

| way | what is new after the kill |
| --- | --- |
| cold | both processes; what can't be avoided without spares |
| warm | both, of spares that have imported torch: what ``run --warm`` does |
| context | both, of spares that have made their CUDA context and a step's kernels, too |
| nccl | both, of spares that have used NCCL alone, too |
| in-process | the killed one, of a spare with its context; the survivor aborts its communicator and keeps all else |
| shrink | nothing: the survivor goes on alone (``ncclCommShrink`` with abort) |

Ways take turns until ``--seconds`` are over; the first start, which loads torch from a cold disk, comes before that. A
stage is over when the slower rank is through it; stages that spares did before count as none. Each wait has a deadline;
a way that does not come back is told as that. On the CPU there is no ``shrink``: Gloo's groups can't, and the table
says so.

    python benchmarks/restart_stages.py --ways warm,context,nccl,in-process,shrink --seconds 300   # two GPUs, one call
    python benchmarks/restart_stages.py --seconds 140 [--ways cold,warm] [--nvrx FOLDER] [--layers 8 --width 4096]
"""

import argparse
import contextlib
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "scripts" / "stage_marks.py"
# 45 s: a cold start over NCCL took 8 s on two H200.
DEADLINE_S = 45.0
# 180 s: what is made ready before a kill is not measured, and torch's files may lie on a cold disk.
READY_S = 180.0
# By the stage that ends it; a column may have several.
COLUMNS = {
    "stop and start": ("told", "aborted", "started", "ordered"),
    "Python": ("entered",),
    "imports": ("imported",),
    "context": ("context",),
    "rendezvous": ("rendezvous",),
    "communicator": ("communicator",),
    "model": ("model",),
    "state": ("loaded",),
    "first step": ("stepped",),
}
LEVELS = {"cold": "none", "warm": "imports", "context": "context", "nccl": "nccl", "in-process": "context"}
BARE = ("cold", "warm", "context", "nccl", "in-process", "shrink")
WITH_NCCL = "run --warm-gpu --nccl-profiler=off"  # its spares have used NCCL, too
LAUNCHERS = ("run", "run --warm", "run --warm-gpu", WITH_NCCL, "nvrx in-process", "nvrx ft_launcher")


def held_bytes() -> int:
    """Return how much memory of the first GPU is in use; 0 where nobody tells."""
    try:
        import pynvml

        pynvml.nvmlInit()
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(first) if first.isdigit() else 0)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    except Exception:  # noqa: BLE001  no GPU, no library, no right: the line is left out
        return 0


class BrokenError(Exception):
    """A way did not come back, and how."""


class Trial(NamedTuple):
    """Seconds by column, and their sum."""

    columns: dict[str, float]
    total_s: float


class Marks:
    """What ranks have written down in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read = [0, 0]

    def forget(self) -> None:
        """Only what comes from now on counts."""
        self._read = [self._size(rank) for rank in (0, 1)]

    def _size(self, rank: int) -> int:
        place = self.folder / f"rank-{rank}"
        return place.stat().st_size if place.exists() else 0

    def of(self, rank: int) -> list[tuple[float, int, str]]:
        """Return (clock, process, stage) of a rank since ``forget``, whole lines only."""
        place = self.folder / f"rank-{rank}"
        if not place.exists():
            return []
        text = place.read_bytes()[self._read[rank] :].decode()
        rows = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
        return [(float(row[0]), int(row[1]), row[4]) for row in rows]

    def await_stage(
        self,
        stage: str,
        ranks: tuple[int, ...],
        alive: "subprocess.Popen[bytes] | None" = None,
        within_s: float = DEADLINE_S,
    ) -> None:
        """Wait until each of these ranks is through a stage.

        Raises:
            BrokenError: one is not in time, or says that it failed.
        """
        end = time.monotonic() + within_s
        while True:
            seen = {rank: [name for _, _, name in self.of(rank)] for rank in ranks}
            if all(stage in names for names in seen.values()):
                return
            failed = next((name for names in seen.values() for name in names if name.startswith("failed:")), "")
            if failed:
                raise BrokenError(failed.replace("_", " "))
            if time.monotonic() > end or (alive is not None and alive.poll() is not None):
                last = {rank: names[-1:] for rank, names in seen.items()}
                raise BrokenError(f"no step of all ranks within {within_s:.0f} s; last stages {last}")
            time.sleep(0.01)


def trial_of(marks: Marks, ranks: tuple[int, ...], fault_s: float) -> Trial:
    """Split the time since a fault by the slower rank's stages; what was done before it counts as nothing."""
    ends: dict[str, float] = {}
    for rank in ranks:
        rows = marks.of(rank)
        began_s = max((clock for clock, _, stage in rows if stage == "started"), default=0.0)
        for clock, _, stage in rows:
            # The first line of a script that a spare runs says when the spare had its order.
            name = "ordered" if stage == "entered" and clock > fault_s > began_s else stage
            ends[name] = max(ends.get(name, 0.0), clock)
    before_s, columns = fault_s, {}
    for column, stages in COLUMNS.items():
        end_s = max([ends[stage] for stage in stages if stage in ends], default=0.0)
        columns[column] = max(0.0, end_s - before_s)
        before_s = max(before_s, end_s)
    return Trial(columns, before_s - fault_s)


class Bare:
    """Two ranks and their spares, started and killed by this process itself."""

    def __init__(self, folder: Path, port: int, options: argparse.Namespace) -> None:
        self.marks = Marks(folder)
        self.log = (folder / "log").open("ab")
        self.generation = 0
        self.deadline_s = options.deadline
        self.held: dict[str, int] = {}  # by level: memory of a GPU that a spare holds
        self.ranks: dict[int, subprocess.Popen[bytes]] = {}
        self.spares: dict[int, subprocess.Popen[bytes]] = {}
        self._env = {
            **os.environ, "BENCH_DIR": str(folder), "STORE_PORT": str(port), "LAYERS": str(options.layers),
            "WIDTH": str(options.width), "OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            "TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        }  # fmt: skip

    def order(self, rank: int, *, shared: bool = False) -> bytes:
        """Return what a spare is told to become this rank."""
        told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "GENERATION": str(self.generation)}
        told["SHARED_BY_SURVIVOR"] = "1" if shared else ""
        return json.dumps(told).encode() + b"\n"

    def prepare(self, level: str, ranks: tuple[int, ...]) -> None:
        """Have spares of a level ready.

        Raises:
            BrokenError: one is not in time.
        """
        self._end(self.spares)
        before = held_bytes() if 0 in ranks else 0
        for rank in ranks:
            command = [sys.executable, "-u", str(SCRIPT), "--spare", level, str(rank)]
            self.spares[rank] = subprocess.Popen(
                command, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log
            )
        end = time.monotonic() + READY_S
        for spare in self.spares.values():
            assert spare.stdout is not None
            come, _, _ = select.select([spare.stdout], [], [], max(0.0, end - time.monotonic()))
            if not come or spare.stdout.readline() != b"ready\n":
                raise BrokenError(f"a spare of level {level} was not ready within {READY_S:.0f} s")
        if before:
            self.held[level] = held_bytes() - before

    def start_cold(self) -> None:
        """Start both ranks anew, to their first step and the checkpoint."""
        self.generation += 1
        self.marks.forget()
        for rank in (0, 1):
            self.ranks[rank] = self._cold(rank)
        self.marks.await_stage("stepped", (0, 1), within_s=READY_S)
        end = time.monotonic() + READY_S
        while not (self.marks.folder / "state.pt").exists() and time.monotonic() < end:
            time.sleep(0.05)

    def _cold(self, rank: int) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-u", str(SCRIPT), "--spare", "none"]
        process = subprocess.Popen(
            command, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self.log
        )
        _say(process, self.order(rank))
        return process

    def trial(self, way: str) -> Trial:
        """Kill rank 1, and go on in one way.

        Raises:
            BrokenError: it did not.
        """
        if way == "in-process":
            self.prepare("context", (1,))
        elif way not in ("cold", "shrink"):
            self.prepare(LEVELS[way], (0, 1))
        time.sleep(0.3)
        self.marks.forget()
        self.generation += 1
        fault_s = time.monotonic()
        self.ranks[1].kill()
        self.ranks[1].wait(10)
        if way in ("shrink", "in-process"):
            told = {"survive": way, "generation": str(self.generation)}
            _say(self.ranks[0], json.dumps(told).encode() + b"\n")
            if way == "in-process":
                self.ranks[1] = self.spares.pop(1)
                _say(self.ranks[1], self.order(1, shared=True))
        else:
            self.ranks[0].kill()
            self.ranks[0].wait(10)
            for rank in (0, 1):
                if way == "cold":
                    self.ranks[rank] = self._cold(rank)
                else:
                    self.ranks[rank] = self.spares.pop(rank)
                    _say(self.ranks[rank], self.order(rank))
        left = (0,) if way == "shrink" else (0, 1)
        self.marks.await_stage("stepped", left, within_s=self.deadline_s)
        return trial_of(self.marks, left, fault_s)

    def end(self) -> None:
        """Kill everything."""
        self._end(self.ranks)
        self._end(self.spares)

    def _end(self, processes: "dict[int, subprocess.Popen[bytes]]") -> None:
        for process in processes.values():
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # the driver holds it
                process.wait(20)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        processes.clear()


def _say(process: "subprocess.Popen[bytes]", line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()


@contextlib.contextmanager
def folder_of(name: str) -> Iterator[Path]:
    """Yield a folder that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix=f"bench-{name}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def launched(way: str, kills: int, until_s: float, options: argparse.Namespace, port: int) -> list[Trial]:
    """Start the script by a launcher, kill rank 1 so often, and return what each restart took.

    Raises:
        BrokenError: it did not come back.
    """
    with folder_of("launch") as folder:
        env = {**os.environ, "BENCH_DIR": str(folder), "OMP_NUM_THREADS": "1"}
        env |= {"LAYERS": str(options.layers), "WIDTH": str(options.width)}
        left: tuple[int, ...] = (0, 1)
        if way.startswith("nvrx"):
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(options.nvrx), env.get("PYTHONPATH", "")]))
        if way == "nvrx in-process":
            left, kills = (0,), 1
            env |= {"WITHIN": "nvrx", "STORE_PORT": str(port), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
            env |= {"TORCH_NCCL_ENABLE_MONITORING": "0"}
        with (folder / "log").open("wb") as log:
            processes = _start(way, folder, env, log)
        marks, found = Marks(folder), []
        try:
            marks.await_stage("stepped", (0, 1), processes[0])
            for _ in range(kills):
                time.sleep(_settle_s(way))
                victim = marks.of(1)[-1][1]
                marks.forget()
                fault_s = time.monotonic()
                os.kill(victim, signal.SIGKILL)
                marks.await_stage("stepped", left, processes[0])
                found.append(trial_of(marks, left, fault_s))
                if time.monotonic() > until_s:
                    break
        except BrokenError as error:
            tail = (folder / "log").read_text(errors="replace").strip().splitlines()[-3:]
            raise BrokenError(f"{error}; {' | '.join(tail)}"[:600]) from error
        finally:
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(15)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    return found


def _settle_s(way: str) -> float:
    """Return how long to wait before the next kill: spares of ``--warm`` are made meanwhile, and the state is saved."""
    return 12.0 if "warm" in way else 3.0


def _start(way: str, folder: Path, env: dict[str, str], log: object) -> "list[subprocess.Popen[bytes]]":
    python, script = sys.executable, str(SCRIPT)
    if way.startswith("run"):
        command = [python, "-m", "megascale_ops.cli.main", "run", "--job=bench", "--quiet", "--nproc-per-node=2"]
        command += [f"--run-dir={folder / 'run'}", f"--box-root={folder / 'boxes'}"]
        command += ["--policy", "restarts_per_hour=1000", "--policy", "restarts_per_cause_per_hour=1000"]
        command += [*way.split()[1:], "--", script]
        commands = [(command, env)]
    elif way == "nvrx ft_launcher":
        settings = folder / "ft.yaml"
        settings.write_text(
            "fault_tolerance:\n  initial_rank_heartbeat_timeout: 60\n  rank_heartbeat_timeout: 10\n"
            "  workload_check_interval: 1\n  rank_termination_signal: SIGKILL\n  log_level: ERROR\n"
        )
        command = [python, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--nproc-per-node=2", "--nnodes=1"]
        command += ["--max-restarts=20", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:29461"]
        commands = [([*command, f"--ft-cfg-path={settings}", script], env)]
    else:
        common = {**env, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29463"}
        ranks = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]
        commands = [([python, "-u", script], of_rank) for of_rank in ranks]
    return [
        subprocess.Popen(command, env=given, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
        for command, given in commands
    ]


class Results:
    """Trials and failures by way."""

    def __init__(self) -> None:
        self.trials: dict[str, list[Trial]] = {}
        self.broken: dict[str, list[str]] = {}
        self.held: dict[str, int] = {}

    def note(self, way: str, trials: list[Trial]) -> None:
        """Take trials, and tell of them as they come."""
        self.trials.setdefault(way, []).extend(trials)
        for one in trials:
            print(f"# {way}: {one.total_s:.2f} s", file=sys.stderr, flush=True)

    def fail(self, way: str, why: str) -> None:
        """Take note that a way did not come back."""
        self.broken.setdefault(way, []).append(why)
        print(f"# {way}: {why}", file=sys.stderr, flush=True)

    def table(self) -> Iterator[str]:
        """Yield the lines of the table: medians of each stage, of the sum median and largest."""
        yield f"| way | kills | {' | '.join(COLUMNS)} | median s | most s |"
        yield f"|---|---|{'---|' * (len(COLUMNS) + 2)}"
        for way, trials in self.trials.items():
            parts = [f"{statistics.median(one.columns[column] for one in trials):.2f}" for column in COLUMNS]
            totals = [one.total_s for one in trials]
            yield (
                f"| {way} | {len(trials)} | {' | '.join(parts)} | {statistics.median(totals):.2f} | {max(totals):.2f} |"
            )
        if self.held:
            held = ", ".join(f"{level} {size / 1e6:.0f} MB" for level, size in self.held.items())
            yield f"\nof a GPU's memory a spare holds: {held}"
        for way, reasons in self.broken.items():
            yield f"{way}: {len(reasons)} without a new step: {'; '.join(dict.fromkeys(reasons))}"


def of_bare(ways: list[str], seconds: float, options: argparse.Namespace, port: int, results: Results) -> None:
    """Take turns with the bare launcher until the time is over, which begins with the first step of all."""
    if not ways:
        return
    with folder_of("bare") as folder:
        bare = Bare(folder, port, options)
        try:
            try:
                bare.start_cold()
            except BrokenError as error:
                results.fail("the first start", _with_log(folder, error))
                return
            lives, until_s = True, time.monotonic() + seconds
            while ways and time.monotonic() < until_s:
                for way in list(ways):
                    if time.monotonic() > until_s:
                        break
                    try:
                        if not lives:
                            bare.end()
                            bare.start_cold()
                        lives = False
                        results.note(way, [bare.trial(way)])
                        lives = way != "shrink"
                    except BrokenError as error:
                        results.fail(way, _with_log(folder, error))
                        ways.remove(way)
        finally:
            bare.end()
            bare.log.close()
            results.held.update(bare.held)


def _with_log(folder: Path, error: BrokenError) -> str:
    """Return why a way broke, with the last line that its ranks have printed."""
    tail = (folder / "log").read_text(errors="replace").strip().splitlines()[-1:]
    return f"{error} {' '.join(tail)}"[:500]


def main() -> None:
    """Take turns, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=140.0)
    parser.add_argument("--ways", default=",".join((*BARE, *LAUNCHERS)), help="comma separated")
    parser.add_argument("--kills", type=int, default=3, help="of each launch by a launcher")
    parser.add_argument(
        "--deadline", type=float, default=DEADLINE_S, help="seconds from a kill to the new step, at most"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--nvrx", type=Path, default=ROOT / ".extra" / "nvrx", help="where it is installed")
    options = parser.parse_args()
    ways, results, began_s = options.ways.split(","), Results(), time.monotonic()
    if unknown := [way for way in ways if way not in (*BARE, *LAUNCHERS)]:
        parser.error(f"--ways: there is no way {unknown[0]!r}, but {', '.join((*BARE, *LAUNCHERS))}")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    until_s = began_s + options.seconds
    if any(way.startswith("nvrx") for way in ways) and not (options.nvrx / "nvidia_resiliency_ext").is_dir():
        ways = [way for way in ways if not way.startswith("nvrx")]
        print(f"# NVRx is not in {options.nvrx}: its rows are missing", file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was measured until then is told
    try:
        of_launchers([way for way in ways if way in LAUNCHERS], until_s, options, store.port, results)
        left_s = max(1.0, until_s - time.monotonic())
        of_bare([way for way in ways if way in BARE], left_s, options, store.port, results)
    finally:
        tell(results, options)


def of_launchers(ways: list[str], until_s: float, options: argparse.Namespace, port: int, results: Results) -> None:
    """Launch by each; with its restarts that takes some 25 s."""
    for way in ways:
        try:
            results.note(way, launched(way, options.kills, until_s, options, port))
        except BrokenError as error:
            results.fail(way, str(error))
        except OSError as error:
            results.fail(way, f"it can't be started: {error}")


def tell(results: Results, options: argparse.Namespace) -> None:
    """Print what was measured, and where."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, Gloo"
    weights = options.layers * options.width**2 * 4 / 1e9
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "-"
    print(f"SIGKILL of rank 1 of 2 to the first new step of all; 2 x {gpu}, torch {torch.__version__}, NCCL {nccl},")
    print(f"weights {weights:.2f} GB, checkpoint three times that, in the page cache; medians, seconds.\n")
    print("\n".join(results.table()))


if __name__ == "__main__":
    main()
