# SPDX-License-Identifier: Apache-2.0
"""Where two ranks of a process group disagree about its collectives, and in which way.

Every rank of a group must call the same collectives in the same order, and the n-th call of one meets the n-th of all
others. So the first number at which two ranks called something different tells what happened there:

    right    .. 40 all_reduce   41 all_reduce   42 broadcast
    skipped  .. 40 all_reduce   41 broadcast    42 all_gather      everything after it came one too early
    swapped  .. 40 all_reduce   41 broadcast    42 all_reduce      the two have changed places
    mismatch .. 40 all_reduce   41 all_reduce of other sizes       the order is right, the data is not

Who waits in the right one cannot show what it would have called next. But training repeats itself: what followed the
same calls in earlier steps is expected to follow again (``expected``). Where a rank waits in its first wrong call,
skipping and swapping look the same; that it is a step ahead of the others speaks for skipping.

Pure: facts in, a deviation with its numbers out.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from megascale_ops.controller.looks import Look
from megascale_ops.schema.messages import CollectiveFact

# 6: the longest pattern that can be seen twice in 16 facts, give or take what waits.
LONGEST_CONTEXT = 6
# Calls in which ranks may bring different sizes: a root and the others, or as much as each has.
UNEVEN = ("all_to_all", "alltoall", "gather", "scatter", "send", "recv", "object")
EVEN_ALL_THE_SAME = ("all_gather", "allgather", "reduce_scatter")

# What each kind of deviation is called in ``schema.health.FAULTS``.
FAULT_OF = {"skipped": "not_joined", "order": "collective_order", "mismatch": "collective_mismatch"}

Calls = Mapping[int, CollectiveFact]


class Deviation(NamedTuple):
    """One rank against one that is right: ``kind`` is skipped, order or mismatch; ``text`` ends a sentence."""

    kind: str
    group: str
    seq: int
    text: str


def calls(facts: Sequence[CollectiveFact], group: str) -> dict[int, CollectiveFact]:
    """Return a rank's collectives of a group by their number."""
    return {fact.seq: fact for fact in facts if fact.group == group and fact.seq >= 0}


def common_sources(right: Look, odd: Look, group: str) -> tuple[Calls, Calls]:
    """Return the calls of both as the best source tells them that has seen both; nothing is compared across sources."""
    for one, other in ((right.recorded, odd.recorded), (right.ring, odd.ring)):
        mine, theirs = calls(one, group), calls(other, group)
        if mine and theirs:
            return mine, theirs
    return {}, {}


def difference(one: CollectiveFact, other: CollectiveFact) -> str:
    """Return in what two calls that should meet differ: function, sizes, dtype, bytes, or "" for nothing known."""
    if one.function != other.function:
        return "function"
    if not _is_even(one.function):
        return ""
    if one.sizes and other.sizes and one.sizes != other.sizes:
        return "sizes"
    if one.dtype and other.dtype and one.dtype != other.dtype:
        return "dtype"
    if one.bytes_moved >= 0 and other.bytes_moved >= 0 and one.bytes_moved != other.bytes_moved:
        return "bytes"
    return ""


def call_of(fact: CollectiveFact) -> CollectiveFact:
    """Return a call as all of its group have to make it: without sizes where each brings as much as it has."""
    if _is_even(fact.function):
        return fact
    return msgspec.structs.replace(fact, sizes="", dtype="", bytes_moved=-1)


def expected(known: Calls, seq: int) -> CollectiveFact | None:
    """Return what should be called as number ``seq``, by what followed the same calls before; None: no pattern yet.

    What is known may have gaps: of thousands of calls an agent tells the newest, and those that began alike before.
    """
    best, length = None, 0
    for at in sorted((number for number in known if number < seq), reverse=True):
        same = 0
        while same < LONGEST_CONTEXT and _alike(known.get(at - 1 - same), known.get(seq - 1 - same)):
            same += 1
        if same > length:
            best, length = known[at], same
    return best


def _alike(one: CollectiveFact | None, other: CollectiveFact | None) -> bool:
    return one is not None and other is not None and not difference(one, other)


def fits(known: Calls, seq: int, called: CollectiveFact) -> bool | None:
    """Say whether a call is what the history of its group lets expect; None when there is no pattern."""
    wanted = expected(known, seq)
    return None if wanted is None else not difference(called, wanted)


def first_difference(right: Calls, odd: Calls) -> int:
    """Return the first number at which the two called something different that explains a hang, -1: none."""
    for seq in sorted(right.keys() & odd.keys()):
        found = difference(right[seq], odd[seq])
        # Other sizes that both have finished with were all right, as in a script whose batches are uneven.
        if found and not (found != "function" and right[seq].done and odd[seq].done):
            return seq
    return -1


def compare(right: Look, odd: Look, group: str, *, ahead: bool) -> Deviation | None:
    """Say in which way ``odd`` deviates from ``right``, or None where they agree as far as is known.

    Args:
        right: a rank that did what it should.
        odd: the rank in question.
        group: name of the process group.
        ahead: the odd rank has finished more steps than the right one.
    """
    good, bad = common_sources(right, odd, group)
    seq = first_difference(good, bad)
    if seq < 0:
        return None
    meant, called = good[seq], bad[seq]
    found = difference(meant, called)
    following = good.get(seq + 1) or expected(good, seq + 1)
    early = following is not None and not difference(following, called)
    after = bad.get(seq + 1)
    if early and (ahead or (after is not None and difference(after, meant))):
        text = f"skipped {describe(meant)}: it called {describe(called)} as number {seq}, one too early"
        return Deviation("skipped", group, seq, text)
    if found == "function" or early:
        text = f"called {describe(called)} as number {seq} of group {group}, where the others called {describe(meant)}"
        if after is not None and not difference(after, meant):
            text += f", and {describe(after)} after it: the two have changed places"
        elif early:
            text += ", which should come next: it skipped one or swapped two"
        return Deviation("order", group, seq, text)
    return Deviation("mismatch", group, seq, _mismatch(found, meant, called))


def describe(fact: CollectiveFact) -> str:
    """Return ``all_reduce #41 of group 0``."""
    return f"{fact.function or 'collective'} #{fact.seq} of group {fact.group}"


def _mismatch(found: str, meant: CollectiveFact, called: CollectiveFact) -> str:
    values = {
        "sizes": (called.sizes, meant.sizes),
        "dtype": (called.dtype, meant.dtype),
        "bytes": (f"{called.bytes_moved:,} bytes", f"{meant.bytes_moved:,} bytes"),
    }
    own, others = values[found]
    return f"called {describe(called)} with {found} {own}, the others with {others}"


def _is_even(function: str) -> bool:
    """Say whether all ranks must bring equal sizes."""
    if any(name in function for name in EVEN_ALL_THE_SAME) and "object" not in function:
        return True
    return not any(name in function for name in UNEVEN)
