# SPDX-License-Identifier: Apache-2.0
"""Read a pickled flight recorder dump without running anything that stands in it.

Torch writes dumps in two forms: JSON, and a pickle (the files that its watchdog leaves, and the only form before 2.5).
A user that may write the one may write the other, and unpickling runs what the bytes name, or fills the memory with
three of them. So each operation is looked at first: torch's own dumps hold dicts, lists, tuples, texts and numbers, of
which a pickle needs two dozen harmless operations. And what is small as bytes may be large as values (one list that
stands in itself a million times), so these are counted while they are copied.
"""

import pickle
import pickletools
from typing import Any

import msgspec

# 4 million: a full ring of 20,000 entries with 40 values each has 800,000; copied in two seconds.
MOST_VALUES = 4_000_000
# What is no part of a judgement and most of a dump: sixty frames an entry.
_LEFT_OUT = frozenset({"frames", "thread_name", "thread_id"})
_PUTS = frozenset({"BINPUT", "LONG_BINPUT"})
_HARMLESS = _PUTS | frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET"),
        *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *("BINUNICODE", "SHORT_BINUNICODE", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "APPEND", "APPENDS"),
        *("SETITEM", "SETITEMS", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    )
)


def is_pickle(dump: bytes) -> bool:
    """Return whether a dump is a pickle: since protocol 2 each begins with a byte that no text begins with."""
    return dump[:1] == b"\x80"


def as_json(dump: bytes) -> bytes:
    """Return a pickled dump as JSON, without stacks and names of threads.

    Raises:
        ValueError: it is no pickle of plain values, or has too many.
    """
    try:
        _check(dump)
        found = pickle.loads(dump)  # noqa: S301  of operations that name nothing
    except Exception as error:  # a broken pickle raises whatever its bytes lead to
        raise ValueError(f"not a flight recorder dump: {error or type(error).__name__}") from error
    left = [MOST_VALUES]
    try:
        return msgspec.json.encode(_plain(found, left))
    except RecursionError as error:
        raise ValueError("not a flight recorder dump: it stands in itself") from error


def _check(dump: bytes) -> None:
    """Refuse any operation that is not known to be harmless.

    Every pickle writer takes places in the memo in order; one far beyond would have
    all up to there allocated.
    """
    puts = 0
    for operation, argument, _ in pickletools.genops(dump):
        if operation.name not in _HARMLESS:
            raise ValueError(f"it has a {operation.name}, which no flight recorder's dump has")
        if operation.name in _PUTS:
            puts += 1
            if (argument or 0) > 2 * puts + 1024:
                raise ValueError(f"it remembers its value {puts} as number {argument}")


def _plain(value: Any, left: list[int]) -> Any:  # noqa: ANN401  whatever a pickle holds
    """Copy dicts, lists and tuples of plain values; a number beyond 64 bits becomes text."""
    left[0] -= 1
    if left[0] < 0:
        raise ValueError(f"not a flight recorder dump: it has more than {MOST_VALUES} values")
    if isinstance(value, dict):
        return {
            str(key): _plain(one, left)
            for key, one in value.items()
            if isinstance(key, str | int) and key not in _LEFT_OUT
        }
    if isinstance(value, list | tuple):
        return [_plain(one, left) for one in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return hex(value)[:40]
    return value
