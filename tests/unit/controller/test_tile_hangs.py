# SPDX-License-Identifier: Apache-2.0
"""Ranks that wait for tiles: the end of the chain is named and no waiter is, whatever else evidence shows of them.

All jobs train in steps of 50 ms; patience for a step is 5 s, and silence has lasted 3 s unless a test says otherwise.
"""

import msgspec
import pytest

from megascale_ops.diagnosis import watchdog
from megascale_ops.diagnosis.exits.last_errors import judge_failed
from megascale_ops.diagnosis.hangs.verdict import Judgement
from megascale_ops.diagnosis.rank_view import RankView
from megascale_ops.schema.messages import EvidenceItem
from megascale_ops.schema.progress import RankError
from megascale_ops.schema.tiles import TileFact, TileWait
from megascale_ops.schema.work import ChildWork, ProcessWork
from tests.fakes.hung_job import ABSENT, POLICY, judge_job, made_calls, rank_view, said_of, stack_of

GROUP = "tiles of 0-3 (1)"
SLEEPS = stack_of("in_syscall", frames=("sleep (train.py:3)",))
SPINS = stack_of("in_native", frames=("synchronize (torch/cuda/__init__.py:985)",))
COMPILES = stack_of(frames=("wait (subprocess.py:1264)", "compile (triton/compiler/compiler.py:9)"))
LOOP = stack_of("in_python", frames=("spin (train.py:40)", "main (train.py:90)"))


def shows(
    operator: str = "ag_gemm", launch: int = 7, peer: int = -1, *, tile: int = 3, group: str = GROUP, **more: object
) -> EvidenceItem:
    """What the boards of a rank show, with the collectives that its box knows."""
    waits = (TileWait(peer, tile, 4),) if peer >= 0 else ()
    fact = TileFact(group, operator, launch, waits=waits, tiles=16, **more)  # type: ignore[arg-type]  # its fields
    known = msgspec.structs.replace(ABSENT, kind="collectives")
    return msgspec.structs.replace(known, tiles=(fact,))


def view(rank: int, peer: int = -1, **more: object) -> RankView:
    """A rank in no collective, for whose tile ``peer`` is waited for as its heartbeat tells."""
    seen = rank_view(rank, waits=False, **more)  # type: ignore[arg-type]  # fields of rank_view
    return seen._replace(report=msgspec.structs.replace(seen.report, tile_peer=peer))


def hung(*items: EvidenceItem, waiters: int = 3, culprit: int = 1, looks: int = 1, **more: object) -> Judgement:
    """All others wait in ag_gemm launch 7 for a tile of the culprit; ``items`` are what is known of it."""
    ranks = range(waiters + 1)
    views = [view(rank, culprit) if rank != culprit else view(rank, **more) for rank in ranks]
    evidence = [
        item for rank in ranks if rank != culprit for item in said_of(rank, *looks * (shows(peer=culprit),), SPINS)
    ]
    return judge_job(views, [*evidence, *said_of(culprit, *items)])


def test_a_wait_for_a_tile_is_a_wait() -> None:
    """The watchdog looks after half of what a step may take, as where ranks wait in a collective."""
    suspicion = watchdog.judge([view(0, 1), view(1), view(2, 1), view(3, 1)], POLICY, 1e6)

    assert suspicion is not None
    assert (suspicion.verdict.culprits, suspicion.held, suspicion.base_s) == ((1,), True, 5.0)


def test_silence_without_tiles_is_not_looked_at_so_soon() -> None:
    """Control: the same job, and no rank reports a tile."""
    assert watchdog.judge([view(rank) for rank in range(4)], POLICY, 1e6) is None


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (shows("gemm_rs", 6), "rank 1 has not come to ag_gemm launch 7 (its last is gemm_rs launch 6)"),
        (shows("none", 0), "rank 1 has not come to ag_gemm launch 7 (it has launched nothing)"),
        (ABSENT, "rank 1 has not come to ag_gemm launch 7, and shows no board of it"),
        (shows("ag_gemm", 7, in_hand=5), "rank 1 stands in ag_gemm launch 7 at tile 5"),
        (shows("gemm_ar", 7), "rank 1 runs gemm_ar as launch 7, where ag_gemm is waited in"),
    ],
)
def test_the_rank_that_does_not_send_is_named_with_operator_tile_and_peer(item: EvidenceItem, text: str) -> None:
    """Whether it never came, runs something else or stands still inside."""
    found = hung(item, SLEEPS)

    verdict = found.verdict
    assert (verdict.fault, verdict.culprits, verdict.nodes) == ("tile_timeout", (1,), ("node0",))
    assert verdict.confidence >= 0.9
    assert verdict.reason.startswith(text)
    assert "for which rank 0 at tile 3 and rank 2 at tile 3 and rank 3 at tile 3 wait" in verdict.reason
    assert "it sleeps in a system call in sleep (train.py:3)" in verdict.reason
    waits = [one.text for one in verdict.evidence if one.name == "tile_wait"]
    assert waits[0] == "rank 0 waits in ag_gemm launch 7 at tile 3 for rank 1"
    assert found.patience_s == 4.5


def test_a_rank_of_which_nothing_is_known_is_named_by_who_waits() -> None:
    """Its agent is silent and its board on another node's memory."""
    views = [view(0, 3), view(1, 3), view(2, 3)]
    evidence = [item for rank in range(3) for item in said_of(rank, shows(peer=3), SPINS)]

    found = judge_job(views, evidence, world_size=4)

    assert (found.verdict.fault, found.verdict.culprits) == ("tile_timeout", (3,))
    assert "nothing is known of it" in found.verdict.reason


def test_a_rank_that_has_sent_all_is_named_with_doubt() -> None:
    """Its launch is over and its flag did not arrive: as likely the way between them."""
    assert hung(shows("ag_gemm", 7, is_over=True), SLEEPS).verdict.confidence == 0.6


def test_a_chain_of_tiles_is_followed() -> None:
    """0 waits for 1, 1 for 2, 2 for 3, which never launched."""
    views = [view(0, 1), view(1, 2), view(2, 3), view(3)]
    evidence = [item for rank in range(3) for item in said_of(rank, shows(peer=rank + 1), SPINS)]

    found = judge_job(views, [*evidence, *said_of(3, shows("gemm_rs", 6), SLEEPS)])

    assert (found.verdict.fault, found.verdict.culprits) == ("tile_timeout", (3,))


def test_a_chain_goes_on_through_a_collective() -> None:
    """0 waits for 1's tile, 1 in an all_reduce that 3 has not entered: 1 and 2 are victims."""
    inside = made_calls("all_reduce", "all_gather", "all_reduce")
    views = [view(0, 1), rank_view(1), rank_view(2), view(3)]
    evidence = [
        *said_of(0, shows(peer=1), SPINS),
        *said_of(1, shows("gemm_rs", 6, group="tiles of 0-1 (1)"), inside, stack_of("in_collective")),
        *said_of(2, inside, stack_of("in_collective")),
        *said_of(3, ABSENT, SLEEPS),
    ]

    found = judge_job(views, evidence)

    assert (found.verdict.fault, found.verdict.culprits) == ("tile_timeout", (3,))
    assert "has not come to all_reduce #41" in found.verdict.reason


def test_a_host_that_runs_ahead_of_its_gpu_waits_where_the_gpu_does() -> None:
    """All hosts but one have queued the all_reduce behind the kernel that waits: the tile tells, not the queue."""
    queued = made_calls("all_reduce", "all_gather", "all_reduce")
    views = [rank_view(0), rank_view(1), rank_view(2), view(3)]
    evidence = [item for rank in range(3) for item in said_of(rank, shows(peer=3), queued, stack_of("in_data_loader"))]

    found = judge_job(views, [*evidence, *said_of(3, shows("gemm_rs", 6), SLEEPS)])

    assert (found.verdict.fault, found.verdict.culprits) == ("tile_timeout", (3,))
    assert "ag_gemm #7" in next(one.text for one in found.verdict.evidence if one.name == "places")


def test_a_circle_names_nobody() -> None:
    """0 waits in one workspace for 1, and 1 in another for 0; no majority, no history, no name."""
    views = [view(0, 1), view(1, 0)]
    first, second = shows(peer=1, group="tiles of 0-1 (1)"), shows("gemm_rs", 3, peer=0, group="tiles of 0-1 (2)")

    found = judge_job(views, [*said_of(0, first, first), *said_of(1, second, second)])

    assert (found.verdict.fault, found.verdict.culprits, found.verdict.confidence) == ("collective_order", (), 0.5)
    assert "rank 0 waits in ag_gemm launch 7 at tile 3 for rank 1; rank 1 waits in gemm_rs launch 3" in (
        found.verdict.reason
    )
    assert found.is_proven


def test_a_circle_in_one_look_proves_nothing() -> None:
    """Two looks at two ranks, one after the other, may show waits that followed each other."""
    views = [view(0, 1), view(1, 0)]

    found = judge_job(views, [*said_of(0, shows(peer=1)), *said_of(1, shows(peer=0))])

    assert not found.is_proven


def test_kernels_that_go_on_are_slow() -> None:
    """A tile more between two looks: no hang, no rank is to blame."""
    views = [view(0, 1), view(1), view(2, 1), view(3, 1)]
    evidence = [
        item for rank in (0, 2, 3) for done in (3, 4) for item in said_of(rank, shows(peer=1, done=done), SPINS)
    ]

    found = judge_job(views, [*evidence, *said_of(1, shows("gemm_rs", 6), SLEEPS)])

    assert (found.verdict.fault, found.patience_s >= 5.0) == ("slow", True)


def test_a_workspace_that_was_closed_accuses_nobody() -> None:
    """Its board is gone at the second look, and with it the wait that it showed."""
    views = [view(rank) for rank in range(4)]
    nothing = msgspec.structs.replace(ABSENT, kind="collectives")
    evidence = [item for rank in range(4) for item in said_of(rank, shows(peer=(rank + 1) % 4), nothing, SLEEPS)]
    suspicion = [one._replace(silent_s=40.0) for one in views]

    found = judge_job(suspicion, evidence)

    assert found.verdict.fault == "idle"


@pytest.mark.parametrize(
    ("items", "fault", "patience_s"),
    [
        ((COMPILES,), "tile_timeout", 1800.0),
        ((*3 * (LOOP,),), "tile_timeout", 10.0),
        (
            (
                EvidenceItem(
                    "process", ok=True,
                    work=ProcessWork(99.0, 2.0, child_cpu_s=1.5, children=(ChildWork(7, "gzip", "R", is_new=True),)),
                ),
                SLEEPS,
            ),
            "busy",
            1800.0,
        ),
    ],
    ids=["compiles", "loops", "works"],
)  # fmt: skip
def test_what_it_does_instead_gives_the_patience(
    items: tuple[EvidenceItem, ...], fault: str, patience_s: float
) -> None:
    """A first compilation on one rank, an evaluation or an upload take as long as they do before a collective."""
    busy = 1.0 if LOOP in items else 0.0

    found = hung(shows("gemm_rs", 6), *items, busy=busy)

    assert (found.verdict.fault, found.verdict.culprits, found.patience_s) == (fault, (1,), patience_s)


def test_a_declared_evaluation_excuses_all() -> None:
    """Others that wait for its tiles wait for a phase that it has declared."""
    views = [view(0, 1), view(1, phase="eval"), view(2, 1), view(3, 1)]

    assert watchdog.judge(views, POLICY, 1e6) is None


def test_a_stopped_process_waits_for_nobody() -> None:
    """What its board shows it had been at; it is named for being stopped."""
    views = [view(0, 1), view(1, state="T"), view(2, 1), view(3, 1)]
    evidence = [item for rank in (0, 2, 3) for item in said_of(rank, shows(peer=1))]

    found = judge_job(views, [*evidence, *said_of(1, shows(peer=0), stack_of("stopped", kind="process"))])

    assert (found.verdict.fault, found.verdict.culprits) == ("frozen", (1,))


def test_ranks_that_gave_up_and_live_on_accuse_whom_they_waited_for() -> None:
    """A kernel's time-out is raised, and something runs at exit: none of the waiters is to blame."""
    views = []
    for rank in range(4):
        seen = view(rank, silent_s=20.0)
        words = f"rank {rank}, ag_gemm launch 7, CTA 0, tile 3: waited 30.000 s for rank 1, flag 0: needed 0x1, saw 0x0"
        error = RankError("megascale_kernels.errors.TileTimeout", words, "t.py:1 f", 20, raised_mono_s=82.0)
        report = msgspec.structs.replace(seen.report, error=None if rank == 1 else error)
        views.append(seen._replace(report=report))

    suspicion = judge_failed(views, 1e6)

    assert suspicion is not None
    verdict = suspicion.verdict
    assert (suspicion.lost, verdict.fault, verdict.culprits, verdict.nodes) == (True, "tile_timeout", (1,), ("node0",))
    assert "rank 1 never came to ag_gemm launch 7: ranks 0,2-3 waited for its tile" in verdict.reason
