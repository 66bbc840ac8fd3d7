# SPDX-License-Identifier: Apache-2.0
"""Logistic regression by a gradient code: a sum of gradients that is whole without the slowest workers.

Rank 0 is the master, which holds the parameters and adds up; the others are workers, which hold the data, each
partition of it in as many places as the code needs. Defaults are of the size of the experiment of "Gradient Coding"
(Tandon, Lei, Dimakis, Karampatziakis, ICML 2017) on generated data: 554,400 samples of 100 numbers from a mixture of
two Gaussians, here with as many workers as there are ranks. NumPy alone: a rank starts in 0.2 s.

    megascale-ops run --nproc-per-node 5 -- examples/train_coded.py --stragglers 1 --slow-worker 2 --slow-times 4
    torchrun --nproc-per-node 5 examples/train_coded.py --code none
"""

import argparse
import io
import os
import sys
import time
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a rank each core; before numpy is imported

import numpy as np
import numpy.typing as npt

from megascale_ops.coded import GradientCode, Master, Worker
from megascale_ops.coded.code import KINDS
from megascale_ops.coded.tally import Tally
from megascale_ops.errors import MegascaleError
from megascale_ops.recorder import recorder
from megascale_ops.whole_file import write_whole

Array = npt.NDArray[np.float64]


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--code", choices=(*KINDS, "none"), default="clustered", help="none: every answer is needed")
    parser.add_argument("--stragglers", type=int, default=1, help="workers that a step may do without")
    parser.add_argument("--pieces", type=int, default=1, help="cyclic: answers are shorter by this, for more work")
    parser.add_argument("--messages", type=int, default=0, help="multi: answers of a worker; 0: one a partition")
    parser.add_argument("--samples", type=int, default=554_400)
    parser.add_argument("--features", type=int, default=100)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--learning-rate", type=float, default=2.0)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grace-s", type=float, default=0.0, help="how long to wait for the rest once the sum follows")
    parser.add_argument("--deadline-s", type=float, default=600.0, help="of a step, for answers that suffice")
    parser.add_argument("--approximate", action="store_true", help="with too many absent take the nearest sum")
    parser.add_argument("--work-s", type=float, default=0.0, help="each partition takes so long besides, asleep")
    parser.add_argument("--slow-worker", type=int, default=-1, help="this one computes everything several times")
    parser.add_argument("--slow-times", type=int, default=4)
    parser.add_argument("--out", type=Path, help="write the parameters into this file (.npy)")
    return parser.parse_args()


class Data:
    """Partitions of the samples, made when first used: the same on every rank that holds them."""

    def __init__(self, options: argparse.Namespace, partitions: int) -> None:
        self._seed, self._features = options.seed, options.features
        # Partitions differ by one sample at most.
        edges = [options.samples * number // partitions for number in range(partitions + 1)]
        self._counts = [after - before for before, after in pairwise(edges)]
        self._counts.append(max(1, options.samples // 20))  # the last one is held out
        self._made: dict[int, tuple[Array, Array]] = {}
        centre = np.random.default_rng([options.seed, 1 << 20]).standard_normal(options.features)
        self._centre = 1.5 * centre / np.linalg.norm(centre)

    def __getitem__(self, partition: int) -> tuple[Array, Array]:
        """Return samples (count, features) and labels (count,) of 0 and 1."""
        if partition not in self._made:
            chance = np.random.default_rng([self._seed, partition])
            count = self._counts[partition]
            labels = chance.integers(0, 2, count).astype(np.float64)
            samples = chance.standard_normal((count, self._features)) + np.outer(2.0 * labels - 1.0, self._centre)
            self._made[partition] = samples, labels
        return self._made[partition]

    @property
    def held_out(self) -> int:
        """Return the number of the partition that is not trained on."""
        return len(self._counts) - 1


def gradient(samples: Array, labels: Array, weights: Array) -> Array:
    """Return the gradient of the logistic loss, summed over samples, (features,)."""
    found: Array = samples.T @ (1.0 / (1.0 + np.exp(-samples @ weights)) - labels)
    return found


def loss(samples: Array, labels: Array, weights: Array) -> float:
    """Return the mean logistic loss."""
    margins = (2.0 * labels - 1.0) * (samples @ weights)
    return float(np.logaddexp(0.0, -margins).mean())


def save(path: Path, state: Array) -> None:
    """Keep the master's state; workers have none."""
    file = io.BytesIO()
    np.save(file, state)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, file.getvalue())


def lead(options: argparse.Namespace, code: GradientCode) -> None:
    """Be the master: hand the parameters out, add up, move them."""
    data = Data(options, code.workers)
    held_out = data[data.held_out]
    weights = np.zeros(options.features)
    velocity = np.zeros(options.features)
    tally = Tally(options.code, code.workers, code.stragglers, code.load)
    folder = os.environ.get("MEGASCALE_RUN_DIR")
    checkpoint = Path(os.environ.get("MEGASCALE_CHECKPOINT_DIR", "checkpoints"), "coded.npy")
    start = 0
    if checkpoint.exists():
        saved = np.load(checkpoint)
        start, weights, velocity = int(saved[0, 0]), saved[1], saved[2]
        print(f"going on at step {start}", flush=True)
    with Master(code, options.features) as master:
        for step in range(start, options.steps):
            ahead = weights + options.momentum * velocity
            master.ask(step, ahead)
            found = master.gather(
                deadline_s=options.deadline_s, grace_s=options.grace_s, approximate=options.approximate
            )
            recorder.waited(found.took_s)
            velocity = options.momentum * velocity - options.learning_rate / options.samples * found.combined.vector
            weights = weights + velocity
            recorder.step(step)
            for line in tally.note(step, found):
                print(line, flush=True)
            if (step + 1) % 10 == 0 or step + 1 == options.steps:
                print(f"step {step + 1} loss {loss(*held_out, weights):.6f}", flush=True)
                save(checkpoint, np.stack([np.full(options.features, step + 1.0), weights, velocity]))
                if folder:
                    tally.write(Path(folder))
    record = tally.record
    late = {worker + 1: one.late for worker, one in record.by_worker.items() if one.late}
    print(f"done: {record.steps} steps in {record.took_s:.2f} s, late by rank: {late or 'none'}", flush=True)
    if options.out:
        np.save(options.out, weights)


def work(options: argparse.Namespace, code: GradientCode, number: int) -> None:
    """Be a worker: compute what is asked for until the master ends."""
    data = Data(options, code.workers)
    times = max(1, options.slow_times) if number == options.slow_worker else 1
    for partition in code.partitions_of(number):
        data[partition]
    with Worker(code, number, options.features, waited=recorder.waited) as worker:
        for task in worker.tasks():

            def gradient_of(partition: int, weights: Array = task.vector) -> Array:
                for _ in range(times):
                    time.sleep(options.work_s)
                    found = gradient(*data[partition], weights)
                return found

            worker.answer(task.step, gradient_of)
            recorder.step(task.step)


def main() -> None:
    """Train as the rank that this is."""
    options = read_arguments()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks < 2:
        sys.exit("train_coded.py needs a master and a worker: start two ranks or more, as with --nproc-per-node 5")
    try:
        kind, stragglers = ("clustered", 0) if options.code == "none" else (options.code, options.stragglers)
        code = GradientCode(ranks - 1, stragglers, kind, pieces=options.pieces, messages=options.messages)
        if rank == 0:
            lead(options, code)
        else:
            work(options, code, rank - 1)
    except MegascaleError as error:
        sys.exit(f"rank {rank}: {error}")


if __name__ == "__main__":
    main()
