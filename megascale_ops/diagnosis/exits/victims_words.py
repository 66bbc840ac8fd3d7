# SPDX-License-Identifier: Apache-2.0
"""What remains when every rank is a victim: the ranks their words name, the calls they quote, the link they report.

Asked last, when no rank's end is a cause and no black box shows which rank was absent. A wrong name costs more than
none, so each answer carries the confidence of the words that it rests on, and without any the verdict stays as it was.

Pure: a verdict and texts in, a verdict out.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from megascale_ops.diagnosis.exits.broken_links import Link, links_in
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


def blame_named(verdict: Verdict, victims: Sequence[Told], world_size: int) -> Verdict:
    """Name the ranks or the link that victims' words name; the same verdict where they name neither."""
    said = [found for one in victims if (found := named_in(one.text)) is not None]
    came = {one.rank for one in victims if _REACHED in one.text}
    fits = [one for one in said if all(rank < world_size for rank in one.ranks) and came.isdisjoint(one.ranks)]
    if fits:
        return _of_named(verdict, fits, victims)
    links = [(one, ends) for one in victims if (ends := links_in(one.text))]
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
    lines = [f"rank {one.rank} on {one.node}: {found[0].text}" for one, found in links]
    more = f" and {len(lines) - _MOST_LINKS} more" if len(lines) > _MOST_LINKS else ""
    nodes = tuple(sorted({one.node for one, _ in links}))
    return msgspec.structs.replace(
        verdict,
        fault="link_cut",
        reason=(
            f"NCCL's InfiniBand connections failed: {'; '.join(lines[:_MOST_LINKS])}{more}; {victims} ranks lost a "
            "peer, and no rank is known to have ended before them"
        ),
        confidence=_BOTH_ENDS if len(links) > 1 else _ONE_END,
        culprits=tuple(sorted(one.rank for one, _ in links)),
        nodes=nodes,
        otherwise="the end of a rank that had died before: its connections fail in the same way",
    )


def _nodes(told: Sequence[Told], ranks: Sequence[int]) -> tuple[str, ...]:
    return tuple(sorted({one.node for one in told if one.rank in ranks}))
