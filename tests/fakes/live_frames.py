# SPDX-License-Identifier: Apache-2.0
"""Frames of the live feed as a controller makes them, of any number of ranks."""

from collections.abc import Collection, Mapping

from megascale_ops.schema.live import (
    JUDGED,
    LIVE_VERSION,
    Columns,
    Frame,
    Headline,
    IncidentLine,
    JobLine,
    Layout,
    Pace,
    Place,
    Slot,
    Times,
    packed,
)

NOW_S = 1_790_000_000.0
FROZEN = Headline(
    level="act",
    sentence="Rank 9 stopped running: the process is frozen; evidence is being gathered.",
    reason="the process of rank 9 has been in state T for 1.5 s while 15 ranks wait for it in the same collective",
    fault="frozen",
    culprits=(9,),
    places=(Place(9, "node-b", 1, "GPU-1b2c3d4e"),),
    since_wall_s=NOW_S - 40,
    confidence=0.95,
    incident="gpt-2",
    command="megascale-ops why gpt-2",
    also=1,
)
INCIDENTS = (
    IncidentLine(
        "gpt-2", "open", "Rank 9 stopped running: the process is frozen", "frozen", "", (9,), ("node-b",), NOW_S - 40
    ),
    IncidentLine(
        "gpt-1", "recovered", "Node node-a does not answer", "node_lost", "", (), ("node-a",), NOW_S - 90_000, 41.2, 12
    ),
)  # fmt: skip


def frame(
    ranks: int = 16,
    bad: Mapping[int, str] | None = None,
    *,
    headline: Headline = FROZEN,
    incidents: tuple[IncidentLine, ...] = INCIDENTS,
    per_node: int = 8,
    jobs: tuple[str, ...] = ("gpt", "eval"),
) -> Frame:
    """Return a whole frame of the first job; ``bad`` says what ranks are that are not ok."""
    judged = [JUDGED.index((bad or {}).get(rank, "ok")) for rank in range(ranks)]
    nodes = -(-ranks // per_node)
    names = tuple(f"node-{chr(97 + node)}" if nodes <= 26 else f"node-{node:04d}" for node in range(nodes))
    return Frame(
        LIVE_VERSION, 7, NOW_S, jobs[0], whole=True,
        headline=headline,
        pace=Pace(
            "confirming", 3, ranks, nodes, 1240, 0.051, 38.2, 40.0, 3723.0, 0.93, 0.88, restarts=2, goodput_now=0.71
        ),
        layout=Layout(names, packed("node", [rank // per_node for rank in range(ranks)])),
        columns=Columns(
            ("data", "forward", "backward"),
            packed("phase", [2] * ranks),
            packed("behind", [int(one > 0) for one in judged]),
            packed("quiet", [40 if one else 38 for one in judged]),
            packed("judged", judged),
            packed("own", [100 + rank % 3 for rank in range(ranks)]),
            packed("waiting", [255 if one else 12 for one in judged]),
        ),
        times=_times(ranks, {rank for rank, one in (bad or {}).items() if one == "slow"}),
        incidents=incidents,
        jobs=tuple(JobLine(job, "running", "calm", 8, 3) for job in jobs),
    )  # fmt: skip


def _times(ranks: int, slow: Collection[int]) -> Times:
    """Return 40 s in which the slow ranks became slower and slower from the 20th on; a row is at most 1/256 of all."""
    row_ranks = 1 if ranks <= 256 else -(-ranks // 2048) * 8
    rows = -(-ranks // row_ranks)

    def cells(at: int) -> bytes:
        late = {rank // row_ranks: 100 + 6 * max(0, at - 19) for rank in slow}
        return bytes(late.get(row, 100 + row % 3) for row in range(rows))

    slots = (Slot(NOW_S - 60 + at, 1.0, at, 0.2 if at == 20 else 0.05, cells=cells(at)) for at in range(40))
    return Times(row_ranks, rows, tuple(slots))
