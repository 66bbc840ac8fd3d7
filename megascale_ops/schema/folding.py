# SPDX-License-Identifier: Apache-2.0
"""Describe what thousands of ranks do in one line: equal ranks share a label, neighbours share a range.

    0-2,4-7: all_reduce #41; 3: DataLoader

Pure: ranks and labels in, text out.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise

# A line of 24 ranges or 8 labels is what a person still reads; what is left out is counted.
MOST_RANGES = 24
MOST_LABELS = 8
MOST_LISTED = 8


def ranges(ranks: Iterable[int], most: int = MOST_RANGES) -> str:
    """Return ``0-2,4-7`` for numbers in any order; what goes beyond ``most`` ranges is counted."""
    spans: list[tuple[int, int]] = []
    first = last = -2
    for rank in sorted(set(ranks)):
        if rank != last + 1:
            spans.append((first, last))
            first = rank
        last = rank
    return _written([*spans[1:], (first, last)] if last >= 0 else [], most)


def _written(spans: Sequence[tuple[int, int]], most: int) -> str:
    """Return spans of numbers, first and last of each, as text."""
    shown = ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans[:most])
    left = sum(last - first + 1 for first, last in spans[most:])
    return f"{shown} and {left:,} more" if left else shown


def listed(items: Sequence[object], most: int = MOST_LISTED) -> str:
    """Return ``a, b, c``; what goes beyond ``most`` is counted."""
    shown = ", ".join(str(item) for item in items[:most])
    return f"{shown} and {len(items) - most:,} more" if len(items) > most else shown


def named(ranks: Collection[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2,5``."""
    if not ranks:
        return "no rank"
    return f"{'rank' if len(set(ranks)) == 1 else 'ranks'} {ranges(ranks)}"


def named_missing(ranks: Iterable[int], size: int) -> str:
    """Return what :func:`named` does of all the ranks below ``size`` but these, "" for none; any ``size`` is fine."""
    edges = [-1, *sorted({rank for rank in ranks if 0 <= rank < size}), size]
    gaps = [(before + 1, after - 1) for before, after in pairwise(edges) if after - before > 1]
    if not gaps:
        return ""
    return f"{'ranks' if len(gaps) > 1 or gaps[0][0] < gaps[0][1] else 'rank'} {_written(gaps, MOST_RANGES)}"


def no_rank(job: str, size: int, unknown: Iterable[int]) -> str:
    """Return the sentence for ranks that a job of ``size`` ranks does not have."""
    has = f"ranks 0-{size - 1}" if size > 1 else "rank 0 only"
    return f"there is no rank {ranges(unknown, 8)}: job {job} has {has}"


def fold(labels: Mapping[int, str], most: int = MOST_LABELS) -> str:
    """Return ranks folded by label, the most frequent label first."""
    by_label: dict[str, list[int]] = {}
    for rank, label in labels.items():
        by_label.setdefault(label, []).append(rank)
    order = sorted(by_label, key=lambda label: (-len(by_label[label]), min(by_label[label])))
    # The rare labels are the interesting ones: of too many, the most frequent and the rarest are shown.
    if len(order) > most:
        order = [order[0], *order[1 - most :]]
    text = "; ".join(f"{ranges(by_label[label])}: {label}" for label in order)
    left = len(by_label) - len(order)
    return f"{text}; and {left} other places" if left else text
