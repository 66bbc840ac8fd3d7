# SPDX-License-Identifier: Apache-2.0
"""The numbers of cyclic codes: which multiples of its partitions' gradients each worker adds up.

Of n workers each holds d = s + m consecutive partitions of n (worker i: i, i+1, ..., modulo n), cuts their gradients
into m pieces and sends one linear combination as long as a piece. From any n - s of these the m pieces of the sum
follow. That d can't be smaller is Ye and Abbe's theorem ("Communication-Computation Efficient Gradient Coding", ICML
2018); with m = 1 it is the cyclic code of Tandon et al. ("Gradient Coding", ICML 2017).

**How.** Take n points v_i in a space of n - s dimensions, such that any n - s of them are a basis. Worker i sends
v_i . h, where the vector h has the m wanted pieces as its last coordinates and, before them, combinations of all
gradients that are chosen so that v_i . h does not need partitions which worker i does not hold. Any n - s answers give
h, so the pieces.

**Which points.** Random ones lose many digits: with n = 30, s = 2 a factor of 600. Here they are real trigonometric
polynomials of the lowest frequencies at n equal steps of a circle: whole frequencies where n - s is odd, halves where
it is even, which are such points by construction (a polynomial of that degree has too few zeros). With the constant as
the wanted direction the rows are shifts of one another: Raviv, Tandon, Dimakis and Tamo's cyclic MDS code ("Gradient
Coding from Cyclic MDS Codes and Expander Graphs", 2018). Where that direction does not exist (n - s even) the nearest
one is taken, and for m > 1 turned bases beside it; the best by measurement.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]

# A code that loses no more than three digits of sixteen is good; no better one is looked for.
GOOD = 1e3
# Turned bases that are tried where the first two directions are not good: each costs n least squares.
_TURNS = 8
# By how much rounding may grow before a code is refused: ten of a float64's sixteen digits are left.
MOST_LOST = 1e6
_DRAWN = 12


def cyclic_matrix(workers: int, stragglers: int, pieces: int) -> Matrix:
    """Return the code's matrix: (n, n * m), row i what worker i sends, column j * m + u piece u of partition j.

    The same arguments give the same matrix on every rank.
    """
    best: Matrix | None = None
    least = np.inf
    for basis in _bases(workers, workers - stragglers, pieces):
        found = _with_holes(basis, workers, stragglers + pieces, pieces)
        if found is None:
            continue
        lost = digits_lost(found, stragglers, pieces)
        # Three digits decide, so that ranks whose libraries round otherwise choose alike.
        if float(f"{lost:.3g}") < float(f"{least:.3g}"):
            best, least = found, lost
        if least <= GOOD:
            break
    return best if best is not None else np.zeros((workers, workers * pieces))


def _bases(workers: int, dimensions: int, pieces: int) -> Iterator[Matrix]:
    """Yield points, (n - s, n), orthonormal in rows, the last m rows being the wanted directions."""
    angles = 2.0 * np.pi * (np.arange(workers) - (workers - 1) / 2) / workers
    rows = [np.ones(workers)] if dimensions % 2 else []
    first = 1.0 if dimensions % 2 else 0.5
    for number in range(dimensions // 2):
        rows += [np.cos((first + number) * angles), np.sin((first + number) * angles)]
    basis = np.linalg.qr(np.array(rows).T)[0].T
    if pieces == 1:
        for wanted in (np.ones(workers), rows[0]):
            yield _turned(basis, (basis @ wanted)[None])
    for seed in range(_TURNS):
        yield _turned(basis, np.random.default_rng(seed).standard_normal((pieces, dimensions)))


def _turned(basis: Matrix, wanted: Matrix) -> Matrix:
    """Return the basis turned so that the ``wanted`` directions, coefficients in it, come last."""
    pieces, dimensions = wanted.shape
    rest = np.random.default_rng(dimensions).standard_normal((dimensions - pieces, dimensions))
    turn = np.linalg.qr(np.vstack([wanted, rest]).T)[0].T
    found: Matrix = np.vstack([turn[pieces:], turn[:pieces]]) @ basis
    return found


def _with_holes(points: Matrix, workers: int, load: int, pieces: int) -> Matrix | None:
    """Return the matrix in which each partition is absent from the workers that do not hold it; None: there is none."""
    matrix = np.zeros((workers, workers * pieces))
    top, wanted = points[: len(points) - pieces], points[len(points) - pieces :]
    for partition in range(workers):
        holders = {(partition - back) % workers for back in range(load)}
        others = [worker for worker in range(workers) if worker not in holders]
        columns = slice(partition * pieces, (partition + 1) * pieces)
        column = wanted.copy()
        if others:
            try:
                column -= np.linalg.solve(top[:, others].T, wanted[:, others].T).T @ top
            except np.linalg.LinAlgError:
                return None
        column[:, others] = 0.0
        matrix[:, columns] = column.T
    scale = np.abs(matrix).max(axis=1, keepdims=True)
    return matrix / scale if np.isfinite(matrix).all() and scale.all() else None


def solve(rows: Matrix, pieces: int) -> tuple[Matrix, float, float]:
    """Find how answers are combined so that every piece of every partition counts once, as nearly as can be.

    Args:
        rows: of the matrix, those that have arrived, (arrived, k * m).
        pieces: m.

    Returns:
        The weights, (m, arrived); the root mean square over partitions by which their weight in the sum is not one; by
        how much errors of rounding in the answers grow in the sum, at most.
    """
    wanted = np.tile(np.eye(pieces), rows.shape[1] // pieces)
    # 1e-12: directions of the answers that are weaker by so much are rounding.
    weights: Matrix = np.linalg.lstsq(rows.T, wanted.T, rcond=1e-12)[0].T.astype(np.float64)
    off = float(np.sqrt(((weights @ rows - wanted) ** 2).sum() / wanted.sum()))
    return weights, off, float((np.abs(weights) @ np.abs(rows)).max(initial=0.0))


def digits_lost(matrix: Matrix, stragglers: int, pieces: int) -> float:
    """Return by how much rounding grows at worst, over patterns of stragglers; inf: with one of them nothing follows.

    Looked at: all runs of ``stragglers`` neighbours, which are the worst of a cyclic code, evenly spread ones, and a
    dozen that are drawn.
    """
    workers = len(matrix)
    chance = np.random.default_rng(workers)
    patterns: list[Sequence[int]] = [[(first + one) % workers for one in range(stragglers)] for first in range(workers)]
    if stragglers:
        patterns.append([one * workers // stragglers for one in range(stragglers)])
        patterns += [list(chance.choice(workers, stragglers, replace=False)) for _ in range(_DRAWN)]
    worst = 0.0
    for absent in patterns:
        _, off, lost = solve(np.delete(matrix, absent, axis=0), pieces)
        if off > 1e-6:
            return float("inf")
        worst = max(worst, lost)
        if worst > MOST_LOST:
            break
    return worst
