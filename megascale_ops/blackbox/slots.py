# SPDX-License-Identifier: Apache-2.0
"""Read whole records out of a ring that somebody else may be writing at this very moment.

Pure: it is given a function that copies bytes, and answers with records. The rule is to copy everything twice, one
copy after the other, and to believe a slot whose two copies are equal and whose sequence is even. Why that suffices:

- Suppose the first copy holds a piece of a *later* record. Its writer had stored the odd sequence before that piece,
  so the second copy, made afterwards, shows the odd sequence or a newer one: no even sequence that fits the first.
- Suppose the first copy is of a record that was still being written, and caught only its even sequence (a copy has
  no order of its own). Then the second copy was made after the record was whole, so it differs where the first lacked
  a piece; where it does not differ nothing was lacking.
- Suppose the second copy holds a piece of a later record. If the first copy holds the same piece, see the first
  case; if not, the two differ.

A writer that was killed leaves an odd sequence in one slot for ever; the slot before it stays whole.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megascale_ops.blackbox.layout import Ring

Read = Callable[[int, int], bytes]  # (offset, length) -> a copy, shorter where the file ends

# A reader takes about 2 us for its two copies; a writer at full speed needs as long for one lap of four slots. Eight
# looks lose only against a writer that does nothing but write, and then the last record known still stands.
LOOKS = 8


@dataclass(frozen=True, slots=True)
class Slot:
    """A whole record: the ``number``-th of its ring (from 0), ``fields`` without the sequence."""

    number: int
    fields: tuple[Any, ...]


def whole_slots(ring: Ring, read: Read, first: int = 0, count: int = -1) -> list[Slot]:
    """Return the whole records of ``count`` slots from slot ``first`` on (default: all), oldest first."""
    once, again = _twice(ring, read, first, ring.slots - first if count < 0 else count)
    return whole_in(ring, once, again, first)


def whole_in(ring: Ring, once: bytes, again: bytes, first: int = 0) -> list[Slot]:
    """Return the records that two copies of slots ``first``, ``first + 1``, ... agree upon, oldest first."""
    found = []
    stride = ring.stride
    still = once == again
    for index in range(min(len(once), len(again)) // stride):
        at = index * stride
        if not still and once[at : at + stride] != again[at : at + stride]:
            continue
        sequence, *fields = ring.codec.unpack_from(again, at)
        number = sequence // 2 - 1
        # A number that does not belong into this slot was not written by a writer of ours: a garbage file.
        if sequence and sequence % 2 == 0 and number % ring.slots == first + index:
            found.append(Slot(number, tuple(fields)))
    found.sort(key=_number)
    return found


def newest(ring: Ring, read: Read) -> Slot | None:
    """Return the newest whole record, or None when there was none in ``LOOKS`` looks."""
    for _ in range(LOOKS):
        once, again = _twice(ring, read, 0, ring.slots)
        found = whole_in(ring, once, again)
        if found:
            return found[-1]
        if once == again:  # nobody is writing, so another look shows nothing else
            return None
    return None


def _twice(ring: Ring, read: Read, first: int, count: int) -> tuple[bytes, bytes]:
    """Copy ``count`` slots, and then copy them again."""
    start, length = ring.offset + first * ring.stride, count * ring.stride
    return read(start, length), read(start, length)


def _number(slot: Slot) -> int:
    """Return what slots are ordered by."""
    return slot.number
