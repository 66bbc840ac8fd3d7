# SPDX-License-Identifier: Apache-2.0
"""What the arrival-skew engine costs at 12,288 ranks, how soon a slow rank is named there, and what is never named.

    python benchmarks/skew.py [--runs 20] [--clean-steps 2000] [--only pass|naming|agent]

*Pass*: what taking heartbeats' samples costs; then 12,288 ranks (8 tensor x 8 pipeline x 192 data parallel) with 1,000
collectives each: the engine on what met,
then the matching of coded rows (by line and rank; in the order of heartbeats: rank by rank, four tensor-parallel ones
and one data-parallel one in turn; with one in 100,000 missing), then all of it from raw columns.

*Naming*: the simulator of ``tests/fakes/traffic.py``, with a rank that works 5 % of a step longer from step 60 on.

*Agent*: what reading and sampling 1,000 collectives of a rank costs.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "agents")]

from megascale_agents.collectives.sample import RankFeed  # noqa: E402  only after the paths
from megascale_agents.collectives.source import BoxSource  # noqa: E402  as above

from megascale_ops.blackbox.reader import BoxReader  # noqa: E402  only after the paths
from megascale_ops.blackbox.records import BoxIdentity, CollectiveRecord  # noqa: E402  only after the paths
from megascale_ops.blackbox.writer import BoxWriter  # noqa: E402  only after the paths
from megascale_ops.diagnosis.skew.detector import Skew  # noqa: E402  only after the paths
from megascale_ops.diagnosis.skew.matching import match  # noqa: E402  only after the paths
from megascale_ops.diagnosis.skew.tables import Line, Rows, arrange  # noqa: E402  only after the paths
from megascale_ops.diagnosis.skew.window import SkewWatch  # noqa: E402  only after the paths
from megascale_ops.schema.collectives import CollectiveSample, SampledLine, pack_rows  # noqa: E402  only after the paths
from megascale_ops.schema.identity import Mesh  # noqa: E402  only after the paths
from megascale_ops.schema.policy import JobPolicy  # noqa: E402  only after the paths
from tests.fakes.skew_columns import code  # noqa: E402  only after the paths
from tests.fakes.traffic import Shape, Traffic, slower  # noqa: E402  only after the paths
from tests.fakes.traffic_passes import Passes  # noqa: E402  only after the paths

RANKS, SLOW = 12_288, 1234


def best_of(times: int, work: Callable[[], object]) -> tuple[float, float]:
    """Return the median and the least of the processor time of some runs."""
    took_s = []
    for _ in range(times):
        gc.collect()
        began_s = time.process_time()
        work()
        took_s.append(time.process_time() - began_s)
    return statistics.median(took_s), min(took_s)


def large() -> tuple[list[Line], np.ndarray, np.ndarray, Rows, np.ndarray]:
    """Make 1,000 collectives of each of 12,288 ranks: 800 tensor-parallel, 200 data-parallel ones."""
    order = np.random.default_rng(1)
    mesh = np.arange(RANKS).reshape(8, 192, 8)
    tensor, data = mesh.reshape(-1, 8), mesh.transpose(0, 2, 1).reshape(-1, 192)
    lines, ranks, numbers, parts = [], [], [], []
    first = 0
    for groups, count in ((tensor, 800), (data, 200)):
        lines += [Line(f"{len(lines) + number:06d}", "all_reduce", 24) for number in range(len(groups))]
        ranks.append(groups.ravel())
        numbers.append(np.repeat(np.arange(len(groups)) + (0 if first == 0 else len(tensor)), groups.shape[1]))
        own_s = (1e-3 * np.exp(0.02 * order.standard_normal((RANKS, count), np.float32))).astype(np.float32)
        own_s[groups.ravel() == SLOW] *= 1.05
        late_s = own_s.reshape(len(groups), groups.shape[1], count)
        took_s = (late_s.max(axis=1, keepdims=True) - late_s + np.float32(2e-4)).reshape(RANKS, count)
        place = np.repeat(np.arange(first, first + RANKS, dtype=np.int32), count)
        seq = np.tile(np.arange(count, dtype=np.int64), RANKS)
        parts.append((place, seq, took_s.ravel(), own_s.ravel(), np.zeros(len(place), np.uint8)))
        first += RANKS
    rows = Rows(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    classes = (np.arange(RANKS) // (192 * 8)).astype(np.int32)
    return lines, np.concatenate(ranks).astype(np.int32), np.concatenate(numbers).astype(np.int32), rows, classes


def told_in_time(rows: Rows, place_rank: np.ndarray) -> Rows:
    """Return the rows of ``large`` rank by rank, each rank's in the order in which it did them."""
    turn = np.where(rows.place >= RANKS, rows.seq * 5 + 4, rows.seq // 4 * 5 + rows.seq % 4)
    return rows.pick(np.argsort(place_rank[rows.place].astype(np.int64) * 1000 + turn))


def lossy(rows: Rows) -> Rows:
    """Return all rows but one in 100,000."""
    return rows.pick(np.flatnonzero(np.random.default_rng(1).random(len(rows.place)) >= 1e-5))


def measure_pass() -> None:
    """Print what a pass costs."""
    lines, place_rank, place_line, rows, classes = large()
    kinds = arrange(lines, place_rank, place_line)
    grids = match(rows, kinds, len(place_rank)).grids
    skew, policy = Skew(lines), JobPolicy()
    skew.add(grids, classes, 1.2, 0.12, policy)
    median_s, least_s = best_of(9, lambda: skew.add(grids, classes, 1.2, 0.12, policy))
    named = [culprit.rank for culprit in skew.report().culprits]
    print(f"one pass over {RANKS:,} ranks x 1,000 collectives: {median_s * 1e3:.0f} ms of a core at the median, "
          f"{least_s * 1e3:.0f} at the least; named: {named}", flush=True)  # fmt: skip
    median_s, least_s = best_of(5, skew.report)
    print(f"its report: {median_s * 1e3:.0f} ms")
    costs = []
    for table in (rows, told_in_time(rows, place_rank), lossy(rows)):
        median_s, least_s = best_of(5, partial(match, table, kinds, len(place_rank)))
        costs.append(f"{median_s * 1e3:.0f} ms more ({least_s * 1e3:.0f})")
    print(f"matching its {len(rows.place):,} coded rows first: {costs[0]}; in the order of heartbeats: {costs[1]}; "
          f"with one in 100,000 missing: {costs[2]}", flush=True)  # fmt: skip
    traffic = Traffic(Shape(tp=8, pp=1, dp=16, layers=50), 1)
    columns = traffic.columns([met for _ in range(10) for met in traffic.step()])
    median_s, least_s = best_of(3, lambda: code(columns))
    print(f"coding raw columns (sorts): {median_s * 1e9 / len(columns.rank):.0f} ns a row, once", flush=True)


def measure_samples() -> None:
    """Print what heartbeats' samples cost the controller at 12,288 ranks: 4 rows a second of each, every 5 s."""
    watch, policy = SkewWatch(RANKS), JobPolicy()
    order = np.random.default_rng(1)
    now_s, took_s, passes_s, pieces_s = 0.0, [], [], []
    for rank in range(RANKS):
        watch.know(rank, f"node-{rank // 8}", Mesh(tp=rank % 8, pp=rank // 1536, dp=rank // 8 % 192))
    for beat in range(10):
        samples = []
        for rank in range(RANKS):
            lines = (
                SampledLine(f"tensor-{rank // 8}", "AllReduce", 24, 3),
                SampledLine(f"data-{rank // 1536}-{rank % 8}", "AllReduce", 28, 0),
            )
            own = 1_000_000 + 20_000 * order.standard_normal(20)
            rows = [
                (number % 2, beat * 10 + number // 2, 2_000_000 - int(own[number]), int(own[number]))
                for number in range(20)
            ]
            samples.append(CollectiveSample(rank, lines, pack_rows(rows), 5.0, 320))
        began_s = time.process_time()
        for first in range(0, RANKS, 8):
            watch.ingest_samples("node", samples[first : first + 8])
        took_s.append(time.process_time() - began_s)
        now_s += 6.0
        known, times_s = watch.report, [time.process_time()]
        times_s.extend(time.process_time() for _ in watch.pieces(now_s, 2.0, policy, time.process_time))
        if watch.report is not known:
            times_s.append(time.process_time())
            passes_s.append(times_s[-1] - times_s[0])
            pieces_s.append(max(after - before for before, after in pairwise(times_s)))
    print(f"taking the samples of {RANKS:,} ranks: {statistics.median(took_s[2:]) * 1e3:.0f} ms each 5 s, "
          f"{statistics.median(took_s[2:]) * 1e6 / RANKS:.1f} us a rank; a pass each 10 s over "
          f"{RANKS * 40:,} rows: {statistics.median(passes_s[1:]) * 1e3:.0f} ms, its longest piece "
          f"{statistics.median(pieces_s[1:]) * 1e3:.0f} ms; "
          f"{len(watch.report.culprits) if watch.report else 0} named", flush=True)  # fmt: skip


def measure_naming(shape: Shape, name: str, runs: int, clean_steps: int, step_noise: float) -> None:
    """Print after how many steps a rank that is 5 % of a step slower was named, and who else."""
    took, wrong = [], 0
    slow = min(SLOW, shape.ranks - 2)
    for seed in range(runs):
        passes = Passes(Traffic(shape, seed, noise=0.03, step_noise=step_noise))
        named = 99
        for step, report in passes.run(
            90, each=5, fault_of=lambda step_s: slower(shape.ranks, slow, 0.05 * step_s, 60)
        ):
            right = [culprit for culprit in report.culprits if culprit.rank == slow and step > 60]
            wrong += len(report.culprits) - len(right)
            named = min(named, step - 60) if right else named
        took.append(named)
    in_time = sum(steps <= 20 for steps in took)
    print(f"{name}, noise of a piece 3 %, of a step {step_noise:.0%}: 5 % slower named within 20 steps in {in_time} of "
          f"{runs} runs, all {sorted(took)}; {wrong} false", flush=True)  # fmt: skip
    if clean_steps:
        false = set()
        passes = Passes(Traffic(shape, 77, noise=0.03, step_noise=step_noise))
        for _, report in passes.run(clean_steps, each=20):
            false |= {culprit.rank for culprit in report.culprits}
        print(f"{name}: {len(false)} false names in {clean_steps:,} clean steps", flush=True)


def measure_agent() -> None:
    """Print what the agent pays for a rank that finishes 1,000 collectives a second."""
    with tempfile.TemporaryDirectory() as folder:
        identity = BoxIdentity(
            job="job", node="node", rank=0, local_rank=0, world_size=8, pid=1, start_ticks=1, round=1
        )
        writer = BoxWriter.create(Path(folder), identity)
        feed = RankFeed(0, BoxSource(BoxReader(Path(folder) / "0.box")), 64.0)
        took_s, sizes = [], []
        for second in range(12):
            for number in range(900):
                at_ns = (second * 900 + number) * 1_000_000 + 1
                writer.add_collective(
                    CollectiveRecord(
                        f"group-{number % 4}",
                        "all_reduce",
                        second * 900 + number // 4,
                        1 << 20,
                        at_ns,
                        at_ns,
                        at_ns + 200_000,
                    )
                )
            began_s = time.process_time()
            sample = feed.drain_sample(float(second))
            took_s.append(time.process_time() - began_s)
            sizes.append(len(sample.rows) * 4 // 3 if sample else 0)
        writer.close()
    print(f"agent: reading and sampling 900 collectives of a rank: {statistics.median(took_s[2:]) * 1e3:.1f} ms, "
          f"{statistics.median(sizes[2:])} bytes told", flush=True)  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--clean-steps", type=int, default=2000)
    parser.add_argument("--only", choices=["pass", "naming", "agent"])
    options = parser.parse_args()
    if options.only in (None, "pass"):
        measure_samples()  # first: on what the other leaves behind, garbage collections take 20 ms each
        measure_pass()
    if options.only in (None, "agent"):
        measure_agent()
    if options.only in (None, "naming"):
        measure_naming(Shape(dp=4), "4 ranks", options.runs, options.clean_steps, 0.01)
        measure_naming(Shape(tp=8, pp=8, dp=192, layers=1), "12,288 ranks", options.runs, options.clean_steps, 0.01)


if __name__ == "__main__":
    main()
