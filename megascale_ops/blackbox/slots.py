# SPDX-License-Identifier: Apache-2.0
"""Read whole records out of a ring that another process may be writing at this very moment.

Pure: it is given a function that copies bytes, and answers with records. The rule is to copy everything twice, one
copy after the other, and to believe a slot whose two copies are equal and whose sequence is even. Why that suffices:

- Suppose the first copy holds a piece of a *later* record. Its writer had stored the odd sequence before that piece,
  so the second copy, made afterwards, shows the odd sequence or a newer one: no even sequence that fits the first.
- Suppose the first copy is of a record that was still being written, and caught only its even sequence (a copy has
  no order of its own). Then the second copy was made after the record was whole, so it differs where the first lacked
  a piece; where it does not differ nothing was lacking.
- Suppose the second copy holds a piece of a later record. If the first copy holds the same piece, see the first
  case; if not, the two differ.

"Later" is also the same record written again: that counts in the upper bits of its sequence, so its even number is a
new one. Only an aligned word that is stored alone (the end of a collective of Python's ring) may change without.

A writer that was killed leaves an odd sequence in one slot for ever; the slot before it stays whole.
"""

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from megascale_ops.blackbox.layout import NUMBER_BITS, Ring

Read = Callable[[int, int], bytes]  # (offset, length) -> a copy, shorter where the file ends

# A reader takes about 2 us for its two copies; a writer at full speed needs as long for one lap of four slots. Eight
# looks lose only against a writer that does nothing but write, and then the last record read still stands.
LOOKS = 8

_NUMBER = (1 << NUMBER_BITS) - 1
_number = itemgetter(0)  # what slots are ordered by
# 64 slots (8 KB) a copy: a second of most jobs. A record that is still being written when 64 newer ones are whole was
# given up by its writer; it must not stand in the way of the others.
CHUNK = 64


class Slot(NamedTuple):
    """A whole record: the ``number``-th of its ring (from 0), ``fields`` without the sequence."""

    number: int
    fields: tuple[Any, ...]


def whole_slots(ring: Ring, read: Read, first: int = 0, count: int = -1) -> list[Slot]:
    """Return the whole records of ``count`` slots from slot ``first`` on (default: all), oldest first."""
    once, again = _twice(ring, read, first, ring.slots - first if count < 0 else count)
    return whole_in(ring, once, again, first)


def whole_in(ring: Ring, once: bytes, again: bytes, first: int = 0, at_least: int = 0) -> list[Slot]:
    """Return the records, from number ``at_least`` on, that two copies of slots ``first``, ... agree upon, in order."""
    stride, slots = ring.stride, ring.slots
    still = once == again
    count = min(len(once), len(again)) // stride
    # Most slots that are read on from hold older records or none: one comparison each, before any other test.
    least = 2 * (at_least + 1)
    sequences: Sequence[int]
    if count <= CHUNK:
        sequences = _sequences(stride, count).unpack_from(again)
    else:
        sequences = [one for (one,) in ring.sequence_codec.iter_unpack(memoryview(again)[: count * stride])]
    unpack, found = ring.body.unpack_from, []
    for index in [index for index, sequence in enumerate(sequences) if sequence >= least and not sequence & 1]:
        number = (sequences[index] & _NUMBER) // 2 - 1
        # A number that does not belong into this slot was not written by the recorder: a garbage file.
        if number < at_least or number % slots != first + index:
            continue
        at = index * stride
        if still or once[at : at + stride] == again[at : at + stride]:
            found.append(Slot(number, unpack(again, at + 8)))
    found.sort(key=_number)
    return found


@lru_cache(maxsize=256)
def _sequences(stride: int, count: int) -> struct.Struct:
    """Return what unpacks the sequences alone of so many slots at once; 4 KB of memory for 64 of them."""
    return struct.Struct("<" + f"Q{stride - 8}x" * count)


class Run(NamedTuple):
    """Records that follow each other: ``next_number`` is the first that is not among them, ``lost`` are gone."""

    slots: list[Slot]
    next_number: int
    lost: int


def since(ring: Ring, read: Read, number: int) -> Run:
    """Return the whole records from ``number`` on, oldest first; costs one small copy when there are none.

    A record that is being written ends the run, so that it is returned next time; unless CHUNK newer ones are whole.
    """
    found: list[Slot] = []
    following = number
    while following < number + ring.slots:
        first = following % ring.slots
        count = min(CHUNK, number + ring.slots - following)
        until_end = min(count, ring.slots - first)
        part = whole_in(ring, *_twice(ring, read, first, until_end), first, number)
        if until_end < count:
            part += whole_in(ring, *_twice(ring, read, 0, count - until_end), 0, number)
            part.sort(key=_number)
        found += part
        following += count
        if part and part[-1].number >= number + ring.slots:  # lapped: begin again with all that is there
            found = whole_in(ring, *_twice(ring, read, 0, ring.slots), 0, number)
            break
        # Where the first is missing, only a record beyond this chunk shows that it will not come any more.
        if not part or (part[-1].number != following - 1 and found[0].number == number):
            break
    return _without_gaps(sorted(found, key=_number), number)


def _without_gaps(found: list[Slot], number: int) -> Run:
    """Cut ``found`` before its first gap that may still be filled; count the others as lost."""
    if not found:
        return Run([], number, 0)
    newest_number = found[-1].number
    if found[0].number == number and newest_number - number + 1 == len(found):  # the usual case: none is missing
        return Run(found, newest_number + 1, 0)
    kept: list[Slot] = []
    lost, following = 0, number
    for slot in found:
        if slot.number > following:
            if following > newest_number - CHUNK:
                break
            lost += slot.number - following
        kept.append(slot)
        following = slot.number + 1
    return Run(kept, following, lost)


def newest(ring: Ring, read: Read) -> Slot | None:
    """Return the newest whole record, or None when there was none in ``LOOKS`` looks."""
    for _ in range(LOOKS):
        once, again = _twice(ring, read, 0, ring.slots)
        found = whole_in(ring, once, again)
        if found:
            return found[-1]
        if once == again:  # no write is under way, so another read gives the same
            return None
    return None


def _twice(ring: Ring, read: Read, first: int, count: int) -> tuple[bytes, bytes]:
    """Copy ``count`` slots, and then copy them again."""
    start, length = ring.offset + first * ring.stride, count * ring.stride
    return read(start, length), read(start, length)
