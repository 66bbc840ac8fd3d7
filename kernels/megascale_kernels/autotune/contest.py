# SPDX-License-Identifier: Apache-2.0
"""Which way serves a shape best, found by its first calls: each way has its turns, timed on the stream, unseen.

The cost model is right to some per cent, and where two ways lie closer than that it guesses. So the first calls of a
shape go around the ways that the model holds for likely, the serial path among them. A kernel of one thread notes the
GPU's clock before and after each; the host waits for nothing. When every way has had its turns, one small all-reduce
gives all ranks the same times, and some calls later, when they have long arrived, the fastest stays.

Before a turn all ranks meet on the stream, for else neither an early nor a late rank's time is the way's. An early one
waits for the late one; a late one finds what the early one has sent, and to it communication costs nothing. How much
differs between ways: our kernels send rows before the peer has begun, NCCL does not. (Without the meeting, by the least
over ranks, contests on two and four H200 kept kernels that were up to 1.14 times as slow as the serial path.) Before
they meet, each rank's stream waits until its host has queued the whole turn, so that the time is the GPU's alone, as in
a filled stream: the serial path takes a host 50 us, and a busy one 200. A turn is as slow as its slowest rank. What ran
before leaves its traces (in the L2 cache, and in what a copy engine still does), so the ways go round in another order
each time, as contenders do in `timing`: always behind the same one, a way's time would be partly that one's.

Where a call's way is also its gradient's (a mixture of experts), both count: the gradient of a turn is timed as the
turn is, whenever it comes, and the times of all are asked for some calls later. If by then one has not come, as where
calls are made without gradients, or there are more layers of a shape than calls to wait, the calls alone decide.

What is decided depends on measurements, so two runs may decide differently, and the ways round differently. For the
same bits in every run a workspace is made with `adaptive=False`, or torch's deterministic mode is set: then the model
decides.

Everything is counted in calls, which all ranks make alike; nothing depends on when a rank's times arrive.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megascale_kernels.autotune.timing import order_of
from megascale_kernels.errors import TileTimeout

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from megascale_kernels.memory.workspace import Workspace

# The first turn compiles, makes communicators and fills caches.
WARM_TURNS = 1
TIMED_TURNS = 5
# Between the last turn and the decision: by then the times have come, unless the host is further ahead of the GPU. Then
# it waits, once for each shape.
PATIENCE_CALLS = 32
# So much the times of one way differ between contests and what is measured later: on two H200 a way that had won by
# 0.7 us of 24 then lost by 1.4. What is not faster than the serial path by more is not taken.
CHANCE, CHANCE_S = 0.01, 1e-6
# The model's choice is taken where no other way is faster by more than this, about what the ratio of two ways scatters
# by between contests (1.3 to 3 % from 0.16 ms on). A turn begins on a GPU that has just waited, at a higher clock than
# in a filled stream, which flatters the way that draws more power: for Llama-3.1-70B at M 4,096 three contests kept
# narrow tiles, and the step was the slower one, 56.1 ms where wide ones took 54.5 (train_fused_2gpu_h200*.txt). Of
# contests drawn anew (contest_noise.txt) two of one shape then differ in 10 % of all shapes instead of 15 %, in 12
# instead of 20 of those that take 0.64 ms or more, for 0.06 and 0.03 % of the time.
MODEL_CHANCE = 0.02
MOST_WAYS = 6  # `CLOCK_WORDS` has room for
MOST_CALLS = MOST_WAYS * (WARM_TURNS + TIMED_TURNS) + 2 * PATIENCE_CALLS + 1  # that a contest takes
POLL_S = 20e-6


Way = TypeVar("Way")


class _Times(NamedTuple):
    """Times of all turns on their way to the host, in nanoseconds, and what tells that they are there."""

    times: Tensor
    arrived: torch.cuda.Event


class Contest(Generic[Way]):
    """The contest of one shape on one workspace.

    Args:
        ways: configurations, None for the serial path; the model's own choice first.
        workspace: whose calls they are.
        has_room: whether every rank has memory for the serial path, and so the same on all; where one has not, the
            contest ends and the model's choice stays. It is asked before each round in which that path has a turn: the
            host's wait then comes before another way each time, as the order goes round. None does not ask.
    """

    def __init__(
        self, ways: Sequence[Way | None], workspace: "Workspace", *, has_room: Callable[[], bool] | None = None
    ) -> None:
        self.ways = list(ways)
        self.best = self.ways[0]
        self.decided = len(self.ways) == 1
        self.turns: dict[Way | None, list[float]] = {}  # seconds of each way's timed turns, once it is decided
        self.seconds: dict[Way | None, float] = {}  # of each way, then
        self._workspace = workspace
        self._has_memory = has_room
        self._turns = len(self.ways) * (WARM_TURNS + TIMED_TURNS)
        self._calls = 0
        self._watched, self._gradients = False, set[int]()  # whether gradients were looked out for; turns whose came
        self._taking_part = False
        self._gate = 0
        self._clock: int | None = None
        self._coming: _Times | None = None

    def begin(self) -> Way | None:
        """The way of the next call; behind it belongs `end`."""
        self._taking_part = not self.decided and not torch.cuda.is_current_stream_capturing() and self._has_room()
        if not self._taking_part:
            return self.best
        turn = self._calls
        if turn < self._turns:
            if turn % len(self.ways) == 0 and None in self.ways and self._has_memory and not self._has_memory():
                self._give_up()
                return self.best
            self._gate = self._workspace.hold()
            self._workspace.meet()
            self._note(2 * turn)
            return order_of(self.ways, turn // len(self.ways))[turn % len(self.ways)]
        if turn == self._due + PATIENCE_CALLS:
            self._decide()
        return self.best

    def end(self, node: "Node | None" = None) -> None:
        """The call that `begin` began is queued.

        Args:
            node: computes the call's gradient, which counts as well; None where there will be none, or no matter.
        """
        if not self._taking_part:
            return
        if self._calls < self._turns:
            self._note(2 * self._calls + 1)
            self._workspace.release(self._gate)
            if node is not None:
                self._watch(node, self._calls)
        self._calls += 1
        if self._calls == self._due:
            self._exchange()

    def _give_up(self) -> None:
        """Undecided, stay with the model's choice; gradients of turns are timed no more."""
        self._taking_part, self.decided = False, True
        if self._clock is not None:
            self._workspace.planned.free_clocks.append(self._clock)
            self._clock = None

    @property
    def _due(self) -> int:
        """The calls after which times are asked for: gradients that were looked out for have had time to come."""
        return self._turns + PATIENCE_CALLS * self._watched

    def _watch(self, node: "Node", turn: int) -> None:
        """Time a turn's gradient, as the turn was: all ranks begin it together, queued whole."""
        self._watched = True
        held: list[int] = []
        place = 2 * (self._turns + turn)

        def before(*_: object) -> None:
            if self._clock is None or turn in self._gradients or torch.cuda.is_current_stream_capturing():
                return
            held.append(self._workspace.hold())
            self._workspace.meet()
            self._note(place)

        def after(*_: object) -> None:
            if not held:
                return
            if self._clock is not None:
                self._note(place + 1)
                self._gradients.add(turn)
            self._workspace.release(held.pop())

        node.register_prehook(before)
        node.register_hook(after)

    def _has_room(self) -> bool:
        """Whether the GPU's clock can be noted: so many contests are held at a time, the others wait for a place."""
        free = self._workspace.planned.free_clocks
        if self._clock is None and self._calls == 0 and free:
            self._clock = free.pop()
        return self._clock is not None or self._calls > 0

    def _note(self, place: int) -> None:
        """Have the GPU note its clock behind what is on the stream so far."""
        assert self._clock is not None  # or the call would take no part
        self._workspace.note_time(self._workspace.clocks[self._clock, 2 * place : 2 * place + 1])

    def _exchange(self) -> None:
        """Queue what gives all ranks the same times, and what brings them to the host."""
        assert self._clock is not None  # every turn noted two readings
        halves = 2 if len(self._gradients) == self._turns else 1
        words = self._workspace.clocks[self._clock, : halves * 4 * self._turns]
        noted = words.view(halves, self._turns, 2, 2)[..., 0]
        took = (noted[..., 1] - noted[..., 0]).sum(0)
        self._workspace.planned.free_clocks.append(self._clock)
        self._clock = None
        dist.all_reduce(took, op=dist.ReduceOp.MAX, group=self._workspace.group)
        times = torch.empty(took.shape, dtype=took.dtype, pin_memory=True)
        times.copy_(took, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch gives it no types
        arrived.record()
        self._coming = _Times(times, arrived)

    def _decide(self) -> None:
        """Take the fastest of the ways, or what is as good (`best_of`).

        Raises:
            TileTimeout: the other ranks' times have not come.
        """
        assert self._coming is not None
        coming, workspace = self._coming, self._workspace
        deadline = time.monotonic() + 2 * workspace.deadline_s
        while not coming.arrived.query():  # type: ignore[no-untyped-call]  # torch gives it no types
            if time.monotonic() > deadline:
                raise TileTimeout(
                    f"rank {workspace.rank}: waited {2 * workspace.deadline_s:g} s for the GPU to end the calls whose "
                    "times decide how a shape runs: a rank has not made them",
                    rank=workspace.rank,
                    operator="all_reduce",
                )
            time.sleep(POLL_S)
        took = turns_of(coming.times.tolist(), len(self.ways))
        self.turns = {way: [one / 1e9 for one in turns] for way, turns in zip(self.ways, took, strict=True)}
        self.seconds = compared(self.turns)
        self.best = best_of(self.seconds)
        self.decided = True
        self._coming = None


def is_settled(workspace: "Workspace") -> bool:
    """Whether every shape that was called on a workspace has found its way; all ranks come to the same."""
    return all(held is None or held.decided for held in workspace.planned.contests.values())


def settle(call: Callable[[], object], workspace: "Workspace") -> None:
    """Make a call as often as its shapes need to find their ways: a measurement that follows is of these. Collective.

    Args:
        call: makes each of its operators' calls at least once. Before the first of a shape there is no contest of it,
            so at least one is made.
        workspace: whose operators they are.
    """
    for _ in range(MOST_CALLS):
        call()
        if is_settled(workspace):
            return


def compared(turns: Mapping[Way | None, Sequence[float]]) -> dict[Way | None, float]:
    """Seconds of each way: the median of its share of each round, times what a round's median way takes.

    In a filled stream of long calls the GPU's clock falls while a contest goes on (on an H200 from 2.68 to 3.05 ms for
    one way, from 2.87 to 3.05 for another). The ways of a round see about the same clock; medians over rounds would
    compare one way's turn before such a step with another's behind it.

    Args:
        turns: seconds of each way's turns, round by round.
    """
    rounds = [median(taken) for taken in zip(*turns.values(), strict=True)]
    usual_s = median(rounds)
    return {
        way: usual_s * median(one / round_s for one, round_s in zip(taken, rounds, strict=True))
        for way, taken in turns.items()
    }


def best_of(seconds: Mapping[Way | None, float]) -> Way | None:
    """The fastest way; the serial path, else the model's choice, where nothing is faster by more than chance.

    Args:
        seconds: of each way, None for the serial path; the model's choice first.
    """
    best = min(seconds, key=seconds.__getitem__)
    first = next(iter(seconds))
    kept = first if first is not None and seconds[first] <= (1 + MODEL_CHANCE) * seconds[best] else best
    # No slower than the fastest by more than chance, or no slower than what would be kept for it.
    as_good_s = max((1 + CHANCE) * seconds[best] + CHANCE_S, seconds[kept])
    return None if seconds.get(None, math.inf) <= as_good_s else kept


def turns_of(took: Sequence[int], ways: int) -> list[list[int]]:
    """The timed turns of each way, which are all but the first `WARM_TURNS`.

    Args:
        took: of each turn, round by round, in each of them as `order_of` has it.
        ways: how many there are.
    """
    found: list[list[int]] = [[] for _ in range(ways)]
    for number in range(WARM_TURNS, len(took) // ways):
        for place, way in enumerate(order_of(range(ways), number)):
            found[way].append(took[number * ways + place])
    return found
