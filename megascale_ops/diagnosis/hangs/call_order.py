# SPDX-License-Identifier: Apache-2.0
"""Where two ranks of a process group disagree about its collectives, and in which way.

Every rank of a group must call the same collectives in the same order, and the n-th call of one meets the n-th of all
others. So the first number at which two ranks called something different shows what happened there:

    right    .. 40 all_reduce   41 all_reduce   42 broadcast
    skipped  .. 40 all_reduce   41 broadcast    42 all_gather      everything after it came one too early
    swapped  .. 40 all_reduce   41 broadcast    42 all_reduce      the two have changed places
    mismatch .. 40 all_reduce   41 all_reduce of other sizes       the order is right, the data is not

A rank that waits in the right one cannot show what it would have called next. But training repeats itself: what
followed the same calls in earlier steps is expected to follow again (``expected``). Where a rank waits in its first
wrong call, skipping and swapping look the same; if it is a step ahead of the others, it skipped.

Pure: facts in, a deviation with its numbers out.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from megascale_ops.diagnosis.hangs.evidence import Look
from megascale_ops.diagnosis.hangs.tensor_sizes import are_same, parts_that_differ
from megascale_ops.schema.messages import CollectiveFact

# 4: an uneven collective of which more parts differ differs as a whole.
MOST_PARTS = 4
# 6: the longest pattern that can be seen twice in 16 facts, give or take what waits.
LONGEST_CONTEXT = 6
# Calls in which ranks may bring, or get, different sizes: a root and the others, or as much as each has.
_OWN_INPUTS = ("all_to_all", "alltoall", "scatter", "send", "recv", "object")
_OWN_OUTPUTS = ("all_to_all", "alltoall", "gather", "send", "recv", "object")
# "reduce" is one with a root; in a reduce_scatter of uneven parts each gets its own.
_OWN_OUTPUTS_WHOLE = ("reduce", "reduce_scatter")
# A black box notes the size of the first argument: of these that is each rank's own output, or its part.
_OWN_FIRST = ("all_to_all", "alltoall", "gather", "reduce_scatter", "scatter", "send", "recv", "object")
_BUT = {"scatter": "reduce_scatter", "gather": "all_gather"}  # names that hold a shorter one and mean something else

# The group of calls of which no words name one.
UNNAMED = "?"

# What each kind of deviation is called in ``schema.fault_classes.FAULTS``.
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
    """Return the calls of both by the best source that has seen both; nothing is compared across sources."""
    for one, other in ((right.recorded, odd.recorded), (right.ring, odd.ring)):
        mine, theirs = calls(one, group), calls(other, group)
        if mine and theirs:
            return mine, theirs
    return {}, {}


def difference(one: CollectiveFact, other: CollectiveFact) -> str:
    """Return in what two calls that should meet differ, "" for nothing known.

    That is function, batch (one of them is a batch of unknown pieces), sizes, outputs, dtype, output dtype, bytes.
    """
    if one.function != other.function:
        return "batch" if "coalesced" in (one.function, other.function) else "function"
    return _inputs_differ(one, other) or _outputs_differ(one, other) or _bytes_differ(one, other)


def _inputs_differ(one: CollectiveFact, other: CollectiveFact) -> str:
    if _is_any(one.function, _OWN_INPUTS):
        return ""
    if one.sizes and other.sizes and not are_same(one.sizes, other.sizes):
        return "sizes"
    return "dtype" if one.dtype and other.dtype and one.dtype != other.dtype else ""


def _outputs_differ(one: CollectiveFact, other: CollectiveFact) -> str:
    if one.function in _OWN_OUTPUTS_WHOLE or _is_any(one.function, _OWN_OUTPUTS):
        return ""
    made, meant = outputs_of(one), outputs_of(other)
    if made and meant and not are_same(made, meant):
        return "outputs"
    kind, wanted = one.output_dtype or one.dtype, other.output_dtype or other.dtype
    return "output dtype" if kind and wanted and kind != wanted else ""


def _bytes_differ(one: CollectiveFact, other: CollectiveFact) -> str:
    known = one.bytes_moved >= 0 and other.bytes_moved >= 0 and not _is_any(one.function, _OWN_FIRST)
    return "bytes" if known and one.bytes_moved != other.bytes_moved else ""


def outputs_of(fact: CollectiveFact) -> str:
    """Return the sizes of a call's outputs: those of its inputs where nothing else is said."""
    return fact.outputs or fact.sizes


def call_of(fact: CollectiveFact) -> CollectiveFact:
    """Return a call as all of its group have to make it: without what each brings, or gets, as it has."""
    call = msgspec.structs.replace(fact, sends=(), receives=(), begun=None)
    if _is_any(fact.function, _OWN_INPUTS):
        call = msgspec.structs.replace(call, sizes="", dtype="")
    if fact.function in _OWN_OUTPUTS_WHOLE or _is_any(fact.function, _OWN_OUTPUTS):
        call = msgspec.structs.replace(call, outputs="", output_dtype="")
    return msgspec.structs.replace(call, bytes_moved=-1) if _is_any(fact.function, _OWN_FIRST) else call


def expected(known: Calls, seq: int) -> CollectiveFact | None:
    """Return what should be called as number ``seq``, by what followed the same calls before; None: no pattern yet.

    What is known may have gaps: of thousands of calls an agent reports the newest, and those that began alike before.
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
    """Return whether a call is what the history of its group lets expect; None when there is no pattern."""
    wanted = expected(known, seq)
    return None if wanted is None else not difference(called, wanted)


def first_difference(right: Calls, odd: Calls) -> int:
    """Return the first number at which the two called something different that explains a hang, -1: none."""
    for seq in sorted(right.keys() & odd.keys()):
        found = difference(right[seq], odd[seq])
        # Other sizes that both have finished with were correct, as in a script whose batches are uneven.
        if found and not (found != "function" and right[seq].done and odd[seq].done):
            return seq
    return -1


def compare(right: Look, odd: Look, group: str, *, ahead: bool) -> Deviation | None:
    """Return in which way ``odd`` deviates from ``right``, or None where they agree as far as is known.

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
        text = f"skipped {describe(meant)}: it called {called.function or 'another'} as number {seq}, one too early"
        return Deviation("skipped", group, seq, text)
    if found == "function" or early:
        text = f"called {describe(called)}, where the others called {meant.function or 'another'}"
        if after is not None and not difference(after, meant):
            text += f", and {describe(after)} after it: the two have changed places"
        elif early:
            text += ", which should come next: it skipped one or swapped two"
        return Deviation("order", group, seq, text)
    return Deviation("mismatch", group, seq, _mismatch(found, meant, called))


def describe(fact: CollectiveFact) -> str:
    """Return ``all_reduce #41 of group 0``."""
    return f"{fact.function or 'collective'} #{fact.seq}{of_group(fact.group)}"


def of_group(group: str) -> str:
    """Return `` of group 0``, nothing where no log names the group."""
    return "" if group == UNNAMED else f" of group {group}"


def _mismatch(found: str, meant: CollectiveFact, called: CollectiveFact) -> str:
    if found == "batch":
        return f"called {describe(called)}, where the others called {describe(meant)}: one is a batch, the other is not"
    own, others = _told(found, called), _told(found, meant)
    parts = parts_that_differ(own, others) if found in ("sizes", "outputs") else ()
    where = f" (part {', '.join(str(at) for at in parts[:MOST_PARTS])})" if parts else ""
    return f"called {describe(called)} with {found} {own}, the others with {others}{where}"


def _told(found: str, fact: CollectiveFact) -> str:
    values = {
        "sizes": fact.sizes,
        "outputs": outputs_of(fact),
        "dtype": fact.dtype,
        "output dtype": fact.output_dtype or fact.dtype,
        "bytes": f"{fact.bytes_moved:,} bytes",
    }
    return values[found]


def _is_any(function: str, names: Sequence[str]) -> bool:
    """Return whether a function is one of these, however its backend calls it."""
    return any(name in function and _BUT.get(name, "-") not in function for name in names)
