# SPDX-License-Identifier: Apache-2.0
"""What remains when every rank is a victim: the ranks their words name, the calls they quote, the link they report.

Asked last, when no rank's end is a cause and no black box shows which rank was absent. A wrong name costs more than
none, so each answer carries the confidence of the words that it rests on, and without any the verdict stays as it was.

A store that gave up counts who has come. Where as many ranks as are missing say that they never reached it, or have
said nothing while all others had reached it, it is they.

Pure: a verdict and texts in, a verdict out.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from megascale_ops.diagnosis.exits.broken_links import Link, links_in, roads_in
from megascale_ops.diagnosis.exits.named_ranks import Named, named_in
from megascale_ops.diagnosis.exits.quoted_calls import quoted_in, versions_in
from megascale_ops.schema.fault_classes import FAULTS
from megascale_ops.schema.folding import named
from megascale_ops.schema.health import Verdict

# 0.8: NCCL's numbers count within a group that need not be the whole job's.
_VERSION_SURE = 0.8
_REACHED = "successfully reached monitoredBarrier"
# 0.9: what most ranks ran is what the script means, but for a script in which most are wrong.
_ODD_SURE = 0.9
# 0.7: both ends report it; 0.5: one end does, and a peer that died unseen looks the same to it.
_BOTH_ENDS, _ONE_END = 0.7, 0.5
_MOST_LINKS = 4
# torch's TCPStore: "Timed out after 601 seconds waiting for clients. 3/4 clients joined."
_JOINED = re.compile(r"waiting for clients\. (\d{1,6})/(\d{1,6}) clients joined")
# Its last words, not the warnings of an attempt after which another one may have reached it.
_NEVER_REACHED = re.compile(
    r"client socket has (?:failed to connect to any network address|timed out after)|Error: host not found: "
)
# 0.7: by their own words; 0.5: by their silence.
_SAID_SO, _SAID_NOTHING = 0.7, 0.5
# A logger's line of an error; whose it is, it says itself.
_ERROR_OF = re.compile(r"^(?:\S{0,60} ){0,4}\[?ERROR\b[^\n]{0,200}?\b[Rr]ank (\d{1,9})\b", re.MULTILINE)
# 0.6: the code is the framework's decision for all ranks; what it decided upon is in the words of one.
_OWN_REPORT = 0.6


class Told(NamedTuple):
    """What one rank said as it ended."""

    node: str
    rank: int
    text: str


def blame_quoted(verdict: Verdict, told: Sequence[Told]) -> Verdict:
    """Quote what ranks brought to one collective where a library compared it; the same verdict where none did."""
    quoted = quoted_in(one.text for one in told)
    if quoted is None:
        return verdict
    ranks = tuple(rank for rank in quoted.odd if any(one.rank == rank for one in told))
    who = f"{named(ranks)} called otherwise than most" if ranks else "which of them is wrong, their words do not tell"
    return msgspec.structs.replace(
        verdict,
        fault="collective_mismatch",
        reason=f"{FAULTS['collective_mismatch'].meaning}: {quoted.text}; {who}",
        confidence=_ODD_SURE if ranks else verdict.confidence,
        culprits=ranks,
        nodes=_nodes(told, ranks),
        otherwise="nobody is named where less than half of all ranks agree",
    )


def blame_version(verdict: Verdict, told: Sequence[Told]) -> Verdict:
    """Name the ranks that run another version of NCCL than most, where NCCL has compared them."""
    quoted = versions_in(one.text for one in told)
    ranks = tuple(rank for rank in quoted.odd if any(one.rank == rank for one in told)) if quoted is not None else ()
    if quoted is None or not ranks:
        return verdict
    return msgspec.structs.replace(
        verdict,
        reason=f"{named(ranks)} runs another version of NCCL than most: {quoted.text}",
        confidence=_VERSION_SURE,
        culprits=ranks,
        nodes=_nodes(told, ranks),
        otherwise="the numbers count within the group that was made",
    )


def blame_uncounted(verdict: Verdict, told: Sequence[Told], lost: set[int], world_size: int) -> Verdict:
    """Name the ranks that a store has missed, where their words or their silence show which ones they are.

    Args:
        verdict: stays as it was where they can't be told.
        told: what each rank said.
        lost: the ranks that died of what others did.
        world_size: of the job; a store of fewer clients counts nodes.
    """
    counts = [(int(found[1]), int(found[2])) for one in told for found in _JOINED.finditer(one.text)]
    if not counts or counts[-1][1] < world_size:
        return verdict
    joined, size = counts[-1]
    refused = [one.rank for one in told if _NEVER_REACHED.search(one.text) and not _JOINED.search(one.text)]
    silent = [one.rank for one in told if one.rank not in lost] if len(told) == size else []
    ranks = next((tuple(sorted(some)) for some in (refused, silent) if 0 < len(some) == size - joined), ())
    if not ranks:
        return verdict
    said_so = list(ranks) == sorted(refused)
    how = "could not reach it, by its own words" if said_so else "alone did not die of that"
    return msgspec.structs.replace(
        verdict,
        fault="not_joined",
        reason=f"{joined} of {size} ranks came to the store that the job begins with; {named(ranks)} {how}",
        confidence=_SAID_SO if said_so else _SAID_NOTHING,
        culprits=ranks,
        nodes=_nodes(told, ranks),
        otherwise="what that rank did while the others waited: its log, or its stack",
    )


def blame_reporter(verdict: Verdict, told: Sequence[Told]) -> Verdict:
    """Name the only rank whose logger has told of an error of its own, where all left with one code that tells none."""
    own = {one.rank: {int(rank) for rank in _ERROR_OF.findall(one.text)} for one in told}
    ranks = tuple(rank for rank in verdict.culprits if own.get(rank))
    # Many frameworks let rank 0 alone speak for all.
    if len(ranks) != 1 or own[ranks[0]] != {ranks[0]} or ranks == (0,):
        return verdict
    text = next(one.text for one in told if one.rank == ranks[0])
    found = _ERROR_OF.search(text)
    line = text[found.start() :].partition("\n")[0][:300] if found is not None else ""
    return msgspec.structs.replace(
        verdict,
        reason=f'{named(verdict.culprits)} left with one code, and {named(ranks)} alone had told of an error: "{line}"',
        confidence=min(verdict.confidence, _OWN_REPORT),
        culprits=ranks,
        nodes=_nodes(told, ranks),
        otherwise="an error of another rank before it",
    )


def blame_named(verdict: Verdict, victims: Sequence[Told], world_size: int) -> Verdict:
    """Name the ranks or the link that victims' words name; the same verdict where they name neither."""
    said = [found for one in victims if (found := named_in(one.text)) is not None]
    came = {one.rank for one in victims if _REACHED in one.text}
    fits = [one for one in said if all(rank < world_size for rank in one.ranks) and came.isdisjoint(one.ranks)]
    if fits:
        return _of_named(verdict, fits, victims)
    links = [(one, ends) for one in victims if (ends := links_in(one.text))]
    if not links:
        # Several that find no way to a peer may all mean one that is gone.
        links = [(one, ends) for one in victims if (ends := roads_in(one.text))]
        links = links if len(links) == 1 else []
    return _of_links(verdict, links, len(victims)) if links else verdict


def _of_named(verdict: Verdict, said: Sequence[Named], victims: Sequence[Told]) -> Verdict:
    first = said[0]
    agree = all(one.ranks == first.ranks for one in said)
    return msgspec.structs.replace(
        verdict,
        fault=first.fault,
        reason=f"{first.why}; {len(victims)} ranks died of it",
        confidence=first.sure if agree else min(first.sure, 0.5),
        culprits=first.ranks,
        nodes=_nodes(victims, first.ranks),
        otherwise="the end of that rank, or its black box: they would tell what it was at",
    )


def _of_links(verdict: Verdict, links: Sequence[tuple[Told, Sequence[Link]]], victims: int) -> Verdict:
    lines = [f"rank {one.rank}{f' on {one.node}' if one.node else ''}: {found[0].text}" for one, found in links]
    # Of two ends the one whose own port went down is the cause; the other one only has no answer.
    own = [(one, found) for one, found in links if found[0].is_own]
    blamed = own or links
    more = f" and {len(lines) - _MOST_LINKS} more" if len(lines) > _MOST_LINKS else ""
    nodes = tuple(sorted({one.node for one, _ in blamed}))
    return msgspec.structs.replace(
        verdict,
        fault="link_cut",
        reason=(
            f"network connections failed: {'; '.join(lines[:_MOST_LINKS])}{more}; {victims} ranks lost a "
            "peer, and no rank is known to have ended before them"
        ),
        confidence=_BOTH_ENDS if len(links) > 1 else _ONE_END,
        culprits=tuple(sorted(one.rank for one, _ in blamed)),
        nodes=nodes,
        otherwise="the end of a rank that had died before: its connections fail in the same way",
    )


def _nodes(told: Sequence[Told], ranks: Sequence[int]) -> tuple[str, ...]:
    return tuple(sorted({one.node for one in told if one.rank in ranks}))
