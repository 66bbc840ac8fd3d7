# SPDX-License-Identifier: Apache-2.0
"""The checks of GPUs measure what they say, in the order they say, on two GPUs that are the host."""

import threading
from itertools import pairwise
from typing import Any

import pytest

from megascale_ops.diagnostics.check import Reading, Task
from megascale_ops.diagnostics.gpu import agreement, devices, gemm, hbm, hbm_pattern, nvlink, pcie

pytest.importorskip("torch")
from tests.fakes.host_gpus import two_host_gpus

TASK = Task(deadline_s=5.0)


def of(reading: Reading) -> dict[str, set[str]]:
    """Return what each figure is of."""
    return {name: {one.of for one in reading.figures if one.name == name} for name in {x.name for x in reading.figures}}


def test_each_check_measures_each_gpu_ten_times() -> None:
    """And each pair, one way, the other way, and both; all of them positive, with the model as their peers."""
    both = {"GPU 0", "GPU 1"}

    with two_host_gpus():
        readings = [module.measure(TASK) for module in (gemm, hbm, pcie, nvlink)]

    found = {name: things for reading in readings for name, things in of(reading).items()}
    assert {name: found[name] for name in ("gemm_bf16", "hbm_copy", "pcie_to_gpu", "pcie_from_gpu")} == dict.fromkeys(
        ("gemm_bf16", "hbm_copy", "pcie_to_gpu", "pcie_from_gpu"), both
    )
    assert found["nvlink_one_way"] == {"GPU 0 to GPU 1", "GPU 1 to GPU 0"}
    assert found["nvlink_both_ways"] == {"GPU 0 and GPU 1"}
    rates = [one for reading in readings for one in reading.figures if one.samples]
    assert all(len(one.samples) == 10 and one.value > 0 and one.peers.startswith("Host GPU") for one in rates)


@pytest.mark.parametrize(("slow_times", "looks", "share"), [(1, 2, 1.0), (2, 3, 1.0), (99, 3, 0.8)])
def test_a_way_to_the_host_that_seems_slow_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, slow_times: int, looks: int, share: float
) -> None:
    """What passes was another program's; what stays is the GPU's. The other GPU is measured once."""
    looked = {0: 0, 1: 0}

    def seconds_of(_work: object, places: list[int], _times: int, repetitions: int) -> dict[int, list[float]]:
        (place,) = places
        if repetitions == 1:
            return {place: [1.0]}
        looked[place] += 1
        is_slow = place == 0 and looked[0] <= 2 * slow_times  # both ways
        return {place: [1.25 if is_slow else 1.0] * repetitions}

    monkeypatch.setattr(pcie, "seconds_of", seconds_of)
    with two_host_gpus():
        reading = pcie.measure(TASK)

    rates = {(one.name, one.of): one.value for one in reading.figures}
    assert looked == {0: 2 * looks, 1: 2}
    for name in ("pcie_to_gpu", "pcie_from_gpu"):
        assert rates[name, "GPU 0"] / rates[name, "GPU 1"] == pytest.approx(share)


def test_a_gpu_that_is_slow_keeps_no_other_waiting() -> None:
    """The first piece of one ends when the last one of the other is done: with one queue for both it never would."""
    done = threading.Event()
    pieces = []

    def work(place: int) -> None:
        pieces.append(place)
        if place == 0:
            assert done.wait(60), "the other GPU was not given its work"
        elif pieces.count(1) == 12:
            done.set()

    with two_host_gpus():
        seconds = devices.seconds_of(work, [0, 1], 4, 3)

    assert sorted(pieces) == [0] * 12 + [1] * 12
    assert [len(seconds[place]) for place in (0, 1)] == [3, 3]


def test_what_fails_on_one_gpu_is_raised() -> None:
    """In the thread of its own that gives it its work, it would be lost."""

    def work(place: int) -> None:
        if place == 1:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    with two_host_gpus(), pytest.raises(RuntimeError, match="uncorrectable ECC"):
        devices.seconds_of(work, [0, 1], 1, 1)


def test_products_of_all_gpus_are_repeated_in_turn() -> None:
    """One on each GPU, then the next: all of them work at once."""
    with two_host_gpus() as chosen:
        agreement.measure(TASK)

    assert len(chosen) == 10
    assert all(one != other for one, other in pairwise(chosen))


def test_equal_gpus_agree_and_a_wrong_product_is_found() -> None:
    """Five repetitions and the first; one bit of one repetition on one GPU is one wrong product there."""
    with two_host_gpus():
        good = agreement.measure(TASK)

    products = 0

    def flip(name: str, result: Any) -> None:  # noqa: ANN401  whatever torch returns
        nonlocal products
        if name == "mm":
            products += 1
            if products == 6:  # the third repetition of GPU 1
                result[17, 5] = -result[17, 5]

    with two_host_gpus(flip):
        wrong = agreement.measure(TASK)

    assert good.values("products") == {"GPU 0": 6, "GPU 1": 6}
    assert good.values("products_wrong") == {"GPU 0": 0, "GPU 1": 0}
    assert len(set(good.texts("product_digest").values())) == 1
    assert agreement.judge(good) == []
    assert wrong.values("products_wrong") == {"GPU 0": 0, "GPU 1": 1}
    assert [one.of for one in agreement.judge(wrong)] == ["GPU 1"]


def test_a_gpu_whose_first_product_differs_has_another_digest() -> None:
    """It is equal to itself each time, and not to the other one."""
    firsts = 0

    def flip(name: str, result: Any) -> None:  # noqa: ANN401  whatever torch returns
        nonlocal firsts
        if name in ("matmul", "__matmul__"):
            firsts += 1
            if firsts == 2:
                result[0, 0] = 1e6

    with two_host_gpus(flip):
        reading = agreement.measure(TASK)

    digests = reading.texts("product_digest")
    assert digests["GPU 0"] != digests["GPU 1"]
    assert [one.severity for one in agreement.judge(reading)]


def test_memory_is_tested_in_pieces() -> None:
    """So many bytes as asked for, less two pieces of room to compare; none is wrong."""
    with two_host_gpus():
        reading = hbm_pattern.measure(TASK)

    assert reading.values("hbm_tested") == dict.fromkeys(("GPU 0", "GPU 1"), (1 << 16) - 2 * 8 * (1 << 10))
    assert reading.values("hbm_wrong") == {"GPU 0": 0, "GPU 1": 0}
