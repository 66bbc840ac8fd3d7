# SPDX-License-Identifier: Apache-2.0
"""What the operators do when a rank is lost, late or wrong: all leave, and the record says who waited for what."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

from megascale_kernels.ag_gemm.push import push_by_copy_engine  # noqa: E402
from megascale_kernels.device.layout import (  # noqa: E402
    ABORTED,
    COMPUTE,
    EPOCH,
    EXPIRED,
    MISMATCH,
    OPERATORS,
    STRANGER,
    signature,
)
from megascale_kernels.emulate import Notify, events  # noqa: E402
from megascale_kernels.planning import tile_order  # noqa: E402
from megascale_kernels.planning.config import Config  # noqa: E402

from tests.fakes.emulated_ranks import EmulatedRanks  # noqa: E402
from tests.fakes.launched import launched, prepared, put  # noqa: E402
from tests.fakes.products import Case  # noqa: E402

DEADLINE_US = 200_000
CTAS = 3
IN_UNITS = Config(16, 32, 32, group_m=2, splits=2)
CASES = {
    "ag_gemm": Case(4, 32, 32, 32, config=IN_UNITS),
    "gemm_rs": Case(4, 16, 64, 32),
    "gemm_ar": Case(4, 16, 64, 32),
}
grouped, gather_source, channel_of_tile, unit_of_row = (
    tile_order.python(one)
    for one in (
        tile_order.grouped,
        tile_order.gather_source,
        tile_order.channel_of_tile,
        tile_order.unit_of_row,
    )
)


def tile_waits_for(operator: str, case: Case, tile: int, rank: int) -> tuple[int | None, int]:
    """The only rank a tile waits for (None: every other) and the flag, by the mappings."""
    blocks_m, blocks_n = -(-case.m // case.config.block_m), -(-case.n // case.config.block_n)
    step, inner = divmod(tile, blocks_m * blocks_n)
    if operator == "gemm_rs":
        assert step == case.ranks - 1, "only our own rows wait, and they come last"
    block_m, block_n = grouped(inner, blocks_m, blocks_n, case.config.group_m)
    if operator == "ag_gemm":
        unit_rows = -(-case.m // case.config.splits)
        return gather_source(step, rank, case.ranks), unit_of_row(block_m * case.config.block_m, unit_rows)
    return None, channel_of_tile(block_m, block_n, blocks_n)


@pytest.mark.parametrize("operator", list(CASES))
def test_a_lost_notify_is_named_and_everybody_leaves(operator: str) -> None:
    """Rank 2's second flag for rank 0 gets lost in launch 2: rank 0 names operator, launch, CTA, tile, peer, flag."""
    case = CASES[operator]

    def lost(notify: Notify) -> bool:
        return (notify.source, notify.target, notify.channel, notify.stamp >> 12) == (2, 0, 1, 2)

    done = launched(operator, case, launches=2, seed=1, deadline_us=DEADLINE_US, drop=lost, ctas=CTAS)

    fault = done.ranks.faults()[0]
    assert fault["code"] == EXPIRED.value
    assert (fault["operator"], fault["epoch"]) == (OPERATORS.index(operator), 2)
    assert (fault["peer"], fault["channel"], fault["role"]) == (2, 1, COMPUTE.value)
    assert fault["needed"] >> 12 == 2
    assert fault["seen"] == 0
    assert DEADLINE_US <= fault["waited_us"] <= 2 * DEADLINE_US
    peer, channel = tile_waits_for(operator, case, fault["tile"], rank=0)
    assert (peer in (2, None), channel) == (True, 1)
    assert fault["cta"] == fault["tile"] % CTAS
    for other in done.ranks.faults()[1:]:
        assert not other or (other["code"], other["raised_by"]) == (ABORTED.value, 1)
    assert [int(words[EPOCH.value]) for words in done.ranks.world.words] == [2] * case.ranks
    assert done.ranks.world.findings == ()


@pytest.mark.parametrize("operator", list(CASES))
def test_a_rank_that_never_launches_is_named(operator: str) -> None:
    """Three ranks wait for the fourth: whoever reaches the deadline first names it, the others follow at once."""
    ranks = EmulatedRanks(4, seed=2, deadline_us=DEADLINE_US)
    given, outs = prepared(operator, CASES[operator], seed=0)

    put(operator, CASES[operator], ranks, given, outs, only=[0, 1, 3])
    ranks.run()

    faults = ranks.faults()
    assert [bool(fault) for fault in faults] == [True, True, False, True]
    expired = [fault for fault in faults if fault and fault["code"] == EXPIRED.value]
    assert expired
    assert all(fault["peer"] == 2 for fault in expired)
    gave_up = [event.at_ns for event in ranks.world.events if event.what == events.GAVE_UP]
    assert max(gave_up) - min(gave_up) < DEADLINE_US * 1000 / 2


OTHERS = {
    "another sum": ("gemm_rs", Case(4, 16, 64, 64)),
    "other columns": ("gemm_rs", Case(4, 16, 32, 32)),
    "other tiles": ("gemm_rs", Case(4, 16, 64, 32, config=Config(16, 64, 32, group_m=2))),
    "another operator": ("gemm_ar", Case(4, 16, 64, 32)),
}


@pytest.mark.parametrize("name", list(OTHERS))
def test_a_rank_that_runs_something_else_is_found_at_once(name: str) -> None:
    """Rank 1 differs: all leave in a small part of the deadline, and nobody blames a rank that is right."""
    ranks = EmulatedRanks(4, seed=3, deadline_us=30_000_000)
    given, outs = prepared("gemm_rs", CASES["gemm_rs"], seed=0)
    operator, case = OTHERS[name]

    put("gemm_rs", CASES["gemm_rs"], ranks, given, outs, only=[0, 2, 3])
    put(operator, case, ranks, *prepared(operator, case, seed=0), only=[1])
    ranks.run()

    faults = ranks.faults()
    found = {rank: fault["peer"] for rank, fault in enumerate(faults) if fault.get("code") == MISMATCH.value}
    assert found
    assert all(peer == 1 for rank, peer in found.items() if rank != 1)
    assert all(fault["code"] in (MISMATCH.value, ABORTED.value) for fault in faults)
    gave_up = [event.at_ns for event in ranks.world.events if event.what == events.GAVE_UP]
    assert max(gave_up) < 30_000_000_000 / 10


def test_gatherers_find_a_stranger_too() -> None:
    """One rank's rows are longer: the others do not multiply half of them."""
    ranks = EmulatedRanks(2, seed=3, deadline_us=30_000_000)

    for rank, case in enumerate((Case(2, 16, 32, 32), Case(2, 16, 32, 64))):
        given, outs = prepared("ag_gemm", case, seed=0)
        put("ag_gemm", case, ranks, given, outs, only=[rank])
    ranks.run()

    assert {fault["code"] for fault in ranks.faults()} <= {MISMATCH.value, ABORTED.value}
    assert max(event.at_ns for event in ranks.world.events) < 30_000_000_000 / 10


def test_whoever_a_stranger_stops_knows_that_it_was_one() -> None:
    """Rank 1's rows are longer and come before its kernel has said hello: the ranks stopped by another know why."""
    ranks = EmulatedRanks(4, seed=3, deadline_us=30_000_000)
    case, longer = Case(4, 16, 32, 32), Case(4, 16, 32, 64)
    given, outs = prepared("ag_gemm", case, seed=0)
    stamp = signature(OPERATORS.index("ag_gemm"), longer.m, longer.n, longer.k, longer.config.code)
    rows = prepared("ag_gemm", longer, seed=0)[0][1].x

    def copies_only(workspace: Any) -> None:  # noqa: ANN401 (an emulated workspace)
        push_by_copy_engine(rows, workspace, workspace.begin(None, lambda: None), longer.m, stamp)

    put("ag_gemm", case, ranks, given, outs, only=[0, 2, 3])
    ranks.call(copies_only, [1])
    ranks.run()

    faults = {rank: fault for rank, fault in enumerate(ranks.faults()) if fault}
    found = [rank for rank, fault in faults.items() if fault["code"] == MISMATCH.value]
    stopped = [fault for fault in faults.values() if fault["code"] == ABORTED.value]
    assert len(found) + len(stopped) == len(faults) == 3
    assert stopped
    assert all(fault["raised_by"] - STRANGER.value - 1 in found for fault in stopped)


def test_after_a_fault_nothing_is_waited_for_in_vain() -> None:
    """Launches queued behind a fault end at once, by the abort word, and the first record is kept."""
    case = Case(2, 16, 32, 32)

    done = launched(
        "gemm_rs", case, launches=4, deadline_us=DEADLINE_US, drop=lambda notify: notify.source == 1, schedule="eager"
    )

    fault = done.ranks.faults()[0]
    assert (fault["code"], fault["epoch"]) == (EXPIRED.value, 1)
    gave_up = sorted(event.at_ns for event in done.ranks.world.events if event.what == events.GAVE_UP)
    assert len(gave_up) > 3
    assert gave_up[-1] < 2 * DEADLINE_US * 1000
