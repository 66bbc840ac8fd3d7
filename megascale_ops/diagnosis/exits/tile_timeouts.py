# SPDX-License-Identifier: Apache-2.0
"""Which rank's tile never came, from the errors of the ranks that waited for it.

An overlapped kernel that waits too long gives up and raises ``TileTimeout`` on every rank that waited: all of them are
victims. Each names the rank that it waited for, and so do the boards of those that were stopped before they raised; a
rank that is waited for and waits for none is to blame. Often it has printed nothing: it was elsewhere, or ended before.

The words are those of ``megascale_kernels`` (``faults``, ``agreement``), read here since programs share no code; a test
raises real ones. They number ranks within the kernel's group and name at their end the job's numbers of its members,
where they are not the same.

``RankMismatch`` is the same kind of end: all ranks raise it, and each names what two of them run.

Pure: ends in, a verdict out.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from megascale_ops.diagnosis.hangs.tile_graph import follow
from megascale_ops.schema.folding import named
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import RankExit
from megascale_ops.schema.progress import RankError
from megascale_ops.schema.tiles import TileFact

_TYPE = re.compile(r"(?:^|\.)TileTimeout$")
_MISMATCH_TYPE = re.compile(r"(?:^|\.)RankMismatch$")
# Numbers of at most nine digits: a text may hold longer ones, which are no ranks.
_IN_KERNEL = re.compile(
    r"rank (?P<rank>\d{1,9}), (?P<operator>\w+) launch (?P<launch>\d{1,9}), CTA \d+, tile (?P<tile>-?\d{1,9}): "
    r"(?:waited (?P<waited_s>[\d.]{1,12}) s for rank (?P<peer>\d{1,9})"
    r"|stopped because rank (?P<first>\d{1,9}) gave up first, waiting for rank (?P<its_peer>\d{1,9}))"
)
_ON_HOST = re.compile(
    r"rank (?P<rank>\d{1,9}), (?P<operator>\w+)(?:\(.*?)?: rank (?P<first>\d{1,9}) waited (?P<waited_s>[\d.]{1,12}) s "
    r"for rank (?P<its_peer>\d{1,9}), which has not called it",
    re.DOTALL,
)
_MEMBERS = re.compile(r"ranks are counted within the group of the job's ranks (?P<members>\d{1,9}(?:, \d{1,9})*)")
_RUNS = re.compile(r"rank (?P<rank>\d{1,9}) runs (?P<what>.+?)(?=; rank \d|: all ranks must)", re.DOTALL)
# 8 ranks share memory; of more that wait a sentence counts them.
_MOST_NAMED = 8


class Missed(NamedTuple):
    """One wait that was in vain; ranks are the job's."""

    waiter: int
    peer: int
    where: str  # operator and launch
    tile: int = -1
    waited_s: float = 0.0


def is_timeout(error: RankError) -> bool:
    """Return whether an exception is a ``TileTimeout``: the rank that raises it is a victim, or was late itself."""
    return _TYPE.search(error.type) is not None


def is_mismatch(error: RankError) -> bool:
    """Return whether an exception means that ranks run different kernels."""
    return _MISMATCH_TYPE.search(error.type) is not None


def missed_of(rank: int, error: RankError | None, facts: Iterable[TileFact] = ()) -> list[Missed]:
    """Return the waits that its exception and its boards report: its own, and those of peers that the text names."""
    found, facts = [], tuple(facts)
    if error is not None and is_timeout(error):
        found += _told(rank, error.message, facts)
    found += [
        Missed(rank, wait.peer, f"{fact.operator} launch {fact.launch}", wait.tile)
        for fact in facts
        for wait in fact.waiting
        if wait.peer != rank
    ]
    return found


def _told(rank: int, message: str, facts: Sequence[TileFact]) -> list[Missed]:
    members = _members(message, facts)

    def job_rank(number: str) -> int:
        at = int(number)
        return at if not members else members[at] if at < len(members) else -1

    if said := _IN_KERNEL.search(message):
        where = f"{said['operator']} launch {said['launch']}"
        if said["peer"] is not None:
            found = [Missed(rank, job_rank(said["peer"]), where, int(said["tile"]), _seconds(said["waited_s"]))]
        else:
            first, peer = job_rank(said["first"]), job_rank(said["its_peer"])
            found = [Missed(first, peer, where), Missed(rank, first if peer == rank else peer, where)]
    elif said := _ON_HOST.search(message):
        first, peer, waited_s = job_rank(said["first"]), job_rank(said["its_peer"]), _seconds(said["waited_s"])
        # A rank that comes late finds that its peers have given up and raises the same error, without any wait.
        found = [Missed(one, peer, said["operator"], -1, waited_s) for one in dict.fromkeys((first, rank))]
    else:
        return []
    return [one for one in found if one.waiter != one.peer and min(one.waiter, one.peer) >= 0]


def _members(message: str, facts: Sequence[TileFact]) -> list[int]:
    """Return the members whose numbers a message uses: by its end, or if that was cut off by the rank's own boards."""
    if counted := _MEMBERS.search(message):
        return [int(number) for number in counted["members"].split(",")]
    said = _IN_KERNEL.search(message) or _ON_HOST.search(message)
    known = {fact.members for fact in facts if fact.waits and said is not None and fact.operator == said["operator"]}
    return list(known.pop()) if len(known) == 1 else []


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def tile_ends(missed: Sequence[Missed]) -> tuple[tuple[int, ...], str] | None:
    """Return the ranks at the end of the wait chain and a sentence about them; None without any wait."""
    peers: dict[int, set[int]] = {}
    for one in missed:
        peers.setdefault(one.waiter, set()).add(one.peer)
    if not peers:
        return None
    ends = follow(peers, lambda rank: peers.get(rank, ()))
    direct = [one for one in missed if one.peer in ends.ranks] or list(missed)
    return ends.ranks, f"{named(ends.ranks)} never came to {direct[0].where}: {_waits(direct)}"


def blame(verdict: Verdict, ended: Sequence[RankExit], errors: Mapping[int, RankError]) -> Verdict:
    """Name the ranks at the end of the wait chain; the same verdict where no tile was missed.

    Args:
        verdict: on the round. Where it names a cause, the reason also names its tile as the missing one.
        ended: how each rank ended, as far as known.
        errors: the exception that ended each.
    """
    missed = [one for exit_ in ended for one in missed_of(exit_.rank, errors.get(exit_.rank), _facts(exit_))]
    if not any(is_timeout(error) for error in errors.values()):
        return _blame_mismatch(verdict, errors) if verdict.fault == "unknown" else verdict
    peers: dict[int, set[int]] = {}
    for one in missed:
        peers.setdefault(one.waiter, set()).add(one.peer)
    exits = {exit_.rank: exit_ for exit_ in ended}
    ends = follow(peers, lambda rank: peers.get(rank) or _behind(exits.get(rank), exits))
    if verdict.fault != "unknown":
        return _told_of_cause(verdict, missed)
    if not ends.ranks:
        if not ends.circle:
            return verdict
        why = f"{named(ends.circle)} waited for each other's tiles in a circle until their deadline: {_waits(missed)}"
        return _named(verdict, why, 0.5, ())
    lines = [_line(rank, missed, exits.get(rank), errors.get(rank)) for rank in ends.ranks[:_MOST_NAMED]]
    certain = all(rank in exits for rank in ends.ranks) and 2 * len(ends.ranks) <= max(2, len(ended))
    return _named(verdict, "; ".join(lines), 0.95 if certain else 0.7, ends.ranks)


def _facts(exit_: RankExit) -> tuple[TileFact, ...]:
    """Return the facts of the boards of a rank that did not end in order."""
    return exit_.tiles if exit_.code else ()


def _behind(exit_: RankExit | None, exits: Mapping[int, RankExit]) -> set[int]:
    """Return the peers of a rank that was stopped inside a collective that had not entered that collective."""
    last = next((fact for fact in reversed(exit_.calls) if fact.function), None) if exit_ is not None else None
    if exit_ is None or last is None or last.done or last.seq < 0 or not exit_.by_us:
        return set()
    found = set()
    for other in exits.values():
        entered = max((fact.seq for fact in other.calls if fact.group == last.group), default=-1)
        if other.rank != exit_.rank and other.calls and entered < last.seq:
            found.add(other.rank)
    return found


def _line(rank: int, missed: Sequence[Missed], exit_: RankExit | None, error: RankError | None) -> str:
    """Return a sentence: which ranks missed a tile of ``rank``, and what that rank did meanwhile."""
    direct = [one for one in missed if one.peer == rank]
    if not direct:
        return f"rank {rank} held up those whose tiles others waited for{_meanwhile(exit_, error)}"
    return f"rank {rank} never came to {direct[0].where}: {_waits(direct)}{_meanwhile(exit_, error)}"


def _waits(missed: Sequence[Missed]) -> str:
    waiters = sorted({one.waiter for one in missed})
    tile = next((one for one in missed if one.tile >= 0), None)
    at = f" (rank {tile.waiter} at tile {tile.tile} for rank {tile.peer})" if tile is not None else ""
    longest_s = max((one.waited_s for one in missed), default=0.0)
    lasted = f" of {longest_s:g} s" if longest_s else ""
    return f"{named(waiters)} waited for its tile until the deadline{lasted}{at}"


def _meanwhile(exit_: RankExit | None, error: RankError | None) -> str:
    if exit_ is None:
        return "; how it ended is not known"
    if error is not None and is_timeout(error):
        return "; it came when the others had given up, and raised the same"
    after = f" after step {exit_.step}" if exit_.step >= 0 else " before its first step"
    phase = f", in phase {exit_.phase}" if exit_.phase else ""
    if exit_.by_us:
        return f"; it was alive elsewhere{phase}{after}, until it was stopped"
    return f"; it had ended with code {exit_.code}{phase}{after}"


def _told_of_cause(verdict: Verdict, missed: Sequence[Missed]) -> Verdict:
    """Add to the reason that the rank with a cause of its own is the one whose tile was missed: it had died before."""
    direct = [one for one in missed if one.peer in verdict.culprits]
    if not direct:
        return verdict
    return msgspec.structs.replace(verdict, reason=f"{verdict.reason}; {direct[0].where}: {_waits(direct)}")


def _blame_mismatch(verdict: Verdict, errors: Mapping[int, RankError]) -> Verdict:
    """Name the ranks that ran another kernel than the majority; no rank where there is no majority."""
    runs: dict[int, str] = {}
    for error in errors.values():
        counted = _MEMBERS.search(error.message) if is_mismatch(error) else None
        members = [int(number) for number in counted["members"].split(",")] if counted is not None else []
        for said in _RUNS.finditer(error.message) if is_mismatch(error) else ():
            at = int(said["rank"])
            runs.setdefault(members[at] if at < len(members) else at, said["what"])
    if len(set(runs.values())) < 2:
        return verdict
    count = Counter(runs.values())
    (right, most), *_ = count.most_common()
    odd = tuple(sorted(rank for rank, what in runs.items() if what != right)) if 2 * most > len(runs) else ()
    told = "; ".join(f"{named([rank for rank, what in runs.items() if what == one])} ran {one}" for one in count)
    return msgspec.structs.replace(
        verdict,
        fault="collective_mismatch",
        reason=f"ranks called different overlapped kernels: {told}",
        confidence=0.95 if odd else 0.5,
        culprits=odd,
        otherwise="no rank would be named, had all called the same",
    )


def _named(verdict: Verdict, why: str, confidence: float, ranks: tuple[int, ...]) -> Verdict:
    return msgspec.structs.replace(
        verdict,
        fault="tile_timeout",
        reason=why,
        confidence=confidence,
        culprits=ranks,
        otherwise="another name, had that rank told for whom it waited itself",
    )
