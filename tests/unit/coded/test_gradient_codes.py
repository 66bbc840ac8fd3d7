# SPDX-License-Identifier: Apache-2.0
"""Gradient codes: any n - s workers give the exact sum, digits are kept, and what is no code is refused in words."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megascale_ops.coded import GradientCode
from megascale_ops.coded.code import KINDS, TooFewAnswersError
from megascale_ops.coded.matrices import digits_lost, solve
from megascale_ops.errors import UsageError

SIZE = 7


def answers(code: GradientCode, gradients: np.ndarray, absent: set[int]) -> dict[tuple[int, int], np.ndarray]:
    """Return what all workers but some send."""
    return {
        (worker, message): code.encode(worker, {one: gradients[one] for one in code.needs(worker, message)}, message)
        for worker in range(code.workers)
        if worker not in absent
        for message in range(code.messages)
    }


def gradients_of(code: GradientCode, seed: int = 0) -> np.ndarray:
    """Return a gradient for each partition."""
    drawn: np.ndarray = np.random.default_rng(seed).standard_normal((code.workers, SIZE))
    return drawn


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_pattern_of_tolerated_stragglers_gives_the_exact_sum(data: st.DataObject) -> None:
    """Whatever n, s and kind: without any s workers the sum is that of all partitions, and each is named."""
    workers = data.draw(st.integers(1, 24))
    kind = data.draw(st.sampled_from(KINDS))
    pieces = data.draw(st.integers(1, 3)) if kind == "cyclic" else 1
    assume(pieces <= workers)
    most = min(workers - pieces, 5 if kind == "cyclic" else workers)
    stragglers = data.draw(st.integers(0, most))
    assume(kind != "fractional" or workers % (stragglers + 1) == 0)
    try:
        code = GradientCode(workers, stragglers, kind, pieces=pieces)
    except UsageError as error:
        assert "loses too many digits" in str(error)  # noqa: PT017  none of those that the next lines would hold
        assert kind == "cyclic" or stragglers >= 10
        return
    absent = set(data.draw(st.permutations(range(workers)))[:stragglers])
    gradients = gradients_of(code, data.draw(st.integers(0, 99)))

    sent = answers(code, gradients, absent)
    found = code.combine(sent, SIZE)

    assert code.suffices(list(sent))
    assert found.is_exact
    assert found.off == 0.0
    assert found.without == tuple(sorted(absent))
    # Rounding of the answers grows by `lost` at most; that of the codes' own numbers comes on top.
    assert np.abs(found.vector - gradients.sum(axis=0)).max() < 1e-12 * max(1.0, found.lost) * workers
    assert all(len(code.partitions_of(worker)) == stragglers + pieces for worker in range(workers))
    assert all(vector.size == -(-SIZE // pieces) for vector in sent.values())


@pytest.mark.parametrize(
    ("workers", "stragglers", "kind", "pieces", "most"),
    [
        (12, 1, "cyclic", 1, 2),
        (12, 2, "cyclic", 1, 100),
        (30, 2, "cyclic", 1, 100),
        (30, 5, "cyclic", 1, 1e4),
        (64, 2, "cyclic", 1, 100),
        (20, 2, "cyclic", 2, 1e3),
        (32, 8, "clustered", 1, 1e3),
        (128, 3, "clustered", 1, 1 + 1e-9),
        (12, 3, "fractional", 1, 1 + 1e-9),
    ],
)
def test_few_digits_are_lost(workers: int, stragglers: int, kind: str, pieces: int, most: float) -> None:
    """Rounding grows by no more than this over all runs of neighbours, which are the worst of a cyclic code."""
    code = GradientCode(workers, stragglers, kind, pieces=pieces)
    gradients = gradients_of(code)

    worst = max(
        code.combine(
            answers(code, gradients, {(first + one) % workers for one in range(stragglers)}), SIZE
        ).lost
        for first in range(workers)
    )  # fmt: skip

    assert worst <= most


def test_a_random_matrix_loses_more() -> None:
    """The measure can fail: with a random code's weights, which the paper draws, digits are lost by the thousand."""
    workers, stragglers = 30, 3
    chance = np.random.default_rng(0)
    kernel = chance.standard_normal((stragglers, workers))
    kernel[:, -1] = -kernel[:, :-1].sum(axis=1)
    matrix = np.zeros((workers, workers))
    for worker in range(workers):
        held = [(worker + one) % workers for one in range(stragglers + 1)]
        matrix[worker, held[0]] = 1.0
        matrix[worker, held[1:]] = -np.linalg.solve(kernel[:, held[1:]], kernel[:, held[0]])

    assert digits_lost(matrix, stragglers, 1) > 1e3


def test_a_code_that_would_lose_its_digits_is_refused() -> None:
    """64 workers without 8 in one cyclic code: the sentence names the kind that keeps them."""
    with pytest.raises(UsageError, match="loses too many digits: take clustered"):
        GradientCode(64, 8, "cyclic")
    with pytest.raises(UsageError, match="too many digits: take workers in a multiple of 17"):
        GradientCode(33, 16, "clustered")
    assert GradientCode(34, 16, "clustered").load == 17


def test_the_same_arguments_make_the_same_code() -> None:
    """Ranks make it each for itself."""
    one, other = GradientCode(11, 3, "cyclic", pieces=2), GradientCode(11, 3, "cyclic", pieces=2)
    gradients = gradients_of(one)

    assert all(
        np.array_equal(vector, answers(other, gradients, set())[key])
        for key, vector in answers(one, gradients, set()).items()
    )


def test_one_absentee_too_many_fails_or_is_told() -> None:
    """By request: an error that names them, or the nearest sum with how far it is off."""
    code = GradientCode(8, 1, "fractional")
    gradients = gradients_of(code)
    sent = answers(code, gradients, {2, 3})

    assert not code.suffices(list(sent))
    with pytest.raises(TooFewAnswersError, match=r"without workers 2, 3.*tolerates 1 absent workers of 8"):
        code.combine(sent, SIZE)
    found = code.combine(sent, SIZE, approximate=True)
    assert not found.is_exact
    assert found.off == pytest.approx(0.5)  # two of eight partitions have weight 0: sqrt(2 / 8)
    assert found.without == (2, 3)
    assert np.allclose(found.vector, np.delete(gradients, [2, 3], axis=0).sum(axis=0))
    nothing = code.combine({}, SIZE, approximate=True)
    assert (nothing.off, nothing.without, nothing.vector.any()) == (1.0, tuple(range(8)), np.False_)


def test_more_absentees_than_tolerated_may_still_be_enough() -> None:
    """Clustered: one of each group, four of twelve with s = 1; cyclic: never."""
    clustered, cyclic = GradientCode(12, 1, "clustered"), GradientCode(12, 1, "cyclic")
    absent = {0, 3, 4, 7}

    assert clustered.suffices(list(answers(clustered, gradients_of(clustered), absent)))
    assert not cyclic.suffices(list(answers(cyclic, gradients_of(cyclic), absent)))


def test_what_a_slow_worker_has_done_counts() -> None:
    """Multi: no worker has sent all it would, and the sum is there; with one message a worker nothing would be."""
    code = GradientCode(6, 2, "multi")
    gradients = gradients_of(code)
    sent = answers(code, gradients, set())

    first = {key: vector for key, vector in sent.items() if key[1] == 0}
    assert code.suffices(list(first))
    assert np.allclose(code.combine(first, SIZE).vector, gradients.sum(axis=0))
    del first[4, 0]
    assert not code.suffices(list(first))
    first[3, 1] = sent[3, 1]
    assert code.combine(first, SIZE).is_exact


def test_messages_trade_numbers_sent_for_waiting() -> None:
    """With c messages each is needed for a c-th of a worker's partitions."""
    code = GradientCode(12, 3, "multi", messages=2)

    assert code.messages == 2
    assert all(len(code.needs(worker, 0)) == 2 for worker in range(12))
    assert all(len(code.partitions_of(worker)) == 4 for worker in range(12))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((0, 0, "cyclic"), "0 workers can't be made: take 1 to 256"),
        ((257, 1, "cyclic"), "257 workers can't be made"),
        ((4, 4, "cyclic"), "4 workers can't do without 4 of them.*at most 3 stragglers"),
        ((4, -1, "cyclic"), "can't do without -1"),
        ((5, 1, "fractional"), "that 2 divides, and 5 is none: take clustered"),
        ((5, 1, "hamming"), "no gradient code 'hamming': take one of fractional, cyclic, clustered, multi"),
        ((4, 1, "fractional", 2), "cut into 2 pieces by a fractional code"),
        ((4, 1, "cyclic", 0), "cut into 0 pieces"),
        ((4, 2, "cyclic", 3), "answers in 3 pieces: each would have 5 partitions of 4; take at most 1 stragglers"),
        ((4, 1, "cyclic", 1, 2), "a cyclic code answers in one message: take multi"),
        ((6, 2, "multi", 1, 2), "3 partitions of 6 can't be answered for in 2 messages"),
    ],
)
def test_what_is_no_code_is_refused_in_a_sentence(arguments: tuple[object, ...], sentence: str) -> None:
    """Each names the number that is wrong and what to take instead."""
    workers, stragglers, kind, *rest = arguments
    with pytest.raises(UsageError, match=sentence):
        GradientCode(workers, stragglers, kind, **dict(zip(("pieces", "messages"), rest, strict=False)))  # type: ignore[arg-type]


def test_weights_of_an_exact_answer_reproduce_it() -> None:
    """The least squares behind all kinds: two copies of a partition count half each."""
    weights, off, lost = solve(np.array([[1.0], [1.0]]), 1)

    assert np.allclose(weights, 0.5)
    assert off == pytest.approx(0.0)
    assert lost == pytest.approx(1.0)
