# SPDX-License-Identifier: Apache-2.0
"""What a MoE layer's products lose to the way in which tiles are dealt to programs, by arithmetic and without a GPU.

    python kernels/benchmarks/moe_waves.py

Programs take every `PROGRAMS`-th tile. A tile of which at most half the rows are no padding takes about half the time,
so programs have unequal work, and the last of them ends a product. Beside that: whoever is free takes the next tile,
and the work divided evenly, which nothing can beat. In times of a whole tile, rank 0 of two, an even routing.
"""

import heapq
import sys
from collections.abc import Callable

import torch
from megascale_kernels.bench.moe.moe_shapes import MoeShape, routing
from megascale_kernels.planning import tile_order

PROGRAMS, TILE_ROWS, RANKS = 132, 128, 2
GROUP = 8  # `MoeConfig.group_m`
HALF = 0.5  # of a tile's time, with half of the rows
LAYERS = (
    ("Qwen3-30B-A3B", 128, 8, 2048, 768), ("DeepSeek-MoE-16B", 64, 6, 2048, 1408),
    ("Qwen2-MoE-2.7B", 64, 4, 2048, 1408), ("Qwen2-57B-A14B", 64, 8, 3584, 2560),
    ("Phi-3.5-MoE", 16, 2, 4096, 6400), ("DeepSeek-V3-like", 32, 8, 7168, 2048),
)  # fmt: skip
TOKENS = (4096, 16384)
grouped: Callable[[int, int, int, int], tuple[int, int]] = tile_order.python(tile_order.grouped)


def tiles_of(rows: list[int], columns: int) -> list[float]:
    """The times of a product's tiles in the order of the walk: expert by expert, `columns` blocks of columns each."""
    times = []
    for count in rows:
        height = -(-count // TILE_ROWS)
        for tile in range(height * columns):
            valid = count - grouped(tile, height, columns, GROUP)[0] * TILE_ROWS
            times.append(1.0 if valid > TILE_ROWS // 2 else HALF)
    return times


def in_turn(times: list[float]) -> float:
    """When the last program ends that takes every `PROGRAMS`-th tile."""
    return max(sum(times[first::PROGRAMS]) for first in range(PROGRAMS))


def to_the_free(times: list[float]) -> float:
    """When the last one ends where whoever is free takes the next tile."""
    ends = [0.0] * PROGRAMS
    for time in times:
        heapq.heapreplace(ends, ends[0] + time)
    return max(ends)


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
    print(f"{'layer':<18} {'tokens':>6} {'layer':>7} {'tiles':>6} {'even':>6} {'in turn':>8} {'to the free':>12}")
    for tokens in TOKENS:
        for name, experts, top_k, hidden, inner in LAYERS:
            rows = rows_of(MoeShape(name, experts, top_k, hidden, inner, tokens, 0.0))
            for product, columns in (("0", -(-inner // 128)), ("1", -(-hidden // 256))):
                times = tiles_of(rows, columns)
                figures = f"{sum(times) / PROGRAMS:>6.1f} {in_turn(times):>8.1f} {to_the_free(times):>12.1f}"
                print(f"{name:<18} {tokens:>6} {product:>7} {len(times):>6} {figures}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
