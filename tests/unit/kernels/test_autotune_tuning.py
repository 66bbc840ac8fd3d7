# SPDX-License-Identifier: Apache-2.0
"""Tuning: the fastest wins, failures cost only themselves, and all ranks end up with rank 0's decision."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from megascale_kernels.autotune import __main__ as command
from megascale_kernels.autotune import choosing, store, trial, tuning
from megascale_kernels.autotune.choosing import choose
from megascale_kernels.autotune.space import candidates
from megascale_kernels.autotune.timing import Measured
from megascale_kernels.planning.config import Config

from tests.fakes.ranks import FakeWorkspace, together, workspaces

SHAPE = ("ag_gemm", 8192, 7168, 8192)
SERIAL_S = 2.0


class FakeTrial:
    """Calls that are nothing but their configuration."""

    serial = "serial"

    def ours(self, config: Config) -> Config:
        """The configuration itself stands for the call."""
        return config


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGASCALE_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(choosing, "describe", lambda _device: ("NVIDIA H200", 132))
    monkeypatch.setattr(trial, "make", lambda *_: FakeTrial())
    monkeypatch.setattr(tuning, "_over", lambda _workspace, *, mine: mine)


def measuring(seconds: Callable[[Config], float]) -> Callable[..., Measured]:
    """A `measure` that looks times up; infinity is a failure."""

    def measure(calls: dict[str, Any], **_: object) -> Measured:
        times = {name: SERIAL_S if call == "serial" else seconds(call) for name, call in calls.items()}
        return Measured(
            times, {name: "OutOfResources: too much" for name, time_s in times.items() if math.isinf(time_s)}
        )

    return measure


def tune_everywhere(world_size: int, **options: float) -> list[tuning.Tuned]:
    """Tune on all ranks; the workspaces choose by it afterwards."""
    ranks = workspaces(world_size)
    tuned: list[tuning.Tuned] = together([partial(tuning.tune, *SHAPE, rank, **options) for rank in ranks])
    assert [choose(*SHAPE, rank) for rank in ranks] == [tuned[0].config] * world_size
    return tuned


def test_the_fastest_is_chosen_remembered_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks choose it from now on, and so does the next job."""
    fastest = candidates(*SHAPE, 2)[4]
    monkeypatch.setattr(tuning, "measure", measuring(lambda config: 1.0 if config == fastest else 1.5))

    tuned = tune_everywhere(2)

    assert [found.config for found in tuned] == [fastest] * 2
    assert tuned[0].measured[0] == (fastest, 1.0)
    assert (tuned[0].time_s, tuned[0].serial_s, tuned[0].left_out) == (1.0, SERIAL_S, 0)
    assert together([partial(choose, *SHAPE, rank) for rank in workspaces(2)]) == [fastest] * 2


def test_serial_wins_when_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is a result too and is remembered."""
    monkeypatch.setattr(tuning, "measure", measuring(lambda _: 2.5))

    tuned = tune_everywhere(2)

    assert tuned[0].config is None
    assert together([partial(choose, *SHAPE, rank) for rank in workspaces(2)]) == [None, None]


def test_a_candidate_that_fails_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are measured all the same, and the workspace is reset once for each failure."""
    broken = candidates(*SHAPE, 2)[:3]
    monkeypatch.setattr(tuning, "measure", measuring(lambda config: math.inf if config in broken else 1.0))
    ranks = workspaces(2)

    tuned = together([partial(tuning.tune, *SHAPE, rank) for rank in ranks])

    assert [config for config, _ in tuned[0].dropped] == broken
    assert tuned[0].dropped[0][1] == "OutOfResources: too much"
    assert tuned[0].config is not None
    assert tuned[0].config not in broken
    assert [rank.resets for rank in ranks] == [3, 3]
    assert [rank.deadline_s for rank in ranks] == [30.0, 30.0]


def test_a_final_that_breaks_is_repeated_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bad finalist among three costs itself, not the other two."""
    best, second = candidates(*SHAPE, 1)[:2]

    def measure(calls: dict[str, Any], *, rounds: int, **_: object) -> Measured:
        is_final = rounds == tuning.FINAL_ROUNDS
        is_broken = is_final and best in calls.values()
        times = {"serial": SERIAL_S} | {
            name: math.inf if is_broken else {best: 1.0, second: 1.2}.get(call, 1.5)
            for name, call in calls.items()
            if name != "serial"
        }
        return Measured(times, {})

    monkeypatch.setattr(tuning, "measure", measure)

    tuned = tune_everywhere(1)[0]

    assert tuned.config == second
    assert tuned.dropped == ((best, "it failed on another rank"),)


def test_when_all_fail_the_serial_path_stays_and_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken driver today must not decide about tomorrow."""
    monkeypatch.setattr(tuning, "measure", measuring(lambda _: math.inf))

    tuned = tune_everywhere(2)

    assert tuned[0].config is None
    assert tuned[0].measured == ()
    assert not store.cache_file().exists()


def test_rank_0_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that would rank the candidates differently take over rank 0's choice."""
    first, second = candidates(*SHAPE, 2)[:2]
    ranks = workspaces(2)

    def compare(_bench: object, configs: list[Config], _rounds: int, workspace: FakeWorkspace) -> Measured:
        favourite = first if workspace.rank == 0 else second
        times = {str(place): 1.0 if config == favourite else 1.5 for place, config in enumerate(configs)}
        return Measured({"serial": SERIAL_S, **times}, {})

    monkeypatch.setattr(tuning, "_compare", compare)

    tuned = together([partial(tuning.tune, *SHAPE, rank) for rank in ranks])

    assert [found.config for found in tuned] == [first, first]


def test_the_budget_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least one candidate is measured; what was left out is counted."""
    clock = iter(range(0, 10000, 10))
    monkeypatch.setattr(tuning.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(tuning, "measure", measuring(lambda _: 1.0))

    tuned = tune_everywhere(1, budget_s=25)[0]

    assert 1 <= len(tuned.measured) <= 3
    assert tuned.left_out == len(candidates(*SHAPE, 1)) - len(tuned.measured)


@pytest.mark.parametrize("budget_s", [0, -1, math.nan, math.inf])
def test_a_senseless_budget_is_refused(budget_s: float) -> None:
    """Before anything is launched."""
    with pytest.raises(ValueError, match="positive number of seconds"):
        tuning.tune(*SHAPE, workspaces(1)[0], budget_s=budget_s)


@pytest.mark.parametrize(
    ("arguments", "environment", "gpus", "words"),
    [
        ("ag_gemm --m 8192 --n 7168 --k 8192", {}, 4, "torchrun"),
        ("ag_gemm --m 0 --n 7168 --k 8192", {}, 4, "must be positive"),
        ("ag_gemm --m 8192 --n 1 --k 1 --budget-s 0", {}, 4, "--budget-s 0.0"),
        ("ag_gemm --m 8192 --n 1 --k 1 --budget-s nan", {}, 4, "--budget-s nan"),
        ("ag_gemm --m 8192 --n 1 --k 1", {"RANK": "0", "WORLD_SIZE": "4"}, 0, "torch sees 0 on this machine"),
        ("gemm_rs --m 8191 --n 1 --k 1", {"RANK": "0", "WORLD_SIZE": "4"}, 4, "multiple of 4"),
    ],
)
def test_bad_requests_are_one_sentence(arguments: str, environment: dict[str, str], gpus: int, words: str) -> None:
    """The command says what to change."""
    said = command.complaint(command.parser().parse_args(arguments.split()), environment, gpus)

    assert said is not None
    assert words in said
    assert "\n" not in said


def test_a_good_request_has_nothing_wrong() -> None:
    """The command of the docstring, under torchrun."""
    options = command.parser().parse_args(["ag_gemm", "--m", "8192", "--n", "7168", "--k", "8192"])

    assert command.complaint(options, {"RANK": "0", "WORLD_SIZE": "4"}, 4) is None
