# SPDX-License-Identifier: Apache-2.0
"""The candidates: few, different, valid, in an order that is the same everywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megascale_kernels.autotune.space import MOST, SHARED_BYTES, candidates, shared_bytes
from megascale_kernels.planning.cost_model import OPERATORS

SIZES = st.integers(min_value=1, max_value=20000)


@given(st.sampled_from(OPERATORS), SIZES, SIZES, SIZES, st.sampled_from([1, 2, 4, 8]))
def test_any_shape_has_a_few_valid_candidates(operator: str, m: int, n: int, k: int, world_size: int) -> None:
    """Between one and fourteen, no two the same, each of which fits the chip."""
    found = candidates(operator, m, n, k, world_size)

    assert 1 <= len(found) <= MOST == 14
    assert len(set(found)) == len(found)
    assert all(shared_bytes(config) <= SHARED_BYTES for config in found)
    assert all(config.carrier == "copy_engine" for config in found if config.kernel == "hopper")
    assert found == candidates(operator, m, n, k, world_size)


def test_large_products_try_both_kernels() -> None:
    """The model's opinion of one kernel does not keep the other from being measured."""
    for operator in ("ag_gemm", "gemm_rs"):
        found = candidates(operator, 8192, 7168, 8192, 4)

        assert {config.kernel for config in found} == {"hopper", "triton", "cublas"}
        assert (found[0].block_m, found[0].block_n) == (128, 256)


def test_what_cublas_multiplies_in_pieces_is_tried_as_well() -> None:
    """By single shards, ours and the others', and all at once; an all-reduce and one rank's product stay whole."""
    for operator in ("ag_gemm", "gemm_rs"):
        found = candidates(operator, 8192, 7168, 8192, 4)
        assert [config.pieces for config in found if config.kernel == "cublas"] == [4, 2, 1]
        assert [one.pieces for one in candidates(operator, 8192, 7168, 8192, 2) if one.kernel == "cublas"] == [2, 1]

    for operator, ranks in (("gemm_ar", 4), ("ag_gemm", 1)):
        assert "cublas" not in {config.kernel for config in candidates(operator, 512, 7168, 8192, ranks)}


def test_the_all_gather_tries_its_timetable_beside_the_plain_order() -> None:
    """With both tiles of the warp-specialised kernel; other operators have no arrivals to plan by."""
    found = candidates("ag_gemm", 2048, 1376, 4096, 2)

    assert {config.block_n for config in found if config.planned} == {128, 256}
    assert any(config.kernel == "hopper" and not config.planned for config in found)
    assert not any(config.planned for config in candidates("gemm_rs", 2048, 4096, 1376, 2))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_shallower_ring_is_tried_where_power_limits_the_product(world_size: int) -> None:
    """In six waves of wide tiles and more, of an all-gather alone, and always beside the full ring."""
    found = candidates("ag_gemm", 4096, 7168, 8192, world_size)
    shallow = [config for config in found if config.kernel == "hopper" and config.stages == 3]

    assert shallow
    assert all(config.block_n == 256 and config._replace(stages=4) in found for config in shallow)
    assert {config.planned for config in shallow} == ({False, True} if world_size > 1 else {False})
    for operator, m in (("ag_gemm", 2048), ("gemm_rs", 4096)):
        others = candidates(operator, m, 7168, 8192, world_size)
        assert all(config.stages == 4 for config in others if config.kernel == "hopper")


def test_few_rows_get_small_tiles() -> None:
    """With a shard of 16 rows no tile of 256 rows is worth a measurement."""
    found = candidates("ag_gemm", 64, 2752, 4096, 4)

    assert max(config.block_m for config in found) <= 128
    assert min(config.block_m for config in found) == 64


def test_only_the_all_gather_chooses_its_carrier() -> None:
    """A reduce-scatter is carried by the epilogue."""
    assert {config.carrier for config in candidates("gemm_rs", 8192, 8192, 3584, 4)} == {"copy_engine"}
    assert "sm" in {config.carrier for config in candidates("ag_gemm", 8192, 7168, 8192, 4)}


@pytest.mark.parametrize("sizes", [(0, 1, 1, 2), (1, 0, 1, 2), (1, 1, -1, 2), (1, 1, 1, 0)])
def test_sizes_below_one_are_refused(sizes: tuple[int, int, int, int]) -> None:
    """The message repeats them."""
    with pytest.raises(ValueError, match="sizes must be positive"):
        candidates("ag_gemm", *sizes)
