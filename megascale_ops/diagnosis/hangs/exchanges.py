# SPDX-License-Identifier: Apache-2.0
"""Ranks that wait for each other in an exchange and brought what can't meet: all_to_alls, sends and receives.

In an all_to_all each pair has a size of its own: what one sends to the other must be what the other expects of it. So
ranks are not compared with each other, pairs are: a rank with a wrong list is in several pairs that do not fit, and
stands out by that. One pair alone names both. Where only sums are known (one tensor, before torch 2.11) they must be
equal over the group, and no rank is named unless nearly all bring the same.

A send and a receive meet by their order between two ranks. Of what neither has finished:

- sizes that fit in no alignment (what was sent first may have arrived, so one may be some ahead) can't meet;
- two that both only receive from each other, or both only send, wait for ever, if no other rank is in their batches;
- batches of nothing but each other with more of one than of the other can't end;
- ranks of which each only sends to the next, all around, or each only receives, wait for ever as two do.

Pure: facts by rank in, clashes out.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megascale_ops.diagnosis.hangs.tensor_sizes import are_same, elements
from megascale_ops.schema.folding import named
from megascale_ops.schema.messages import CollectiveFact

# 0.95: more pairs than one meet in this rank, and all others fit. 0.8: it differs from what more than half bring.
SURE, LIKELY, EITHER = 0.95, 0.8, 0.5
# 0.6: that they do not fit is proven, which rank is wrong is not; no rank is named.
NOBODY = 0.6


class Clash(NamedTuple):
    """What does not fit: a class of ``fault_classes.FAULTS``, the ranks to blame, how sure that is, and a sentence."""

    fault: str
    ranks: tuple[int, ...]
    confidence: float
    text: str


class _Pair(NamedTuple):
    """Two ranks, and what does not fit between them (ends a sentence)."""

    one: int
    other: int
    text: str
    fault: str = "collective_mismatch"


# ---- all_to_all ----


def splits_clash(calls: Mapping[int, CollectiveFact], members: Sequence[int]) -> Clash | None:
    """Compare the all_to_all that ranks of one group are in, under one number.

    Args:
        calls: by rank; those of which it is not known are missing.
        members: all ranks of the group, in its order.
    """
    if clash := _types_clash(calls):
        return clash
    told = {rank: call for rank, call in calls.items() if len(call.sends) == len(call.receives) == len(members)}
    places = {rank: place for place, rank in enumerate(members)}
    where = _where(calls)
    pairs = [
        _Pair(one, other, f"rank {one} sends rank {other} {sent:,} elements, which expects {wanted:,}")
        for one in told
        for other in told
        if one in places and other in places
        for sent, wanted in ((told[one].sends[places[other]], told[other].receives[places[one]]),)
        if sent != wanted
    ]
    if pairs:
        return _blamed(pairs, where)
    if told or len(calls) < len(members):
        return None
    return _sums_clash(calls, where)


def _types_clash(calls: Mapping[int, CollectiveFact]) -> Clash | None:
    """Compare the types: equal counts of another type are other bytes."""
    kinds = {rank: call.dtype for rank, call in calls.items() if call.dtype}
    if len(set(kinds.values())) < 2:
        return None
    usual, count = Counter(kinds.values()).most_common(1)[0]
    odd = tuple(sorted(rank for rank, kind in kinds.items() if kind != usual))
    text = f"in {_where(calls)} {named(odd)} brings {kinds[odd[0]]}, the others {usual}"
    is_known = 2 * count > len(kinds)
    return Clash("collective_mismatch", odd if is_known else tuple(sorted(kinds)), SURE if is_known else EITHER, text)


def _sums_clash(calls: Mapping[int, CollectiveFact], where: str) -> Clash | None:
    """Compare what all send with what all expect."""
    sums: dict[int, tuple[int, int]] = {}
    for rank, call in calls.items():
        sent, wanted = elements(call.sizes), elements(call.outputs or call.sizes)
        if sent is None or wanted is None or not call.sizes:
            return None
        sums[rank] = sum(sent), sum(wanted)
    sent_in_all, wanted_in_all = sum(one for one, _ in sums.values()), sum(other for _, other in sums.values())
    if sent_in_all == wanted_in_all:
        return None
    text = f"in {where} all ranks send {sent_in_all:,} elements and expect {wanted_in_all:,}"
    usual, count = Counter(sums.values()).most_common(1)[0]
    odd = tuple(sorted(rank for rank, found in sums.items() if found != usual))
    if 2 * count > len(sums) and usual[0] == usual[1]:
        own = sums[odd[0]]
        text += f"; {named(odd)} sends {own[0]:,} and expects {own[1]:,}, the others {usual[0]:,}"
        return Clash("collective_mismatch", odd, LIKELY, text)
    return Clash("collective_mismatch", (), NOBODY, text)


def _where(calls: Mapping[int, CollectiveFact]) -> str:
    call = next(iter(calls.values()))
    return f"{call.function} #{call.seq} of group {call.group}"


# ---- sends and receives ----


def pairs_clash(facts: Mapping[int, Sequence[CollectiveFact]]) -> Clash | None:
    """Compare what ranks that wait send to each other and receive; ``facts`` by rank, oldest first."""
    open_ones = {rank: _outstanding(some) for rank, some in facts.items()}
    pairs: list[_Pair] = []
    for rank, mine in open_ones.items():
        for peer in sorted({fact.peer for fact in mine if fact.peer > rank and fact.peer in open_ones}):
            theirs = open_ones[peer]
            for group in sorted({fact.group for fact in mine if fact.peer == peer}):
                pairs.extend(_of_pair(rank, peer, *_in_group(group, mine, theirs)))
    if not pairs:
        return _circle(open_ones)
    odd = _unusual(pairs[0], open_ones) if len(pairs) == 1 else None
    if odd is not None:
        return Clash(pairs[0].fault, (odd,), LIKELY, f"{pairs[0].text}; the other ranks send what rank {odd} does not")
    return _blamed(pairs, "sends and receives")


def _circle(open_ones: Mapping[int, Sequence[CollectiveFact]]) -> Clash | None:
    """Return ranks of which each does nothing but send to the next, or receive from it, until the first comes again."""
    following: dict[int, tuple[str, int]] = {}
    for rank, mine in open_ones.items():
        calls = {(fact.function, fact.peer) for fact in mine}
        if len(calls) == 1:
            following[rank] = calls.pop()
    for first in sorted(following):
        function, at = following[first]
        path = [first]
        while at not in path and following.get(at, ("", -1))[0] == function:
            path.append(at)
            at = following[at][1]
        if at == first and len(path) > 1:
            verb = "sends to" if function == "send" else "receives from"
            text = f"{named(path)} wait in a circle: each of them only {verb} the next"
            return Clash("collective_order", tuple(sorted(path)), EITHER, text)
    return None


def _outstanding(facts: Sequence[CollectiveFact]) -> list[CollectiveFact]:
    return [fact for fact in facts if fact.function in ("send", "recv") and fact.peer >= 0 and not fact.done]


def _in_group(
    group: str, mine: Sequence[CollectiveFact], theirs: Sequence[CollectiveFact]
) -> tuple[list[CollectiveFact], list[CollectiveFact]]:
    return [fact for fact in mine if fact.group == group], [fact for fact in theirs if fact.group == group]


def _of_pair(rank: int, peer: int, mine: Sequence[CollectiveFact], theirs: Sequence[CollectiveFact]) -> Iterator[_Pair]:
    """Yield what does not fit between two ranks."""
    for sender, receiver, sent, wanted in (
        (rank, peer, _of(mine, "send", peer), _of(theirs, "recv", rank)),
        (peer, rank, _of(theirs, "send", rank), _of(mine, "recv", peer)),
    ):
        if sent and wanted and not _fits_somehow(sent, wanted):
            text = f"rank {sender} sends rank {receiver} {_size(sent[0])}, which receives {_size(wanted[0])}"
            yield _Pair(rank, peer, text)
            return
    yield from _of_batches(rank, peer, mine, theirs)


def _of_batches(
    rank: int, peer: int, mine: Sequence[CollectiveFact], theirs: Sequence[CollectiveFact]
) -> Iterator[_Pair]:
    """Yield what does not fit between the oldest batches of two ranks that involve no third rank."""
    first, second = _first_batch(mine), _first_batch(theirs)
    if {fact.peer for fact in first} != {peer} or {fact.peer for fact in second} != {rank}:
        return
    kinds = {fact.function for fact in (*first, *second)}
    if len(kinds) == 1:
        verb = "receive from" if kinds == {"recv"} else "send to"
        yield _Pair(rank, peer, f"ranks {rank} and {peer} both only {verb} each other", "collective_order")
        return
    if first[0].batch < 0 or second[0].batch < 0:  # torch before 2.4 does not tell what is one batch
        return
    for sender, receiver, sent, wanted in (
        (rank, peer, _of(first, "send", peer), _of(second, "recv", rank)),
        (peer, rank, _of(second, "send", rank), _of(first, "recv", peer)),
    ):
        if len(sent) != len(wanted):
            text = f"rank {sender} sends rank {receiver} {len(sent)} tensors in one batch, which receives {len(wanted)}"
            yield _Pair(rank, peer, text)
            return


def _of(facts: Sequence[CollectiveFact], function: str, peer: int) -> list[CollectiveFact]:
    return [fact for fact in facts if fact.function == function and fact.peer == peer]


def _first_batch(facts: Sequence[CollectiveFact]) -> list[CollectiveFact]:
    """Return the oldest batch; a send or a receive by itself is one of its own."""
    return [fact for fact in facts if fact.batch == facts[0].batch] if facts else []


def _fits_somehow(sent: Sequence[CollectiveFact], wanted: Sequence[CollectiveFact]) -> bool:
    """Return whether sends and receives fit in some alignment: one side may have finished some more than the other."""
    shifts = [(shift, 0) for shift in range(len(sent))] + [(0, shift) for shift in range(1, len(wanted))]
    return any(
        all(_meets(one, other) for one, other in zip(sent[here:], wanted[there:], strict=False))
        for here, there in shifts
    )


def _meets(sent: CollectiveFact, wanted: CollectiveFact) -> bool:
    if sent.dtype and wanted.dtype and sent.dtype != wanted.dtype:
        return False
    return not (sent.sizes and wanted.sizes) or are_same(sent.sizes, wanted.sizes)


def _size(fact: CollectiveFact) -> str:
    return f"{fact.sizes} {fact.dtype}".strip()


def _unusual(pair: _Pair, facts: Mapping[int, Sequence[CollectiveFact]]) -> int | None:
    """Return the one of two whose sizes no other rank has, where some have the other one's; None: there is none."""
    if pair.fault != "collective_mismatch":
        return None
    others = {_size(fact) for rank, some in facts.items() if rank not in (pair.one, pair.other) for fact in some}
    usual = {
        rank: any(_size(fact) in others for fact in facts[rank] if fact.peer in (pair.one, pair.other))
        for rank in (pair.one, pair.other)
    }
    odd = [rank for rank, is_usual in usual.items() if not is_usual]
    return odd[0] if len(odd) == 1 else None


# ---- which ranks of the pairs ----


def _blamed(pairs: Sequence[_Pair], where: str) -> Clash:
    """Name the ranks in which the pairs that do not fit meet; of a single pair both."""
    count = Counter(rank for pair in pairs for rank in {pair.one, pair.other})
    fault, text = pairs[0].fault, f"in {where} {pairs[0].text}"
    if len(pairs) > 1:
        text += f"; {len(pairs) - 1} more {'pair does' if len(pairs) == 2 else 'pairs do'} not fit"
    by_count = count.most_common()
    together = {(min(pair.one, pair.other), max(pair.one, pair.other)) for pair in pairs}
    if len(together) > 1 and by_count[0][1] == len(pairs) > by_count[1][1]:
        odd = by_count[0][0]
        return Clash(fault, (odd,), SURE, f"{text}, all of them of rank {odd}")
    return Clash(fault, tuple(sorted(count)), EITHER, text)
