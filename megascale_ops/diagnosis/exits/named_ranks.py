# SPDX-License-Identifier: Apache-2.0
"""Ranks that a victim's words name: which did not come, and whose failure was carried to all others.

Most words of victims name nobody. A few do, for their library has looked:

- Gloo's monitored barrier names who did not come, within its group;
- torch's report of a desync names who did not join the collective that the others are in;
- a store that waits for NCCL's id names the rank that should have put it there;
- distributed checkpoints gather the exceptions of all ranks and raise them in all of them.

Pure: a text in, ranks and a class out.
"""

import re
from typing import NamedTuple

from megascale_ops.diagnosis.exits.last_words import fault_of, row_of_error
from megascale_ops.schema.folding import named

_BARRIER = re.compile(r"Ranks? (\d{1,9}(?:, *\d{1,9})*) failed to pass monitoredBarrier")
_DESYNC = re.compile(r"\[(\d{1,9})\] finished collective #(\d{1,12}), but didn't join collective #(\d{1,12})")
_NO_ID = re.compile(r"retr(?:ie|ei)ving ncclUniqueId from \[(\d{1,9})\][^\n]{0,200}(?:[Tt]imeout|[Tt]imed out)")
# torch/distributed/checkpoint/api.py, CheckpointException: each rank's traceback, its exception last.
_GATHERED = re.compile(r"CheckpointException ranks:dict_keys\(\[(\d{1,9}(?:, \d{1,9})*)\]\)")
_OF_RANK = re.compile(r"Traceback \(most recent call last\): \(RANK (\d{1,9})\)")
_CHAINED = re.compile(r"The above exception was the direct cause|During handling of the above exception")
_RAISED = re.compile(r"^(?:\[rank\d+\]: ?)?([A-Za-z_][\w.]{0,120}): ([^\n]{0,440})", re.MULTILINE)


class Named(NamedTuple):
    """Whom a text names."""

    ranks: tuple[int, ...]
    fault: str
    why: str
    sure: float


def named_in(text: str) -> Named | None:
    """Return the ranks that a victim's words name; None where they name nobody."""
    if gathered := gathered_in(text):
        return gathered
    if found := _BARRIER.search(text):
        ranks = _numbers(found[1])
        # 0.8: the numbers count within the barrier's group, and nothing says that it is the whole job's.
        return Named(ranks, "not_joined", f"{named(ranks)} did not come to a monitored barrier of the others", 0.8)
    if late := _DESYNC.findall(text):
        ranks = tuple(sorted({int(rank) for rank, _, _ in late}))
        why = f"torch's desync report says that {named(ranks)} did not join collective #{late[0][2]} of the others"
        return Named(ranks, "not_joined", why, 0.8)
    if found := _NO_ID.search(text):
        ranks = (int(found[1]),)
        # 0.6: it may itself have waited for a rank that came late to the same group.
        return Named(ranks, "not_joined", f"{named(ranks)} did not give NCCL's id, for which the others waited", 0.6)
    return None


def gathered_in(text: str) -> Named | None:
    """Return whose exceptions a distributed checkpoint has carried to all ranks, and of which class they are."""
    pieces = _OF_RANK.split(text)  # before the first, then a rank's number and its traceback in turn
    listed = _GATHERED.search(text)
    ranks = tuple(sorted({*(_numbers(listed[1]) if listed else ()), *(int(piece) for piece in pieces[1::2])}))
    if not ranks:
        return None
    blocks = [_CHAINED.split(piece)[0] for piece in pieces[2::2]]
    # An exception that was cut away, at either end, is looked for in all that was said.
    raised = [found for block in blocks if (found := _RAISED.search(block))] or [*_RAISED.finditer(text)]
    rows = [row_of_error(found[1], found[2]) for found in raised]
    first = next((at for at, row in enumerate(rows) if fault_of(row) not in ("exception", "peer")), 0)
    fault = fault_of(rows[first]) if rows else "exception"
    hint = f" ({rows[first].hint})" if rows and rows[first].hint else ""
    words = f": {raised[first][1]}: {raised[first][2][:200]}{hint}" if raised else ""
    why = f"{named(ranks)} failed in a distributed checkpoint, which raises it in all ranks{words}"
    return Named(ranks, "exception" if fault in ("peer", "unknown") else fault, why, 0.9)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(number) for number in text.split(",")}))
