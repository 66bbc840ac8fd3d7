# SPDX-License-Identifier: Apache-2.0
"""After ranks gave up on a tile: who never sent it, by their words, by their boards, and beside other causes."""

import signal
import threading

import pytest

from megascale_ops.diagnosis.exits.classify import Ended
from megascale_ops.diagnosis.exits.first_cause import judge_exits
from megascale_ops.diagnosis.exits.tile_timeouts import Missed, missed_of
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import CollectiveFact, RankExit
from megascale_ops.schema.progress import RankError
from megascale_ops.schema.tiles import TileFact, TileWait

TYPE = "megascale_kernels.errors.TileTimeout"
WHERE = "operators.py:80 ag_gemm"
OF_TP = "; ranks are counted within the group of the job's ranks 4, 5, 6, 7"


def waited(rank: int, peer: int, *, operator: str = "ag_gemm", tile: int = 3) -> str:
    """What a kernel that gave up says."""
    return (
        f"rank {rank}, {operator} launch 7, CTA 105, tile {tile}: waited 2.000 s for rank {peer}, flag 0: needed "
        f"0x00007b73, saw 0x00003aae; rank {peer} last showed tile 17 of {operator} launch 6"
    )


def stopped(rank: int, first: int, peer: int, own_peer: int) -> str:
    """What a kernel says that another rank has stopped."""
    return (
        f"rank {rank}, ag_gemm launch 7, CTA 3, tile 4: stopped because rank {first} gave up first, waiting for rank "
        f"{peer} (this CTA waited for rank {own_peer}); look at rank {first}'s message"
    )


def on_host(rank: int, first: int, peer: int, said: str = "ag_gemm(M 8, N 8, K 8)") -> str:
    """What the serial path says, on who waited and on who came late."""
    return f"rank {rank}, {said}: rank {first} waited 2.000 s for rank {peer}, which has not called it"


def failed(rank: int, message: str, *, kind: str = TYPE, ago_s: float = 0.1) -> Ended:
    """A rank that died of an exception."""
    error = RankError(kind, message, WHERE, 10)
    return Ended("n0", RankExit(rank, rank, 100 + rank, 1, 0.0, step=10, phase="forward", error=error), ago_s)


def ended(rank: int, code: int = -signal.SIGTERM, *, by_us: bool = True, **more: object) -> Ended:
    """A rank that said nothing."""
    exit_ = RankExit(rank, rank, 100 + rank, code, 0.0, by_us=by_us, step=10, phase="data", **more)  # type: ignore[arg-type]
    return Ended("n1", exit_, 0.05)


def judged(*ends: Ended, world_size: int = 0) -> Verdict:
    """What becomes of them."""
    size = world_size or len(ends)
    return judge_exits(ends, world_size=size, missing=(), reports={}, hosts={}, round_=1, wall_s=1e6)


def gave_up_on(peer: int, *, operator: str = "ag_gemm") -> tuple[TileFact, ...]:
    """The boards of a rank that waits or has given up."""
    return (TileFact("tiles of 0-3 (1)", operator, 7, waits=(TileWait(peer, 5, 4, gave_up=True),)),)


@pytest.mark.parametrize(
    ("message", "missed"),
    [
        (waited(0, 1), [Missed(0, 1, "ag_gemm launch 7", 3, 2.0)]),
        (waited(0, 1) + OF_TP, [Missed(0, 5, "ag_gemm launch 7", 3, 2.0)]),
        (stopped(0, 2, 1, 2), [Missed(2, 1, "ag_gemm launch 7"), Missed(0, 1, "ag_gemm launch 7")]),
        (stopped(0, 2, 0, 2), [Missed(2, 0, "ag_gemm launch 7"), Missed(0, 2, "ag_gemm launch 7")]),
        (on_host(0, 0, 1), [Missed(0, 1, "ag_gemm", -1, 2.0)]),
        (on_host(2, 0, 1), [Missed(0, 1, "ag_gemm", -1, 2.0), Missed(2, 1, "ag_gemm", -1, 2.0)]),
        (on_host(1, 0, 1), [Missed(0, 1, "ag_gemm", -1, 2.0)]),  # it came late: it waited for no peer
        (on_host(0, 0, 1, "Workspace(max_rows=8, dtype=torch.bfloat16) on cuda"), [Missed(0, 1, "Workspace", -1, 2.0)]),
        ("rank 7, something else entirely", []),
        ("", []),
    ],
)
def test_words_of_a_time_out_name_waiter_and_peer(message: str, missed: list[Missed]) -> None:
    """By the job's numbers, also where the kernel counts within a part of it."""
    rank = int(message[5]) if message else 0

    assert missed_of(rank, RankError(TYPE, message)) == missed


def test_a_message_that_was_cut_is_counted_by_the_boards() -> None:
    """Black boxes hold 700 bytes; without its end a message would accuse a rank of another group."""
    fact = TileFact("tiles of 4-7 (1)", "ag_gemm", 7, waits=(TileWait(5, 3, 1, gave_up=True),), members=(4, 5, 6, 7))
    other = TileFact("tiles of 4-5 (2)", "gemm_rs", 3, members=(4, 5))

    found = missed_of(4, RankError(TYPE, waited(0, 1)), (other, fact))

    assert {(one.waiter, one.peer) for one in found} == {(4, 5)}


def test_the_real_exceptions_are_read() -> None:
    """Negative control of the words above: what the kernels raise today is what is read."""
    dist = pytest.importorskip("torch.distributed")
    pytest.importorskip("triton", minversion="3.6")
    from megascale_kernels.errors import TileTimeout
    from megascale_kernels.memory.agreement import Agreement

    store, raised = dist.HashStore(), dict[int, str]()

    def call(rank: int) -> None:
        note = OF_TP if rank == 2 else ""
        try:
            Agreement(store, "talk", rank, 3, note).compare("gemm_rs(M 8)", 0.05, lambda _: None)
        except TileTimeout as error:
            raised[rank] = str(error)

    threads = [threading.Thread(target=call, args=(rank,)) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    call(1)  # late

    found = {rank: missed_of(rank, RankError(TYPE, message)) for rank, message in raised.items()}
    assert {(one.waiter, one.peer) for one in found[0]} >= {(0, 1)}
    assert {one.peer for one in found[2]} == {5}
    assert {one.peer for one in found[1]} == {1}
    assert all(one.where == "gemm_rs" for each in found.values() for one in each)


def test_three_that_wait_accuse_the_fourth() -> None:
    """The case of the field: all raise the same exception, the one to blame raises nothing."""
    verdict = judged(failed(0, waited(0, 1)), failed(2, waited(2, 1)), failed(3, stopped(3, 0, 1, 2)), ended(1))

    assert (verdict.fault, verdict.culprits, verdict.nodes) == ("tile_timeout", (1,), ("n1",))
    assert verdict.confidence == 0.95
    assert "rank 1 never came to ag_gemm launch 7: ranks 0,2-3 waited for its tile until the deadline of 2 s" in (
        verdict.reason
    )
    assert "(rank 0 at tile 3 for rank 1)" in verdict.reason
    assert "it was alive elsewhere, in phase data after step 10, until it was stopped" in verdict.reason


def test_who_comes_late_raises_the_same_and_is_named() -> None:
    """On the CPU the late one finds that the others have given up."""
    verdict = judged(failed(0, on_host(0, 0, 1)), failed(2, on_host(2, 0, 1)), failed(1, on_host(1, 0, 1)))

    assert (verdict.fault, verdict.culprits) == ("tile_timeout", (1,))
    assert "it came when the others had given up" in verdict.reason


def test_a_rank_in_the_middle_is_a_victim() -> None:
    """0 waits for 1, 1 for 2: by what 1 said, or by its board where it was stopped before it could raise."""
    said = judged(failed(0, waited(0, 1)), failed(1, waited(1, 2)), ended(2))
    shown = judged(failed(0, waited(0, 1)), ended(1, tiles=gave_up_on(2)), ended(2))

    assert said.culprits == shown.culprits == (2,)


def test_a_peer_that_waits_in_a_collective_is_a_victim() -> None:
    """1 was stopped inside an all_reduce that 3 has not entered: 3 holds all of them up."""
    inside, before = CollectiveFact("0", 41, "all_reduce"), CollectiveFact("0", 40, "all_reduce", done=True)

    verdict = judged(
        failed(0, waited(0, 1)), ended(1, calls=(before, inside)), ended(2, calls=(before, inside)),
        ended(3, calls=(before,)),
    )  # fmt: skip

    assert (verdict.fault, verdict.culprits) == ("tile_timeout", (3,))


def test_ranks_that_wait_for_each_other_are_not_told_apart() -> None:
    """A circle names no rank."""
    verdict = judged(failed(0, waited(0, 1)), failed(1, waited(1, 0, operator="gemm_rs")))

    assert (verdict.fault, verdict.culprits, verdict.confidence) == ("tile_timeout", (), 0.5)
    assert "in a circle" in verdict.reason


@pytest.mark.parametrize(
    ("cause", "fault"),
    [
        (ended(1, -signal.SIGKILL, by_us=False), "killed"),
        (failed(1, "the gradient is broken", kind="ValueError", ago_s=9.0), "exception"),
        (ended(1, -signal.SIGSEGV, by_us=False), "segfault"),
    ],
)
def test_a_peer_that_had_died_before_is_named_for_what_it_died_of(cause: Ended, fault: str) -> None:
    """Those that waited for it are victims, and it is told that they did."""
    verdict = judged(failed(0, waited(0, 1)), failed(2, waited(2, 1)), cause)

    assert (verdict.fault, verdict.culprits) == (fault, (1,))
    assert "ag_gemm launch 7: ranks 0,2 waited for its tile" in verdict.reason


def test_a_peer_that_had_ended_in_order_is_told_so() -> None:
    """Its script was over while the others still computed."""
    verdict = judged(failed(0, waited(0, 1)), failed(2, waited(2, 1)), ended(1, 0, by_us=False))

    assert (verdict.fault, verdict.culprits) == ("exited_early", (1,))


def test_a_peer_whose_end_is_not_known_is_named_with_less_certainty() -> None:
    """Those that waited know whom; nothing else does."""
    verdict = judged(failed(0, waited(0, 3)), failed(1, waited(1, 3)), world_size=4)

    assert (verdict.fault, verdict.culprits, verdict.confidence) == ("tile_timeout", (3,), 0.7)
    assert "how it ended is not known" in verdict.reason


def test_a_wait_on_a_board_alone_is_no_time_out() -> None:
    """A rank stopped in a healthy launch waited for a peer, as all do; its round ended for another reason."""
    verdict = judged(ended(0, tiles=gave_up_on(1)), ended(1), failed(2, "bad row", kind="ValueError"))

    assert (verdict.fault, verdict.culprits) == ("exception", (2,))
    assert "tile" not in verdict.reason


def test_a_script_that_caught_one_and_died_of_something_else_is_judged_by_that() -> None:
    """The word stands in the message of another exception."""
    verdict = judged(failed(0, f"gave up: {waited(0, 1)}", kind="ValueError"), ended(1))

    assert (verdict.fault, verdict.culprits) == ("exception", (0,))


RUNS = "rank 0 runs ag_gemm(M 8, N 8, K 8); rank {} runs ag_gemm(M 8, N 9, K 8): all ranks must call the same operators"


@pytest.mark.parametrize(("others", "culprits"), [((0, 1, 3), (2,)), ((0,), ())])
def test_ranks_that_run_different_kernels_are_quoted(others: tuple[int, ...], culprits: tuple[int, ...]) -> None:
    """The majority is right; of two none is, and all are victims of the exception that all raise."""
    kind = "megascale_kernels.errors.RankMismatch"
    ends = [failed(rank, RUNS.format(2).replace("rank 0", f"rank {rank}"), kind=kind) for rank in others]

    verdict = judged(*ends, failed(2, RUNS.format(2), kind=kind))

    assert (verdict.fault, verdict.culprits) == ("collective_mismatch", culprits)
    assert "ran ag_gemm(M 8, N 9, K 8)" in verdict.reason
