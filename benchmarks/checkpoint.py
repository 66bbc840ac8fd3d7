# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint costs the training, and how fast it comes back: ours in its three modes, torch's own beside them.

    python benchmarks/checkpoint.py --device cuda --gb 10 --rounds 1 --step-ms 1000 --folder /dev/shm
    python benchmarks/checkpoint.py --device cpu --gb 0.5
    python benchmarks/checkpoint.py --only copy,async,overlapped --gb 10 --rounds 5 --folder /dev/shm   # stalls alone
    python benchmarks/checkpoint.py --only restore --gb 10 --rounds 3 --folder /a/disk                  # restores alone

The state is parameters and both moments of AdamW, float32, in as many tensors as asked. A training step is matrix
products for ``--step-ms``, which touch none of it, and the optimizer's step, which overwrites all of it. The contenders
take turns, round after round, and each row is printed when it is there. Of each, at the end, medians:

    call     seconds until the call that saves has returned, from the end of the step before; below zero: it returned
             while the GPU was still at that step
    stall    a step before that call, the call and a step after it, less two steps: what the training loses
    beside   the steps while it is still written, each against a step without, in per cent
    whole    seconds from the end of the step before until the checkpoint is complete on disk

``copy`` is the floor: the same tensors to pinned host memory that is already there (on the CPU: to memory that is
there), nothing else; what the stalls are held against is the median of five of it alone. It and ours in the background
make host memory at their first call, which is a round of its own and no part of the medians. A row that is not there
within ``--row-s`` is said to be late, and that contender is left out from then on. What a contender has written is
removed before the next one, so that memory is not what is measured.

Then the newest checkpoint restored, everything verified, against reading its files from front
to back into memory that is already there: with the page cache dropped before (``cold``) where the files are on a disk,
and with it warm. The last lines hold what was measured against what was asked for.
"""

import argparse
import faulthandler
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from megascale_ops.checkpoint import CheckpointManager
from megascale_ops.checkpoint.latest import newest
from megascale_ops.checkpoint.trust.digests import digests
from megascale_ops.checkpoint.trust.file_digests import FileDigest
from megascale_ops.errors import CheckpointError

# 8 MB: as our own restore reads; larger reads are not faster.
_CHUNK_BYTES = 8 << 20
# What is asked for: of the copy, a stall that waits and one that a step hides; of a sequential read, a restore; GB/s.
_ROWS = ("copy", "async", "overlapped", "sync", "dcp.async_save", "torch.save", "restore")
_ASKED_STALL, _ASKED_HIDDEN, _ASKED_RESTORE, _ASKED_DIGEST = 1.15, 0.05, 0.9, 10.0


class Trial(NamedTuple):
    """Seconds of one save; see the module's text. ``beside`` is a ratio."""

    call_s: float
    stall_s: float
    beside: float
    whole_s: float

    def row(self, copy_s: float) -> str:
        """As a line of the table."""
        share = self.stall_s / copy_s
        return f"{self.call_s:9.3f}{self.stall_s:9.3f}{share:9.2f}{self.beside:9.1%}{self.whole_s:9.3f}"


_HEAD = f"{'':17}{'':8}{'call':>9}{'stall':>9}{'of copy':>9}{'beside':>9}{'whole':>9}   seconds"


class LateError(Exception):
    """A row is not there in time."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """End what waits in Python by an exception, and what does not come back to Python by the end of the process.

    Raises:
        LateError: the time is over.
    """

    def late(*_: object) -> None:
        raise LateError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(2 * seconds, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


class Training:
    """The state, and steps that overwrite it."""

    def __init__(self, device: str, gb: float, tensors: int, step_ms: float) -> None:
        self.device = device
        each = int(gb * 1e9 / 12 / tensors)
        made = (torch.nn.Parameter(torch.randn(each, device=device)) for _ in range(tensors))
        self.parameters = torch.nn.ParameterList(made)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-6, foreach=True)
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        self._side = torch.randn(4096 if device == "cuda" else 512, 4096 if device == "cuda" else 512, device=device)
        self._products = 1
        self.optimizer.step()
        self._multiply()
        while (took_s := self.seconds_of(self._multiply)) < 0.05:
            self._products *= 2
        self._products = max(1, round(self._products * step_ms / 1e3 / took_s))
        self._plain: list[float] = [self.seconds_of(self.step) for _ in range(3)]

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

    def plain_s(self) -> float:
        """Seconds of a step without a save: one more, and the median of the last five."""
        self._plain.append(self.seconds_of(self.step))
        return statistics.median(self._plain[-5:])

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


class Contender:
    """One way to save.

    Args:
        name: of the row.
        save: saves a step; returns what waits until the checkpoint is whole.
        clear: removes what was written.
        warms: whether the first call makes memory that all later ones use.
    """

    def __init__(
        self,
        name: str,
        save: Callable[[int], Callable[[], object]],
        clear: Callable[[], object] = lambda: None,
        *,
        warms: bool = False,
    ) -> None:
        self.name, self.save, self.clear, self.warms = name, save, clear, warms
        self.first: Trial | None = None
        self.trials: list[Trial] = []
        self.is_late = False

    def median(self) -> Trial | None:
        """Of all rounds but the first, where that is its own."""
        return Trial(*map(statistics.median, zip(*self.trials, strict=True))) if self.trials else None


def host_targets(sources: list[torch.Tensor], *, pinned: bool) -> list[torch.Tensor]:
    """As much host memory, there and, where asked, locked."""
    sizes = [-(-each.numel() * each.element_size() // 64) * 64 for each in sources]
    memory = torch.empty(sum(sizes), dtype=torch.uint8).fill_(1)
    if pinned:
        cuda: Any = torch.cuda
        status = cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 1)
        assert int(status) == 0, f"CUDA locks no {memory.numel()} bytes of host memory"
    parts = torch.split(memory, sizes)
    return [
        part[: each.numel() * each.element_size()].view(each.dtype).view(each.shape)
        for part, each in zip(parts, sources, strict=True)
    ]


def contenders(training: Training, folder: Path, row_s: float) -> Iterator[Contender]:
    """Yield all of them."""
    sources = training.tensors()
    targets = host_targets(sources, pinned=training.device == "cuda")

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

    def dcp_save(step: int) -> Callable[[], object]:
        state = {"model": training.parameters.state_dict(), "optimizer": training.optimizer.state_dict()}
        writer = FileSystemWriter(folder / "dcp", sync_files=True)
        response = async_save(state, checkpoint_id=folder / "dcp", storage_writer=writer, no_dist=True)
        del step
        future = response.upload_completion if isinstance(response, AsyncSaveResponse) else response
        return lambda: future.result(row_s)

    def ours(mode: Any) -> Contender:  # noqa: ANN401  a word of the manager's
        manager = CheckpointManager(folder / mode, keep=1, mode=mode)

        def save(step: int) -> Callable[[], object]:
            manager.save(step, training.state)
            return lambda: manager.wait(row_s)

        def clear() -> None:
            for path in (folder / mode).glob("step-*"):
                shutil.rmtree(path, ignore_errors=True)

        return Contender(f"ours, {mode}", save, clear, warms=mode != "sync")

    yield Contender("copy", copy, warms=True)
    yield ours("async")
    if training.device == "cuda":
        yield ours("overlapped")
    yield ours("sync")
    yield Contender("dcp.async_save", dcp_save, lambda: shutil.rmtree(folder / "dcp", ignore_errors=True))
    yield Contender("torch.save", torch_save, lambda: (folder / "torch.pt").unlink(missing_ok=True))


def trial(training: Training, step: int, save: Callable[[int], Callable[[], object]]) -> Trial:
    """One save between two steps, which a GPU is given without a wait, as in a training; then a step beside it."""
    plain_s = training.plain_s()
    training.synchronize()
    began_s = time.perf_counter()
    training.step()
    wait = save(step)
    call_s = time.perf_counter() - began_s - plain_s
    training.step()
    training.synchronize()
    stall_s = time.perf_counter() - began_s - 2 * plain_s
    beside = training.seconds_of(training.step) / plain_s - 1
    wait()
    return Trial(call_s, stall_s, beside, time.perf_counter() - began_s - plain_s)


def take_turns(training: Training, saves: list[Contender], rounds: int, row_s: float, until_s: float) -> float:
    """Print each row as it comes, then the medians; seconds of the bare copy. None begins after ``until_s``."""
    (copy,) = (each for each in saves if each.name == "copy")
    with within(row_s):
        copy_s = statistics.median(training.seconds_of(lambda: copy.save(0)) for _ in range(5))
    print(_HEAD, flush=True)
    for number in range(rounds + 1):
        for each in saves:
            if each.is_late or (number == 0 and not each.warms):
                continue
            if time.perf_counter() > until_s:
                print(f"{each.name:17}{f'round {number}':8} no time was left", flush=True)
                continue
            try:
                with within(row_s):
                    taken = trial(training, number, each.save)
            except (LateError, TimeoutError, CheckpointError) as exc:
                each.is_late = True
                print(f"{each.name:17}{f'round {number}':8} not there within {row_s:.0f} s {exc}", flush=True)
                continue
            finally:
                each.clear()
            if number == 0:
                each.first = taken
            else:
                each.trials.append(taken)
            print(f"{each.name:17}{f'round {number}':8}{taken.row(copy_s)}", flush=True)
    print(f"medians of {rounds}, and the first call")
    for each in saves:
        median = each.median()
        first = f"{each.first.call_s:9.3f}" if each.first is not None else f"{'':9}"
        print(f"{each.name:17}{first[1:]}{median.row(copy_s) if median is not None else '  none'}", flush=True)
    return copy_s


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


def is_memory(folder: Path) -> bool:
    """Whether a folder's files lie in memory, from which they cannot be dropped."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    inside = [(len(mount), kind) for mount, kind in mounts if folder.resolve().is_relative_to(mount)]
    return max(inside, default=(0, ""))[1] in {"tmpfs", "ramfs"}


def restores(training: Training, folder: Path, rounds: int, row_s: float) -> dict[str, float]:
    """Print how fast a checkpoint comes back; the ratios to a sequential read by the state of the cache."""
    with within(row_s):
        CheckpointManager(folder, keep=1).save(rounds + 2, training.state)
    chosen = newest(folder).newest
    assert chosen is not None, f"nothing was saved to {folder}"
    path = Path(chosen.path)
    size = sum(each.stat().st_size for each in path.iterdir())
    buffer = memoryview(bytearray(max(each.stat().st_size for each in path.iterdir()) + _CHUNK_BYTES))
    ratios: dict[str, float] = {}
    for cache in ("warm",) if is_memory(path) else ("cold", "warm"):
        took: dict[str, list[float]] = {"read": [], "restore": []}
        for _ in range(rounds + 1):
            for what, work in (
                ("read", lambda: read_sequentially(path, buffer)),
                ("restore", lambda: CheckpointManager(folder).restore(training.state)),
            ):
                if cache == "cold":
                    drop(path)
                with within(row_s):
                    took[what].append(training.seconds_of(work))
        # The first of each is of another kind: a buffer that is not there yet, a library that is not imported yet.
        read_s, restore_s = (statistics.median(took[what][1:]) for what in ("read", "restore"))
        ratios[cache] = read_s / restore_s
        print(
            f"restore, {cache}: {restore_s:.3f} s, {size / restore_s / 1e9:.2f} GB/s (first {took['restore'][0]:.3f}); "
            f"sequential read {read_s:.3f} s, {size / read_s / 1e9:.2f} GB/s; ratio {ratios[cache]:.2f}",
            flush=True,
        )
    return ratios


def digest_rates(training: Training) -> float:
    """Print GB/s of one core's digests of files, and of a digest of tensors where they lie; XXH3's."""
    data = memoryview(bytearray(os.urandom(1 << 20)) * 256)
    rates: dict[str, float] = {}
    for algorithm in ("xxh3_128", "sha256"):
        took: list[float] = []
        for _ in range(3):
            digest, began_s = FileDigest(algorithm), time.thread_time()
            for start in range(0, len(data), _CHUNK_BYTES):
                digest.update(data[start : start + _CHUNK_BYTES])
            digest.text()
            took.append(time.thread_time() - began_s)
        rates[algorithm] = len(data) / statistics.median(took) / 1e9
    sources = [each for each in training.tensors() if each.numel() > 1]
    size = sum(each.numel() * each.element_size() for each in sources)
    digests(sources[:3])
    tensor_s = training.seconds_of(lambda: digests(sources))
    told = ", ".join(f"{name} {rate:.1f} GB/s" for name, rate in rates.items())
    print(f"digests of files, one core: {told}; of tensors on the {training.device}: {size / tensor_s / 1e9:.1f} GB/s")
    return rates["xxh3_128"]


def held_against(saves: list[Contender], copy_s: float, ratios: dict[str, float], rate: float) -> Iterator[str]:
    """Yield what was measured beside what is asked for."""
    for name, asked in (("ours, async", _ASKED_STALL), ("ours, overlapped", _ASKED_HIDDEN)):
        for median in (each.median() for each in saves if each.name == name):
            if median is not None:
                share = median.stall_s / copy_s
                yield f"{name}: a stall of {share:.2f} of the copy; asked for: {asked:g} at most: {share <= asked}"
    for cache, ratio in ratios.items():
        is_met = ratio >= _ASKED_RESTORE
        yield f"restore, {cache}: {ratio:.2f} of a sequential read; asked for: {_ASKED_RESTORE:g}: {is_met}"
    yield f"digest: {rate:.1f} GB/s a core; asked for: {_ASKED_DIGEST:g}: {rate >= _ASKED_DIGEST}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gb", type=float, default=0.5, help="of state")
    parser.add_argument("--tensors", type=int, default=100, help="parameters; each has two moments and a counter")
    parser.add_argument("--step-ms", type=float, default=500.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--row-s", type=float, default=60.0, help="how long a row may take")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no row begins later; restores come after them")
    parser.add_argument("--only", help=f"of {', '.join(_ROWS)}; comma separated")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder when not given")
    options = parser.parse_args()
    only = options.only.split(",") if options.only else _ROWS
    if unknown := [name for name in only if name not in _ROWS]:
        parser.error(f"--only: there is no row {unknown[0]!r}, but {', '.join(_ROWS)}")
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(
        f"# {' '.join(['python', *sys.argv])}; torch {torch.__version__}; {device}; {os.cpu_count()} CPUs", flush=True
    )
    if options.device == "cpu":
        torch.set_num_threads(1)  # or the steps and the writers contend for the cores of a small machine
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        began_s = time.perf_counter()
        training = Training(options.device, options.gb, options.tensors, options.step_ms)
        size = sum(each.numel() * each.element_size() for each in training.tensors())
        folder = Path(scratch)
        saves = [] if only == ["restore"] else list(contenders(training, folder, options.row_s))
        saves = [each for each in saves if each.name.removeprefix("ours, ") in ("copy", *only)]
        print(
            f"{size / 1e9:.2f} GB in {len(training.tensors())} tensors, a step of {training.plain_s():.3f} s",
            flush=True,
        )
        rate, copy_s, ratios = digest_rates(training), 0.0, {}
        if saves:
            copy_s = take_turns(training, saves, options.rounds, options.row_s, began_s + options.seconds)
            print(f"the bare copy: {copy_s:.4f} s, {size / copy_s / 1e9:.1f} GB/s", flush=True)
        with suppress(LateError):
            if "restore" in only:
                ratios = restores(training, folder / "sync", options.rounds, options.row_s)
        for line in held_against(saves, copy_s, ratios, rate):
            print(line)
        print(f"all of it took {time.perf_counter() - began_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
