# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN001, ANN201, ARG001
# (kernels: their types are Triton's to infer; who stands for another takes its arguments)
"""Attention on emulated ranks: right to a few roundings, ordered by more than luck, whatever the schedule."""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

import triton.language as tl  # noqa: E402
from megascale_kernels.attention import partial_sums  # noqa: E402
from megascale_kernels.attention import triton_kernel as forward_kernel  # noqa: E402
from megascale_kernels.attention.problem import AttentionConfig  # noqa: E402
from megascale_kernels.device import primitives  # noqa: E402
from megascale_kernels.device.layout import EXPIRED  # noqa: E402
from megascale_kernels.emulate import RACE, UNFENCED, Notify, events  # noqa: E402
from torch import Tensor  # noqa: E402

from tests.fakes.attentions import Attention, attended, gradients_attended, relative  # noqa: E402
from tests.fakes.emulated_ranks import EmulatedRanks  # noqa: E402
from tests.matrix import wide  # noqa: E402

SMALL = AttentionConfig(16, 16, keys_block=16, keys_step=16, queries_block=16, queries_step=16)
# Of the largest element: three roundings of bf16 (weights, result, and in backward the scores' gradients), which are
# 2^-9 each; a missing or doubled key of some thirty would be ten times that.
CLOSE = 2.0**-7
CASES = {
    "causal, zig-zag": Attention(2, 32, config=SMALL),
    "blocks end within chunks, groups, a batch": Attention(2, 20, 2, 4, 2, config=SMALL._replace(block_n=32)),
    "full, four ranks in order": Attention(4, 24, causal=False, zigzag=False, config=SMALL),
    "causal in order: the last rank sees all": Attention(2, 40, zigzag=False, dtype=torch.float16, config=SMALL),
    "packed, tokens behind the last": Attention(2, 24, lengths=(10, 3, 40, 30), config=SMALL),
    "packed, full, one within one rank": Attention(2, 24, causal=False, lengths=(50, 5, 41), config=SMALL),
    "in one piece": Attention(2, 20, config=SMALL._replace(splits=1, block_m=32)),
    "one rank": Attention(1, 40, config=SMALL),
}
SCHEDULES = ("random", "round_robin", "eager")


# The gradients below begin with the same launch and are wrong where its result is: two cases launch it on its own.
FORWARD_TOO = ("causal, zig-zag", "full, four ranks in order")


@pytest.mark.parametrize(
    ("seed", "name"),
    wide(enumerate(CASES), keep=[(seed, name) for seed, name in enumerate(CASES) if name in FORWARD_TOO]),
)
def test_every_launch_is_right_and_ordered(seed: int, name: str) -> None:
    """Three launches over both slots of poisoned memory: no wrong element, no unordered access, no fault."""
    done = attended(CASES[name], seed=seed, schedule=SCHEDULES[seed % 3])

    assert done.worst <= CLOSE
    assert done.ranks.world.findings == ()
    assert not any(done.ranks.faults())


@pytest.mark.parametrize(
    ("seed", "name"),
    # Four ranks take turns as two do; their forward is above.
    wide(enumerate(CASES), keep=[(seed, name) for seed, name in enumerate(CASES) if "four ranks" not in name]),
)
def test_every_gradient_is_right_and_ordered(seed: int, name: str) -> None:
    """Forward and backward twice in a row: all gradients, of the peers' keys too; nothing unordered, no fault."""
    ranks, worst = gradients_attended(CASES[name], seed=seed, schedule=SCHEDULES[seed % 3])

    assert worst <= CLOSE
    assert ranks.world.findings == ()
    assert not any(ranks.faults())


def test_the_device_may_count_the_launches() -> None:
    """As in a captured graph, where a kernel announces the copies: the same bits."""
    case = CASES["causal, zig-zag"]
    done = attended(case, seed=3, counted=True)

    assert done.ranks.world.findings == ()
    assert same_bits(done.outs, attended(case, seed=4).outs)


@pytest.mark.parametrize("straggler", wide([0, 1], keep=[1]))
def test_bits_do_not_depend_on_who_is_slow(straggler: int) -> None:
    """A rank that is a hundred times slower is waited for; a program more or less changes nothing either."""
    case = CASES["packed, tokens behind the last"]

    slow = attended(case, stragglers={straggler: 100.0}, schedule="round_robin")

    assert slow.ranks.world.findings == ()
    assert straggler in {event.peer for event in slow.ranks.world.events if event.what == events.WAIT}
    assert same_bits(slow.outs, attended(case, ctas=2).outs)


def same_bits(some: list[list[Tensor]], others: list[list[Tensor]]) -> bool:
    """Whether all outputs of two runs are equal."""
    pairs = zip(some, others, strict=True)
    return all(torch.equal(one, other) for mine, theirs in pairs for one, other in zip(mine, theirs, strict=True))


def test_own_keys_come_first_and_hidden_ones_are_not_waited_for() -> None:
    """One program a rank: no tile waits for its own rank; under the mask rank 0's first tokens wait for nobody."""
    case = Attention(2, 16, zigzag=False, q_heads=1, config=SMALL._replace(splits=1))
    done = attended(case, launches=1, ctas=1)

    waits = [(event.who.rank, event.peer, event.tile) for event in done.ranks.world.events if event.what == events.WAIT]
    # Rank 1 sees rank 0's keys in its tile 0; either waits for all that is left at the end, as "tile" 1 of one.
    assert sorted(waits) == [(0, 1, 1), (1, 0, 0), (1, 0, 1)]


# --- controls: what is taken away is found -------------------------------------------------------------------------

# What has not arrived is poison, and NumPy says so.
poisoned = pytest.mark.filterwarnings("ignore:.*(All-NaN|invalid value).*:RuntimeWarning")


@triton.jit
def do_not_wait(channel, flag_ptr, role, tile, peer, index):
    """`signals.wait_for` that looks, and goes on whatever it saw."""
    tl.atomic_add(flag_ptr, 0, sem="relaxed", scope="sys")
    return 0


@triton.jit
def wait_for_no_part(channel, source, entry, half, begin, end, chunk_rows, unit_rows, tile, code,
                     HALVES: tl.constexpr, AWAIT: tl.constexpr):  # fmt: skip  # noqa: N803
    """`await_part` that does not."""
    return code


def kinds(run: Callable[..., Any]) -> set[str]:
    """Kinds of findings of a run of the plainest case."""
    done = run(CASES["causal, zig-zag"], launches=2, seed=2)
    ranks = done[0] if isinstance(done, tuple) and isinstance(done[0], EmulatedRanks) else done.ranks
    return {finding.kind for finding in ranks.world.findings}


@poisoned
@pytest.mark.parametrize("run", [attended, gradients_attended])
def test_a_missing_wait_is_found(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what `wait_for` orders, the peers' K and V are read in no order with their copies."""
    monkeypatch.setattr(primitives, "wait_for", do_not_wait)

    assert RACE in kinds(run)


@poisoned
def test_a_part_that_is_not_waited_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait at the end of a launch does not stand for those before the parts."""
    monkeypatch.setattr(forward_kernel, "await_part", wait_for_no_part)

    assert RACE in kinds(attended)


@poisoned
def test_one_slot_would_not_do() -> None:
    """With a single slot a fast rank overwrites keys that a slow one still reads, and the detector sees it."""
    done = attended(CASES["causal, zig-zag"], launches=3, slots=1, seed=1)

    assert RACE in {finding.kind for finding in done.ranks.world.findings}


@poisoned
def test_without_the_wait_at_the_end_a_slot_would_be_reused_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 sees none of rank 1's keys: only the wait at the end keeps it from running ahead of rank 1.

    Else it writes the launch after the next into rank 1's slot and flags, and rank 1 waits for a stamp that is gone.
    """
    case = Attention(2, 16, zigzag=False, config=SMALL)
    slow = {"stragglers": {1: 200.0}, "schedule": "round_robin", "launches": 4}
    kept = attended(case, **slow).ranks
    assert kept.world.findings == ()
    assert not any(kept.faults())

    @triton.jit
    def wait_for_nothing(channel, rows, unit_rows, code, tile, role, AWAIT: tl.constexpr):  # noqa: ANN202, N803
        tl.debug_barrier()

    monkeypatch.setattr(forward_kernel, "await_all", wait_for_nothing)

    assert attended(case, **slow).ranks.faults()[1]["peer"] == 0


def test_a_missing_fence_is_found() -> None:
    """TMA loads behind an acquire need the fence between the proxies."""
    from megascale_kernels.device import signals

    done = attended(CASES["causal, zig-zag"], launches=1, assembly={signals.ASM_FENCE_PROXY.value: lambda _: 0})

    assert {finding.kind for finding in done.ranks.world.findings} == {UNFENCED}


@poisoned
def test_a_lost_announcement_names_rank_and_tile() -> None:
    """The deadline passes, every rank returns, and the fault says which tile of which rank waited for whom."""

    def lost(notify: Notify) -> bool:
        return notify.who.rank == 1 and notify.target == 0

    done = attended(CASES["causal, zig-zag"], launches=1, drop=lost, deadline_us=1000)

    fault, other = done.ranks.faults()
    assert fault["code"] == EXPIRED.value
    assert (fault["peer"], fault["role"], fault["waited_us"] >= 1000) == (1, 0, True)
    assert not other or other["raised_by"] == 1


# --- sums of the peers' shares -------------------------------------------------------------------------------------


def summed(shares: Tensor, workspace: Any) -> Tensor:  # noqa: ANN401 (an emulated workspace)
    """One reduce-scatter; here one workspace serves, as no other launch crosses it."""
    return partial_sums.finish(partial_sums.start(shares, workspace, workspace))


@pytest.mark.parametrize(("world_size", "counted"), [(2, False), (4, True)])
def test_shares_are_summed_by_their_owners(world_size: int, counted: bool) -> None:
    """Four sums in a row over both slots: each within a rounding, nothing unordered."""
    ranks = EmulatedRanks(world_size, data_bytes=1 << 12, seed=world_size, counted=counted)
    torch.manual_seed(world_size)
    given = [[torch.randn(world_size, 70).bfloat16() for _ in range(world_size)] for _ in range(4)]

    outs = [ranks.call(lambda workspace, row=row: summed(row[workspace.rank], workspace)) for row in given]
    # Behind its announcements: a graph's might find no room beside it.
    assert ranks.called(0)[-2:] == ["join", "sum_partials_kernel"]
    ranks.run()

    for shares, row in zip(given, outs, strict=True):
        wanted = torch.stack(shares).double().sum(0)
        assert max(relative(out, wanted[rank]) for rank, out in enumerate(row)) <= 2.0**-8
    assert ranks.world.findings == ()


@poisoned
def test_a_share_that_is_not_waited_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever adds before the shares have come reads them in no order with their copies."""
    monkeypatch.setattr(primitives, "wait_for", do_not_wait)
    ranks = EmulatedRanks(2, data_bytes=1 << 12)
    shares = torch.randn(2, 70).bfloat16()

    ranks.call(lambda workspace: summed(shares, workspace))
    ranks.run()

    assert RACE in {finding.kind for finding in ranks.world.findings}
