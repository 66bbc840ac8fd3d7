# SPDX-License-Identifier: Apache-2.0
"""Which collectives have channels when they would cost NCCL too much, and that no send ever waits for its receive.

A C program plays NCCL 2.28 to 2.30: an operation takes its mask before the plugin hears of it, and goes by that.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from megascale_ops.blackbox import nccl_codes, nccl_words
from tests.fakes.nccl_host import Binaries, Played, compiled, play
from tests.matrix import wide

pytestmark = pytest.mark.processes

EVERYTHING = 1 << 1 | 1 << 2 | 1 << 6
GOLDEN = 0x9E3779B97F4A7C15


@pytest.fixture(
    scope="module",
    params=wide(["", "address,undefined", "thread"], keep=["", "thread"]),
    ids=["plain", "asan", "tsan"],
)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Binaries:
    """Plugin and host: plain, and under the sanitizers."""
    return compiled(tmp_path_factory, request.param)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Binaries:
    """The same without sanitizers, for what is about rates."""
    return compiled(tmp_path_factory, "")


def told(binaries: Binaries, folder: Path, abi: int, scenario: str, *lines: str, **variables: str) -> Played:
    """Play a scenario that reads lines; its input is at its end behind them."""
    folder.mkdir(mode=0o700, exist_ok=True)
    defaults = {"MEGASCALE_PROFILER_MASK": "thin", "MEGASCALE_PROFILER_THIN_AFTER": "0"}
    played = play(binaries, folder, abi, scenario, defaults | variables)
    for line in lines:
        played.say(line)
    return played


def keeps(shift: int, number: int) -> bool:
    """Say whether one in 2**shift keeps this number, as the plugin should."""
    return shift == 0 or (number * GOLDEN) % 2**64 >> (64 - shift) == 0


def by_two(numbers: Sequence[float]) -> list[tuple[float, float]]:
    """Return numbers two by two."""
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def test_what_is_kept_of_few_is_kept_of_many(plain: Binaries, tmp_path: Path) -> None:
    """A rank that keeps one in 64 keeps nothing that one with one in 8 does not, and no two are far apart."""
    played = told(plain, tmp_path, 5, "keeps", "k 3 0 4000", "k 6 0 4000", "k 0 0 5", "k 10 0 4000")

    said = played.finish()

    eighth, rest = said["kept3"], said["kept6"]
    assert eighth == [number for number in range(4000) if keeps(3, number)]
    assert set(said["kept10"]) < set(rest) < set(eighth)
    assert said["kept0"] == [0, 1, 2, 3, 4]
    assert max(after - before for before, after in pairwise(rest)) <= 2 * 64


def test_thinner_at_once_and_back_step_by_step(plain: Binaries, tmp_path: Path) -> None:
    """As thin as the budget wants, in parts of a million; half as thin when that is within three quarters of it."""
    cases = [(0, 4_500, 0), (0, 5_001, 1), (0, 300_000, 6), (0, 10**9, 10), (6, 300_000, 6), (6, 130_000, 6),
             (6, 119_000, 5), (1, 3_751, 1), (1, 3_750, 0), (10, 0, 9), (3, 10**9, 10)]  # fmt: skip
    played = told(plain, tmp_path, 5, "keeps", *(f"t {shift} {reckoned} 5000" for shift, reckoned, _ in cases))

    said = played.finish()

    assert said["thin"] == [after for _, _, after in cases]


@pytest.mark.calm  # rates: how many operations a second is what is judged
def test_beyond_the_budget_all_ranks_keep_the_same_ones(plain: Binaries, tmp_path: Path) -> None:
    """7,500 small ones a second would cost 11 %: at 2 % one in 8, at 1 % one in 16; 300 a second bring all back."""
    lines = ("7500 2 1000 0", "7500 2 1000 2000", "300 8 1000 200", "300 0.5 10000000 0")
    ranks = [
        told(plain, tmp_path / budget, 5, "turns", *lines, MEGASCALE_PROFILER_BUDGET=budget) for budget in ("2", "1")
    ]

    found = [played.finish() for played in ranks]

    for played, said, shift in zip(ranks, found, (3, 4), strict=True):
        kept = [number for number in said["kept"] if number < 30_000]
        assert kept == [number for number in range(28_000, 30_000) if keeps(shift, number)]
        last = said["kept"][len(kept) :]
        assert last == list(range(32_200, 32_400))
        records, state = played.box.nccl(), played.box.profiler()
        assert state is not None
        assert (state.level, state.timed_one_in, state.mask) == (0, 1, EVERYTHING)
        assert state.untimed == sum(all_ - had for had, all_ in by_two(said["had"]))
        assert all(one.is_done for one in records)
        for one in records:
            assert bool(one.flags & nccl_codes.FLAG_UNTIMED) == (one.started_channels == 0)
            assert one.is_timed == bool(one.started_channels)
        assert any(one.flags & nccl_codes.FLAG_UNTIMED for one in records)
    assert set(found[1]["kept"]) < set(found[0]["kept"])


@pytest.mark.calm  # rates
def test_large_ones_cost_little_and_are_all_kept(plain: Binaries, tmp_path: Path) -> None:
    """2,000 a second of 40 MB would cost 0.28 % at 1.4 us, of 4 KB 3 % at 15 us."""
    counts = {}

    for count in (10_000_000, 1000):
        played = told(plain, tmp_path / str(count), 5, "turns", f"2000 2.6 {count} 0")
        ((counts[count], _),) = by_two(played.finish()["had"])

    assert counts[10_000_000] == 5200
    assert counts[1000] < 4000


@pytest.mark.parametrize(("abi", "mode"), [(4, "thin"), (5, "fixed"), (6, "fixed"), (7, "thin")])
def test_where_it_is_not_known_or_wished_nothing_turns(plain: Binaries, tmp_path: Path, abi: int, mode: str) -> None:
    """Interface 4 tells of no calls, NCCL 2.31's source was not read, and nothing turns unasked."""
    played = told(plain, tmp_path, abi, "turns", "20000 2.5 1000 0", MEGASCALE_PROFILER_MASK=mode)

    said = played.finish()

    assert by_two(said["had"]) == [(50_000, 50_000)]


@pytest.mark.calm  # rates
def test_nothing_is_left_out_before_half_a_minute_of_collectives(plain: Binaries, tmp_path: Path) -> None:
    """Unless another time is wished: by then a script that sends and receives at all has begun with it."""
    lines = "20000 2.5 1000 0"
    unasked = told(
        plain, tmp_path / "a", 5, "turns", lines, MEGASCALE_PROFILER_MASK="", MEGASCALE_PROFILER_THIN_AFTER=""
    )
    asked = told(
        plain, tmp_path / "b", 5, "turns", lines, MEGASCALE_PROFILER_MASK="", MEGASCALE_PROFILER_THIN_AFTER="1.5"
    )

    all_of_them = by_two(unasked.finish()["had"])
    ((had, number),) = by_two(asked.finish()["had"])

    assert all_of_them == [(50_000, 50_000)]
    assert 10_000 < had < number


@pytest.mark.parametrize("text", ["soon", "-1", "3601", "1e3"])
def test_a_time_that_is_none_is_told_and_half_a_minute_is_used(plain: Binaries, tmp_path: Path, text: str) -> None:
    """From 0 to 3600 seconds."""
    played = told(plain, tmp_path, 5, "turns", "1 1 1000 0", MEGASCALE_PROFILER_THIN_AFTER=text)

    played.finish()

    state = played.box.profiler()
    assert state is not None
    assert f"no number from 0 to 3600 (seconds), so 30 is used: {text}" in state.complaint


@pytest.mark.parametrize("order", [0, 1], ids=["a send first", "a receive first"])
def test_the_first_send_or_receive_ends_it_for_ever(built: Binaries, tmp_path: Path, order: int) -> None:
    """Three other threads turn the mask all the time: no send waits for what its receive does not note.

    Afterwards everything has channels, and the budget changes that no more.
    """
    # 5 %: 3,300 a second and more are too many, which ThreadSanitizer's three threads reach on a busy machine, too.
    played = told(built, tmp_path, 5, "settles", f"{order} 50 0", MEGASCALE_PROFILER_BUDGET="5")

    said = played.finish()

    assert said["turned"] == [1]
    assert said["stuck"] == [0]
    assert said["changed"] == [0]
    assert said["later"] == [300]
    assert said["mask"] == [EVERYTHING]
    state = played.box.profiler()
    assert state is not None
    assert state.untimed > 0
    assert state.timed_one_in == 1
    assert all(one.is_done for one in played.box.nccl() if one.peer >= 0)


def test_a_receive_at_the_wrong_moment_harms_nothing(plain: Binaries, tmp_path: Path) -> None:
    """Six processes more whose first group comes while other threads turn the mask."""
    for run in range(6):
        played = told(plain, tmp_path / str(run), 6, "settles", f"{run % 2} 3 0", MEGASCALE_PROFILER_BUDGET="100")
        said = played.finish()

        assert (said["turned"], said["stuck"], said["later"]) == ([1], [0], [300])


def test_without_that_sends_do_get_stuck(plain: Binaries, tmp_path: Path) -> None:
    """The negative control: the plugin is told of no send and no receive, and the stand-in sees them wait for ever."""
    played = told(plain, tmp_path, 5, "settles", "0 5000 1", MEGASCALE_PROFILER_BUDGET="100")

    said = played.finish()

    assert said["turned"] == [1]
    assert said["stuck"][0] > 0
    assert said["changed"][0] > 0


@pytest.mark.parametrize("abi", [5, 6])
def test_what_is_captured_ends_it_and_is_not_counted_by_nccl(built: Binaries, tmp_path: Path, abi: int) -> None:
    """A captured collective without channels tells of no replay; NCCL would count one with a handle and channels."""
    # 2 %: some 1,300 a second are too many, which ThreadSanitizer makes on a busy machine, too.
    played = told(built, tmp_path, abi, "captures", MEGASCALE_PROFILER_BUDGET="2")

    said = played.finish()

    before, after = by_two(said["had"])
    assert before[0] < before[1]
    assert said["captured"] == [1]
    assert said["kept_handle"] == [0]
    assert after == (50_000, 50_000)


@pytest.mark.alone  # CPU time, but of cores whose caches no other process uses
def test_all_calls_of_a_collective_take_less_than_two_microseconds(plain: Binaries, tmp_path: Path) -> None:
    """Group, call and collective while the mask turns, in CPU time; asked is 2 us with NCCL's own part."""
    played = told(plain, tmp_path, 5, "costs")

    said = played.finish()

    assert said["call"][0] < 2000


def test_a_word_that_is_none_is_told_and_nothing_turns(plain: Binaries, tmp_path: Path) -> None:
    """MEGASCALE_PROFILER_MASK has three words."""
    played = told(plain, tmp_path, 5, "turns", "1 1 1000 0", MEGASCALE_PROFILER_MASK="lots")

    played.finish()

    state = played.box.profiler()
    assert state is not None
    assert "MEGASCALE_PROFILER_MASK is thin, adapt or fixed, so fixed is used: lots" in state.complaint


def test_what_hangs_is_still_seen_behind_what_is_not_timed(plain: Binaries, tmp_path: Path) -> None:
    """The last known end, and how far the script went since, whatever was left out in between."""
    played = told(plain, tmp_path, 5, "turns", "10000 2.5 1000 0", MEGASCALE_PROFILER_BUDGET="2")
    played.finish()
    records = played.box.nccl()

    (sentence,) = nccl_words.untimed_sentences(records, {5: "turning"})

    ended = max(one.seq for one in records if one.is_timed)
    assert sentence == (
        f"NCCL AllReduce of turning: enqueued up to #{records[-1].seq}, the last known to have ended is #{ended}: "
        f"{records[-1].number - next(one.number for one in records if one.seq == ended)} since then were not timed"
    )
