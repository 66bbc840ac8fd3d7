# SPDX-License-Identifier: Apache-2.0
"""Who is slower than its equals: the slow ones are named, and in clean noise none is."""

import random
from itertools import product
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.diagnostics.equals import Comparison, compare
from megascale_ops.diagnostics.figures import KINDS
from megascale_ops.diagnostics.report import Figure

REPETITIONS = 10
SIZES = (2, 3, 4, 8, 16, 72, 1856)


def drawn(seed: int) -> random.Random:
    """Return a source of numbers that a failing example can name."""
    return random.Random(seed)  # noqa: S311  nothing of it is a secret


def fleet(
    draw: random.Random, size: int, spread: float, noise: float = 0.002, name: str = "gemm_bf16"
) -> dict[str, tuple[float, ...]]:
    """Return the samples of equals: they differ by ``spread``, and repetitions of one by ``noise``."""
    found = {}
    for number in range(size):
        own = 700e12 * draw.gauss(1.0, spread)
        found[f"GPU {number}"] = tuple(own * draw.gauss(1.0, noise) for _ in range(REPETITIONS))
    assert name in KINDS
    return found


def compared(samples: dict[str, tuple[float, ...]], name: str = "gemm_bf16") -> Comparison:
    """Compare the medians of samples."""
    return compare([Figure(name, of, median(each), each, "H100") for of, each in samples.items()])[0]


def named(comparison: Comparison) -> list[str]:
    """Return who is slow."""
    return [one.figure.of for one in comparison.slow]


@pytest.mark.parametrize("size", SIZES)
def test_in_fifty_clean_fleets_none_is_named(size: int) -> None:
    """GPUs that differ by 1 % (standard deviation) in health: the range of eight is then 3 %, of 1,856 6.5 %."""
    draw = drawn(size)

    found = [named(compared(fleet(draw, size, 0.010 if size > 4 else 0.007))) for _ in range(50)]

    assert not any(found)


def test_noise_of_any_kind_names_few() -> None:
    """Whatever spread equals have in health, up to 2 %, and however the repetitions vary: under 2 % of fleets of 8."""
    draw = drawn(1)

    for spread, noise in product((0.0, 0.005, 0.01, 0.015, 0.02), (0.001, 0.02, 0.10)):
        found = [named(compared(fleet(draw, 8, spread, noise))) for _ in range(300)]
        assert sum(map(bool, found)) <= 8, (spread, noise)


@pytest.mark.parametrize("size", SIZES)
def test_one_that_is_five_percent_slow_is_named(size: int) -> None:
    """It alone, in 20 fleets of 20, where equals differ by 0.3 %."""
    draw = drawn(size)

    for _ in range(20):
        samples = fleet(draw, size, 0.003)
        samples["GPU 1"] = tuple(700e12 * 0.945 * draw.gauss(1.0, 0.002) for _ in range(REPETITIONS))
        assert named(compared(samples)) == ["GPU 1"]


@given(st.integers(5, 64), st.floats(0.06, 0.9), st.integers(0, 2**32))
def test_several_slow_ones_do_not_hide_each_other(size: int, short: float, seed: int) -> None:
    """Up to two fifths of them, each 6 % slow or more: all are named, and no other."""
    draw = drawn(seed)
    samples = fleet(draw, size, 0.0, 0.0005)
    slow = draw.sample(sorted(samples), max(1, size * 2 // 5 - 1))
    for gpu in slow:
        samples[gpu] = tuple((1 - short) * each for each in samples[gpu])

    assert sorted(named(compared(samples))) == sorted(slow)


@given(st.integers(2, 40), st.floats(1e-6, 1e18), st.integers(0, 2**32))
def test_units_and_order_do_not_matter(size: int, factor: float, seed: int) -> None:
    """The same are named whatever the unit, and in whatever order they come."""
    draw = drawn(seed)
    samples = fleet(draw, size, 0.02, 0.01)
    scaled = {of: tuple(each * factor for each in values) for of, values in samples.items()}
    mixed = dict(draw.sample(sorted(samples.items()), size))

    assert sorted(named(compared(samples))) == sorted(named(compared(mixed)))
    assert sorted(named(compared(samples))) == sorted(named(compared(scaled)))


def test_of_a_time_the_longer_one_is_slow() -> None:
    """And the shorter one is not; of a rate it is the other way round."""
    times = {f"/disk{number}": (0.001,) for number in range(4)}

    assert named(compared({**times, "/slow": (0.002,)}, "disk_sync")) == ["/slow"]
    assert named(compared({**times, "/fast": (0.0001,)}, "disk_sync")) == []
    assert named(compared({**times, "/fast": (0.0001,)}, "gemm_bf16")) == ["/fast"]


def test_one_whose_repetitions_vary_is_not_named_for_it() -> None:
    """6 % less, with repetitions that differ by 20 %: that may be chance; with steady ones it is named."""
    steady = {f"GPU {number}": (700e12,) * REPETITIONS for number in range(4)}
    wild = tuple(700e12 * 0.94 * (1 + 0.2 * (-1) ** number) for number in range(REPETITIONS))

    assert named(compared({**steady, "GPU 9": wild})) == []
    assert named(compared({**steady, "GPU 9": (700e12 * 0.94,) * REPETITIONS})) == ["GPU 9"]


def test_only_equals_are_compared() -> None:
    """Of another model, without equals, not compared at all, or no number: no verdict, and no error."""
    figures = [
        Figure("gemm_bf16", "GPU 0", 700e12, peers="H100"),
        Figure("gemm_bf16", "GPU 1", 250e12, peers="A100"),
        Figure("gemm_bf16", "GPU 2", 1e12),
        Figure("gpu_power", "GPU 0", 700.0, peers="H100"),
        Figure("gpu_power", "GPU 1", 70.0, peers="H100"),
        Figure("hbm_copy", "GPU 0", float("nan"), peers="H100"),
        Figure("hbm_copy", "GPU 1", 3e12, peers="H100"),
        Figure("hbm_copy", "GPU 2", 0.0, peers="H100"),
        Figure("unheard_of", "GPU 1", 3e12, peers="H100"),
    ]

    assert compare(figures) == []


def test_the_sentence_has_its_bar() -> None:
    """From which difference on one would have been named is known, and grows with the noise of the equals."""
    draw = drawn(3)
    calm, wild = (compared(fleet(draw, 16, spread)) for spread in (0.002, 0.03))

    assert calm.bar == KINDS["gemm_bf16"].bar
    assert wild.bar > 2 * calm.bar


def test_half_the_rate_is_named_however_the_others_differ() -> None:
    """Two of five at a fifth, the others between 400 and 900: their spread alone would excuse anything."""
    rates = {"a": 897e6, "b": 700e6, "c": 400e6, "d": 48e6, "e": 48e6}

    assert named(compared({of: (value,) for of, value in rates.items()}, "pair_rate")) == ["d", "e"]
