# SPDX-License-Identifier: Apache-2.0
"""The cost model: near to what was measured, and sane where nothing was."""

import pytest
from megascale_kernels.planning.config import Config
from megascale_kernels.planning.cost_model import (
    H200,
    OPERATORS,
    bytes_bound,
    cublas_time,
    machine_of,
    nccl_time,
    predict,
    predict_serial,
    sent_bytes,
)

# 4 x H200, bf16, milliseconds: M, K, N; cuBLAS, NCCL all-gather, both in series, plain Triton overlapped, its splits.
GATHERS = [
    (8192, 8192, 7168, 1.250, 0.364, 1.605, 1.302, 1),
    (4096, 8192, 7168, 0.616, 0.195, 0.808, 0.636, 1),
    (8192, 12288, 12288, 3.431, 0.532, 3.990, 3.610, 1),
    (8192, 4096, 2752, 0.251, 0.194, 0.440, 0.281, 1),
    (2048, 8192, 7168, 0.304, 0.111, 0.414, 0.358, 1),
    (8192, 8192, 3584, 0.611, 0.353, 0.961, 0.637, 2),
]
# The same for NCCL reduce-scatter: M, K, N; NCCL, both in series.
SCATTERS = [
    (8192, 7168, 8192, 0.356, 1.603),
    (4096, 7168, 8192, 0.196, 0.811),
    (8192, 12288, 12288, 0.525, 3.895),
    (8192, 3584, 4096, 0.199, 0.541),
]


@pytest.mark.parametrize(("m", "k", "n", "gemm", "comm", "serial", "ours", "splits"), GATHERS)
def test_a_gather_is_predicted_within_15_percent(
    m: int, k: int, n: int, gemm: float, comm: float, serial: float, ours: float, splits: int
) -> None:
    """What was measured on four H200 is what the model says of them."""
    in_series = predict_serial("ag_gemm", m, n, k, 4, H200)
    overlapped = predict("ag_gemm", m, n, k, 4, Config(splits=splits), H200)

    assert in_series.gemm_s * 1e3 == pytest.approx(gemm, rel=0.15)
    assert in_series.comm_s * 1e3 == pytest.approx(comm, rel=0.15)
    assert in_series.total_s * 1e3 == pytest.approx(serial, rel=0.15)
    assert overlapped.total_s * 1e3 == pytest.approx(ours, rel=0.15)


@pytest.mark.parametrize(("m", "k", "n", "comm", "serial"), SCATTERS)
def test_a_scatter_in_series_is_predicted_within_15_percent(m: int, k: int, n: int, comm: float, serial: float) -> None:
    """NCCL's reduce-scatter lies on the line of its all-gather."""
    in_series = predict_serial("gemm_rs", m, n, k, 4, H200)

    assert in_series.comm_s * 1e3 == pytest.approx(comm, rel=0.15)
    assert in_series.total_s * 1e3 == pytest.approx(serial, rel=0.15)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    "config", [Config(), Config(64, 128, stages=6), Config(carrier="sm", comm_ctas=16), Config(kernel="hopper")]
)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_nothing_is_faster_than_its_parts(operator: str, config: Config, world_size: int) -> None:
    """A launch takes at least its product, its memory traffic and its bytes over the link."""
    for m in (64, 512, 4096):
        estimate = predict(operator, m, 2752, 4096, world_size, config, H200)

        assert estimate.total_s >= estimate.gemm_s
        assert estimate.total_s >= estimate.comm_s
        assert estimate.total_s >= bytes_bound(m, 2752, 4096, H200)
        assert estimate.exposed_s == pytest.approx(estimate.total_s - estimate.gemm_s)


@pytest.mark.parametrize("operator", OPERATORS)
def test_twice_the_work_is_never_faster(operator: str) -> None:
    """Doubling any size does not shorten a prediction, ours or the serial one."""
    for doubled in range(3):
        for step in range(6):
            smaller = [8192 if doubled else 1024, 1024, 1024]
            smaller[doubled] = 512 * 2**step
            larger = list(smaller)
            larger[doubled] *= 2

            ours = [predict(operator, *sizes, 4, Config(), H200).total_s for sizes in (smaller, larger)]
            serial = [predict_serial(operator, *sizes, 4, H200).total_s for sizes in (smaller, larger)]

            assert ours == sorted(ours)
            assert serial == sorted(serial)


def test_one_rank_communicates_nothing() -> None:
    """Alone, the estimate is the product."""
    for operator in OPERATORS:
        estimate = predict(operator, 4096, 4096, 4096, 1, Config(), H200)

        assert (estimate.comm_s, estimate.exposed_s) == (0, 0)
        assert predict_serial(operator, 4096, 4096, 4096, 1, H200).comm_s == 0


def test_a_ring_moves_what_it_must() -> None:
    """Bytes that leave one rank: (W - 1) / W of the gathered or scattered matrix, twice that for an all-reduce."""
    assert sent_bytes("ag_gemm", 8192, 1, 8192, 4) == 2 * 8192 * 8192 * 3 / 4
    assert sent_bytes("gemm_rs", 8192, 1024, 1, 4) == 2 * 8192 * 1024 * 3 / 4
    assert sent_bytes("gemm_ar", 8192, 1024, 1, 4) == 2 * sent_bytes("gemm_rs", 8192, 1024, 1, 4)


def test_small_messages_use_the_small_protocol() -> None:
    """Below a few megabytes NCCL is not as slow as the line of large messages says."""
    assert nccl_time(H200.gather, 1e5, H200) == H200.small.time_s(1e5)
    assert nccl_time(H200.gather, 1e8, H200) == H200.gather.time_s(1e8)


def test_only_measured_gpus_are_known() -> None:
    """An H200 and an H100 with NVLink are known; others, also those of similar names, promise nothing."""
    assert machine_of("NVIDIA H200", 132).known
    assert machine_of("NVIDIA H100 80GB HBM3", 132).known
    assert not machine_of("NVIDIA H200", 114).known
    assert not machine_of("NVIDIA H100 PCIe", 114).known
    assert not machine_of("NVIDIA B200", 148).known


def test_a_partial_wave_costs_a_whole_one() -> None:
    """133 tiles on 132 multiprocessors take as long as 264 in plain Triton; cut along K, less."""
    one_too_many = predict("gemm_ar", 128 * 133, 256, 8192, 1, Config(), H200).gemm_s
    full = predict("gemm_ar", 128 * 264, 256, 8192, 1, Config(), H200).gemm_s
    cut = predict("gemm_ar", 128 * 133, 256, 8192, 1, Config(kernel="hopper"), H200).gemm_s

    assert one_too_many == pytest.approx(full, rel=0.01)
    assert cut < 0.8 * one_too_many


def test_an_unknown_operator_is_refused() -> None:
    """The message names what the model knows."""
    with pytest.raises(ValueError, match="ag_gemm, gemm_rs, gemm_ar"):
        predict("all_to_all", 1, 1, 1, 2, Config(), H200)


@pytest.mark.parametrize(("n", "k"), [(7169, 8192), (7168, 8190)])
def test_rows_that_cublas_reads_word_by_word_cost_fourfold(n: int, k: int) -> None:
    """An odd N or K: measured on 38 shapes; the next multiples of eight are the control."""
    slow, fast = cublas_time(4096, n, k, H200), cublas_time(4096, -(-n // 8) * 8, -(-k // 8) * 8, H200)

    assert 3.5 < slow / fast < 4.5


@pytest.mark.parametrize(
    ("m", "n", "k", "measured_us"),
    [(1152, 4224, 12288, 151), (8704, 6440, 12288, 1816), (1102, 4096, 6144, 83)],
)
def test_products_of_few_tiles_are_foretold(m: int, n: int, k: int, measured_us: float) -> None:
    """Within a quarter of what cuBLAS took on an H200, also where 128 rows and columns fit badly."""
    assert 0.75 < cublas_time(m, n, k, H200) * 1e6 / measured_us < 1.25


@pytest.mark.parametrize("operator", ["ag_gemm", "gemm_rs"])
def test_pieces_hide_copies_behind_products_and_one_piece_hides_none(operator: str) -> None:
    """A long product hides the copies, all at once does not; one whose halves fill no wave is better whole."""
    at_once, apart = (
        predict(operator, 8192, 8192, 8192, 2, Config(kernel="cublas", pieces=pieces), H200) for pieces in (1, 2)
    )

    assert at_once.exposed_s > at_once.comm_s
    assert apart.exposed_s < 0.4 * apart.comm_s
    assert predict(operator, 256, 16384, 5120, 2, Config(kernel="cublas", pieces=1), H200).total_s < (
        predict(operator, 256, 16384, 5120, 2, Config(kernel="cublas", pieces=2), H200).total_s
    )
