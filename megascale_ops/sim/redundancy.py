# SPDX-License-Identifier: Apache-2.0
"""Coded computation in the simulator: what a step takes when replicas do more work, and some are not waited for.

The workers of the code are the data-parallel replicas: a replica answers when the slowest of its ranks is done. A
replica that is late goes on with what it had begun and takes the newest step when it is done, as `coded.master` has it;
so does one that has begun a message that is needed no more. What is sent takes as long as without a code, divided by
the pieces; that a master takes all answers, where an all-reduce divides that among the ranks, is left out, in favour
of the code.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megascale_ops.coded.code import check, cluster_sizes
from megascale_ops.errors import UsageError

Fields = npt.NDArray[np.float64]
# `coded.worker.LINGER_SHARE`: what a worker waits before it begins another message.
_LINGER = 0.25


class Redundancy(NamedTuple):
    """A code of the simulated job: ``messages`` is 1 but for ``multi``."""

    stragglers: int
    kind: str
    pieces: int
    messages: int

    @property
    def load(self) -> int:
        """Return how many times the work of an uncoded replica each does at most."""
        return self.stragglers + self.pieces

    def close(self, once_s: Fields, busy_s: Fields) -> tuple[float, Fields]:
        """Return when a step ends, and for how long after that each replica is still busy with it or an older one.

        Args:
            once_s: by replica, its share of the work without a code, (n,).
            busy_s: what the last call returned, zeros at first, (n,).
        """
        if self.kind == "multi":
            return self._close_multi(once_s, busy_s)
        done_s = busy_s + self.load * once_s
        end_s, first = 0.0, 0
        clustered = self.kind in ("fractional", "clustered")
        for size in cluster_sizes(len(once_s), self.load) if clustered else [len(once_s)]:
            group = done_s[first : first + size]
            # A cluster of s + 1 that all compute the same needs one answer; any other all but s.
            end_s = max(end_s, float(np.partition(group, size - self.stragglers - 1)[size - self.stragglers - 1]))
            first += size
        begun = busy_s < end_s
        return end_s, np.maximum(0.0, np.where(begun, done_s, busy_s) - end_s)

    def _close_multi(self, once_s: Fields, busy_s: Fields) -> tuple[float, Fields]:
        """The same where a replica answers in several messages: a part is there when the first who has it is done."""
        count, width = len(once_s), self.load // self.messages
        parts = count // width
        numbers = np.arange(self.messages)
        # (n, c): when each message of each replica is done, if nothing ends it before.
        done_s = busy_s[:, None] + width * once_s[:, None] * (1.0 + numbers * (1.0 + _LINGER))
        held = (np.arange(count)[:, None] + numbers) % parts
        first_s = np.full(parts, np.inf)
        np.minimum.at(first_s, held, done_s)
        end_s = float(first_s.max())
        begun_s = done_s - width * once_s[:, None]
        at_work = (begun_s < end_s) & (done_s > end_s)
        left_s = np.where(at_work, done_s - end_s, 0.0).max(axis=1)
        return end_s, np.maximum(left_s, busy_s - end_s)


def read_code(text: str, replicas: int) -> Redundancy | None:
    """Return the code that a setting names, ``s=1,kind=cyclic``, also with ``pieces`` and ``messages``; "": none.

    Raises:
        UsageError: it can't be read, or there is no such code of so many replicas.
    """
    if not text:
        return None
    values = {"s": "1", "kind": "clustered", "pieces": "1", "messages": "0"}
    for part in text.split(","):
        name, found, value = (word.strip() for word in part.partition("="))
        if not found or name not in values:
            raise UsageError(f"coded {text!r} can't be read at {part!r}: give s=1,kind=cyclic, also pieces=, messages=")
        values[name] = value
    try:
        stragglers, pieces, messages = (int(values[name]) for name in ("s", "pieces", "messages"))
    except ValueError:
        raise UsageError(f"coded {text!r} can't be read: s, pieces and messages are whole numbers") from None
    kind = values["kind"]
    check(replicas, stragglers, kind, pieces, messages)
    return Redundancy(stragglers, kind, pieces, (messages or stragglers + 1) if kind == "multi" else 1)
