# SPDX-License-Identifier: Apache-2.0
"""What a MoE layer's products lose to the way in which tiles are dealt to programs, by arithmetic and without a GPU.

    python kernels/benchmarks/moe_waves.py [--random COUNT --seed SEED] [--half 0.5]

A tile of which at most half the rows are no padding takes less time than a whole one (`--half`), so programs have
unequal work, and the last of them ends a product. *In turn*: every program takes each `PROGRAMS`-th tile. *Half last*:
in turn, but in layer 0 half ones that fill the last wave come last. *Shifted*: the same, but each wave is dealt some
programs further on than the one before. *Cut*: shifted, and the tiles of the last wave are cut into halves of their
rows where there is a program for each, which is what runs. *To the free*: whoever is free takes the next tile, whole or
half. *Even*: the work divided evenly, which nothing can beat. In times of a whole tile, rank 0 of two; published
layers, or random ones with random skew as the benchmark draws them.
"""

import argparse
import heapq
import math
import sys
from collections.abc import Callable

import torch
from megascale_kernels.bench.moe.moe_shapes import MODELS, TOKENS, MoeShape, drawn, routing
from megascale_kernels.moe.moe_config import MoeConfig
from megascale_kernels.planning import tile_order

PROGRAMS, TILE_ROWS, RANKS = 132, 128, 2
GROUP = 8  # `MoeConfig.group_m`
grouped: Callable[[int, int, int, int], tuple[int, int]] = tile_order.python(tile_order.grouped)


def tiles_of(rows: list[int], columns: int, half: float) -> list[float]:
    """The times of a product's tiles in the order of the walk: expert by expert, `columns` blocks of columns each."""
    times = []
    for count in rows:
        height = -(-count // TILE_ROWS)
        for tile in range(height * columns):
            valid = count - grouped(tile, height, columns, GROUP)[0] * TILE_ROWS
            times.append(1.0 if valid > TILE_ROWS // 2 else half)
    return times


def in_turn(times: list[float], shift: int = 0) -> float:
    """When the last program ends, each wave dealt `shift` programs further on than the one before."""
    ends = [0.0] * PROGRAMS
    for unit, time in enumerate(times):
        wave, place = divmod(unit, PROGRAMS)
        ends[(place - wave * shift) % PROGRAMS] += time
    return max(ends)


def cut(times: list[float], half: float) -> list[float]:
    """The times of units: `walk.whole_tiles`."""
    last = len(times) % PROGRAMS
    if not last or 2 * last > PROGRAMS:
        return times
    # A tile of which half is padding has one half with work.
    parts = [part for time in times[len(times) - last :] for part in (half, half if time > half else 0.0)]
    return times[: len(times) - last] + parts


def to_the_free(times: list[float]) -> float:
    """When the last one ends where whoever is free takes the next tile."""
    ends = [0.0] * PROGRAMS
    for time in times:
        heapq.heapreplace(ends, ends[0] + time)
    return max(ends)


def half_last(rows: list[int], columns: int, half: float) -> list[float]:
    """`tiles_of` where half ones that fill the last wave come last, if there are enough: `routing.list_tiles`."""
    heights = [-(-count // TILE_ROWS) for count in rows]
    halves = [
        expert for expert, count in enumerate(rows) if 0 < count - (heights[expert] - 1) * TILE_ROWS <= TILE_ROWS // 2
    ]
    wanted = -(-(sum(heights) * columns % PROGRAMS) // columns)
    late = set(halves[len(halves) - wanted :]) if 0 < wanted <= len(halves) else set()
    others = [(heights[expert] - 1) * TILE_ROWS if expert in late else count for expert, count in enumerate(rows)]
    return tiles_of(others, columns, half) + [half] * (len(late) * columns)


def rows_of(shape: MoeShape) -> list[int]:
    """Pairs of each expert of rank 0."""
    counts = torch.zeros(shape.experts, dtype=torch.long)
    for rank in range(RANKS):
        ids, _ = routing(shape, shape.tokens // RANKS, 0, rank, torch.device("cpu"))
        counts += torch.bincount(ids.view(-1).long(), minlength=shape.experts)
    found: list[int] = counts[: shape.experts // RANKS].tolist()
    return found


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="What the dealing of tiles costs a MoE layer's products.")
    parser.add_argument("--random", type=int, default=0, help="so many random layers instead of the published ones")
    parser.add_argument("--seed", type=int, default=0, help="of random layers")
    parser.add_argument("--half", type=float, default=0.5, help="time of a half-empty tile (default 0.5)")
    options = parser.parse_args()
    layers = drawn(options.random, options.seed, RANKS)
    if not layers:
        layers = [MoeShape(name, *sizes, tokens) for tokens in TOKENS for name, sizes in MODELS.items()]
    shift = MoeConfig(shifted=True).shift(PROGRAMS)
    heading = ("even", "in turn", "half last", "shifted", "cut", "to the free")
    print(f"{'layer':<17} {'tokens':>6} {'layer':>5} {'tiles':>6} " + " ".join(map("{:>11}".format, heading)))
    shares: dict[str, list[float]] = {name: [] for name in heading[1:]}
    for shape in layers:
        rows = rows_of(shape)
        for product, columns in (("0", -(-shape.inner // 128)), ("1", -(-shape.hidden // 256))):
            times = tiles_of(rows, columns, options.half)
            even = sum(times) / PROGRAMS
            late = half_last(rows, columns, options.half) if product == "0" else times
            units = cut(times, options.half)
            ends = (
                in_turn(times), in_turn(late), in_turn(late, shift),
                in_turn(late if units is times else units, shift), to_the_free(units),
            )  # fmt: skip
            for name, end in zip(shares, ends, strict=True):
                shares[name].append(even / end)
            figures = " ".join(f"{end:>11.1f}" for end in (even, *ends))
            print(f"{shape.name:<17} {shape.tokens:>6} {product:>5} {len(times):>6} {figures}")
    for name, all_of in shares.items():
        mean = math.exp(sum(map(math.log, all_of)) / len(all_of))
        print(f"{name}: even work is {mean:.3f} of it in the geometric mean, at worst {min(all_of):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
