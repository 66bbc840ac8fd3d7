# SPDX-License-Identifier: Apache-2.0
"""The same kernel on many ranks: which rank needs longer for it than its equals. Pure.

Equals are ranks of one pipeline stage that call the kernel equally often. One rank's median is held against the median
of the others' medians. It stands out when three things are true together:

- it is above the others by ``MARGIN``, and by six times the others' own spread (median deviation x 1.4826: one rank
  in a hundred million by chance, were it noise of a bell's shape);
- so is its lower quartile. A process that loses its core now and then has slow calls and fast ones, a slow chip only
  slow ones;
- it costs: the calls' excess is at least ``LEAST_SHARE`` of the rank's profiled time.

Collectives are shown and never judged: they end together, so the rank that others wait for has the *shortest* ones.
Of two ranks neither is named: which of them is as it should be is not known.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from statistics import median
from typing import NamedTuple

import msgspec

from megascale_ops.schema.folding import named
from megascale_ops.schema.kernels import KernelTime, ProfileRank, ProfileRow, RankKernels

# A GPU's kernels of one size take the same time on equal GPUs, within 3 %. Operators on a CPU share caches and cores
# with whatever else runs: 30 % between equal ranks is nothing.
MARGIN = {"gpu": 0.08, "cpu": 0.5}
LEAST_SHARE = {"gpu": 0.002, "cpu": 0.01}
# 2 calls suffice on a GPU; on a CPU the machine may have been busy twice, hardly four times.
LEAST_CALLS = {"gpu": 2, "cpu": 4}
SPREADS = 6.0
_MAD_TO_SIGMA = 1.4826
# With three, two agree against one.
LEAST_RANKS = 3
# Among so few one that is far off widens the spread of all, and would hide itself: it is left out of it.
_FEW_RANKS = 16
# Calls may differ by a twentieth: one step more or less of something that happens now and then.
_CALLS_APART = 0.05
# Three kernels that have two thirds of the time that could be compared: it is the chip and not a kernel.
_CHIP_SHARE, _CHIP_KERNELS = 2 / 3, 3
# 2,000 rows are 300 KB; what stands out comes first.
MOST_ROWS = 2000
_WAITING = ("nccl", "gloo:", "c10d::", "mpi:", "ucc:", "record_param_comms", "nvshmem", "rccl")


class Found(NamedTuple):
    """The comparison."""

    verdict: str
    ranks: dict[int, ProfileRank]
    rows: tuple[ProfileRow, ...]
    left_out: int


def is_waiting(kernel: str) -> bool:
    """Return whether a kernel's time is mostly that of others: a collective, a send, a receive."""
    return kernel.lower().startswith(_WAITING)


def compare(found: Mapping[int, RankKernels], groups: Mapping[int, int]) -> Found:
    """Compare ranks.

    Args:
        found: by rank; those that answered.
        groups: by rank, the class of equals (the pipeline stage); a rank that is missing is in group -1.
    """
    device = next((kernels.device for kernels in found.values()), "cpu")
    members: dict[tuple[int, str], dict[int, KernelTime]] = {}
    for rank, kernels in found.items():
        for row in kernels.kernels:
            members.setdefault((groups.get(rank, -1), row.name), {})[rank] = row
    rows = [row for (_, name), by_rank in members.items() for row in _rows(name, by_rank, found, device)]
    rows.sort(key=lambda row: (not row.is_slow, -row.total_us, row.rank))
    ranks = _ranks(found, rows, device)
    return Found(_verdict(ranks, rows, device), ranks, tuple(rows[:MOST_ROWS]), max(0, len(rows) - MOST_ROWS))


def _rows(
    name: str, by_rank: Mapping[int, KernelTime], found: Mapping[int, RankKernels], device: str
) -> Iterable[ProfileRow]:
    """Yield one kernel's row of each rank of a group."""
    usual_calls = median(row.calls for row in by_rank.values())
    peers = {rank: row for rank, row in by_rank.items() if abs(row.calls - usual_calls) <= _CALLS_APART * usual_calls}
    medians = sorted(row.median_us for row in peers.values())
    lows = sorted(row.low_us for row in peers.values())
    spread_us = _spread(medians)
    for rank, row in by_rank.items():
        span_us = found[rank].span_s * 1e6
        made = ProfileRow(
            rank, name, row.calls, row.median_us, row.total_us, _share(row.total_us, span_us),
            is_waiting=is_waiting(name),
        )  # fmt: skip
        others_us = _median_without(medians, row.median_us) if rank in peers and len(peers) > 1 else 0.0
        if not others_us:
            yield made
            continue
        if len(medians) <= _FEW_RANKS:
            spread_us = _spread([us for index, us in enumerate(medians) if index != medians.index(row.median_us)])
        ratio = row.median_us / others_us
        excess = _share(row.calls * (row.median_us - others_us), span_us)
        is_slow = (
            not made.is_waiting
            and len(peers) >= LEAST_RANKS
            and row.calls >= LEAST_CALLS[device]
            and ratio - 1 > max(MARGIN[device], SPREADS * spread_us / others_us)
            and row.low_us > (1 + MARGIN[device]) * _median_without(lows, row.low_us)
            and excess >= LEAST_SHARE[device]
        )
        yield msgspec.structs.replace(made, ratio=round(ratio, 3), others_us=round(others_us, 3), is_slow=is_slow)


def _spread(values: list[float]) -> float:
    """Return how far values lie apart, as a standard deviation that outliers do not move."""
    if not values:
        return 0.0
    middle = median(values)
    return _MAD_TO_SIGMA * median(abs(value - middle) for value in values)


def _median_without(ordered: list[float], one: float) -> float:
    """Return the median of all but ``one`` of them."""
    left = len(ordered) - 1
    skip = bisect_left(ordered, one)
    at = [n + (n >= skip) for n in ((left - 1) // 2, left // 2)]
    return (ordered[at[0]] + ordered[at[1]]) / 2


def _ranks(found: Mapping[int, RankKernels], rows: list[ProfileRow], device: str) -> dict[int, ProfileRank]:
    """Sum up each rank: all its kernels together beside what its equals need for them."""
    own_us: dict[int, float] = dict.fromkeys(found, 0.0)
    others_us: dict[int, float] = dict.fromkeys(found, 0.0)
    slow_us: dict[int, float] = dict.fromkeys(found, 0.0)
    slow_kernels: dict[int, int] = dict.fromkeys(found, 0)
    for row in rows:
        if row.others_us and not row.is_waiting and row.calls >= LEAST_CALLS[device]:
            own_us[row.rank] += row.calls * row.median_us
            others_us[row.rank] += row.calls * row.others_us
            slow_us[row.rank] += row.calls * row.median_us * row.is_slow
            slow_kernels[row.rank] += row.is_slow
    return {
        rank: ProfileRank(
            rank,
            span_s=kernels.span_s,
            own_s=kernels.own_s,
            ratio=round(own_us[rank] / others_us[rank], 3) if others_us[rank] else 0.0,
            is_slow=slow_kernels[rank] >= _CHIP_KERNELS and slow_us[rank] > _CHIP_SHARE * own_us[rank],
        )
        for rank, kernels in found.items()
    }


def _verdict(ranks: Mapping[int, ProfileRank], rows: list[ProfileRow], device: str) -> str:
    """Return the ranks that stand out, in sentences."""
    thing = "kernel" if device == "gpu" else "operator"
    slow: dict[int, list[ProfileRow]] = {}
    for row in rows:
        if row.is_slow:
            slow.setdefault(row.rank, []).append(row)
    if not slow:
        if not any(row.ratio for row in rows):
            if len(ranks) == 1:
                return f"nothing can be compared: one rank alone was looked at, and others' {thing}s show who is slower"
            return f"no {thing} was run equally often by several ranks: nothing can be compared"
        few = len(ranks) < LEAST_RANKS
        why = f": of fewer than {LEAST_RANKS} ranks none can be named" if few else ""
        return f"no rank stands out in any {thing}{why}"
    sentences = []
    for rank, of_rank in sorted(slow.items(), key=lambda item: -max(row.share for row in item[1]))[:8]:
        first = max(of_rank, key=lambda row: row.calls * (row.median_us - row.others_us))
        text = f"rank {rank} runs {first.kernel} {first.ratio:.2f} times as slowly as its equals"
        if ranks[rank].is_slow:
            what = "GPU" if device == "gpu" else "processor"
            text += f", and its other {thing}s as well ({ranks[rank].ratio:.2f} times on the whole): its {what} is slow"
        elif len(of_rank) > 1:
            text += f", and {len(of_rank) - 1} other {thing}{'s' if len(of_rank) > 2 else ''}"
        sentences.append(text)
    if len(slow) > 8:
        sentences.append(f"so do {named(sorted(slow)[8:])}" if len(slow) < 64 else f"so do {len(slow) - 8:,} more")
    return "; ".join(sentences)


def _share(part_us: float, span_us: float) -> float:
    return round(part_us / span_us, 5) if span_us > 0 else 0.0
