# SPDX-License-Identifier: Apache-2.0
"""Who of those that should hold the same does not: digests in, names and a sentence out.

Where more than half of the copies are equal, the others are wrong: a flipped bit, a lost update. Where no half is (two
copies, or each its own), one of them is wrong and nothing here tells which: they are told as what they are, a pair or
more that disagree.

Everything here is judgement: no torch, no files, no clock.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from megascale_ops.checkpoint.state.layout import Layout, named

# The same names as in schema.fault_classes; schema and checkpoint share a floor and do not import each other.
Fault = Literal["silent_corruption", "replicas_differ", "stale_weights"]
# What a manager does about replicas: tell of those that differ, let the save fail as well, or compare none.
Replicas = Literal["check", "refuse", "off"]

# 4 tensors are named in a sentence, and looked into; the rest is counted.
MOST_NAMED = 4
# 8 ranks are named one by one.
MOST_RANKS = 8


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """What a rank holds of one entry at one place: which parts (``layout``) and what is in them (``content``)."""

    layout: bytes
    content: bytes
    count: int


class Odd(msgspec.Struct, frozen=True):
    """One tensor of which the copies differ.

    ``ranks``: those whose copy is unlike that of the majority; where there is no majority, all of them.
    """

    key: str
    ranks: tuple[int, ...]
    of: tuple[int, ...]  # all that hold this part of it
    against: int  # a rank whose copy is unlike that of the first of ``ranks``
    has_majority: bool


class Alarm(msgspec.Struct, frozen=True):
    """Something that a save has found, for people and for the controller."""

    fault: Fault
    ranks: tuple[int, ...]  # to blame, or that disagree; (): the whole job
    text: str


def differing(summaries: Sequence[Sequence[Bucket]]) -> frozenset[bytes]:
    """Of what each rank holds, by the order of ranks: the layouts that are held with more than one content."""
    contents: defaultdict[bytes, set[bytes]] = defaultdict(set)
    for summary in summaries:
        for bucket in summary:
            contents[bucket.layout].add(bucket.content)
    return frozenset(layout for layout, found in contents.items() if len(found) > 1)


def odd_ones(held: Sequence[Mapping[tuple[str, str], bytes]]) -> list[Odd]:
    """Compare copies.

    Args:
        held: of each rank, in the order of ranks: digests by (layout, key) of what is in doubt.

    Returns:
        The parts of which the copies are not all equal, in the order of their names.
    """
    copies: defaultdict[tuple[str, str], dict[int, bytes]] = defaultdict(dict)
    for rank, mine in enumerate(held):
        for which, digest in mine.items():
            copies[which][rank] = digest
    found = []
    for (_, key), by_rank in copies.items():
        counts = Counter(by_rank.values())
        if len(counts) < 2:
            continue
        ((usual, times),) = counts.most_common(1)
        has_majority = 2 * times > len(by_rank)
        odd = tuple(rank for rank, digest in by_rank.items() if digest != usual or not has_majority)
        against = next(rank for rank, digest in by_rank.items() if digest != by_rank[odd[0]])
        found.append(Odd(key, odd, tuple(by_rank), against, has_majority))
    return sorted(found, key=lambda one: (one.key, one.of))


def judge(
    odd: Sequence[Odd],
    details: Mapping[str, str],
    count: int,
    names: Sequence[int],
    layouts: Sequence[Layout] = (),
) -> list[Alarm]:
    """What to tell of copies that differ.

    Args:
        odd: of tensors that must agree.
        details: by key, what is known of the difference (``1 of 512 elements differs``).
        count: how many tensors were compared.
        names: the number in the whole job of each rank.
        layouts: the meshes in which they stand.
    """
    alarms = []
    for has_majority in (True, False):
        mine = [one for one in odd if one.has_majority is has_majority]
        if not mine:
            continue
        ranks = sorted({rank for one in mine for rank in one.ranks})
        keys = list(dict.fromkeys(one.key for one in mine))
        told = [f"{key} ({details[key]})" if key in details else key for key in keys[:MOST_NAMED]]
        more = f" and {len(keys) - len(told)} more" if len(keys) > len(told) else ""
        which = f"{len(keys)} of {count} tensors: {', '.join(told)}{more}"
        who = _ranks([named(names[rank], layouts) for rank in ranks])
        replicas = len({rank for one in mine for rank in one.of} - set(ranks))
        if has_majority:
            holds = "hold" if len(ranks) > 1 else "holds"
            text = f"{who} {holds} other values than the {replicas} other replicas in {which}"
            fault: Fault = "silent_corruption"
        else:
            text = f"the replicas on {who} differ in {which}; no majority tells which of them is right"
            fault = "replicas_differ"
        alarms.append(Alarm(fault, tuple(names[rank] for rank in ranks), text))
    return alarms


def _ranks(ranks: Sequence[str]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > MOST_RANKS:
        return f"{len(ranks)} ranks ({ranks[0]}, {ranks[1]} and others)"
    return f"ranks {', '.join(ranks[:-1])} and {ranks[-1]}"


def told_others(odd: Sequence[Odd]) -> str:
    """What to tell, once, of what differs between ranks and may: buffers, generators, positions; "" for nothing."""
    keys = list(dict.fromkeys(_place(one.key) for one in odd))
    if not keys:
        return ""
    more = f" and {len(keys) - MOST_NAMED} more" if len(keys) > MOST_NAMED else ""
    return (
        f"the ranks hold different values under {', '.join(keys[:MOST_NAMED])}{more}, which are neither parameters nor "
        "an optimizer's: as statistics, generators and positions do. The checkpoint has those of one rank: to keep "
        "all, give each rank's a name of its own; what should be equal, name in CheckpointManager(replicated=...)"
    )


def _place(key: str) -> str:
    return key.partition("::")[0]
