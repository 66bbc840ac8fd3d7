# SPDX-License-Identifier: Apache-2.0
"""What kernel timings cost a rank: nothing asked, one step profiled, one step in N.

    python benchmarks/kernel_profile.py [--steps 40] [--layers 48]

A small transformer's worth of operators on the CPU (48 layers: about 4,500 events a step), in this process, on one
CPU. Every second step is profiled (A B A B), so that the machine's mood hits both alike. Told are medians: a step
without and with the profiler, what switching it on and off takes, how long adding up takes beside the next steps, and
what sampling one step in N therefore costs. Last what a step's end costs without a request, in nanoseconds.
"""

import argparse
import os
import statistics
import tempfile
import time
import timeit
from pathlib import Path

import msgspec
import torch

from megascale_ops.blackbox.records import BoxIdentity
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.recorder.recording.recording import Recording
from megascale_ops.recorder.torch_hooks.kernel_profile import KernelProfile, TorchProfiler
from megascale_ops.schema.kernels import RankKernels

EVERY = (100, 1000)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=48)
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    layers = [torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64)) for _ in range(options.layers)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    x = torch.randn(32, 64)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        identity = BoxIdentity(
            job="b", node="n", rank=0, local_rank=0, world_size=1, pid=os.getpid(), start_ticks=0, round=1
        )
        recording = Recording(BoxWriter.create(folder, identity))
        idle_ns = min(timeit.repeat(lambda: recording.at_step_end is not None, number=100_000, repeat=5)) * 1e4
        profile = KernelProfile(recording, TorchProfiler(), folder / "0", every=2)
        took: dict[bool, list[float]] = {False: [], True: []}
        own_s, adding_s = [], []
        for number in range(2 * options.steps + 6):
            profiled = profile._running is not None  # noqa: SLF001  which of the two it is
            began_s = time.perf_counter()
            step()
            ended_s = time.perf_counter()
            recording.step()
            if number < 6:  # the profiler's first start, caches
                continue
            took[profiled].append(ended_s - began_s)
            if profiled and profile._writer is not None:  # noqa: SLF001  alone, so that it does not disturb a step
                before_s = time.perf_counter()
                profile._writer.join()  # noqa: SLF001  as above
                adding_s.append(time.perf_counter() - before_s)
                found = msgspec.json.decode((folder / "0.sampled.json").read_bytes(), type=RankKernels)
                own_s.append(found.own_s)
        calls = sum(row.calls for row in found.kernels)
    plain_s, with_s = statistics.median(took[False]), statistics.median(took[True])
    switching_s = statistics.median(own_s)
    extra_s = with_s - plain_s + switching_s
    print(f"operators a step, in the {len(found.kernels)} longest kinds  {calls:10,}")
    print(f"a step without the profiler                 {plain_s * 1e3:10.2f} ms")
    print(f"the same step with it                       {with_s * 1e3:10.2f} ms")
    print(f"switching it on and off                     {switching_s * 1e3:10.2f} ms")
    print(f"adding up, beside the next steps            {statistics.median(adding_s) * 1e3:10.2f} ms")
    for every in EVERY:
        print(f"one step in {every:5,}: share of the time      {extra_s / (every * plain_s):10.3%}")
    print(f"a step's end when nobody has asked          {idle_ns:10.0f} ns")


if __name__ == "__main__":
    main()
