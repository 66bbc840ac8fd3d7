# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN001, ANN201, ARG001
# (kernels: their types are Triton's to infer; who stands for another takes its arguments)
"""Operators taken apart into cuBLAS's products, on emulated ranks: right, ordered, bounded, and equal in every run."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

import triton.language as tl  # noqa: E402
from megascale_kernels.device import primitives  # noqa: E402
from megascale_kernels.emulate import NARROW, RACE, events  # noqa: E402
from megascale_kernels.errors import Unsupported, WorkspaceTooSmall  # noqa: E402
from megascale_kernels.memory.operands import Weight, check_config, product_of  # noqa: E402
from megascale_kernels.planning.config import Config  # noqa: E402
from megascale_kernels.planning.pieces import pieces_of  # noqa: E402

from tests.fakes.emulated_ranks import EmulatedRanks  # noqa: E402
from tests.fakes.launched import launched, prepared, put  # noqa: E402
from tests.fakes.products import Case  # noqa: E402

OPERATORS = ("ag_gemm", "gemm_rs")
SCHEDULES = ("random", "round_robin", "eager")


def case(ranks: int, pieces: int | None, **options: Any) -> Case:  # noqa: ANN401 (those of `Case`)
    """Sizes that fill no block of any kernel."""
    sizes = {"m": 20, "n": 40, "k": 24, **options}
    return Case(ranks, config=Config(kernel="cublas", pieces=pieces), **sizes)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    ("world_size", "pieces", "counted"),
    [(2, None, False), (2, 1, True), (3, 1, False), (3, None, True), (4, 2, False), (4, 3, True)],
)
def test_every_launch_is_right_and_ordered(
    operator: str, world_size: int, pieces: int | None, *, counted: bool
) -> None:
    """Three launches over both slots of poisoned memory; the host announces copies, or a kernel does, as in a graph."""
    of = case(world_size, pieces, bias=pieces != 1, is_nk=pieces != 2, counted=counted)

    done = launched(operator, of, seed=world_size, schedule=SCHEDULES[(pieces or 0) % 3])

    assert done.worst <= 1
    assert done.ranks.world.findings == ()
    assert not any(done.ranks.faults())


def test_a_sum_that_may_fill_the_device_begins_behind_its_announcements(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's announcement might find no room beside it, and each rank would wait for the other's."""
    order: list[str] = []
    monkeypatch.setattr(EmulatedRanks, "run", lambda ranks: order.extend(ranks.called(0)))
    launched("gemm_rs", case(2, 2, counted=True), launches=1)

    assert order[-2:] == ["join", "add_partials_kernel"]
    assert "announce_kernel" in order


def test_rows_that_no_wide_word_reads_are_summed_too() -> None:
    """All at once would leave our own term at an address that wide words cannot read: it is multiplied apart."""
    done = launched("gemm_rs", case(2, 1, m=3, n=5, dtype=torch.float16), seed=1)

    assert done.worst <= 1
    assert done.ranks.world.findings == ()


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_straggler_changes_no_bit(operator: str) -> None:
    """Whoever is late, and whatever the schedule: the same bits, and everybody waited for the straggler."""
    first = launched(operator, case(4, 2), seed=1, launches=2)

    late = launched(operator, case(4, 2), launches=2, stragglers={2: 100.0}, schedule="round_robin")

    assert first.same_bits(late)
    assert late.ranks.world.findings == ()
    waits = [event for event in late.ranks.world.events if event.what == events.WAIT]
    assert {event.who.rank for event in waits if event.peer == 2} == {0, 1, 3}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("pieces", [None, 1])
def test_a_rank_that_does_not_come_is_named(operator: str, pieces: int | None) -> None:
    """Those who came leave at the deadline and say for whom they waited; the second wait of a launch does not add."""
    of = case(4, pieces)
    ranks = EmulatedRanks(4, of.dtype, seed=2, deadline_us=50_000)

    given, outs = prepared(operator, of, seed=3)
    put(operator, of, ranks, given, outs, only=[0, 1, 3])
    ranks.run()

    faults = ranks.faults()
    first = next(fault for fault in faults if fault and fault["code"] == 1)
    assert first["peer"] == 2
    assert 50_000 <= first["waited_us"] < 100_000
    assert [bool(fault) for fault in faults] == [True, True, False, True]


@triton.jit
def do_not_wait(channel, flag_ptr, role, tile, peer, index):
    """`signals.wait_for` that looks, and goes on whatever it saw."""
    tl.atomic_add(flag_ptr, 0, sem="relaxed", scope="sys")
    return 0


@triton.jit
def publish_relaxed(channel, flag_ptr):
    """`signals.publish` without the release."""
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, channel.stamp, sem="relaxed", scope="sys")


@triton.jit
def publish_to_gpu(channel, flag_ptr):
    """`signals.publish` for this GPU alone."""
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, channel.stamp, sem="release", scope="gpu")


def kinds(operator: str, pieces: int | None, **options: object) -> set[str]:
    """The kinds of findings in two launches, as a graph makes them."""
    done = launched(operator, case(2, pieces, counted=True), launches=2, seed=2, **options)
    return {finding.kind for finding in done.ranks.world.findings}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("pieces", [None, 1])
def test_what_a_launch_cannot_do_without_is_missed(
    operator: str, pieces: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait before a product or a sum, and the release behind a copy; the control is the launch as it is."""
    assert kinds(operator, pieces) == set()
    for name, instead, expected in (
        ("wait_for", do_not_wait, {RACE}),
        ("publish", publish_relaxed, {RACE}),
        ("publish", publish_to_gpu, {NARROW, RACE}),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(primitives, name, instead)
            assert kinds(operator, pieces) >= expected, name


@pytest.mark.parametrize("operator", OPERATORS)
def test_one_slot_is_too_few(operator: str) -> None:
    """A rank that is a launch ahead overwrites what a peer still reads."""
    findings = [
        finding
        for seed in (0, 1, 2)
        for finding in launched(operator, case(2, None), launches=4, slots=1, seed=seed).ranks.world.findings
    ]

    assert RACE in {finding.kind for finding in findings}


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_does_not_fit_is_refused(operator: str) -> None:
    """Before anything is launched."""
    of = case(2, None, m=200)
    ranks = EmulatedRanks(2, of.dtype, data_bytes=4096)
    given, outs = prepared(operator, of, seed=1)

    with pytest.raises(WorkspaceTooSmall, match=operator):
        put(operator, of, ranks, given, outs)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("pieces", [None, 1, 2, 3, 9])
def test_pieces_are_all_shards_once_ours_first(world_size: int, pieces: int | None) -> None:
    """In the order in which rows arrive, as even as they can be, each as one or two runs of rows."""
    for rank in range(world_size):
        cut = pieces_of(rank, world_size, pieces)

        steps = [step for piece in cut for step in range(piece.first, piece.last)]
        assert steps == list(range(world_size))
        assert len(cut) == min(pieces or world_size, world_size)
        assert len(cut) == 1 or (cut[0].first, cut[0].last) == (0, 1)
        sizes = {piece.last - piece.first for piece in cut[1:]}
        assert not sizes or max(sizes) - min(sizes) <= 1
        for piece in cut:
            shards = [shard for begin, end in piece.runs for shard in range(begin, end)]
            assert sorted(shards) == sorted((rank + step) % world_size for step in range(piece.first, piece.last))
            assert len(piece.runs) <= 2


def test_widened_operands_are_multiplied_as_they_were() -> None:
    """Rows of x and the weight were widened by zeros, each by itself: the product is of what both have."""
    x, kn, nk = torch.randn(4, 5), torch.randn(5, 3), torch.randn(3, 5)
    pad = torch.nn.functional.pad
    wide = pad(x, (0, 3))

    for rows, matrix, is_nk, exact in (
        (wide, pad(kn, (0, 5)), False, x @ kn),
        (wide, pad(nk, (0, 3)), True, x @ nk.T),
        (x, kn, False, x @ kn),
    ):
        product = product_of(Weight(matrix, is_nk, rows.shape[1], 3))
        torch.testing.assert_close(rows[:, : product.depth] @ product.weight(matrix), exact)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(("is_nk", "pieces"), [(True, None), (False, 1), (False, 2)])
def test_tensors_that_begin_within_their_memory_and_are_wider_than_the_weight(
    operator: str, pieces: int | None, *, is_nk: bool
) -> None:
    """As widened ones are, and views: the result is that of the plain tensors."""
    of = case(2, pieces, is_nk=is_nk)
    given, outs = prepared(operator, of, seed=4)
    plain = EmulatedRanks(2, of.dtype, seed=1)
    put(operator, of, plain, given, outs)
    plain.run()
    moved, odd_outs = [], []
    for one, out in zip(given, outs, strict=True):
        x = torch.zeros(one.x.numel() // 24 * 32 + 8, dtype=of.dtype)[8:].view(-1, 32)
        x[:, :24] = one.x
        matrix = torch.nn.functional.pad(one.weight.matrix, (0, 8))  # of zeros, as the dispatcher widens
        if is_nk:
            assert matrix.shape[1] == 32
        moved.append(one._replace(x=x, weight=one.weight._replace(matrix=matrix, k_size=32)))
        odd_outs.append(torch.full((out.numel() + 8,), float("nan"), dtype=of.dtype)[8:].view(out.shape))

    ranks = EmulatedRanks(2, of.dtype, seed=2)
    put(operator, of, ranks, moved, odd_outs)
    ranks.run()

    assert ranks.world.findings == ()
    for out, odd in zip(outs, odd_outs, strict=True):
        torch.testing.assert_close(odd, out)


@pytest.mark.parametrize(
    ("config", "operator", "message"),
    [
        (Config(kernel="cublas", pieces=0), "ag_gemm", "pieces is 0, and an operator has one product or more"),
        (Config(kernel="cublas"), "gemm_ar", "takes all-gathers and reduce-scatters apart, no all-reduce"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(config: Config, operator: str, message: str) -> None:
    """In a sentence, before anything is launched."""
    with pytest.raises(Unsupported, match=message):
        check_config(config, EmulatedRanks(2).workspaces[0], operator)
