# SPDX-License-Identifier: Apache-2.0
"""A gradient code: which partitions of the data each worker computes, what it sends, and what follows from answers.

Four kinds, all of which tolerate any ``stragglers`` workers of ``workers``:

    fractional  groups of s + 1 workers that hold the same s + 1 partitions; s + 1 must divide n (Tandon et al., 2017)
    cyclic      each worker holds s + m consecutive partitions (`matrices`)
    clustered   several cyclic codes side by side, each of s + 1 to 2 s + 1 workers: any n, and few digits are lost. Up
                to s of *each* may be absent (Ozfatura, Gunduz, Ulukus: "Gradient Coding with Clustering and
                Multi-message Communication", 2019); the same as fractional where s + 1 divides n
    multi       a worker sends as it goes, one message for each 1/c of its partitions, so that what a slow one has done
                counts (multi-message communication, the same authors and "Straggler-aware Distributed Learning", 2020)

Every worker does s + m times the work of an uncoded one (m = 1 but for cyclic codes with ``pieces``), and sends 1/m of
the numbers, or with multi c times as many.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megascale_ops.coded.matrices import MOST_LOST, Matrix, cyclic_matrix, digits_lost, solve
from megascale_ops.errors import MegascaleError, UsageError

Vector = npt.NDArray[np.float64]
Arrived = Mapping[tuple[int, int], Vector]  # by worker and message

KINDS = ("fractional", "cyclic", "clustered", "multi")
# 256: beyond that the search for a matrix takes minutes, and one master can't take so many answers.
MOST_WORKERS = 256
# The weights of partitions in a sum that is exact are one but for rounding.
_EXACT = 1e-6


class TooFewAnswersError(MegascaleError):
    """More workers are absent than the code tolerates, and no approximation was asked for."""


class Combined(NamedTuple):
    """A sum over partitions.

    ``vector``: (size,). ``is_exact``: every partition counts once; else ``off`` is the root mean square by which their
    weights miss one. ``without``: workers of which nothing arrived. ``lost``: how much rounding has grown, at most.
    """

    vector: Vector
    is_exact: bool
    off: float
    without: tuple[int, ...]
    lost: float


class Message(NamedTuple):
    """One message of a worker: the partitions that it needs, and their weights by piece, (partitions, m)."""

    partitions: tuple[int, ...]
    weights: Matrix


class GradientCode:
    """Who computes what, and how the sum follows. The same arguments make the same code on every rank.

    Args:
        workers: n, those that compute; the data is cut into as many partitions.
        stragglers: s, how many may be absent.
        kind: one of ``KINDS``.
        pieces: m, of cyclic codes: answers are 1/m as long, for one more partition each.
        messages: c, of multi: in how many messages a worker answers; it divides s + 1, and (s + 1) / c divides n.
            0: s + 1, one a partition.

    Raises:
        UsageError: there is no such code.
    """

    def __init__(
        self, workers: int, stragglers: int, kind: str = "clustered", *, pieces: int = 1, messages: int = 0
    ) -> None:
        check(workers, stragglers, kind, pieces, messages)
        self.workers, self.stragglers, self.kind, self.pieces = workers, stragglers, kind, pieces
        self.load = stragglers + pieces
        self.messages = (messages or self.load) if kind == "multi" else 1
        self._plan = _plans(self)
        if any(not message.weights.any() for plan in self._plan for message in plan):
            raise _no_digits(self)
        self._rows = {
            (worker, number): self._row(message)
            for worker, plan in enumerate(self._plan)
            for number, message in enumerate(plan)
        }
        self._solved: dict[frozenset[tuple[int, int]], tuple[Matrix, float, float]] = {}

    def _row(self, message: Message) -> Vector:
        row = np.zeros((self.workers, self.pieces))
        row[list(message.partitions)] = message.weights
        return row.ravel()

    def partitions_of(self, worker: int) -> tuple[int, ...]:
        """Return the partitions that a worker computes, in the order in which its messages need them."""
        return tuple(dict.fromkeys(one for message in self._plan[worker] for one in message.partitions))

    def needs(self, worker: int, message: int) -> tuple[int, ...]:
        """Return the partitions that one message needs."""
        return self._plan[worker][message].partitions

    def length(self, size: int) -> int:
        """Return how many numbers one message has for gradients of ``size``."""
        return -(-size // self.pieces)

    def encode(self, worker: int, gradients: Mapping[int, Vector], message: int = 0) -> Vector:
        """Return one message of a worker.

        Args:
            worker: which.
            gradients: by partition, those that ``needs`` names, all of one size.
            message: which of its messages.
        """
        partitions, weights = self._plan[worker][message]
        total = np.zeros(self.length(gradients[partitions[0]].size))
        for partition, by_piece in zip(partitions, weights, strict=True):
            gradient = np.asarray(gradients[partition], dtype=np.float64).ravel()
            if self.pieces == 1:
                total += by_piece[0] * gradient
            else:
                total += by_piece @ _cut(gradient, self.pieces)
        return total

    def suffices(self, arrived: Sequence[tuple[int, int]]) -> bool:
        """Return whether the exact sum follows from these answers: (worker, message) each."""
        if len(arrived) < self._least():
            return False
        return self._solve(frozenset(arrived))[1] <= _EXACT

    def _least(self) -> int:
        """Return with how many answers it can be enough at best: of each partition one must be there."""
        return -(-self.workers * self.messages // self.load)

    def combine(self, arrived: Arrived, size: int, *, approximate: bool = False) -> Combined:
        """Return the sum of the gradients of all partitions.

        Args:
            arrived: answers by worker and message.
            size: of a gradient.
            approximate: where too many are absent, return the nearest sum (least squares over the partitions' weights)
                and say so, instead of failing.

        Raises:
            TooFewAnswersError: too many are absent.
        """
        keys = sorted(arrived)
        without = tuple(sorted(set(range(self.workers)) - {worker for worker, _ in keys}))
        weights, off, lost = self._solve(frozenset(keys)) if keys else (np.zeros((self.pieces, 0)), 1.0, 0.0)
        if off > _EXACT and not approximate:
            raise TooFewAnswersError(
                f"the sum does not follow without workers {', '.join(map(str, without)) or '-'}: {len(keys)} answers "
                f"are there, and the code tolerates {self.stragglers} absent workers of {self.workers}"
            )
        found = np.zeros((self.pieces, self.length(size)))
        for number, key in enumerate(keys):
            found += np.outer(weights[:, number], arrived[key])
        return Combined(found.ravel()[:size], off <= _EXACT, off if off > _EXACT else 0.0, without, lost)

    def _solve(self, keys: frozenset[tuple[int, int]]) -> tuple[Matrix, float, float]:
        """Return weights of the answers in sorted order; kept, as the same ranks are slow again and again."""
        found = self._solved.get(keys)
        if found is None:
            if len(self._solved) >= 1024:
                self._solved.clear()
            found = self._solved[keys] = solve(np.array([self._rows[key] for key in sorted(keys)]), self.pieces)
        return found


def check(workers: int, stragglers: int, kind: str, pieces: int = 1, messages: int = 0) -> None:
    """Refuse what is no code.

    Raises:
        UsageError: with what to take instead.
    """
    if kind not in KINDS:
        raise UsageError(f"there is no gradient code {kind!r}: take one of {', '.join(KINDS)}")
    if not 1 <= workers <= MOST_WORKERS:
        raise UsageError(f"a gradient code of {workers} workers can't be made: take 1 to {MOST_WORKERS}")
    if pieces < 1 or (pieces > 1 and kind != "cyclic"):
        raise UsageError(f"answers can't be cut into {pieces} pieces by a {kind} code: take 1, or a cyclic code")
    if stragglers < 0 or stragglers + pieces > workers:
        raise UsageError(
            f"{workers} workers can't do without {stragglers} of them with answers in {pieces} pieces: each would have "
            f"{stragglers + pieces} partitions of {workers}; take at most {max(0, workers - pieces)} stragglers"
        )
    load = stragglers + 1
    if kind == "fractional" and workers % load:
        raise UsageError(
            f"a fractional code needs a number of workers that {load} divides, and {workers} is none: take clustered"
        )
    if kind != "multi" and messages > 1:
        raise UsageError(f"a {kind} code answers in one message: take multi for {messages}")
    if kind == "multi" and (messages < 0 or (messages and (load % messages or workers % (load // messages)))):
        raise UsageError(
            f"{load} partitions of {workers} can't be answered for in {messages} messages: take a divisor of {load}, "
            f"such that parts of {load} / messages partitions divide {workers}"
        )


def _no_digits(code: GradientCode) -> UsageError:
    instead = f"workers in a multiple of {code.load}" if code.kind == "clustered" else "clustered"
    return UsageError(
        f"a {code.kind} code of {code.workers} workers, {code.stragglers} stragglers and {code.pieces} pieces loses "
        f"too many digits: take {instead}, or fewer stragglers"
    )


def _plans(code: GradientCode) -> list[tuple[Message, ...]]:
    """Return each worker's messages."""
    if code.kind == "multi":
        return [_messages(code, worker) for worker in range(code.workers)]
    groups = [code.workers] if code.kind == "cyclic" else cluster_sizes(code.workers, code.load)
    matrices = {size: _matrix(size, code) for size in set(groups)}
    plans: list[tuple[Message, ...]] = []
    for size in groups:
        first = len(plans)
        for member in range(size):
            held = [(member + step) % size for step in range(code.load)]
            weights = matrices[size].reshape(size, size, code.pieces)[member, held]
            plans.append((Message(tuple(first + one for one in held), weights),))
    return plans


def _matrix(size: int, code: GradientCode) -> Matrix:
    """Return the cyclic code of a group; where all hold all, each sends the sum."""
    if code.load == size and code.pieces == 1:
        return np.ones((size, size))
    matrix = cyclic_matrix(size, code.stragglers, code.pieces)
    if digits_lost(matrix, code.stragglers, code.pieces) > MOST_LOST:
        raise _no_digits(code)
    return matrix


def cluster_sizes(workers: int, load: int) -> list[int]:
    """Return the sizes of clusters of s + 1 workers (``load``) or more: as small as can be, the larger ones first."""
    groups = workers // load
    return [workers // groups + (one < workers % groups) for one in range(groups)]


def _messages(code: GradientCode, worker: int) -> tuple[Message, ...]:
    """Return the messages of a worker that answers as it goes: sums over its parts, beginning at another one each."""
    width = code.load // code.messages
    parts = code.workers // width
    return tuple(
        Message(tuple(range(part * width, (part + 1) * width)), np.ones((width, 1)))
        for part in ((worker + step) % parts for step in range(code.messages))
    )


def _cut(gradient: Vector, pieces: int) -> Matrix:
    """Return a gradient as (m, length), filled up with zeros."""
    length = -(-gradient.size // pieces)
    filled = np.zeros(pieces * length)
    filled[: gradient.size] = gradient
    return filled.reshape(pieces, length)
