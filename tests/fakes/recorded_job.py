# SPDX-License-Identifier: Apache-2.0
"""A small recorded job, every time known: ranks that come late on purpose, nodes whose clocks differ on purpose."""

from collections.abc import Mapping, Sequence

from megascale_ops.blackbox.records import BoxIdentity, StepRecord
from megascale_ops.schema.identity import Mesh
from megascale_ops.trace.rank_records import NS, CollectiveSpan, RankRecords, make_rank_records

MS = 1_000_000
BOOTED_S = 10_000.0
STEP_MS = 100
MOVING_MS = 2


def identity(rank: int, world: int, node: str = "a", **more: float | str) -> BoxIdentity:
    """Return whose records they are."""
    fields = {"job": "toy", "started_mono_s": BOOTED_S - 5.0, "started_wall_s": 1_800_000_000.0, **more}
    return BoxIdentity(
        node=node, rank=rank, local_rank=rank % 2, world_size=world, pid=100 + rank, start_ticks=0, round=1,
        mesh=Mesh(dp=rank // 2, tp=rank % 2), **fields,  # type: ignore[arg-type]  # as given
    )  # fmt: skip


def late_ms(rank: int, late: Mapping[int, float]) -> float:
    """Return by how much a rank comes late into each collective."""
    return late.get(rank, 0.1 * rank)


def recorded_job(
    nodes: Sequence[str] = ("a", "a"),
    *,
    steps: int = 3,
    late: Mapping[int, float] | None = None,
    ahead_s: Mapping[str, float] | None = None,
    communicator: str = "0",
) -> list[RankRecords]:
    """Return the records of a job with one rank for each of ``nodes`` and one all_reduce a step.

    A step lasts 100 ms. Its all_reduce is enqueued 50 ms after the step's beginning, later by ``late`` ms of a rank (by
    default 0.1 ms times its number), and ends 2 ms after the last rank has come. ``ahead_s`` of a node is how much its
    monotonic clock is ahead; its wall clock is right.
    """
    late, ahead_s = late or {}, ahead_s or {}
    world = len(nodes)
    last_ms = max(late_ms(rank, late) for rank in range(world))
    all_records = []
    for rank, node in enumerate(nodes):
        ahead = ahead_s.get(node, 0.0)
        records, spans = [], []
        for step in range(steps):
            began_s = BOOTED_S + ahead + step * STEP_MS / 1000
            waiting_s = (last_ms - late_ms(rank, late)) / 1000
            records.append(
                StepRecord(
                    step,
                    began_s + STEP_MS / 1000,
                    STEP_MS / 1000,
                    data_s=0.01,
                    forward_s=0.02,
                    backward_s=0.02,
                    optimizer_s=0.005,
                    waiting_s=waiting_s,
                    loss=float(step),
                )
            )
            at_ns = round(began_s * NS) + 50 * MS
            spans.append(
                CollectiveSpan(
                    communicator,
                    "all_reduce",
                    step,
                    4096,
                    at_ns + round(late_ms(rank, late) * MS),
                    at_ns + round((last_ms + MOVING_MS) * MS),
                )
            )
        mine = identity(rank, world, node, started_mono_s=BOOTED_S + ahead - 5.0)
        all_records.append(make_rank_records(mine, records, spans))
    return all_records
