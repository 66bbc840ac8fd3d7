# SPDX-License-Identifier: Apache-2.0
"""The timetable of all-gather + GEMM: sums done by hand, near to what was measured, never worse than no plan."""

import pytest

pytest.importorskip("triton", minversion="3.6")

from hypothesis import given
from hypothesis import strategies as st
from megascale_kernels.planning.config import Config
from megascale_kernels.planning.cost_model import H200, gather_launch
from megascale_kernels.planning.gather_schedule import (
    COPY_S,
    LAUNCH_S,
    LINK_BYTES_PER_S,
    MOST_PARTIALS,
    MOST_WAVES,
    SEAM_BLOCKS,
    Launch,
    arrivals,
    lead_of,
    plan,
    play,
)
from megascale_kernels.planning.tiling import EVEN, EVEN_BLOCKS, EVEN_HELP, WORTH_CUTTING, cut_last_wave

# Ranks, M, N, K, width of a tile, parts that the last wave's tiles were cut into, milliseconds: walked shard by shard
# (ag_gemm_2gpu, _4gpu).
MEASURED = [
    (2, 2048, 1376, 4096, 128, 3, 0.0748),
    (2, 2048, 1792, 4096, 128, 1, 0.0599),
    (2, 4096, 1792, 4096, 128, 2, 0.1224),
    (2, 8192, 1376, 4096, 128, 3, 0.1934),
    (2, 1024, 3584, 8192, 128, 1, 0.0993),
    (2, 2048, 3584, 8192, 128, 2, 0.1824),
    (2, 4096, 5504, 4096, 256, 3, 0.2573),
    (2, 8192, 3584, 8192, 256, 1, 0.6295),
    (4, 4096, 1376, 4096, 128, 1, 0.1269),
    (4, 4096, 1792, 4096, 128, 2, 0.1378),
    (4, 8192, 2752, 4096, 256, 3, 0.2721),
    (4, 4096, 7168, 8192, 256, 1, 0.6319),
    (4, 8192, 3584, 8192, 256, 1, 0.6418),
]

# The same by timetable on two ranks; before the milliseconds the parts that a shard is copied in, and the row blocks of
# a group (ag_gemm_planned_2gpu).
PLANNED = [
    (2, 1024, 1792, 4096, 128, 1, 16, 0.0429),
    (2, 2048, 1376, 4096, 128, 1, 16, 0.0616),
    (2, 512, 6144, 12288, 128, 1, 16, 0.1336),
    (2, 8192, 1376, 4096, 128, 2, 16, 0.1566),
    (2, 4096, 1792, 4096, 256, 1, 16, 0.1059),
    (2, 2048, 3584, 8192, 256, 1, 16, 0.1790),
    (2, 4096, 3584, 8192, 256, 4, 16, 0.3200),
    (2, 4096, 1376, 4096, 128, 2, 8, 0.0933),
    (2, 4096, 1792, 4096, 128, 2, 8, 0.0999),
    (2, 8192, 1792, 4096, 128, 2, 8, 0.1768),
    (2, 2048, 3584, 8192, 128, 4, 4, 0.1792),
    (2, 512, 26624, 16384, 256, 1, 16, 0.6310),
]


def launch_of(ranks: int, m: int, n: int, k: int, width: int = 128, splits: int = 1, group: int = 16) -> Launch:
    """A launch on H200 as the launcher describes it."""
    config = Config(128, width, group_m=group, kernel="hopper", planned=True, splits=splits)
    return gather_launch(m // ranks, n, k, ranks, config, H200)


def small(**changes: object) -> Launch:
    """Two ranks of two row blocks, three columns of 10 us tiles, rows whose copy takes `COPY_S` and 10 us."""
    launch = Launch(
        m_shard=256, blocks_n=3, blocks_k=10, world_size=2, programs=4, block_m=128, block_n=128, group_m=16, splits=1,
        k_block_s=1e-6, fixed_s=0.0, row_bytes=round(10e-6 * LINK_BYTES_PER_S / 256),
    )  # fmt: skip
    return launch._replace(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("ranks", "m", "n", "k", "width", "split", "measured"), MEASURED)
def test_the_timetable_is_near_to_what_was_measured(
    ranks: int, m: int, n: int, k: int, width: int, split: int, measured: float
) -> None:
    """Within 6 percent, on two ranks as on four."""
    launch = launch_of(ranks, m, n, k, width)

    played = plan(launch, split=split, lead=launch.blocks_n)

    assert played.time_s * 1e3 == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize(("ranks", "m", "n", "k", "width", "splits", "group", "measured"), PLANNED)
def test_what_was_planned_takes_what_was_foretold(
    ranks: int, m: int, n: int, k: int, width: int, splits: int, group: int, measured: float
) -> None:
    """Within 6 percent, whatever the plan cuts and walks together."""
    played = plan(launch_of(ranks, m, n, k, width, splits, group))

    assert played.time_s * 1e3 == pytest.approx(measured, rel=0.06)


def test_rows_arrive_one_copy_after_the_other() -> None:
    """Our own are there; a unit of a later shard has waited for all copies before it."""
    there = arrivals(small(splits=2), 3)

    assert there[:6] == [0.0] * 6
    assert there[6:] == pytest.approx([COPY_S + 5e-6, 2 * COPY_S + 10e-6] * 3, rel=0.01)


def test_a_launch_is_the_sum_of_its_waits_and_tiles() -> None:
    """Four programs: four own tiles; two own and two that wait until 19 us; four more, 10 us each."""
    launch = small()

    assert play(launch, arrivals(launch, 3), 12, 1) == pytest.approx(LAUNCH_S + COPY_S + 10e-6 + 20e-6, rel=0.01)


def test_the_last_part_waits_for_the_others() -> None:
    """One tile in two parts on two programs: half a tile, and half a seam on either side."""
    launch = small(m_shard=128, blocks_n=1, world_size=1, programs=2)

    assert play(launch, [0.0], 0, 2) == pytest.approx(LAUNCH_S + 5e-6 + SEAM_BLOCKS * 1e-6)


def test_programs_without_a_tile_share_what_comes_late() -> None:
    """7B at TP8's size, M 1024 on two ranks: 44 tiles of our own and 44 late ones on 132 programs are all cut."""
    launch = launch_of(2, 1024, 1376, 4096)

    chosen = plan(launch)

    assert chosen.split > 1
    assert chosen.time_s < 0.9 * plan(launch, split=1).time_s


def test_a_cut_that_would_wait_for_late_rows_is_not_made() -> None:
    """7B at TP8's size, M 2048 on two ranks: with the last wave in three parts programs wait (0.075 ms measured)."""
    launch = launch_of(2, 2048, 1376, 4096)

    assert plan(launch).time_s < 0.9 * plan(launch, split=3).time_s


def test_flat_shards_are_walked_together_once_the_others_rows_are_there() -> None:
    """Two row blocks a shard read the weight twice; from a group of row blocks on there is nothing to win."""
    assert plan(launch_of(2, 512, 26624, 16384)).lead < 208
    assert plan(launch_of(2, 4096, 7168, 4096)).lead == 56
    assert lead_of(launch_of(1, 512, 26624, 16384)) == 208


def test_rows_within_one_row_block_share_a_timetable() -> None:
    """A server's M takes every value; playing one through takes up to 20 ms."""
    assert launch_of(2, 2048, 1376, 4096) == launch_of(2, 2048 - 250, 1376, 4096)
    assert launch_of(2, 2048, 1376, 4096) != launch_of(2, 2048 - 256, 1376, 4096)


def test_long_launches_are_not_played_through() -> None:
    """There the last wave is cut as ever."""
    launch = launch_of(2, 8192, 28672, 1024)
    assert launch.tiles > MOST_WAVES * launch.programs

    chosen = plan(launch)

    assert chosen[1:] == (*cut_last_wave(launch.tiles, launch.programs, launch.blocks_k), 0.0)


def test_the_last_wave_is_dealt_out_where_that_is_fastest() -> None:
    """70B, M 4096 on four ranks, 6.8 waves: 591 us instead of 598 in rehearsal; narrow tiles and flat shards never."""
    assert plan(launch_of(4, 4096, 7168, 8192, 256))[1:3] == (6 * 132, EVEN)
    assert plan(launch_of(4, 4096, 7168, 8192, 128)).split != EVEN
    assert plan(launch_of(4, 1024, 12288, 12288, 256)).split != EVEN


def test_even_shares_are_played_like_what_they_are() -> None:
    """Three tiles of ten K blocks on four programs, 7.5 blocks each; the idle one, the seam and the doubt cost more."""
    launch = small(m_shard=128, world_size=1)

    whole_s = play(launch, [0.0] * 3, 3, 1)

    seams = EVEN_BLOCKS / 2 * 2
    slower = (1 - EVEN_HELP) / 4 + 1 - WORTH_CUTTING
    assert whole_s == pytest.approx(LAUNCH_S + 10e-6)
    assert play(launch, [0.0] * 3, 0, EVEN) == pytest.approx(LAUNCH_S + (8 + seams + 10 * slower) * 1e-6)


@given(
    st.sampled_from([2, 4, 8]), st.integers(1, 1024), st.integers(1, 4096), st.integers(1, 8192),
    st.sampled_from([128, 256]), st.integers(1, 3),
)  # fmt: skip
def test_no_plan_is_worse_than_doing_nothing(ranks: int, m_shard: int, n: int, k: int, width: int, splits: int) -> None:
    """Neither than cutting nothing shard by shard, nor than cutting the last wave; and its parts have flags."""
    launch = launch_of(ranks, m_shard * ranks, n, k, width, splits)
    chosen = plan(launch)
    if launch.tiles > MOST_WAVES * launch.programs:
        return

    assert chosen.time_s <= plan(launch, split=1, lead=launch.blocks_n).time_s
    assert (launch.tiles - chosen.whole) * (chosen.split - 1) <= MOST_PARTIALS
    assert chosen == plan.__wrapped__(launch)
