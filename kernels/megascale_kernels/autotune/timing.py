# SPDX-License-Identifier: Apache-2.0
"""Time several ways to do the same thing so that the numbers may be compared.

A GPU's clock wanders with its temperature and power, so contenders take turns. What ran before leaves its traces in the
L2 cache (60 MB: the weight of a small product may stay there), so the order is another one in each round, and after as
many rounds as there are contenders each has followed each other one once (Williams, 1949). Before each, a sleep on the
GPU lets the host queue up everything that follows, and a tiny all-reduce lets all ranks begin together; events around
the call give its time. A collective is as slow as its slowest rank, so each round counts with the maximum over ranks,
and a contender with the median of its rounds.

One rank's failure must not leave the others in a collective: a contender that fails here is no longer called here, but
the meetings go on, and in the end all ranks learn of it.
"""

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

SLEEP_CYCLES = 1_500_000  # 0.8 ms at 1.8 GHz: more than the host needs to queue up a launch with a dozen copies
WARM_ROUNDS = 2  # the first compiles, the second fills caches

Call = Callable[[], object]
Contender = TypeVar("Contender")


class Measured(NamedTuple):
    """What came out.

    Attributes:
        seconds: per name the median over rounds of the maximum over ranks; infinite when it failed on any rank.
        errors: per name what this rank saw go wrong.
    """

    seconds: dict[str, float]
    errors: dict[str, str]


def measure(
    calls: dict[str, Call],
    *,
    rounds: int,
    group: dist.ProcessGroup | None,
    check: Call | None = None,
    risky: Sequence[str] = (),
    ends: int = 0,
    in_a_row: int = 1,
) -> Measured:
    """Time calls in turn, on the current stream of the current device. Collective.

    Args:
        calls: name and call; a call must queue its work on the current stream and not wait for it.
        rounds: how many times each is timed, after `WARM_ROUNDS`.
        group: the ranks that take part.
        check: called after each phase; it waits for the device and raises the kernels' error.
        risky: the names that `check` covers; when it raises they all count as failed.
        ends: so many of the first and of the last calls keep their places in every round.
        in_a_row: calls of a turn, back to back, of which the mean counts: with many the GPU gets as warm, and its clock
            as low, as in a filled stream.
    """
    names = list(calls)
    inner = slice(ends, len(names) - ends)
    tiny = torch.zeros(1, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    errors: dict[str, str] = {}
    for phase in (range(WARM_ROUNDS), range(rounds)):
        for turn in phase:
            for name in [*names[: inner.start], *order_of(names[inner], turn), *names[inner.stop :]]:
                torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001 - it has no public name
                dist.all_reduce(tiny, group=group)
                begin, end = _event(), _event()
                begin.record()
                for _ in range(in_a_row):
                    if name not in errors:
                        _attempt(calls[name], [name], errors)
                end.record()
                events[name].append((begin, end))
        torch.cuda.synchronize()
        if check is not None:
            _attempt(check, [name for name in calls if name in risky], errors)
    times = [
        [begin.elapsed_time(end) / 1e3 / in_a_row for begin, end in pairs[WARM_ROUNDS:]] for pairs in events.values()
    ]
    table = torch.tensor(times, dtype=torch.float64, device="cuda")
    for row, name in enumerate(calls):
        if name in errors:
            table[row] = math.inf
    dist.all_reduce(table, op=dist.ReduceOp.MAX, group=group)
    return Measured({name: median(row) for name, row in zip(calls, table.tolist(), strict=True)}, errors)


def order_of(names: Sequence[Contender], turn: int) -> list[Contender]:
    """The order of one turn: over `len(names)` turns (twice as many for an odd number) each follows each other alike.

    Row `turn` of a Williams square, 0 1 n-1 2 n-2 .. shifted by one a turn; an odd number needs the mirror image too.
    """
    number = len(names)
    zigzag = [place // 2 + 1 if place % 2 else -(place // 2) for place in range(number)]
    order = [names[(place + turn) % number] for place in zigzag]
    return order[::-1] if number % 2 and turn // number % 2 else order


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types here


def _attempt(call: Call, names: Sequence[str], errors: dict[str, str]) -> None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - a contender may fail in any way; it is reported to the caller by name
        for name in names:
            errors.setdefault(name, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
