# SPDX-License-Identifier: Apache-2.0
"""Black boxes on disk of ranks that were never there, with every time known."""

from pathlib import Path

from megascale_ops.blackbox.records import BoxIdentity, CollectiveRecord, StepRecord
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.schema.identity import Mesh

BOOTED_S = 5000.0


def box(
    folder: Path,
    rank: int,
    world: int = 2,
    job: str = "toy",
    round_: int = 1,
    steps: int = 30,
    *,
    late_ms: float | None = None,
    mesh: Mesh = Mesh(),  # noqa: B008  frozen
    function: str = "all_reduce",
    also: str = "",
) -> Path:
    """Write the box of a rank that has made some steps of 100 ms with one collective each.

    It ends 9 ms after the first can have come; a rank comes ``late_ms`` after that, by default as many microseconds as
    its number. ``also`` is called before it, in a communicator of its own.
    """
    identity = BoxIdentity(
        job=job, node="a", rank=rank, local_rank=rank, world_size=world, pid=100 + rank, start_ticks=0, round=round_,
        mesh=mesh, started_mono_s=BOOTED_S, started_wall_s=1_800_000_000.0,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    late_ns = rank * 1000 if late_ms is None else round(late_ms * 1e6)
    writer = BoxWriter.create(folder, identity)
    for step in range(steps):
        ended_s = BOOTED_S + 1.0 + 0.1 * step
        at_ns = round((ended_s - 0.05) * 1e9)
        writer.add_collective(CollectiveRecord("0", function, step, 64, at_ns, at_ns + late_ns, at_ns + 9_000_000))
        if also:
            writer.add_collective(CollectiveRecord("1", also, step, 64, at_ns - 9_000_000, at_ns - 8_000_000, at_ns))
        writer.add_step(StepRecord(step, ended_s, 0.1, data_s=0.01))
        writer.set_now(step, "forward", now_mono_s=ended_s)
    writer.close()
    return folder / f"{rank}.box"
