# SPDX-License-Identifier: Apache-2.0
"""What one judgement of a hang costs: 12,288 ranks, of which one is missing, with evidence of all of them.

    python benchmarks/judgement.py [RANKS]

A tick asks the watchdog about all ranks and then ``hangs`` about all evidence; it has 0.1 s of one core. Evidence is
folded when it arrives, one node after the other, so its cost is told apart, for each node of eight ranks.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from megascale_ops.diagnosis import watchdog
from megascale_ops.diagnosis.hangs import verdict
from megascale_ops.diagnosis.hangs.evidence import NOTHING, Look, see
from megascale_ops.diagnosis.rank_view import RankView
from megascale_ops.schema.messages import CollectiveFact, EvidenceItem
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import CollectivePosition, ProcessReading, Progress, RankReport

RANKS = 12_288
RANKS_A_NODE = 8
TENSOR_PARALLEL = 8
RUNS = 15
LIMIT_S = 0.1
POLICY = JobPolicy()
T = TypeVar("T")


def view(rank: int, world: int, *, missing: bool) -> RankView:
    """One rank as its heartbeats describe it."""
    progress = Progress("running", 999, steps_seen=1000, phase="backward", moved_mono_s=94.0, beat_mono_s=100.0)
    report = RankReport(
        rank,
        rank % RANKS_A_NODE,
        1000 + rank,
        1,
        world,
        progress=progress,
        collective=CollectivePosition(40 if missing else 41, 40, "pg 0"),
        process=ProcessReading(state="S"),
    )
    return RankView(f"node{rank // RANKS_A_NODE}", report, 6.0, 0.0, 6.0, 0.1)


def evidence(rank: int, kind: str) -> tuple[EvidenceItem, ...]:
    """Flight recorder and stack of one rank: its collectives in the world's group and in its tensor parallel one."""
    odd = kind != "waits"
    own = f"tp{rank // TENSOR_PARALLEL}"
    facts = [CollectiveFact(own, 100 + place, "all_gather", "[[4096]]", "bfloat16", done=True) for place in range(7)]
    facts += [CollectiveFact("0", 33 + place, "all_reduce", "[[8192]]", "float", done=True) for place in range(8)]
    if kind != "missing":
        sizes = "[[1]]" if odd else "[[8192]]"
        facts.append(CollectiveFact("0", 41, "all_reduce", sizes, "float"))
    frames = (f"{kind} (train.py:40)", "step (train.py:80)", "main (train.py:120)")
    mark = "in_syscall" if kind == "missing" else "in_collective"
    return (
        EvidenceItem("flight_recorder", ok=True, rank=rank, collectives=tuple(facts)),
        EvidenceItem("stacks", ok=True, rank=rank, frames=frames, marks=(mark,)),
    )


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Return the median CPU time of several runs, and the answer."""
    times = []
    for _ in range(RUNS):
        began_s = time.process_time()
        answer = work()
        times.append(time.process_time() - began_s)
    return statistics.median(times), answer


def fold(items: list[EvidenceItem]) -> dict[int, Look]:
    """Take evidence in as the loop does."""
    looks: dict[int, Look] = {}
    for item in items:
        looks[item.rank] = see(looks.get(item.rank, NOTHING), item)
    return looks


def main() -> None:
    """Judge a hang of each kind, print the table, and fail when a tick takes too long."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ranks", type=int, nargs="?", default=RANKS)
    world = parser.parse_args().ranks
    culprit = world // 3
    gc.disable()  # the controller looks for garbage once a minute
    print(f"{world:,} ranks, median of {RUNS} runs, ms")
    print(f"{'hang':<12}{'fold a node':>12}{'watchdog':>10}{'hangs':>8}{'tick':>8}  verdict")
    slowest_s = 0.0
    for kind in ("missing", "mismatch"):
        views = [view(rank, world, missing=kind == "missing" and rank == culprit) for rank in range(world)]
        items = [item for rank in range(world) for item in evidence(rank, kind if rank == culprit else "waits")]
        fold_s, looks = timed(lambda items=items: fold(items))  # type: ignore[misc]  # bound at once
        watch_s, suspicion = timed(lambda views=views: watchdog.judge(views, POLICY, 1e6))  # type: ignore[misc]  # as above
        assert suspicion is not None
        judge_s, judged = timed(lambda: verdict.judge(suspicion, views, looks, world, POLICY))  # noqa: B023  called at once
        assert judged.verdict.culprits == (culprit,), judged.verdict
        tick_s = watch_s + judge_s
        slowest_s = max(slowest_s, tick_s)
        node_ms = fold_s * 1e3 / (world / RANKS_A_NODE)
        print(
            f"{kind:<12}{node_ms:>12.3f}{watch_s * 1e3:>10.1f}{judge_s * 1e3:>8.1f}{tick_s * 1e3:>8.1f}  "
            f"{judged.verdict.fault}, rank {culprit}, {judged.verdict.confidence:.0%}"
        )
    print(f"the slowest tick takes {slowest_s * 1e3:.1f} ms; {LIMIT_S * 1e3:.0f} ms are allowed")
    sys.exit(slowest_s > LIMIT_S and world <= RANKS)


if __name__ == "__main__":
    main()
