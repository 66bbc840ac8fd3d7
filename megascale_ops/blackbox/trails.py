# SPDX-License-Identifier: Apache-2.0
"""Through which phases and steps a rank went last, and which collectives it called in each: its trail.

The training thread notes each phase or step that it begins in one word (``layout.PASSAGES``), and with each collective
which was the newest. So the order of both is exact, whatever clocks and other threads do. A trail begins where all is
known: behind a phase that has no name in the box, a number of a step that jumped, and the oldest call of a full ring.

Pure: copies of a box in, a trail out. Whatever the bytes are, a trail is what they give.
"""

import struct
from collections.abc import Sequence

from megascale_ops.blackbox.calls import living, number_of
from megascale_ops.blackbox.layout import PASSAGE_BITS, PASSAGE_STEP_BITS, PASSAGES, PHASES
from megascale_ops.blackbox.records import CollectiveRecord
from megascale_ops.blackbox.values import name_of
from megascale_ops.schema.progress import Trail

# 384 characters: as many as there are passages, seventy usual steps; a message then has half a kilobyte of a rank.
_MOST = PASSAGES.slots
# A digit for each group: the ten that were called last. A rank of a mesh with four axes is in eight or so.
_MOST_GROUPS = 10
_NUMBER, _STEP = (1 << PASSAGE_BITS) - 1, (1 << PASSAGE_STEP_BITS) - 1
_NOTHING = Trail()


def trail_of(words: bytes, phases: bytes, calls: Sequence[CollectiveRecord], *, are_all: bool) -> Trail:
    """Return the trail of a process that has ended.

    Args:
        words: What ``PASSAGES`` holds.
        phases: What ``PHASES`` holds.
        calls: Python's ring of collectives, oldest first.
        are_all: There were no older ones, which newer ones have driven out.
    """
    passages = _passages(words)
    if not passages:
        return _NOTHING
    newest = max(passages)
    oldest, stride = _known_from(passages, newest)
    called = [record for record in living(calls) if record.passage and number_of(record) >= 0]
    if not are_all and called:
        oldest = max(oldest, called[0].passage + 1)
    last: dict[str, int] = {}
    made: dict[int, list[str]] = {}
    for record in called:
        if oldest <= record.passage <= newest:
            last.pop(record.communicator, None)  # what was called last stands last
            last[record.communicator] = record.seq
            made.setdefault(record.passage, []).append(record.communicator)
    groups = list(last)[-_MOST_GROUPS:]
    digits = {group: str(at) for at, group in enumerate(groups)}
    letters: dict[int, str] = {}
    parts: list[str] = []
    for number in range(oldest, newest + 1):
        step, phase = passages[number]
        letter = letters.setdefault(phase, chr(ord("a") + len(letters)))
        is_end = number > oldest and step != passages[number - 1][0]
        parts.append(
            (letter.upper() if is_end else letter) + "".join(digits.get(group, "") for group in made.get(number, ()))
        )
    return Trail(
        path=_newest(parts),
        phases=tuple(_phase(phases, phase) for phase in letters),
        groups=tuple(groups),
        seqs=tuple(last[group] for group in groups),
        step=passages[newest][0],
        stride=stride,
    )


def _passages(words: bytes) -> dict[int, tuple[int, int]]:
    """Return step and phase of each passage by its number."""
    found = {}
    count = len(words) // PASSAGES.stride
    for at, word in enumerate(struct.unpack_from(f"<{count}Q", words)):
        number = word & _NUMBER
        if number and number % PASSAGES.slots == at:  # else nothing was written there, or garbage
            found[number] = word >> PASSAGE_BITS & _STEP, word >> PASSAGE_BITS + PASSAGE_STEP_BITS
    return found


def _known_from(passages: dict[int, tuple[int, int]], newest: int) -> tuple[int, int]:
    """Return the oldest passage from which on nothing is missing, and by how much each end of a step raised its number.

    A trail of no passage begins behind the newest.
    """
    oldest, stride = newest + 1, 0
    while (before := passages.get(oldest - 1)) is not None and 0 < before[1] <= PHASES.slots:
        if oldest <= newest and (rise := passages[oldest][0] - before[0] & _STEP):
            if stride and rise != stride:
                break
            stride = rise
        oldest -= 1
    return oldest, stride


def _newest(parts: Sequence[str]) -> str:
    """Join as many of the newest parts as a trail has room for."""
    kept = len(parts)
    room = _MOST
    while kept and len(parts[kept - 1]) <= room:
        kept -= 1
        room -= len(parts[kept])
    return "".join(parts[kept:])


def _phase(phases: bytes, place: int) -> str:
    at = (place - 1) * PHASES.stride
    return name_of(phases[at : at + PHASES.stride])
