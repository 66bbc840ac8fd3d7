# SPDX-License-Identifier: Apache-2.0
"""What a trace costs: 8 ranks on 2 nodes, 1,000 steps of 24 collectives each, written as Perfetto and as Chrome's JSON.

    python benchmarks/trace.py [RANKS] [STEPS]

The records are synthetic: a black box holds 256 steps and 1,024 collectives, a tenth of what is drawn here. Ranks come
late by a few hundred microseconds, another one each time; the second node's clock is a day ahead. Allowed: 10 s from
records to the finished file, and 100 MB.
"""

import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from megascale_ops.blackbox.records import BoxIdentity, StepRecord
from megascale_ops.schema.identity import Mesh
from megascale_ops.trace.choosing import Chosen
from megascale_ops.trace.clocks import align
from megascale_ops.trace.matching import Key, Meeting, meet, newest_of
from megascale_ops.trace.picture import Picture
from megascale_ops.trace.rank_records import NS, CollectiveSpan, RankRecords, make_rank_records
from megascale_ops.trace.writing import write

RANKS, STEPS, COLLECTIVES = 8, 1_000, 24
STEP_NS = 200_000_000
MOVING_NS = 1_500_000
DAY_S = 86_400.0
BOOTED_S = 400_000.0
LIMIT_S, LIMIT_BYTES = 10.0, 100_000_000
FUNCTIONS = (("all_reduce", 33_554_432), ("all_gather", 8_388_608), ("reduce_scatter", 8_388_608))


def records_of(ranks: int, steps: int) -> list[RankRecords]:
    """Return the synthetic job."""
    randomness = random.Random(1)
    starts_ns = [[0] * (steps * COLLECTIVES) for _ in range(ranks)]
    ends_ns = [0] * (steps * COLLECTIVES)
    for number in range(steps * COLLECTIVES):
        at_ns = round(BOOTED_S * NS) + number * (STEP_NS // COLLECTIVES)
        for rank in range(ranks):
            starts_ns[rank][number] = at_ns + randomness.randrange(400_000)
        ends_ns[number] = max(starts[number] for starts in starts_ns) + MOVING_NS
    return [_records_of_rank(rank, ranks, steps, starts_ns[rank], ends_ns, randomness) for rank in range(ranks)]


def _records_of_rank(
    rank: int, ranks: int, steps: int, starts_ns: list[int], ends_ns: list[int], randomness: random.Random
) -> RankRecords:
    node = rank * 2 // ranks
    ahead_s = node * DAY_S
    identity = BoxIdentity(
        job="bench", node=f"node{node}", rank=rank, local_rank=rank % max(1, ranks // 2), world_size=ranks,
        pid=1000 + rank, start_ticks=0, round=1, mesh=Mesh(dp=rank, tp=0), started_mono_s=BOOTED_S + ahead_s - 60.0,
        started_wall_s=1.8e9 - 60.0,
    )  # fmt: skip
    step_s = STEP_NS / NS
    parts = {"data_s": 0.01, "forward_s": 0.05, "backward_s": 0.09, "waiting_s": 0.03, "optimizer_s": 0.015}
    records = [
        StepRecord(
            number, BOOTED_S + ahead_s + (number + 1) * step_s, step_s, **parts, gc_s=0.001, cpu_s=0.2,
            loss=5.0 / (1 + number),
        )
        for number in range(steps)
    ]  # fmt: skip
    ahead_ns = round(ahead_s * NS)
    spans = [
        CollectiveSpan(
            "0", FUNCTIONS[number % 3][0], number, FUNCTIONS[number % 3][1], start_ns + ahead_ns,
            end_ns + ahead_ns + randomness.randrange(20_000),
        )
        for number, (start_ns, end_ns) in enumerate(zip(starts_ns, ends_ns, strict=True))
    ]  # fmt: skip
    return make_rank_records(identity, records, spans)


def main() -> None:
    """Write both formats, print the table, and fail when the limits are passed."""
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else RANKS
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else STEPS
    all_records = records_of(ranks, steps)
    print(f"{ranks} ranks x {steps:,} steps x {COLLECTIVES} collectives; seconds of wall clock, CPU in brackets")
    print(f"{'format':<10}{'align, match':>16}{'draw, write':>18}{'MB':>8}{'slices':>11}{'arrows':>10}{'B/slice':>9}")
    passed = True
    with tempfile.TemporaryDirectory() as folder:
        for format_name in ("perfetto", "chrome"):
            began_s, cpu_s = time.perf_counter(), time.process_time()
            meetings: dict[Key, Meeting] = {}
            for records in all_records:
                meet(meetings, records.identity.rank, newest_of(records).items())
            chosen = tuple(Chosen(rank, "asked for") for rank in range(ranks))
            by_rank = {records.identity.rank: records for records in all_records}
            picture = Picture("bench", chosen, by_rank, align(all_records), meetings, ranks)
            ready_s, ready_cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
            done = write(Path(folder, "trace"), format_name, picture.draw, range(ranks), steps, 10**12)
            took_s, took_cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
            print(
                f"{format_name:<10}{ready_s:>9.2f} ({ready_cpu_s:.2f}){took_s - ready_s:>11.2f} "
                f"({took_cpu_s - ready_cpu_s:.2f}){done.size_bytes / 1e6:>8.1f}{done.slices:>11,}{done.arrows:>10,}"
                f"{done.size_bytes / done.slices:>9.0f}"
            )
            if format_name == "perfetto":
                passed = took_s < LIMIT_S and done.size_bytes < LIMIT_BYTES
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"clocks: {'; '.join(picture.clocks.sentences())}")
    print(f"peak memory, with the synthetic records: {peak_mb:,.0f} MB")
    print(f"allowed: {LIMIT_S:.0f} s, {LIMIT_BYTES / 1e6:.0f} MB: {'kept' if passed else 'NOT kept'}")
    sys.exit(not passed and (ranks, steps) == (RANKS, STEPS))


if __name__ == "__main__":
    main()
