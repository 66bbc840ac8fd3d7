# SPDX-License-Identifier: Apache-2.0
"""How tiles are laid out over a multiprocessor, what fits into a slot, and how the last wave of them is cut."""

import pytest

triton = pytest.importorskip("triton", minversion="3.6")
pytest.importorskip("torch")

from megascale_kernels.errors import Unsupported  # noqa: E402
from megascale_kernels.planning.config import Config  # noqa: E402
from megascale_kernels.planning.stream_k import pairs_quarters, tiling_of  # noqa: E402
from megascale_kernels.planning.tiling import (  # noqa: E402
    EVEN,
    PARTIAL_PIECES,
    PARTIAL_WIDTH,
    Tiling,
    cut_last_wave,
)

WIDE, NARROW = Config(128, 256, 64, kernel="hopper"), Config(128, 128, 64, kernel="hopper")


def test_a_quarter_of_both_consumers_sums_fits_over_b() -> None:
    """What a slot brings of partials is no more than the B that lies there otherwise."""
    for config in (WIDE, NARROW):
        tiling = tiling_of(config, is_nk=True)
        assert tiling.partial_bytes == tiling.columns * tiling.block_k * 2
        assert PARTIAL_PIECES * tiling.partial_rows * PARTIAL_WIDTH == tiling.rows * tiling.columns


def test_the_last_wave_is_cut_only_where_that_wins() -> None:
    """Full waves and nearly full ones stay whole; what is between is dealt out, or halved where tiles are narrow."""
    assert cut_last_wave(264, 132, 128) == (264, 1)
    assert cut_last_wave(512, 132, 112) == (512, 1)
    assert cut_last_wave(448, 132, 128) == (396, EVEN)
    assert cut_last_wave(448, 132, 128, columns=128) == (396, 2)
    assert cut_last_wave(448, 132, 128, height=2) == (396, 2)
    assert cut_last_wave(1536, 132, 96, peers=1) == (1452, EVEN)
    assert cut_last_wave(1536, 132, 96, peers=3) == (1536, 1)
    assert cut_last_wave(448, 132, 128, split=1) == (448, 1)
    assert cut_last_wave(7, 132, 1) == (7, 1)
    assert cut_last_wave(7, 132, 1, split=EVEN) == (7, 1)


def test_a_tiling_that_cannot_be_is_refused() -> None:
    """Too much shared memory, a strange number of rows or of consumers: the error says which."""
    with pytest.raises(ValueError, match="bytes of shared memory"):
        Tiling(slots=5)
    with pytest.raises(ValueError, match="multiple of 64 rows"):
        Tiling(rows=32)
    with pytest.raises(ValueError, match="two consumers, not 4"):
        Tiling(consumers=4)
    with pytest.raises(ValueError, match="several peers, or two quarters of a lone peer's, not both"):
        Tiling(slots=3, fills_slots=True, pairs_quarters=True)
    with pytest.raises(ValueError, match="64 columns cannot come 64 and 64 a slot"):
        Tiling(columns=64, pairs_quarters=True)


def test_quarters_are_paired_between_two_ranks_alone() -> None:
    """One peer cannot fill a slot in any other way; several peers can, and none has no partials."""
    assert [ranks for ranks in range(1, 9) if pairs_quarters(ranks)] == [2]


@pytest.mark.parametrize("config", [WIDE, NARROW], ids=["wide", "narrow"])
def test_what_shares_a_slot_has_room_there(config: Config) -> None:
    """Three peers' boxes fill a slot of wide tiles and two a slot of narrow ones; two quarters fit into either."""
    filled = tiling_of(config, is_nk=True, keeps_tiles=True, fills_slots=True)
    paired = tiling_of(config, is_nk=True, keeps_tiles=True, pairs_quarters=True)

    assert filled.partials_a_slot * filled.box_bytes == filled.slot_bytes
    assert 2 * paired.box_bytes <= paired.slot_bytes
    assert paired.partials_a_slot == 1
    assert paired.shared_bytes == filled.shared_bytes


@pytest.mark.parametrize(
    "config", [Config(64, 128, kernel="hopper"), Config(carrier="sm", comm_ctas=8, kernel="hopper")]
)
def test_a_configuration_these_kernels_do_not_have_is_refused(config: Config) -> None:
    """Other tiles would be laid out in one way and announced in another."""
    with pytest.raises(Unsupported, match="kernel='hopper' has tiles of 128 x 256 x 64 and 128 x 128 x 64"):
        tiling_of(config, is_nk=True)
