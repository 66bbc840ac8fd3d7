# SPDX-License-Identifier: Apache-2.0
"""Tell of each rank in a heartbeat only what has changed, and of ranks that changed alike only once. Pure.

Of 1,024 ranks that train nearly all go on in the same way: a heartbeat of eight has 3 kB, and what is new in it fits
into a hundred bytes. A folded heartbeat has ``folded`` in place of each job's ``ranks``: pairs of a rank and what is
different from the same agent's heartbeat before (of a rank that is new, from the rank beside it), and numbers, which
say that so many ranks more, by their numbers in order, differ in the same way.

Lines are handed in and given back in order, since each leans on those before.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from megascale_ops.errors import UsageError
from megascale_ops.foreign import UNREADABLE
from megascale_ops.schema.messages import MAX_BODY_BYTES

Rank = dict[str, Any]

_GONE = "-"  # in a difference: keys that are there no more
_FOLDED = "folded"
# 4: a controller takes no larger heartbeat; several that were told as one have more.
_MOST_BYTES = 4 * MAX_BODY_BYTES
_BEAT = b'{"kind":"heartbeat"'
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class Folding:
    """What was told of each agent's ranks so far; the same one folds all lines of a recording, or unfolds all."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str], dict[int, Rank]] = {}

    def fold(self, line: bytes) -> bytes:
        """Return a line with less in it; what is no heartbeat stays as it is."""
        if not line.startswith(_BEAT):
            return line
        entry = _decode(line)
        told = []
        reports = entry["m"].get("jobs", ())
        if len({report["job"] for report in reports}) < len(reports):  # a job is told twice
            return line
        try:
            for report in reports:
                known = self._of(entry["m"], report)
                listed = report.pop("ranks", ())
                ranks = {rank.pop("rank", 0): rank for rank in listed}
                if len(ranks) < len(listed):  # one is told twice
                    return line
                told.append((known, ranks, report, _folded(known, ranks)))
        except _AmbiguousError:
            return line
        for known, ranks, report, folded in told:
            known.update(ranks)
            if folded:
                report[_FOLDED] = folded
        return _encode(entry)

    def unfold(self, line: bytes, name: str) -> bytes:
        """Return a line as it was.

        Raises:
            UsageError: it can't be, or is too large; the message begins with ``name``.
        """
        if not line.startswith(_BEAT):
            return line
        try:
            entry = _decode(line)
            for report in entry["m"].get("jobs", ()):
                if _FOLDED in report:
                    report["ranks"] = _unfolded(self._of(entry["m"], report), report.pop(_FOLDED))
        except (*UNREADABLE, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(f"{name} is no entry of a recording: what was folded in it can't be unfolded") from error
        return _encode(entry)

    def _of(self, heartbeat: dict[str, Any], report: dict[str, Any]) -> dict[int, Rank]:
        return self._known.setdefault((heartbeat["node"], heartbeat["agent_id"], report["job"]), {})


class _AmbiguousError(Exception):
    """A rank's report has a key that stands for something else in a difference."""


def _folded(known: Mapping[int, Rank], ranks: Mapping[int, Rank]) -> list[Any]:
    told: list[Any] = []
    beside: Rank = {}
    last: tuple[int, Rank] | None = None
    for number, rank in ranks.items():
        changed = _difference(known.get(number, beside), rank)
        if last != (number - 1, changed):
            told.append([number, changed])
        elif isinstance(told[-1], int):
            told[-1] += 1
        else:
            told.append(1)
        last, beside = (number, changed), rank
    return told


def _unfolded(known: dict[int, Rank], told: Iterable[Any]) -> list[Rank]:
    """Return the ranks, and know them from now on."""
    ranks: list[Rank] = []
    beside: Rank = {}
    changed: Rank = {}
    following, left_bytes = 0, _MOST_BYTES
    for one in told:
        if isinstance(one, int):
            first, count = following, one
        else:
            (first, changed), count = one, 1
        for number in range(first, first + count):
            beside = known[number] = _changed(known.get(number, beside), changed)
            left_bytes -= len(_encode(beside))
            if left_bytes < 0:
                raise ValueError("a heartbeat is too large")
            ranks.append({"rank": number, **beside})
        following = first + count
    return ranks


def _difference(before: Rank, after: Rank) -> Rank:
    """Return what leads from one to the other."""
    if _GONE in after:
        raise _AmbiguousError
    changed: Rank = {}
    for key, value in after.items():
        old = before.get(key)
        if key not in before or type(old) is not type(value):
            changed[key] = value
        elif isinstance(value, dict) and isinstance(old, dict):
            inner = _difference(old, value)
            if inner:
                changed[key] = inner
        elif old != value:
            changed[key] = value
    gone = [key for key in before if key not in after]
    if gone:
        changed[_GONE] = gone
    return changed


def _changed(before: Rank, changed: Rank) -> Rank:
    """Return what a difference leads to; neither of the two is changed."""
    if not changed:
        return before
    gone = changed.get(_GONE, ())
    after = {key: value for key, value in before.items() if key not in gone}
    for key, value in changed.items():
        if key == _GONE:
            continue
        old = after.get(key)
        after[key] = _changed(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
    return after
