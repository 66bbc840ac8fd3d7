# SPDX-License-Identifier: Apache-2.0
"""Which way serves a shape: every way has its turns, which all ranks begin together, and all ranks keep the same."""

import itertools
import random
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megascale_kernels.autotune import choosing, contest
from megascale_kernels.autotune.choosing import contenders
from megascale_kernels.autotune.contest import (
    PATIENCE_CALLS,
    TIMED_TURNS,
    WARM_TURNS,
    Contest,
    best_of,
    compared,
    turns_of,
)
from megascale_kernels.autotune.timing import order_of
from megascale_kernels.errors import TileTimeout
from megascale_kernels.memory.planned import Planned
from megascale_kernels.memory.symmetric_memory import CLOCK_WORDS
from megascale_kernels.planning.config import Config

from tests.fakes.ranks import workspaces

WIDE, NARROW = Config(kernel="hopper"), Config(128, 128, kernel="hopper")
PIECES = Config(kernel="cublas", pieces=1)


class Clock:
    """A workspace whose GPU takes as long for each way as it is told, and an event that arrives when it is told."""

    def __init__(self, took: dict[Config | None, int]) -> None:
        self.took, self.now, self.running = took, 0, WIDE
        self.device, self.group, self.rank, self.deadline_s = torch.device("cpu"), None, 1, 0.01
        self.clocks, self.planned = torch.zeros(2, CLOCK_WORDS, dtype=torch.int64), Planned()
        self.planned.free_clocks = [0]
        self.done: list[str] = []

    def meet(self) -> None:
        """All ranks have come here."""
        self.done.append("met")

    def note_time(self, at: torch.Tensor) -> None:
        """The time of the GPU."""
        self.done.append("noted")
        at.fill_(self.now)

    def hold(self) -> int:
        """The stream waits for the host."""
        self.done.append("held")
        return self.done.count("held")

    def release(self, gate: int) -> None:
        """No longer."""
        assert gate == self.done.count("held")
        self.done.append("released")

    def call(self, held: Contest) -> Config | None:
        """One call of an operator; the way that it ran."""
        way = held.begin()
        self.now += self.took[way]
        held.end()
        self.now += 1000
        return way

    def train(self, held: Contest, backward: dict[Config | None, int]) -> torch.Tensor:
        """One call of an operator whose gradient takes its time, whenever it is asked for."""
        clock, way = self, held.begin()

        class Operator(torch.autograd.Function):
            @staticmethod
            def forward(_: object, x: torch.Tensor) -> torch.Tensor:
                return x * 2

            @staticmethod
            def backward(_: object, grad: torch.Tensor) -> torch.Tensor:
                clock.now += backward[way]
                return grad * 2

        self.now += self.took[way]
        out = Operator.apply(torch.ones(1, requires_grad=True))
        held.end(out.grad_fn)
        self.now += 1000
        return out


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Nothing is captured, one rank's times are all ranks', pinned memory is memory, and events have happened."""
    exchanged: list[torch.Tensor] = []

    class Event:
        def record(self) -> None:
            """At once."""

        def query(self) -> bool:
            """It has happened."""
            return True

    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(contest.torch, "empty", lambda shape, dtype, **_: empty(shape, dtype=dtype))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: exchanged.append(tensor))
    return exchanged


@pytest.mark.parametrize("best", [WIDE, NARROW, None])
def test_the_fastest_way_stays(best: Config | None) -> None:
    """Three ways take turns; then the model's choice runs until the times are there, and the fastest ever after."""
    ways = [WIDE, NARROW, None]
    clock = Clock({way: 50_000 if way == best else 70_000 for way in ways})
    held = Contest(ways, clock)  # type: ignore[arg-type]  # what a contest asks of one
    turns = len(ways) * (WARM_TURNS + TIMED_TURNS)

    ran = [clock.call(held) for _ in range(turns + PATIENCE_CALLS + 3)]

    rounds = [ran[first : first + len(ways)] for first in range(0, turns, len(ways))]
    assert all(sorted(map(ways.index, ran)) == [0, 1, 2] for ran in rounds)
    assert ran[0] == WIDE
    before = {(one, other) for taken in rounds for one, other in itertools.pairwise(taken)}
    assert len(before) == len(ways) * (len(ways) - 1)  # each has followed each other one
    assert ran[turns : turns + PATIENCE_CALLS] == [WIDE] * PATIENCE_CALLS
    assert ran[turns + PATIENCE_CALLS :] == [best] * 3
    assert held.decided
    assert held.seconds == {way: (50_000 if way == best else 70_000) / 1e9 for way in ways}


def test_a_turn_is_queued_whole_then_all_ranks_begin_it_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a busy host's time is measured, or what a late rank finds that its peers have sent; the slowest counts."""
    reduced: list[object] = []
    monkeypatch.setattr(dist, "all_reduce", lambda _, op, **__: reduced.append(op))
    clock = Clock({WIDE: 50, None: 70})
    held = Contest([WIDE, None], clock)  # type: ignore[arg-type]  # what a contest asks of one

    for _ in range(2 * (WARM_TURNS + TIMED_TURNS) + PATIENCE_CALLS + 3):
        clock.call(held)

    assert clock.done == ["held", "met", "noted", "noted", "released"] * 2 * (WARM_TURNS + TIMED_TURNS)
    assert reduced == [dist.ReduceOp.MAX]


TURNS = 2 * (WARM_TURNS + TIMED_TURNS)


@pytest.mark.parametrize("layers", [1, 5, PATIENCE_CALLS])
def test_where_a_way_is_also_its_gradients_both_decide(layers: int) -> None:
    """Faster forward and slower as a whole loses, also where the backwards of several layers come later, last first."""
    clock, backward = Clock({WIDE: 50, None: 70}), {WIDE: 90_000, None: 30_000}
    held = Contest([WIDE, None], clock)  # type: ignore[arg-type]  # what a contest asks of one
    calls = 0

    while not held.decided:
        outs = [clock.train(held, backward) for _ in range(layers)]
        for out in reversed(outs):
            out.backward()
        calls += layers

    assert held.best is None
    assert held.seconds == {WIDE: pytest.approx(90_050e-9), None: pytest.approx(30_070e-9)}
    assert TURNS + 2 * PATIENCE_CALLS < calls <= TURNS + 2 * PATIENCE_CALLS + layers
    assert clock.done.count("held") == clock.done.count("released") == clock.done.count("met") == 2 * TURNS


@pytest.mark.parametrize("layers", [TURNS + PATIENCE_CALLS, 3])
def test_gradients_that_do_not_come_in_time_do_not_count(layers: int) -> None:
    """More calls before the first backward than are waited for, or one turn in which none is asked for."""
    clock, backward = Clock({WIDE: 50_000, None: 70_000}), {WIDE: 900_000, None: 30_000}
    held = Contest([WIDE, None], clock)  # type: ignore[arg-type]  # what a contest asks of one
    skipped = layers < TURNS

    while not held.decided:
        outs = [clock.train(held, backward) for _ in range(layers)]
        for out in outs[skipped:]:
            out.backward()

    assert held.best == WIDE
    assert held.seconds == {WIDE: pytest.approx(50e-6), None: pytest.approx(70e-6)}
    assert clock.done.count("held") == clock.done.count("released")


def test_a_captured_or_repeated_backward_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph keeps no hold of the host's; of one turn's two backwards the first counts."""
    clock, backward = Clock({WIDE: 50, None: 70}), {WIDE: 100, None: 100}
    held = Contest([WIDE, None], clock)  # type: ignore[arg-type]  # what a contest asks of one
    out = clock.train(held, backward)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    out.backward(retain_graph=True)
    assert clock.done.count("held") == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for _ in range(2):
        out.backward(retain_graph=True)
    assert clock.done.count("held") == clock.done.count("released") == 2


def test_one_way_is_no_contest() -> None:
    """It is taken, and no clock is read."""
    held = Contest([None], Clock({}))  # type: ignore[arg-type]  # what a contest asks of one

    assert held.begin() is None
    held.end()
    assert held.decided


def test_while_a_graph_is_captured_the_best_known_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph keeps what it captured, so no turn is given to it, and none is counted."""
    clock = Clock({WIDE: 1, None: 1})
    held = Contest([WIDE, None], clock)  # type: ignore[arg-type]  # what a contest asks of one
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    assert [clock.call(held) for _ in range(5)] == [WIDE] * 5

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert [clock.call(held) for _ in range(4)] == [WIDE, None, None, WIDE]


def test_a_contest_waits_for_a_place_where_the_clock_is_noted() -> None:
    """With all places taken the model's choice runs, without turns; another's times leave a place free."""
    clock = Clock({WIDE: 1, None: 2})
    first, second = (Contest([WIDE, None], clock) for _ in range(2))  # type: ignore[arg-type]  # what one asks of it
    clock.call(first)

    assert [clock.call(second) for _ in range(3)] == [WIDE] * 3

    for _ in range(2 * (WARM_TURNS + TIMED_TURNS) - 1):
        clock.call(first)
    assert [clock.call(second) for _ in range(3)] == [WIDE, None, None]


def test_times_that_never_come_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has not made its calls leaves the others without times: that has a deadline as every wait has."""
    clock = Clock({WIDE: 1, None: 2})
    held = Contest([WIDE, None], clock)  # type: ignore[arg-type]  # what a contest asks of one
    for _ in range(2 * (WARM_TURNS + TIMED_TURNS) + PATIENCE_CALLS):
        clock.call(held)
    monkeypatch.setattr(held._coming.arrived, "query", lambda: False)

    with pytest.raises(TileTimeout, match=r"rank 1: waited 0\.02 s for the GPU .* a rank has not made them"):
        held.begin()


def test_the_first_round_does_not_count() -> None:
    """It compiles. Turns are told apart by way, in whatever order a round had them."""
    assert turns_of([9, 1, 6, 5, 5, 6, 66, 55, 5, 6, 6, 5], 2) == [[5, 5, 55, 5, 5], [6, 6, 66, 6, 6]]


def test_a_single_slow_turn_decides_nothing() -> None:
    """The median of each way's shares of its rounds counts."""
    clock = Clock({WIDE: 50, NARROW: 60})
    held = Contest([WIDE, NARROW], clock)  # type: ignore[arg-type]  # what a contest asks of one
    for turn in range(2 * (WARM_TURNS + TIMED_TURNS) + PATIENCE_CALLS + 1):
        clock.took[WIDE] = 999 if turn in (4, 5, 10, 11) else 50  # rounds 2 and 5
        clock.call(held)

    assert held.best == WIDE
    assert sorted(held.turns[WIDE]) == [50e-9, 50e-9, 50e-9, 999e-9, 999e-9]


def chosen_by_noise(gain: float, *, margin: bool) -> float:
    """The share of 4,000 contests of three ways, each as much faster than serial, that serial loses."""
    drawn = random.Random(7)  # noqa: S311 - noise, no secrets
    ways = {WIDE: 30e-6 / (1 + gain), NARROW: 30e-6 / (1 + gain), PIECES: 30e-6 / (1 + gain), None: 30e-6}
    lost = 0
    for _ in range(4000):
        turns = {way: [seconds * drawn.gauss(1, 0.03) for _ in range(TIMED_TURNS)] for way, seconds in ways.items()}
        for taken in turns.values():
            if drawn.random() < 0.25:
                taken[0] += 30e-6
        measured = compared(turns)
        lost += (best_of(measured) if margin else min(measured, key=measured.__getitem__)) is not None
    return lost / 4000


@pytest.mark.parametrize(("gain", "most"), [(-0.05, 0.004), (-0.03, 0.015), (-0.02, 0.03)])
def test_noise_seldom_decides_against_the_serial_path(gain: float, most: float) -> None:
    """Turns of 30 us that scatter by 3 %, a twentieth of them by 30 us: as much as was measured of small shapes.

    Ways 5 % slower than serial displace it in less than four of a thousand contests, where the least median alone would
    let them in more than ten times as many.
    """
    wrong = chosen_by_noise(gain, margin=True)

    assert wrong <= most
    assert wrong < 0.1 * chosen_by_noise(gain, margin=False)


def kept_while_the_clock_falls(decide: Callable[[dict[Any, list[float]]], dict[Any, float]], drop: float) -> float:
    """The share of 2,000 contests of three ways that the fastest wins, by 2 %, where the clock falls in some turn."""
    drawn = random.Random(11)  # noqa: S311 - noise, no secrets
    truth = {WIDE: 1.02e-3, NARROW: 1.0e-3, PIECES: 1.04e-3}
    kept = 0
    for _ in range(2000):
        turns: dict[Any, list[float]] = {way: [] for way in truth}
        falls = drawn.randrange(len(truth) * TIMED_TURNS)
        for place in range(len(truth) * TIMED_TURNS):
            way = order_of(list(truth), place // len(truth))[place % len(truth)]
            turns[way].append(truth[way] * (1 + drop * (place >= falls)) * drawn.gauss(1, 0.003))
        seconds = decide(turns)
        kept += min(seconds, key=seconds.__getitem__) == NARROW
    return kept / 2000


def test_a_clock_that_falls_in_mid_contest_decides_nothing() -> None:
    """A way is held against those of its round: medians would compare turns before the fall with others behind it."""
    medians = kept_while_the_clock_falls(lambda turns: {way: median(taken) for way, taken in turns.items()}, 0.1)

    assert kept_while_the_clock_falls(compared, 0.1) >= 0.99
    assert medians < 0.9
    assert kept_while_the_clock_falls(compared, 0.0) >= 0.99  # its own noise is no worse


def test_what_gains_is_seldom_given_up_to_noise() -> None:
    """A way that is faster by 8 % is kept by nineteen of twenty contests."""
    assert chosen_by_noise(0.08, margin=True) >= 0.95


def test_what_is_faster_by_chance_alone_does_not_displace_the_serial_path() -> None:
    """By a microsecond and a hundredth."""
    assert best_of({WIDE: 23.1e-6, NARROW: 26e-6, None: 23.8e-6}) is None
    assert best_of({WIDE: 23.1e-6, NARROW: 26e-6, None: 24.5e-6}) == WIDE
    assert best_of({NARROW: 1e-3, WIDE: 1.005e-3, None: 1.010e-3}) is None
    assert best_of({NARROW: 1e-3, WIDE: 1.005e-3, None: 1.012e-3}) == NARROW
    assert best_of({WIDE: 2e-6, NARROW: 2e-6}) == WIDE


def test_the_model_s_choice_is_displaced_by_what_is_faster_by_more_than_chance() -> None:
    """By a fiftieth; a way that the model does not prefer has no such margin, nor has the model's serial path."""
    assert best_of({WIDE: 1.019e-3, NARROW: 1e-3}) == WIDE
    assert best_of({WIDE: 1.021e-3, NARROW: 1e-3}) == NARROW
    assert best_of({WIDE: 1.2e-3, PIECES: 1.019e-3, NARROW: 1e-3}) == NARROW
    assert best_of({None: 1.019e-3, WIDE: 1.018e-3, NARROW: 1e-3}) == NARROW
    assert best_of({WIDE: 1.015e-3, NARROW: 1e-3, None: 1.005e-3}) is None


def test_the_serial_path_gives_way_to_nothing_that_is_slower() -> None:
    """Between the fastest way and the model's choice, which would be kept for it, lies the serial path."""
    assert best_of({WIDE: 1.018e-3, NARROW: 1e-3, None: 1.015e-3}) is None
    assert best_of({WIDE: 1.018e-3, NARROW: 1e-3, None: 1.031e-3}) == WIDE
    assert best_of({WIDE: 1.022e-3, NARROW: 1e-3, None: 1.015e-3}) == NARROW


@pytest.mark.parametrize(("gain", "least", "most"), [(0.0, 0.13, 0.19), (0.05, 0.9, 0.97), (-0.05, 0.0, 0.001)])
def test_two_contests_of_one_shape_seldom_differ_by_chance(gain: float, least: float, most: float) -> None:
    """A millisecond whose ratio between two ways scatters by 2 %, as was measured.

    A way that is as fast as the model's choice displaces it in a sixth of all contests, not in half of them as by the
    least time alone; one that is faster by 5 % in nine of ten.
    """
    drawn = random.Random(5)  # noqa: S311 - noise, no secrets

    def measured(truth: float) -> float:
        return truth * (1 + 0.02 / 2**0.5 * drawn.gauss(0, 1))

    contests = [{WIDE: measured(1e-3), NARROW: measured(1e-3 * (1 - gain))} for _ in range(4000)]
    displaced = sum(best_of(seconds) == NARROW for seconds in contests) / len(contests)
    by_the_least = sum(seconds[NARROW] < seconds[WIDE] for seconds in contests) / len(contests)

    assert least <= displaced <= most
    assert displaced <= by_the_least
    assert gain or by_the_least == pytest.approx(0.5, abs=0.03)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One rank of two, on a GPU that was measured."""
    monkeypatch.setattr(choosing, "describe", lambda _device: ("NVIDIA H200", 132))
    monkeypatch.setattr(choosing, "from_rank_zero", lambda _group, _rank, _world, said, _what: said)
    return workspaces(2)


def test_where_the_model_is_sure_there_is_no_contest(ranks: list[Any]) -> None:
    """A product that hides its communication wholly is not tried in series; the model's choice comes first."""
    ways = contenders("ag_gemm", 8192, 1376, 4096, ranks[0])

    assert None not in ways
    assert ways[0] == choosing.choose("ag_gemm", 8192, 1376, 4096, ranks[0])


@pytest.mark.parametrize("operator", ["ag_gemm", "gemm_rs"])
def test_ways_within_twice_the_model_s_error_are_tried(ranks: list[Any], operator: str) -> None:
    """A long product gains little by overlap, so either tile, cuBLAS in pieces and the serial path have their turns."""
    ways = contenders(operator, 2048, 7168, 8192, ranks[0])

    assert None in ways
    assert len(ways) == len(set(ways)) <= contest.MOST_WAYS
    assert {way.block_n for way in ways if way is not None and way.kernel == "hopper"} == {128, 256}
    assert {way.pieces for way in ways if way is not None and way.kernel == "cublas"} == {1, 2}


@pytest.mark.parametrize("operator", ["ag_gemm", "gemm_rs"])
def test_with_few_rows_all_ways_are_tried(ranks: list[Any], operator: str) -> None:
    """Latencies decide there, and the model does not know them: it may be as wrong as it likes."""
    n, k = (1376, 4096) if operator == "ag_gemm" else (4096, 1376)

    assert None not in contenders(operator, 8192, n, k, ranks[0])
    assert len(contenders(operator, 512, n, k, ranks[0])) >= 5
    assert None in contenders(operator, 512, n, k, ranks[0])


@pytest.mark.parametrize("last", [1, 3, WARM_TURNS + TIMED_TURNS])
def test_a_contest_ends_where_the_serial_path_has_no_memory_left(last: int) -> None:
    """Memory is asked for before each round; then the model's choice stays and the clock is free again."""
    asked: list[int] = []
    workspace = Clock({WIDE: 2000, NARROW: 1000, None: 500})
    held = Contest([WIDE, NARROW, None], workspace, has_room=lambda: asked.append(1) or len(asked) < last)

    ran = [workspace.call(held) for _ in range(contest.MOST_CALLS)]

    assert len(asked) == last
    assert ran.count(None) == last - 1
    assert held.decided
    assert set(ran[-PATIENCE_CALLS:]) == {WIDE}
    assert workspace.planned.free_clocks == [0]
    assert workspace.done.count("held") == workspace.done.count("released")


def test_a_contest_with_memory_ends_as_one_that_does_not_ask() -> None:
    """The fastest stays, asked for once a round; a contest without the serial path asks for nothing."""
    asked: list[int] = []
    workspace = Clock({WIDE: 2000, NARROW: 1000, None: 500})
    held = Contest([WIDE, NARROW, None], workspace, has_room=lambda: bool(asked.append(1)) or True)

    for _ in range(contest.MOST_CALLS):
        workspace.call(held)

    assert len(asked) == WARM_TURNS + TIMED_TURNS
    assert held.best is None
    other = Contest([WIDE, NARROW], workspace, has_room=lambda: False)
    for _ in range(contest.MOST_CALLS):
        workspace.call(other)
    assert other.best == NARROW


def test_a_contest_has_room_for_its_turns() -> None:
    """Two readings of the clock a turn, and as many for its gradient, two words each."""
    assert 2 * contest.MOST_WAYS * (WARM_TURNS + TIMED_TURNS) * 4 <= CLOCK_WORDS


def test_few_rows_stay_serial(ranks: list[Any]) -> None:
    """Below half a tile a rank communication is latency alone."""
    assert contenders("ag_gemm", 64, 7168, 8192, ranks[0]) == [None]


def test_a_measurement_waits_for_contests_that_its_own_calls_begin() -> None:
    """On a new workspace there is none before the first call: it counts as settled only after that."""
    calls: list[int] = []

    class Held:
        @property
        def decided(self) -> bool:
            return len(calls) >= 5

    class Fresh:
        planned = Planned()

    def call() -> None:
        calls.append(1)
        Fresh.planned.contests["a shape"] = Held()

    contest.settle(call, Fresh())  # type: ignore[arg-type]  # what it asks of one

    assert len(calls) == 5
