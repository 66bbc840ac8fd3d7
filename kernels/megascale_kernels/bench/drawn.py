# SPDX-License-Identifier: Apache-2.0
"""Draw shapes at random: what a user might run, and not what the kernels were tuned on.

Rows are log-uniform. Sizes are those of published models over TP 2, 4 and 8, whatever the number of GPUs here; some are
moved by a few percent, as pruned and widened models are. The weight lies as in `nn.Linear` or the other way round.
Kinds are dealt out in blocks of sixteen, each shuffled by itself, so that shares are exact and a run that ends early
has seen a little of everything.
"""

import math
import random
from typing import NamedTuple

from megascale_kernels.bench.published import MODELS
from megascale_kernels.bench.shapes import Shape

LEAST_ROWS, MOST_ROWS = 256, 16384
MOST_COUNT = 10000  # at half a second a shape, more than an hour
SHARES = (2, 4, 8)
MOVED = 0.05  # a moved size is within so much of the published one
BLOCK = 16
# Of sixteen: rows by what divides them ("tile": 128 divides M; "eight": 8 divides the rows of a rank, but 128 not M;
# "odd": neither), the size that is moved ("near" to a multiple of 8, which the TMA unit can read; "any" to another
# number), and whether the weight is kept [N, K].
ROW_KINDS = ("tile",) * 8 + ("eight",) * 4 + ("odd",) * 4
SIZE_KINDS = ("published",) * 12 + ("near",) * 3 + ("any",)
LAYOUTS = (True,) * 8 + (False,) * 8


class Drawn(NamedTuple):
    """One shape that was drawn.

    Attributes:
        shape: its name is the model's; its scale TP2, TP4 or TP8, with a ~ where a size was moved.
        is_nk: the weight is kept [N, K], as `nn.Linear` does, else [K, N].
    """

    shape: Shape
    is_nk: bool

    @property
    def layout(self) -> str:
        """How the weight lies, in two letters."""
        return "NK" if self.is_nk else "KN"

    @property
    def label(self) -> str:
        """The shape in a sentence."""
        shape = self.shape
        return f"{shape.m}x{shape.n}x{shape.k} {self.layout} ({shape.name} {shape.scale})"


class Rows(NamedTuple):
    """Between which M is drawn, both included."""

    least: int = LEAST_ROWS
    most: int = MOST_ROWS


ALL_M = Rows()


def read_rows(text: str) -> Rows:
    """LEAST-MOST in words.

    Raises:
        ValueError: no two numbers, or not in ascending order between `LEAST_ROWS` and `MOST_ROWS`.
    """
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and LEAST_ROWS <= int(first) <= int(last) <= MOST_ROWS):
        raise ValueError(f"--rows {text}: give two numbers between {LEAST_ROWS} and {MOST_ROWS}, as in 256-1023")
    return Rows(int(first), int(last))


def draw(operator: str, count: int, seed: int, gpus: int, between: Rows = ALL_M) -> list[Drawn]:
    """So many shapes of an operator: the same for the same arguments, and the first of them whatever the count.

    Args:
        operator: "ag_gemm" or "gemm_rs".
        count: how many.
        seed: which.
        gpus: ranks; M is a multiple of it.
        between: where M is drawn from.

    Raises:
        ValueError: a count that is not between 1 and `MOST_COUNT`, a negative seed, or no M that ranks can share in
            tiles.
    """
    if not 1 <= count <= MOST_COUNT:
        raise ValueError(f"--random {count}: give a number of shapes between 1 and {MOST_COUNT}")
    if seed < 0:
        raise ValueError(f"--seed {seed}: give a whole number, zero or more")
    tile = math.lcm(128, gpus)
    if between.most // tile * tile < between.least:
        raise ValueError(f"--rows {between.least}-{between.most}: no multiple of {tile} lies there")
    rng = random.Random(f"{operator} {seed} {gpus}")  # noqa: S311 - shapes are not secrets
    found: list[Drawn] = []
    while len(found) < count:
        kinds = zip(*(rng.sample(deck, BLOCK) for deck in (ROW_KINDS, SIZE_KINDS, LAYOUTS)), strict=True)
        found += [_one(operator, rng, gpus, between, *kind) for kind in kinds]
    return found[:count]


def _one(
    operator: str, rng: random.Random, gpus: int, between: Rows, row_kind: str, size_kind: str, is_nk: bool
) -> Drawn:
    model, share = rng.choice(MODELS), rng.choice(SHARES)
    sizes = [model.hidden, model.inner // share]
    if size_kind != "published":
        place = rng.randrange(2)
        sizes[place] = moved(sizes[place], rng, by_eight=size_kind == "near")
    hidden, inner = sizes
    k, n = (hidden, inner) if operator == "ag_gemm" else (inner, hidden)
    scale = f"TP{share}" + "~" * (size_kind != "published")
    return Drawn(Shape(model.name, scale, rows(row_kind, rng, gpus, between), n, k), is_nk)


def moved(size: int, rng: random.Random, *, by_eight: bool) -> int:
    """A size up to `MOVED` away and never the same: another multiple of 8, or a number that is none."""
    away = rng.uniform(0.2, 1) * MOVED * size * rng.choice((-1, 1))
    if by_eight:
        return size + 8 * (round(away / 8) or 1)
    other = size + round(away)
    return other if other % 8 else other + rng.randint(1, 7)


def rows(kind: str, rng: random.Random, gpus: int, between: Rows) -> int:
    """Log-uniform rows, a multiple of the ranks: the nearest number that is of the kind."""
    step = {"tile": math.lcm(128, gpus), "eight": 8 * gpus, "odd": gpus}[kind]
    wished = math.exp(rng.uniform(math.log(between.least), math.log(between.most))) / step
    least, most = -(-between.least // step), between.most // step
    near = range(max(least, round(wished) - BLOCK), min(most, round(wished) + BLOCK) + 1)
    return step * min((whole for whole in near if _fits(kind, whole * step, gpus)), key=lambda it: abs(it - wished))


def _fits(kind: str, m: int, gpus: int) -> bool:
    if kind == "tile":
        return True  # it is a multiple of 128
    return m % 128 != 0 if kind == "eight" else m // gpus % 8 != 0
