# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint costs the training, and how fast it comes back: ours in its three modes, torch's own beside them.

    python benchmarks/checkpoint.py --device cuda --gb 10 --folder /scratch/bench > benchmarks/results/checkpoint.txt
    python benchmarks/checkpoint.py --device cpu --gb 0.5

The state is parameters and both moments of AdamW, float32, in as many tensors as asked. A training step is matrix
products for ``--step-ms``, which touch none of it, and the optimizer's step, which overwrites all of it. The contenders
take turns, round after round. Of each, medians:

    call     seconds inside the call that saves
    stall    a step right after that call, call included, less a step without one: what the training loses
    beside   the steps while it is still written, each against a step without, in per cent
    whole    seconds until the checkpoint is complete on disk

``copy`` is the floor: the same tensors to pinned host memory that is already there (on the CPU: to memory that is
there), nothing else. The last lines restore the newest checkpoint, everything verified, against reading its files from
front to back into memory that is already there; both with the page cache dropped before (``cold``) where the system
lets a file be dropped, and with it warm.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from megascale_ops.checkpoint import CheckpointManager, newest

DEADLINE_S = 600.0
_CHUNK_BYTES = 16 << 20


class Trial(NamedTuple):
    """Seconds of one save; see the module's text. ``beside`` is a ratio, NaN where no step fitted in."""

    call_s: float
    stall_s: float
    beside: float
    whole_s: float


class Training:
    """The state, and steps that overwrite it."""

    def __init__(self, device: str, gb: float, tensors: int, step_ms: float) -> None:
        self.device = device
        each = int(gb * 1e9 / 12 / tensors)
        self.parameters = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(each)) for _ in range(tensors))
        self.parameters.to(device)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-6, foreach=True)
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        self._side = torch.randn(4096 if device == "cuda" else 512, 4096 if device == "cuda" else 512, device=device)
        self._products = 1
        self.optimizer.step()
        while self._products < 1 << 20 and self.seconds_of(self._multiply) < step_ms / 1e3:
            self._products *= 2

    @property
    def state(self) -> dict[str, Any]:
        """As it is saved."""
        return {"model": self.parameters, "optimizer": self.optimizer}

    def seconds_of(self, work: Callable[[], object]) -> float:
        """Seconds of some work, the GPU's part included."""
        self.synchronize()
        began_s = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - began_s

    def step(self) -> None:
        """One training step."""
        self._multiply()
        self.optimizer.step()

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _multiply(self) -> None:
        product = self._side
        for _ in range(self._products):
            product = self._side @ product
            product = product / product.norm()

    def tensors(self) -> list[torch.Tensor]:
        """Everything that is saved."""
        moments = [value for held in self.optimizer.state.values() for value in held.values()]
        return [*(parameter.detach() for parameter in self.parameters), *moments]


Contender = Callable[[int], Callable[[], object]]
"""Saves a step; returns what waits until the checkpoint is whole."""


def contenders(training: Training, folder: Path) -> Iterator[tuple[str, Contender]]:
    """Yield all of them, by name."""
    sources = training.tensors()
    pinned = training.device == "cuda"
    targets = [torch.empty(each.shape, dtype=each.dtype, pin_memory=pinned).zero_() for each in sources]

    def copy(_step: int) -> Callable[[], object]:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        training.synchronize()
        return lambda: None

    def torch_save(step: int) -> Callable[[], object]:
        state = {name: value.state_dict() for name, value in training.state.items()}
        torch.save(state, folder / "torch.pt")
        del step
        return lambda: None

    def async_save(step: int) -> Callable[[], object]:
        state = {"model": training.parameters.state_dict(), "optimizer": training.optimizer.state_dict()}
        shutil.rmtree(folder / "dcp", ignore_errors=True)
        writer = dcp.FileSystemWriter(folder / "dcp", sync_files=True)
        response = dcp.async_save(state, checkpoint_id=folder / "dcp", storage_writer=writer, no_dist=True)
        del step
        future = response.upload_completion if isinstance(response, AsyncSaveResponse) else response
        return lambda: future.result(DEADLINE_S)

    def of_manager(manager: CheckpointManager) -> Contender:
        def save(step: int) -> Callable[[], object]:
            manager.save(step, training.state)
            return lambda: manager.wait(DEADLINE_S)

        return save

    yield "copy", copy
    for mode in ("sync", "async", "overlapped") if training.device == "cuda" else ("sync", "async"):
        yield f"ours, {mode}", of_manager(CheckpointManager(folder / mode, keep=1, mode=mode))
    yield "dcp.async_save", async_save
    yield "torch.save", torch_save


def trial(training: Training, step: int, save: Contender) -> Trial:
    """One save between two steps."""
    plain_s = statistics.median(training.seconds_of(training.step) for _ in range(3))
    began_s = time.perf_counter()
    wait = save(step)
    call_s = time.perf_counter() - began_s
    training.step()
    training.synchronize()
    stall_s = time.perf_counter() - began_s - plain_s
    beside = training.seconds_of(training.step) / plain_s - 1
    wait()
    return Trial(call_s, stall_s, beside, time.perf_counter() - began_s)


def read_sequentially(folder: Path, buffer: memoryview) -> None:
    """All files of a checkpoint, from front to back."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        try:
            at = 0
            while count := os.readv(handle, [buffer[at : at + _CHUNK_BYTES]]):
                at += count
        finally:
            os.close(handle)


def drop(folder: Path) -> None:
    """Take a checkpoint out of the page cache, where it is on a disk."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def restores(training: Training, folder: Path, rounds: int) -> None:
    """Print how fast the newest checkpoint comes back."""
    chosen = newest(folder).newest
    assert chosen is not None, f"nothing was saved to {folder}"
    path = Path(chosen.path)
    size = sum(each.stat().st_size for each in path.iterdir())
    buffer = memoryview(bytearray(size + _CHUNK_BYTES))
    for cache in ("cold", "warm"):
        took: dict[str, list[float]] = {"read": [], "restore": []}
        for _ in range(rounds):
            for what, work in (
                ("read", lambda: read_sequentially(path, buffer)),
                ("restore", lambda: CheckpointManager(folder).restore(training.state)),
            ):
                if cache == "cold":
                    drop(path)
                took[what].append(training.seconds_of(work))
        read_s, restore_s = (statistics.median(took[what]) for what in ("read", "restore"))
        print(
            f"restore, {cache}: {restore_s:.3f} s, {size / restore_s / 1e9:.2f} GB/s; "
            f"sequential read {read_s:.3f} s, {size / read_s / 1e9:.2f} GB/s; ratio {read_s / restore_s:.2f}"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gb", type=float, default=0.5, help="of state")
    parser.add_argument("--tensors", type=int, default=100, help="parameters; each has two moments and a counter")
    parser.add_argument("--step-ms", type=float, default=500.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder when not given")
    options = parser.parse_args()
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"# {' '.join(['python', *sys.argv])}; torch {torch.__version__}; {device}; {os.cpu_count()} CPUs")
    if options.device == "cpu":
        torch.set_num_threads(1)  # or the steps and the writers contend for the cores of a small machine
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        training = Training(options.device, options.gb, options.tensors, options.step_ms)
        size = sum(each.numel() * each.element_size() for each in training.tensors())
        folder, found = Path(scratch), dict[str, list[Trial]]()
        saves = list(contenders(training, folder))
        for number in range(options.rounds + 1):
            for name, save in saves:
                found.setdefault(name, []).append(trial(training, number, save))
        copy_s = statistics.median(one.call_s for one in found["copy"][1:])
        print(f"{size / 1e9:.2f} GB in {len(training.tensors())} tensors; copy at {size / copy_s / 1e9:.1f} GB/s")
        print(f"{'':16}{'first':>9}{'call':>9}{'stall':>9}{'of copy':>9}{'beside':>9}{'whole':>9}   seconds, medians")
        for name, (first, *rest) in found.items():
            call, stall, beside, whole = (statistics.median(values) for values in zip(*rest, strict=True))
            print(f"{name:16}{first.call_s:9.3f}{call:9.3f}{stall:9.3f}{stall / copy_s:9.2f}{beside:9.1%}{whole:9.3f}")
        restores(training, folder / "sync", options.rounds)


if __name__ == "__main__":
    main()
