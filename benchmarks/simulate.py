# SPDX-License-Identifier: Apache-2.0
"""Days of large clusters with and without each feature, beside what was published: ``simulate`` many times.

    python benchmarks/simulate.py --rows llama3,no-spares --seeds 7,8,9 --workers 2 --out FOLDER

Each row and seed is a process of its own. Every run's report goes to FOLDER as JSON as soon as it is there, and a table
of the means to the standard output. A run that has no time left ends at the hour that it has reached, and says so.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from megascale_ops.schema.policy import JobPolicy
from megascale_ops.sim.faults import Fault, draw
from megascale_ops.sim.report import Report
from megascale_ops.sim.settings import Settings, checked
from megascale_ops.sim.simulate import simulate

_NO_EVICTION = JobPolicy(check_suspects=False, actions={"cuda_error": "restart", "straggler": "warn"})

# By name: what differs from the defaults, and in words.
ROWS: Mapping[str, tuple[dict[str, Any], str]] = {
    "llama3": ({}, "Llama 3's failures, the policy as it comes"),
    "no-spares": ({"spares": 0}, "without spare nodes"),
    "no-checks": ({"policy": JobPolicy(check_suspects=False)}, "without the self-check of a suspected node"),
    "no-eviction": ({"policy": _NO_EVICTION}, "no node is checked or let go: restarts only"),
    "patience-60": ({"policy": JobPolicy(absent_patience_s=60.0)}, "a minute's patience with who keeps others waiting"),
    "patience-1800": ({"policy": JobPolicy(absent_patience_s=1800.0)}, "half an hour's"),
    "sync-saves": ({"checkpoint_stall_s": 60.0, "checkpoint_write_s": 0.0}, "ranks wait until a checkpoint is written"),
    "saves-300": ({"checkpoint_every_s": 300.0}, "a checkpoint every five minutes"),
    "saves-7200": ({"checkpoint_every_s": 7200.0}, "a checkpoint every two hours"),
    "slow-start": ({"start_s": 300.0, "load_s": 300.0}, "ten minutes until ranks step again"),
    "slow": ({"faults": ("llama3", "fail-slow")}, "slow ranks beside (one a day in 4,000)"),
    "slow-left": (
        {"faults": ("llama3", "fail-slow"), "policy": JobPolicy(actions={"straggler": "warn"})},
        "slow ranks beside, and nothing is done about them",
    ),
    "byterobust": ({"faults": ("byterobust",)}, "ByteRobust's mix of symptoms"),
    "meta-rsc1": ({"faults": ("meta-rsc1",)}, "RSC-1's failures of hardware"),
}


def main() -> None:
    """Run what was asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--seeds", default="7,8,9")
    parser.add_argument("--ranks", type=int, default=12_288)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument(
        "--faults-of", type=int, default=0, help="as many faults as a cluster of so many ranks has; 0: of --ranks"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=0.0, help="end all runs so many seconds from now; 0: never")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    rows = [name.strip() for name in asked.rows.split(",")]
    unknown = [name for name in rows if name not in ROWS]
    if unknown:
        sys.exit(f"there is no row {unknown[0]!r}: take some of {', '.join(ROWS)}")
    try:
        seeds = [int(seed) for seed in asked.seeds.split(",")]
    except ValueError:
        sys.exit(f"seeds {asked.seeds!r} can't be read: give whole numbers with commas")
    asked.out.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + asked.seconds if asked.seconds else 0.0
    found: dict[str, list[Report]] = {name: [] for name in rows}
    context = get_context("spawn")
    with ProcessPoolExecutor(asked.workers, mp_context=context) as pool:
        runs = {
            pool.submit(_one, name, seed, asked.ranks, asked.hours, until_s, asked.faults_of): (name, seed)
            for seed in seeds
            for name in rows
        }
        for done in as_completed(runs):
            name, seed = runs[done]
            report, took_s = done.result()
            (asked.out / f"{name}_{asked.ranks}_{seed}.json").write_bytes(msgspec.json.encode(report))
            found[name].append(report)
            print(f"{name}, seed {seed}: {report.hours:g} h in {took_s:.0f} s of CPU", file=sys.stderr, flush=True)
    print("\n".join(table(found)))


def _one(name: str, seed: int, ranks: int, hours: float, until_s: float, faults_of: int = 0) -> tuple[Report, float]:
    """Run one row with one seed; return its report and the seconds of CPU that it took.

    ``faults_of``: a smaller cluster gets the faults, and the spares, of one of so many ranks, at the same places of it.
    What a fault costs hardly depends on the number of ranks, and how many there are a day is what a row is about.
    """
    settings = msgspec.convert({"ranks": ranks, "hours": hours, "seed": seed}, Settings)
    settings = msgspec.structs.replace(settings, **ROWS[name][0])
    ends_early = (lambda: time.monotonic() > until_s) if until_s else None
    began_s = time.process_time()
    named: Sequence[Fault] = ()
    if faults_of:
        large = checked(msgspec.structs.replace(settings, ranks=faults_of))
        named = draw(large, np.random.default_rng(np.random.SeedSequence(seed).spawn(1)[0]))
        settings = msgspec.structs.replace(settings, faults=(), spares=large.spares)
    return simulate(settings, named, ends_early=ends_early), time.process_time() - began_s


def table(found: Mapping[str, Sequence[Report]]) -> Iterator[str]:
    """Yield the table: means over the seeds, with the least and the most effective time."""
    yield "| what | seeds | hours | effective (least to most) | faults | restarts | evictions | precision | recall |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, reports in found.items():
        if not reports:
            continue
        effective = [one.true_effective for one in reports]
        hours = sorted({one.hours for one in reports})
        yield (
            f"| {ROWS[name][1]} | {len(reports)} | {hours[0]:g}{f' to {hours[-1]:g}' if len(hours) > 1 else ''} "
            f"| {fmean(effective):.2%} ({min(effective):.2%} to {max(effective):.2%}) "
            f"| {fmean(len(one.faults) for one in reports):.1f} | {fmean(one.restarts for one in reports):.1f} "
            f"| {fmean(one.evictions for one in reports):.1f} | {_mean(one.precision for one in reports)} "
            f"| {_mean(one.recall for one in reports)} |"
        )


def _mean(shares: Iterator[float]) -> str:
    known = [share for share in shares if share >= 0.0]
    return f"{fmean(known):.1%}" if known else "-"


if __name__ == "__main__":
    main()
