# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN001, ANN201, ANN401, N803
# (kernels: their types are Triton's to infer, compile-time arguments are capitals; workspaces are emulated ones)
"""The gather beside an operator, the meeting of all ranks, and operators in turn, on emulated ranks."""

from importlib import import_module
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

import triton.language as tl  # noqa: E402
from megascale_kernels.ag_gemm.all_gather import finish, start  # noqa: E402
from megascale_kernels.device.barrier import barrier  # noqa: E402
from megascale_kernels.device.layout import EPOCH, layout  # noqa: E402
from megascale_kernels.emulate import RACE, Launch, World, events  # noqa: E402
from megascale_kernels.planning.config import Config  # noqa: E402

from tests.fakes.emulated_ranks import EmulatedRanks  # noqa: E402
from tests.fakes.products import Case, gathered_error, operands, summed_error  # noqa: E402

ROWS, COLS = 5, 16
ag_gemm, gemm_rs, gemm_ar = (
    import_module(f"megascale_kernels.{name}") for name in ("ag_gemm.launch", "gemm_rs.launch", "gemm_ar")
)


@triton.jit
def keep(gathered_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """A reader behind the gather on its stream."""
    here = tl.arange(0, BLOCK)
    tl.store(out_ptr + here, tl.load(gathered_ptr + here, mask=here < size), mask=here < size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("counted", "dtype"), [(False, torch.bfloat16), (True, torch.float16)])
def test_gathers_in_a_row_give_all_rows_in_order(world_size: int, counted: bool, dtype: Any) -> None:
    """Four gathers over both slots, each read by the next kernel of its stream: all rows, nothing unordered."""
    ranks = EmulatedRanks(world_size, dtype, seed=world_size, counted=counted)
    torch.manual_seed(world_size)
    given = [[torch.randn(ROWS, COLS).to(dtype) for _ in range(world_size)] for _ in range(4)]
    outs = [[torch.zeros(world_size * ROWS, COLS, dtype=dtype) for _ in range(world_size)] for _ in range(4)]

    def gather(workspace: Any) -> None:
        for xs, out in zip(given, outs, strict=True):
            gathered = finish(start(xs[workspace.rank], workspace))
            args = (gathered, out[workspace.rank], gathered.numel())
            ranks.put(Launch(workspace.rank, keep, 1, args, {"BLOCK": 512}))

    ranks.call(gather)
    ranks.run()

    assert all(torch.equal(out, torch.cat(xs)) for xs, row in zip(given, outs, strict=True) for out in row)
    assert ranks.world.findings == ()
    assert not any(ranks.faults())


def test_one_slot_would_not_do_for_gathers() -> None:
    """With a single slot a fast rank overwrites what a slow one still reads, and the detector sees it."""
    ranks = EmulatedRanks(2, slots=1, seed=1)
    x, out = torch.ones(ROWS, COLS, dtype=torch.bfloat16), torch.zeros(2, 2 * ROWS * COLS, dtype=torch.bfloat16)

    def gather(workspace: Any) -> None:
        for _ in range(2):
            gathered = finish(start(x, workspace))
            args = (gathered, out[workspace.rank], gathered.numel())
            ranks.put(Launch(workspace.rank, keep, 1, args, {"BLOCK": 512}))

    ranks.call(gather)
    ranks.run()

    assert RACE in {finding.kind for finding in ranks.world.findings}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_nobody_leaves_a_meeting_before_all_have_come(world_size: int) -> None:
    """Three meetings in a row with a slow rank: its arrival comes before every other's departure, each time."""
    slow = world_size - 1
    ranks = EmulatedRanks(world_size, stragglers={slow: 50.0}, schedule="round_robin")

    ranks.call(lambda workspace: [barrier(workspace, deadline_s=1.0) for _ in range(3)])
    ranks.run()

    happened = [event for event in ranks.world.events if event.what in (events.START, events.END)]
    for meeting in range(3):
        begun = [[e for e in happened if e.who.rank == rank and e.what == events.START] for rank in range(world_size)]
        ended = [[e for e in happened if e.who.rank == rank and e.what == events.END] for rank in range(world_size)]
        latest = max(mine[meeting].at_ns for mine in begun)
        assert all(mine[meeting].at_ns >= latest for mine in ended)
    assert ranks.world.findings == ()
    assert not any(ranks.faults())
    assert [int(words[EPOCH.value]) for words in ranks.world.words] == [3] * world_size


def test_a_rank_that_does_not_come_to_a_meeting_is_named() -> None:
    """Those who came leave at the deadline, and say for whom they waited."""
    ranks = EmulatedRanks(4, seed=2, deadline_us=50_000)

    ranks.call(lambda workspace: barrier(workspace, deadline_s=0.05), ranks=[0, 1, 3])
    ranks.run()

    faults = ranks.faults()
    first = next(fault for fault in faults if fault and fault["code"] == 1)
    assert first["peer"] == 2
    assert first["waited_us"] >= 50_000
    assert [bool(fault) for fault in faults] == [True, True, False, True]


def test_operators_take_turns_in_one_workspace() -> None:
    """Gather, meeting, scatter, reduce, twice over: each finds the slots as the others left them."""
    case = Case(2, 16, 32, 32, config=Config(16, 32, 32, group_m=2))
    ranks = EmulatedRanks(2, seed=5)
    gathers, sums = operands(case, 16, seed=8), operands(case, 32, seed=9)
    outs = [torch.full((32, 32), float("nan"), dtype=case.dtype) for _ in range(12)]

    def step(workspace: Any, turn: int) -> None:
        rank = workspace.rank
        at = 6 * rank + 3 * turn
        ag_gemm.launch(gathers[rank].x, gathers[rank].weight, outs[at], None, workspace, case.config)
        barrier(workspace, deadline_s=1.0)
        gemm_rs.launch(sums[rank].x, sums[rank].weight, outs[at + 1][:16], None, workspace, case.config)
        gemm_ar.launch(sums[rank].x, sums[rank].weight, outs[at + 2], None, workspace, case.config)

    ranks.call(lambda workspace: [step(workspace, turn) for turn in range(2)])
    ranks.run()

    for rank in range(2):
        own = slice(16 * rank, 16 * rank + 16)
        for at in (6 * rank, 6 * rank + 3):
            assert gathered_error(outs[at], rank, gathers) <= 1
            assert summed_error(outs[at + 1][:16], own, sums) <= 1
            assert summed_error(outs[at + 2], slice(None), sums) <= 1
    assert ranks.world.findings == ()
    assert not any(ranks.faults())


def test_a_world_of_eight_ranks_meets() -> None:
    """Eight by construction: the tables and lines of all ranks fit."""
    assert World(layout(8, 32, 0)).world_size == 8
    ranks = EmulatedRanks(8, seed=4)

    ranks.call(lambda workspace: barrier(workspace, deadline_s=1.0))
    ranks.run()

    assert ranks.world.findings == ()
    assert not any(ranks.faults())
