# SPDX-License-Identifier: Apache-2.0
"""Which collectives a judge gets to see: the same facts from torch's flight recorder or the black box.

The flight recorder knows all collectives with sizes and types, but has to be asked. The black box needs no
answer of the rank, so it also covers one that is stopped or killed (``blackbox.calls`` describes what it knows).
"""

import zlib
from collections.abc import Sequence

from megascale_ops.blackbox.calls import living, of_ring
from megascale_ops.blackbox.records import CollectiveRecord
from megascale_ops.schema.messages import CollectiveFact
from megascale_ops.schema.progress import CollectivePosition

MOST_FACTS = 16  # the limit of schema.messages.EvidenceItem
_CONTEXT = 3  # calls: which part of a step it is
# 240 characters: the parts of an uneven all_gather of 16 ranks, of which a judge names the one that differs. A call of
# hundreds of tensors is shortened to its beginning and a checksum.
_MOST_SIZES = 240


def sizes_of(sizes: Sequence[object]) -> str:
    """Write sizes as "[[4, 4]]"; long ones stay comparable by their checksum."""
    text = str(list(sizes))
    return text if len(text) <= _MOST_SIZES else f"{text[:_MOST_SIZES]}... {zlib.crc32(text.encode()):08x}"


def choose(facts: Sequence[CollectiveFact], most: int = MOST_FACTS) -> tuple[CollectiveFact, ...]:
    """Choose the unfinished ones, the last finished of each group, what began alike before, the newest; oldest first.

    Args:
        facts: All that a source knows, oldest first.
        most: How many; a quarter of it is kept for finished ones.
    """
    unfinished = [number for number, fact in enumerate(facts) if not fact.done]
    finished = [number for number, fact in enumerate(facts) if fact.done]
    waited_for = {facts[number].group for number in unfinished}
    last = {(facts[number].group, facts[number].seq < 0): number for number in finished}
    # How far a group came matters most where it waits. Its earlier calls show a pattern, newest first.
    newest = sorted(last.values(), key=lambda number: (facts[number].group not in waited_for, -number))
    before = sorted(set(finished) - set(newest), key=lambda number: (facts[number].group not in waited_for, -number))
    # A rank waits in its oldest unfinished ones; what queues behind them only fills what is left.
    oldest = most * 3 // 4
    wanted = list(dict.fromkeys([*unfinished[:oldest], *newest, *_habit(facts), *before, *unfinished[oldest:]]))
    return tuple(facts[number] for number in sorted(wanted[:most]))


def _habit(facts: Sequence[CollectiveFact]) -> list[int]:
    """Return which calls led to the oldest unfinished one, and the last time they were made before, with what followed.

    A step looks like the one before it, but not the first after a checkpoint: its like may be hundreds of calls back.
    """
    at = next((number for number, fact in enumerate(facts) if not fact.done and fact.seq >= 0), -1)
    own = [number for number, fact in enumerate(facts) if fact.group == facts[at].group and fact.seq >= 0]
    here = own.index(at) if at >= 0 else 0
    best, length = 0, 0
    for there in range(here - 1, 0, -1):
        same = 0
        while same < min(_CONTEXT, there) and _called(facts[own[there - 1 - same]]) == _called(
            facts[own[here - 1 - same]]
        ):
            same += 1
        if same > length:
            best, length = there, same
        if length == _CONTEXT:
            break
    if not length:
        return []
    return [*own[here - length : here], *own[best - length : best + 1]]


def _called(fact: CollectiveFact) -> tuple[str, str, str]:
    return fact.function, fact.sizes, fact.dtype


def describe_ring(records: Sequence[CollectiveRecord], position: CollectivePosition | None, now_ns: int) -> str:
    """Return the same as text for people."""
    lines = [f"{len(records)} collectives in the black box"]
    if position is not None:
        lines.append(f"{position.name}: entered {position.enqueued}, finished {position.completed}")
    facts = of_ring(records, position)
    open_ones = [(record, fact) for record, fact in zip(living(records), facts, strict=False) if not fact.done]
    lines += [
        f"not finished: {record.function} {record.seq} of group {record.communicator}, {record.bytes_moved} bytes, "
        f"for {(now_ns - record.enqueued_mono_ns) * 1e-9:.1f} s"
        for record, _ in open_ones[:MOST_FACTS]
    ]
    if len(open_ones) > MOST_FACTS:
        lines.append(f"and {len(open_ones) - MOST_FACTS} more")
    return "\n".join(lines)
