# SPDX-License-Identifier: Apache-2.0
"""What a runner and its ranks leave on a node, made by a test: real processes, round files, black boxes, logs."""

import contextlib
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec
from megascale_agents.collectors import process

from megascale_ops.blackbox.layout import PROFILER
from megascale_ops.blackbox.records import BoxIdentity, GpuStepRecord, StepRecord
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.schema import environment
from megascale_ops.schema.identity import RankProcess, RoundFile
from megascale_ops.schema.version import MESSAGE_VERSION
from tests.fakes.boards import FakeBoard

BOOTSTRAP = Path(environment.__file__).parents[1] / "recorder" / "bootstrap"
SLEEP = "import time; time.sleep(600)"


# Of a script, with its arguments and its environment; its stderr goes to the file.
StartRank = Callable[[str, Sequence[str], Mapping[str, str], IO[bytes]], "subprocess.Popen[bytes]"]


def _start_program(
    script: str, arguments: Sequence[str], env: Mapping[str, str], stderr: IO[bytes]
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", script, *arguments], stderr=stderr, env=env, start_new_session=True)


def before_others(folder: Path) -> str:
    """Return a PYTHONPATH that begins with a folder and keeps what the caller's has: the tree under test, perhaps."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH", "")])])


class FakeNode:
    """One node's box root with one job on it; ``start_round`` does what a runner does."""

    def __init__(
        self, folder: Path, job: str = "job", node: str = "node-a", start_rank: StartRank | None = None
    ) -> None:
        self.root = folder / "boxes"
        self.job_folder = self.root / job
        self.run_dir = folder / "run"
        self.job = job
        self.node = node
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self.boxes: dict[int, BoxWriter] = {}
        self.round = 0
        self._start_rank = start_rank or _start_program
        self.run_dir.mkdir(parents=True, exist_ok=True)

    def start_round(
        self,
        ranks: int = 2,
        *,
        script: str = SLEEP,
        boxes: bool = True,
        recorder: bool = False,
        world_size: int = 0,
    ) -> RoundFile:
        """Stop the ranks of the round before, start new ones, write the round file and the boxes.

        With ``recorder`` each rank makes its own box, by the real recorder. ``world_size``: of the whole job, where it
        has other nodes.
        """
        self.kill_all()
        self.round += 1
        self.job_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        started = tuple(self._start(rank, ranks, script, recorder=recorder) for rank in range(ranks))
        file = RoundFile(
            version=MESSAGE_VERSION,
            job=self.job,
            node=self.node,
            round=self.round,
            runner_pid=os.getpid(),
            runner_start_ticks=process.read_once(os.getpid()).start_ticks,
            run_dir=str(self.run_dir),
            ranks=started,
        )
        self.write_round(file)
        if boxes and not recorder:
            for one in started:
                self.make_box(one.rank, one.pid, one.start_ticks, world_size or ranks)
        return file

    def write_round(self, file: RoundFile) -> None:
        """Write the round file beside and rename it."""
        path = self.job_folder / f"{self.node}.round.json"
        beside = path.with_suffix(".new")
        beside.write_bytes(msgspec.json.encode(file))
        beside.replace(path)

    def make_box(self, rank: int, pid: int, start_ticks: int, world_size: int = 1) -> BoxWriter:
        """Make a rank's black box, as its recorder would."""
        identity = BoxIdentity(
            job=self.job,
            node=self.node,
            rank=rank,
            local_rank=rank,
            world_size=world_size,
            pid=pid,
            start_ticks=start_ticks,
            round=self.round,
        )
        box = BoxWriter.create(self.job_folder, identity)
        box.set_state("running")
        self.boxes[rank] = box
        return box

    def step(self, rank: int, step: int) -> None:
        """Let a rank finish a step."""
        self.boxes[rank].add_step(StepRecord(step=step, ended_mono_s=0.0, wall_s=0.05))
        self.boxes[rank].set_now(step, "forward")

    def gpu_step(self, rank: int, step: int) -> None:
        """Let a rank's GPU have finished a step."""
        self.boxes[rank].add_gpu_step(GpuStepRecord(step, step, 0.05, 0.002, 0.018, 0.025, 0.004, 0.001))

    def profile(self, rank: int, **values: int) -> None:
        """Let NCCL's profiler plugin have written what it says of itself into a rank's box."""
        known = {"abi": 5, "opened_mono_ns": 9, "budget_ppm": 5000, **values}
        page = [known.get(field.name, b"" if field.kind == "chars" else 0) for field in PROFILER.fields]
        with (self.job_folder / f"{rank}.box").open("r+b") as box:
            box.seek(PROFILER.offset)
            box.write(PROFILER.codec.pack(*page))

    def put_board(self, rank: int, board: FakeBoard, name: str = "0") -> None:
        """Write a kernel's progress board as its owner does: whole pages, renamed into place."""
        pid = self.children[rank].pid
        board.host(pid, process.read_once(pid).start_ticks & 0x7FFF_FFFF)
        words = struct.pack(f"<{len(board.words)}I", *(word & 0xFFFF_FFFF for word in board.words))
        path = self.job_folder / f"{rank}.{name}.board"
        beside = path.with_suffix(".beside")
        beside.write_bytes(words.ljust(36_864, b"\0"))
        beside.rename(path)

    def stderr(self, rank: int) -> Path:
        """Where a rank of this round writes its stderr."""
        return self.run_dir / "logs" / f"round-{self.round}" / f"rank-{rank}" / "stderr.log"

    def freeze(self, rank: int) -> None:
        """Stop a rank's process and wait until it is stopped."""
        pid = self.children[rank].pid
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)

    def end_job(self) -> None:
        """Do what a runner does when its job is over."""
        self.kill_all()
        (self.job_folder / f"{self.node}.round.json").unlink(missing_ok=True)

    def kill_all(self) -> None:
        """Kill all ranks and let go of their boxes."""
        for child in self.children.values():
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):  # it has ended since, and is waited for below
                    os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        self.children.clear()
        for box in self.boxes.values():
            box.close()
        self.boxes.clear()

    def _start(self, rank: int, ranks: int, script: str, *, recorder: bool) -> RankProcess:
        log = self.stderr(rank)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as stderr:
            arguments = (str(self.job_folder), str(rank))
            if recorder:
                child = self._start_rank(script, arguments, self._environment(rank, ranks), stderr)
            else:
                line = [sys.executable, "-S", "-c", script, *arguments]
                child = subprocess.Popen(line, stderr=stderr, start_new_session=True)
        self.children[rank] = child
        ticks = process.read_once(child.pid).start_ticks
        return RankProcess(
            rank=rank, local_rank=rank, pid=child.pid, start_ticks=ticks, stdout_path="", stderr_path=str(log)
        )

    def _environment(self, rank: int, ranks: int) -> dict[str, str]:
        """What a runner tells a rank."""
        return {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": "1",
            environment.JOB: self.job,
            environment.NODE: self.node,
            environment.ROUND: str(self.round),
            environment.BOX_DIR: str(self.job_folder),
            environment.STDERR_PATH: str(self.stderr(rank)),
            "PYTHONPATH": before_others(BOOTSTRAP),
        }
