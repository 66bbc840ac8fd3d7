# SPDX-License-Identifier: Apache-2.0
"""Which rank runs the same kernel more slowly than its equals; noise, waiting and other work name none."""

import random
import time

import pytest

from megascale_ops.diagnosis.stragglers.kernel_compare import MOST_ROWS, Found, compare, is_waiting
from megascale_ops.schema.kernels import KernelTime, RankKernels


def timed(name: str, us: float, calls: int = 10, low: float = 0.97) -> KernelTime:
    """Return a kernel's row."""
    return KernelTime(name, calls, calls * us, us, us * low)


def of_rank(*kernels: KernelTime, device: str = "gpu", span_s: float = 0.1) -> RankKernels:
    """Return what one rank found in two steps of 50 ms."""
    return RankKernels(id="p", device=device, steps=2, span_s=span_s, kernels=kernels)


def slow(found: Found) -> set[tuple[int, str]]:
    """Return who stands out, and in what."""
    return {(row.rank, row.kernel) for row in found.rows if row.is_slow}


def test_a_gpu_that_runs_one_kernel_slower_is_named() -> None:
    """A fifth more, of a kernel that has a tenth of the step."""
    ranks = {rank: of_rank(timed("gemm", 1000.0), timed("norm", 200.0)) for rank in range(8)}
    ranks[5] = of_rank(timed("gemm", 1200.0), timed("norm", 201.0))

    found = compare(ranks, {})

    assert slow(found) == {(5, "gemm")}
    assert found.rows[0].rank == 5
    assert (found.rows[0].ratio, found.rows[0].others_us, found.rows[0].share) == (1.2, 1000.0, 0.12)
    assert found.verdict == "rank 5 runs gemm 1.20 times as slowly as its equals"
    assert not found.ranks[5].is_slow


def test_a_gpu_that_is_slow_in_everything_is_called_slow() -> None:
    """It is the chip then, not the kernel."""
    names = ("gemm", "norm", "gelu", "adam")
    ranks = {rank: of_rank(*(timed(name, 500.0) for name in names)) for rank in range(4)}
    ranks[2] = of_rank(*(timed(name, 560.0) for name in names))

    found = compare(ranks, {})

    assert slow(found) == {(2, name) for name in names}
    assert found.ranks[2].is_slow
    assert found.ranks[2].ratio == pytest.approx(1.12)
    assert found.verdict.endswith("and its other kernels as well (1.12 times on the whole): its GPU is slow")


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_equal_ranks_name_nobody(seed: int, device: str) -> None:
    """With 2 % of noise on GPUs, on a CPU with 15 % and one call in ten interrupted for a millisecond."""
    noise = random.Random(seed)  # noqa: S311  no secret
    spread, interrupted = (0.02, 0.0) if device == "gpu" else (0.15, 0.1)
    ranks = {}
    for rank in range(8):
        rows = []
        for kernel in range(20):
            usual = 50.0 * (1 + kernel)
            calls = sorted(
                usual * noise.gauss(1.0, spread) + 1000.0 * (noise.random() < interrupted) for _ in range(10)
            )
            rows.append(KernelTime(f"k{kernel}", 10, sum(calls), (calls[4] + calls[5]) / 2, calls[2]))
        ranks[rank] = of_rank(*rows, device=device)

    found = compare(ranks, {})

    assert slow(found) == set()
    assert found.verdict.startswith("no rank stands out in any ")


def test_a_rank_that_lost_its_core_now_and_then_is_not_named() -> None:
    """Its median is three times as high, but a quarter of its calls were as fast as any other's."""
    ranks = {rank: of_rank(timed("aten::mm", 500.0), device="cpu") for rank in range(4)}
    ranks[1] = of_rank(timed("aten::mm", 1500.0, low=0.33), device="cpu")

    assert slow(compare(ranks, {})) == set()


def test_collectives_are_shown_and_never_judged() -> None:
    """One rank waits three times as long in NCCL as the others: that is the work of who came late."""
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    ranks = {rank: of_rank(timed("gemm", 500.0), timed(name, 3000.0)) for rank in range(4)}
    ranks[1] = of_rank(timed("gemm", 500.0), timed(name, 9000.0))

    found = compare(ranks, {})

    assert slow(found) == set()
    assert [row.is_waiting for row in found.rows if row.kernel == name] == [True] * 4
    assert is_waiting("c10d::allreduce_")
    assert not is_waiting("aten::mm")


def test_ranks_that_differ_anyway_hide_a_small_difference() -> None:
    """Equals between 900 and 1,100 us: 1,250 is no news, 2,000 is."""
    ranks = {rank: of_rank(timed("gemm", 900.0 + 25.0 * rank)) for rank in range(9)}

    assert slow(compare({**ranks, 9: of_rank(timed("gemm", 1250.0))}, {})) == set()
    assert slow(compare({**ranks, 9: of_rank(timed("gemm", 2000.0))}, {})) == {(9, "gemm")}


def test_of_three_ranks_the_slow_one_does_not_hide_itself() -> None:
    """Two that differ by a third, and one that takes three and a half times as long: measured under load."""
    ranks = {rank: of_rank(timed("mm", us, 40), device="cpu") for rank, us in enumerate((203.0, 831.0, 272.0))}

    assert slow(compare(ranks, {})) == {(1, "mm")}


def test_pipeline_stages_are_not_compared_with_each_other() -> None:
    """The last stage's gemm is four times as large on all its ranks; in its stage rank 6 stands out."""
    ranks = {rank: of_rank(timed("gemm", 400.0 if rank >= 4 else 100.0, 50)) for rank in range(8)}
    ranks[6] = of_rank(timed("gemm", 500.0, 50))

    assert slow(compare(ranks, {rank: rank // 4 for rank in range(8)})) == {(6, "gemm")}


def test_ranks_that_call_a_kernel_less_often_are_not_compared() -> None:
    """An expert that got other tokens runs other shapes under the same name."""
    ranks = {rank: of_rank(timed("gemm", 100.0, 100)) for rank in range(4)}
    ranks[3] = of_rank(timed("gemm", 300.0, 40))

    found = compare(ranks, {})

    assert slow(found) == set()
    assert next(row.ratio for row in found.rows if row.rank == 3) == 0.0


def test_what_costs_nothing_is_not_worth_a_name() -> None:
    """Twice as slow, for 2 us of a 100 ms span."""
    ranks = {rank: of_rank(timed("fill", 1.0, 2)) for rank in range(4)}
    ranks[0] = of_rank(timed("fill", 2.0, 2))

    assert slow(compare(ranks, {})) == set()


def test_of_two_ranks_none_is_named() -> None:
    """Nothing tells which of them is as it should be; the ratio is shown."""
    found = compare({0: of_rank(timed("gemm", 500.0)), 1: of_rank(timed("gemm", 1000.0))}, {})

    assert slow(found) == set()
    assert [row.ratio for row in found.rows] == [2.0, 0.5]
    assert found.verdict == "no rank stands out in any kernel: of fewer than 3 ranks none can be named"


def test_one_rank_or_none_is_no_comparison() -> None:
    """Its kernels are shown all the same."""
    alone = compare({4: of_rank(timed("gemm", 500.0))}, {})

    assert [(row.rank, row.ratio) for row in alone.rows] == [(4, 0.0)]
    assert alone.verdict.startswith("nothing can be compared: one rank alone was looked at")
    assert compare({0: of_rank(timed("a", 1.0)), 1: of_rank(timed("b", 1.0))}, {}).verdict.endswith("be compared")
    assert compare({}, {}).rows == ()
    assert compare({0: of_rank(), 1: of_rank()}, {}).ranks[1].ratio == 0.0


def test_twelve_thousand_ranks_are_compared_in_seconds() -> None:
    """12,288 ranks with 12 kernels each: one is named, and the answer stays small."""
    noise = random.Random(1)  # noqa: S311  no secret
    ranks = {
        rank: of_rank(*(timed(f"k{kernel}", noise.gauss(500.0, 5.0)) for kernel in range(12))) for rank in range(12_288)
    }
    ranks[7777] = of_rank(timed("k3", 600.0))
    began_s = time.process_time()

    found = compare(ranks, {})

    assert time.process_time() - began_s < 20  # 2 s alone; shared machines are slow
    assert slow(found) == {(7777, "k3")}
    assert len(found.rows) == MOST_ROWS
    assert found.left_out == 12_287 * 12 + 1 - MOST_ROWS
