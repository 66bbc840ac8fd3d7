# SPDX-License-Identifier: Apache-2.0
"""The training script that faults are injected into: small, real torch on Gloo or NCCL, under any elastic launcher.

    megascale-ops run --nproc-per-node=4 -m -- megascale_ops.chaos.workload --folder=/tmp/x --fault=gil_held --rank=1

Steps of 50 ms, nearly all of it slept inside the forward pass, so that four ranks fit on two cores: data loader,
forward, backward, one all_reduce and one all_gather, optimizer, a checkpoint every 20 steps, an evaluation every 50.
Every step is written to ``FOLDER/steps/RANK`` ("wall clock, pid, step, step restored"), and the moment of the fault to
``FOLDER/marks/FAULT.RANK``: once it is there the fault does not happen again, also not after a restart.
"""

import argparse
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.utils.data import DataLoader, Dataset

from megascale_ops.chaos import no_compiler, overlapped
from megascale_ops.chaos.legitimate import WAITS
from megascale_ops.chaos.misdeeds import collect_garbage, exchange, suffer
from megascale_ops.chaos.scene import Scene
from megascale_ops.checkpoint.manager import CheckpointManager
from megascale_ops.recorder import recorder

CHECKPOINT_EVERY = 20
EVALUATE_EVERY = 50
# Faults that last: from their step on, the rank behaves differently in every step.
LASTING = frozenset({"gc_storm", "data_slow", "launch_late", "drift", "slow_one_in_fifty", "steps_alternate"})
LASTING |= {"lengths_uneven", "compute_5", "compute_20", "compute_100"}
THE_END = 1 << 40  # a step after all others
BEFORE_START = frozenset({"exception_startup", "rendezvous_never", "idle_before_start"})


def read_arguments() -> argparse.Namespace:
    """Return what this rank is asked to do."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--fault", default="")
    parser.add_argument("--rank", type=int, default=1, help="who suffers it; -1: every rank")
    parser.add_argument("--at", type=int, default=40)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--slow", type=float, default=0.0, help="how much longer the fault makes a step, as a share")
    parser.add_argument("--burn-ms", type=float, default=0.0, help="CPU time of every step")
    parser.add_argument("--payload-kb", type=int, default=0, help="more gradients to reduce")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo", help="nccl: a GPU each, or shared")
    parser.add_argument("--loader-workers", type=int, default=0, help="processes of the data loader")
    parser.add_argument("--overlap-s", type=float, default=0.0, help="run overlapped kernels that wait for so long")
    return parser.parse_args()


class Fate:
    """Whether this rank suffers the fault, since when, and whether it has already."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self.name: str = options.fault
        self._here = options.rank in {-1, rank}
        self._at: int = options.at
        self.marker = options.folder / "marks" / f"{self.name}.{rank}"
        self.marker.parent.mkdir(parents=True, exist_ok=True)
        self.began_s = 0.0

    def strikes(self, name: str, step: int) -> bool:
        """Return whether ``name`` happens now, and note when; true once in the life of the folder."""
        if name != self.name or not self._here or step < self._at:
            return False
        try:
            with self.marker.open("x") as out:
                out.write(f"{time.time():.6f}")
        except FileExistsError:
            return False
        self.began_s = time.monotonic()
        return True

    def lasts(self, name: str, step: int, steps: int = THE_END) -> bool:
        """Return whether this rank suffers ``name`` in this step and so many in all."""
        if name == self.name and self._here and self._at <= step < self._at + steps:
            self.strikes(name, step)
            self.began_s = self.began_s or time.monotonic()
            return True
        return False


class Numbers(Dataset[torch.Tensor]):
    """Random rows, read as slowly as the fault asks."""

    def __init__(self, fate: Fate, first: int, seconds: float) -> None:
        self._fate = fate
        self._first = first
        self._seconds = seconds

    def __len__(self) -> int:
        """More rows than any trial trains on."""
        return 10_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return the batch of one step."""
        step = self._first + index
        if self._fate.lasts("data_slow", step):
            time.sleep(0.02)
        if self._fate.strikes("loader_hung", step):
            time.sleep(3600)
        if self._fate.strikes("loader_killed", step):
            os.kill(os.getpid(), signal.SIGKILL)  # the worker's own: as the kernel does when out of memory
        if self._fate.strikes("loader_slow", step):
            time.sleep(self._seconds)
        scale = float("nan") if self._fate.strikes("loss_nan", step) else 1.0
        odd = self._fate.lasts("loss_spike", step, 5) or self._fate.strikes("one_bad_batch", step)
        return torch.randn(8, 8) * (10.0 if odd else scale)


class Work(torch.nn.Module):
    """One layer, and the time that a large model would take."""

    def __init__(self, options: argparse.Namespace, fate: Fate, rank: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self._options = options
        self._fate = fate
        self._random = random.Random(rank)  # noqa: S311  lengths of sequences are no secrets
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute for as long as this step takes."""
        time.sleep(self._pause_s())
        burnt = time.process_time() + self._options.burn_ms / 1000
        while time.process_time() < burnt:
            x = x + 0.0
        found: torch.Tensor = self.layer(x)
        return found

    def _pause_s(self) -> float:
        # 5 ms of the 50 go to real computing, collectives and Python.
        own: float = max(0.0, (self._options.step_ms - self._options.burn_ms - 5.0) / 1000)
        fate, step = self._fate, self.step
        if fate.lasts("lengths_uneven", step):
            return own * self._random.uniform(0.4, 2.4)
        if fate.lasts("steps_alternate", step):
            return own * (0.4 if step % 2 else 4.0)
        if fate.name.startswith("compute_") and fate.lasts(fate.name, step):
            return own * (1.0 + float(self._options.slow))
        if fate.lasts("drift", step):
            return own * (1.0 + 0.01 * (time.monotonic() - fate.began_s) / 60.0)
        if fate.lasts("slow_one_in_fifty", step) and step % 50 == 0:
            return own + 0.3
        return own


class Disk:
    """A value of the checkpoint that is as slow to save as the fault asks."""

    def __init__(self, options: argparse.Namespace, fate: Fate) -> None:
        self._options = options
        self._fate = fate
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        """Be saved."""
        if self._fate.strikes("checkpoint_slow", self.step):
            time.sleep(self._options.seconds)
        if self._fate.strikes("storage_hung", self.step):
            pipe = self._options.folder / "storage"
            os.mkfifo(pipe)
            pipe.write_bytes(b"never read")  # opening it waits for a reader that never comes
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Be restored."""
        self.step = state["step"]


class Rank:
    """One rank's training."""

    def __init__(self, options: argparse.Namespace, fate: Fate, scene: Scene) -> None:
        self.options, self.fate, self.scene = options, fate, scene
        torch.manual_seed(0)
        self.device = device_of(options, scene.rank)
        self.model = Work(options, fate, scene.rank).to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.disk = Disk(options, fate)
        # The sum of the gradients goes nowhere, so a fault of one rank's data or random numbers stays its own: the
        # models are equal by their seed alone, and are no replicas.
        self.checkpoints = CheckpointManager(options.folder / "checkpoints", replicas="off")
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, f"disk{scene.rank}": self.disk}
        self.restored = self.checkpoints.restore(self.state)
        self.layer = overlapped.Layer(self.device, scene.world, options.overlap_s) if options.overlap_s else None
        self.payload = torch.ones(options.payload_kb * 256, device=self.device)
        steps = options.folder / "steps"
        steps.mkdir(exist_ok=True)
        self.log = (steps / str(scene.rank)).open("a", buffering=1)
        self.heartbeat = heartbeat()

    def train(self) -> None:
        """Make all steps that are left."""
        first = self.restored + 1
        data = Numbers(self.fate, first, self.options.seconds)
        batches = iter(DataLoader(data, batch_size=None, num_workers=self.options.loader_workers))
        for step in range(first, self.options.steps):
            loss = self.one_step(step, next(batches))
            self.log.write(f"{time.time():.4f} {os.getpid()} {step} {self.restored}\n")
            self.heartbeat()
            if self.scene.rank == 0 and step % 10 == 0:
                print(f"step {step} loss {loss:.4f}", flush=True)  # noqa: T201  a training script prints
            if (step + 1) % CHECKPOINT_EVERY == 0:
                self.disk.step = step
                self.checkpoints.save(step, self.state)
            if (step + 1) % EVALUATE_EVERY == 0:
                self.evaluate(0.05)
        wait_at_end(self.fate, self.scene, self.options.steps)

    def one_step(self, step: int, batch: torch.Tensor) -> float:
        """Train on one batch and return the loss."""
        now = self.before(step)
        self.meet(step)
        if self.layer is not None:
            self.layer.run(now)
        self.model.step = step
        loss = self.model(batch.to(self.device)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        if self.fate.lasts("gc_storm", step):
            collect_garbage(0.02)
        if self.fate.lasts("launch_late", step):
            time.sleep(0.015)
        gradients = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        exchange(now, torch.cat([*gradients, self.payload]), self.scene.world)
        self.optimizer.step()
        value = float(loss.detach())
        if self.device.type == "cuda":  # read by itself only where that waits for nothing
            recorder.loss(value)
        return value

    def before(self, step: int) -> str:
        """Suffer what comes between two steps; return the fault of this step's collectives, or ""."""
        name = self.fate.name
        elsewhere = {
            "loader_hung",
            "loader_killed",
            "loader_slow",
            "data_slow",
            "loss_nan",
            "loss_spike",
            "one_bad_batch",
            "storage_hung",
            "checkpoint_slow",
            "",
        }
        if name in LASTING | elsewhere | BEFORE_START or name == "end_apart":
            return ""
        others = name == "group_not_created" and not self.fate.marker.exists() and step == self.options.at
        if not self.fate.strikes(name, step):
            if others and self.scene.rank != self.options.rank and self.restored < 0:
                # NCCL forms a group when it is first used, Gloo at once.
                dist.barrier(group=dist.new_group(list(range(self.scene.world))))
            return ""
        if name in {"eval_declared", "eval_one_declared"}:
            self.evaluate(self.scene.seconds)
        elif name == "saves_alone":
            self.checkpoints.save(step, self.state)
        elif name == "debugger_attached":
            self.wait_for_debugger()
        else:
            suffer(name, self.scene)
        return name

    def meet(self, step: int) -> None:
        """Wait for the rank whose wait the others expect at a barrier."""
        if step == self.options.at and self.fate.name in WAITS and WAITS[self.fate.name].guarded:
            dist.barrier()

    def evaluate(self, seconds: float) -> None:
        """Evaluate inside a declared phase, for real: it burns CPU."""
        with recorder.phase("eval"), torch.no_grad():
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                self.model.layer(torch.randn(64, 8, device=self.device))

    def wait_for_debugger(self) -> None:
        """Declare the phase "debugger", and wait up to 60 s for the debugger to have looked at this rank."""
        done = self.options.folder / "debugged"
        end = time.monotonic() + 60.0
        with recorder.phase("debugger"):
            while not done.exists() and time.monotonic() < end:
                time.sleep(0.05)


def wait_at_end(fate: Fate, scene: Scene, step: int) -> None:
    """Do what was asked for after the last step (a step that never comes), or behind that, without the others."""
    if fate.name in WAITS and fate.strikes(fate.name, step):
        suffer(fate.name, scene)


def device_of(options: argparse.Namespace, rank: int) -> torch.device:
    """Return where a rank computes; by its rank, because the nodes of a test share one machine."""
    if options.backend == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


@contextlib.contextmanager
def process_group(options: argparse.Namespace, fate: Fate, scene: Scene) -> Iterator[None]:
    """Join the others, after what may happen before."""
    if fate.name in BEFORE_START and fate.strikes(fate.name, -1):
        suffer(fate.name, scene)
    if options.backend == "nccl":
        torch.cuda.set_device(device_of(options, scene.rank))
        if torch.cuda.device_count() < scene.world:  # NCCL lets ranks of different hosts alone have the same GPU
            os.environ["NCCL_HOSTID"] = f"rank-{scene.rank}"
    dist.init_process_group(options.backend)
    yield
    dist.barrier()  # a rank that leaves while another is in the last collective breaks its connection
    if fate.lasts("end_apart", THE_END):
        time.sleep(scene.rank * scene.seconds)
    dist.destroy_process_group()


def heartbeat() -> Callable[[], None]:
    """Return the function that sends NVIDIA's launcher the script's heartbeat, by which alone it sees a hang."""
    if not os.environ.get("CHAOS_FT_CLIENT"):
        return lambda: None
    from importlib import import_module

    client = import_module("nvidia_resiliency_ext.fault_tolerance").RankMonitorClient()
    client.init_workload_monitoring()
    send: Callable[[], None] = client.send_heartbeat
    return send


def main() -> None:
    """Train."""
    options = read_arguments()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    fate = Fate(options, rank)
    scene = Scene(rank, world, options.folder, options.seconds)
    if options.fault != "recompilation" and not (options.fault in WAITS and WAITS[options.fault].compiles):
        no_compiler.leave_out()
    with process_group(options, fate, scene):
        Rank(options, fate, scene).train()
    wait_at_end(fate, scene, THE_END)


if __name__ == "__main__":
    main()
