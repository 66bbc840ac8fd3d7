# SPDX-License-Identifier: Apache-2.0
"""What the recorder costs: nanoseconds an event, and the share of a 50 ms step with 24 events.

    python benchmarks/recorder.py [--rounds 5] [--json FILE]
    python benchmarks/recorder.py --events  (the first measurement alone, in CPU time, as JSON: see recorder_in_turn.py)

Three measurements. *Events*: each event on its own, in this process, into a real box. *Steps*: one small training loop
(a DataLoader, a backward pass, an optimizer, eight all-reduces on Gloo with one rank, one declared phase: 24 events
a step) in processes of its own, without (A) and with (B) the recorder in turn, A B A B; the median step of each, and
their difference as a share of 50 ms. *Start*: the wall time of ``python -c pass`` and of ``import torch``, A B A B.

Everything of a loop runs on one CPU. Gloo hands each all-reduce to a thread of its own and back; where the scheduler is
free to choose, that takes 10 us on some runs and 60 us on others, and the same loop 0.2 or 0.6 ms a step: a lottery
that, with or without the recorder, hides what is measured. On one CPU the recorder's own threads share it as well.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path

import megascale_ops
from megascale_ops.blackbox.records import BoxIdentity
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.recorder.hook_guard import guarded_about, guarded_plain
from megascale_ops.recorder.recording.api import Recorder
from megascale_ops.recorder.recording.recording import Recording
from megascale_ops.recorder.torch_hooks.collectives import CollectiveLog, wrap

BOOTSTRAP = Path(megascale_ops.__file__).parent / "recorder" / "bootstrap"
EVENTS_A_STEP = 24  # 2 data, 2 backward, 2 optimizer, 8 x 2 collectives, 2 phase
REAL_STEP_S = 0.05
DEADLINE_S = 120.0

LOOP = """
import json, os, time
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
import torch
import torch.distributed as dist
from megascale_ops.recorder import recorder
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
loss = torch.zeros(1)
took = []
for epoch in range(3):
    before = time.perf_counter()
    for (x,) in DataLoader(TensorDataset(torch.randn(1000, 16)), batch_size=1):
        model(x).sum().backward()
        for _ in range(8):
            dist.all_reduce(loss)
        optimizer.step()
        optimizer.zero_grad()
        with recorder.phase("log"):
            pass
        after = time.perf_counter()
        took.append(after - before)
        before = after
took = sorted(took[500:])
print(json.dumps(took[len(took) // 2]))
dist.destroy_process_group()
"""


class Group:
    """Stands for a process group: its name and its number at torch's price are measured in the loop."""

    group_name = "0"

    def _get_sequence_number_for_group(self) -> int:
        return 1


def measure_events(folder: Path, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Return nanoseconds of each event by ``clock``, the best of seven rounds."""
    identity = BoxIdentity(
        job="b", node="n", rank=0, local_rank=0, world_size=1, pid=os.getpid(), start_ticks=0, round=1
    )
    recording = Recording(BoxWriter.create(folder, identity))
    optimizer = Recorder()  # any object that can be referred to weakly
    face = Recorder()
    face.attach(recording)
    group = Group()
    noted = wrap(all_reduce, CollectiveLog(recording, lambda: group), lambda: False)

    def phase() -> None:
        with face.phase("eval"):
            pass

    begin, end = guarded_about("b", recording.optimizer_begin), guarded_about("b", recording.optimizer_end)

    def optimizer_step() -> None:
        begin(optimizer, (), {})
        end(optimizer, (), {})

    pairs: dict[str, tuple[Callable[[], object], int]] = {
        "data (begin, end)": (
            both(guarded_plain("b", recording.data_begin), guarded_plain("b", recording.data_end)),
            2,
        ),
        "backward (begin, end)": (
            both(guarded_plain("b", recording.backward_begin), guarded_plain("b", recording.backward_end)),
            2,
        ),
        "optimizer (begin, end of the step)": (optimizer_step, 2),
        "collective (enter, leave)": (lambda: noted(None), 2),
        "recorder.phase (enter, leave)": (phase, 2),
        "recorder.step": (lambda: face.step(1), 1),
        "recorder.step outside of a run": (Recorder().step, 1),
    }
    count = 20_000
    return {
        name: min(timeit.repeat(call, timer=clock, number=count, repeat=7)) / count / events * 1e9
        for name, (call, events) in pairs.items()
    }


def all_reduce(tensor: object, group: object = None) -> None:
    """Stand for a collective."""


def both(begin: Callable[..., None], end: Callable[..., None]) -> Callable[[], object]:
    """Return one call for two events."""

    def pair() -> None:
        begin()
        end()

    return pair


def run(folder: Path, code: str, *, recorded: bool) -> tuple[float, str]:
    """Run ``code`` in a process of its own; return its wall time in seconds and what it printed."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MEGASCALE")}
    environ |= {"OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    if recorded:
        environ |= {"PYTHONPATH": str(BOOTSTRAP), "MEGASCALE_BOX_DIR": str(folder / "box")}
    before = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, check=True, timeout=DEADLINE_S, stdout=subprocess.PIPE, text=True
    )
    return time.perf_counter() - before, done.stdout


def step_s(folder: Path, recorded: bool) -> float:
    """Return the median step of the small loop."""
    return float(json.loads(run(folder, LOOP, recorded=recorded)[1]))


def wall_s(folder: Path, code: str, recorded: bool) -> float:
    """Return how long a process that runs ``code`` takes."""
    return run(folder, code, recorded=recorded)[0]


def measure_in_turn(rounds: int, one: Callable[[bool], float]) -> tuple[float, float]:
    """Return the medians without and with the recorder, measured in turn."""
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for recorded in (False, True):
            found[recorded].append(one(recorded))
    return statistics.median(found[0]), statistics.median(found[1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--events", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        if options.events:
            print(json.dumps(measure_events(folder, time.process_time)))
            return
        events = measure_events(folder)
        off_s, on_s = measure_in_turn(options.rounds, partial(step_s, folder))
        start = {
            code: measure_in_turn(options.rounds * repeat, partial(wall_s, folder, code))
            for code, repeat in (("pass", 6), ("import torch", 1))
        }
    share = (on_s - off_s) / REAL_STEP_S
    print(f"{'event':38}{'ns':>8}")
    for label, ns in events.items():
        print(f"{label:38}{ns:8.0f}")
    print(f"\n{'median step of the small loop':38}{off_s * 1e6:8.1f} us without, {on_s * 1e6:.1f} us with")
    print(f"{'an event in the loop':38}{(on_s - off_s) / EVENTS_A_STEP * 1e9:8.0f} ns")
    print(f"{'of a 50 ms step with 24 events':38}{share:8.3%}")
    for code, (without_s, with_s) in start.items():
        print(f"{'python -c ' + repr(code):38}{without_s * 1e3:8.1f} ms without, {with_s * 1e3:.1f} ms with")
    if options.json:
        options.json.write_text(
            json.dumps({"events_ns": events, "step_off_s": off_s, "step_on_s": on_s, "share": share, "start_s": start})
        )


if __name__ == "__main__":
    main()
