# SPDX-License-Identifier: Apache-2.0
"""Which ranks can't reach each other, by the TCP connections in which their data is not acknowledged.

When a network is cut, all ranks wait in the same collective, and nothing that they did distinguishes them. Their
kernels do. Data of a living network is acknowledged by the other end's kernel whatever the process there does (stopped,
stuck, reading nothing), so data that was sent again twice and more without an answer, seconds after the last step, was
not delivered. Which rank is at the other end follows from its own end of the same connection, or its node's address.

Named is the smallest thing that explains all of it: a node that is in every pair which can't reach each other, where
there are several; of a single pair both ends, because neither end can know whose cable it is.

What is not acknowledged and was not sent again has not left the sender, or its reader has no room for it. Only the
first of both is evidence: of a few ranks whose data does not leave while all wait, theirs is the way that is cut.

Nodes may also be unable to meet before a round has any ranks; their runners report it when they ask for the next one.

Pure: stands in, an answer or None out.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from megascale_ops.diagnosis.hangs.causes import Patience
from megascale_ops.diagnosis.hangs.questions import CLEAR, MOST_TOLD, Answer, finding_of
from megascale_ops.diagnosis.hangs.rank_wait import RankWait
from megascale_ops.schema.folding import named
from megascale_ops.schema.health import Finding, Verdict
from megascale_ops.schema.messages import StuckConnection

# Twice: one packet is lost on healthy networks too; twice means that 0.6 s at least have brought no answer.
LEAST_RESENT = 2
# 2 looks, 2 s apart: what was lost on its way has been sent again by then, and is no longer taken for held back.
LEAST_LOOKS = 2
_LOOPBACK = ("127.", "[::1]")


class Line(NamedTuple):
    """One connection in which a rank's data does not get on."""

    stand: RankWait
    fact: StuckConnection
    peer: RankWait | None  # the rank at the other end, where its own end is known
    node: str  # the other end's node, "" where it is not known

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes at both ends."""
        return frozenset({self.stand.view.node, self.node})


def cut(stands: Sequence[RankWait]) -> Answer | None:
    """Question 3: ranks whose data is not acknowledged by the kernels of others."""
    lines = [line for line in _lines(stands) if line.fact.resent >= LEAST_RESENT and line.node]
    if not lines:
        return None
    pairs = {line.nodes for line in lines}
    center = _center(pairs)
    ends = {stand.rank: stand for line in lines for stand in (line.stand, line.peer) if stand is not None}
    if center:
        culprits = {rank: stand for rank, stand in ends.items() if stand.view.node == center}
        culprits = culprits or {stand.rank: stand for stand in stands if stand.view.node == center}
        rest = sorted(frozenset().union(*pairs) - {center})
        why = f"{named(list(culprits))} on {center} is cut off from {_some(rest)}"
    else:
        culprits = ends | _of_unknown_ends(lines, ends, stands)
        # The other end of a connection within a node is reported by that same node only.
        others = "each other" if len(culprits) > 1 else f"who is at {lines[0].fact.remote}"
        why = f"{_sides(culprits.values())} can't reach {others}"
    most = max(line.fact.resent for line in lines)
    why += f": {_count(len(lines))} not acknowledged, sent again up to {most} times"
    otherwise = "no cut, had the other end's kernel acknowledged what was sent to it"
    return Answer("link_cut", sorted(culprits), CLEAR, why, Patience.NETWORK, otherwise, _findings(lines))


def unsent(stands: Sequence[RankWait]) -> Answer | None:
    """Question 7: all ranks wait, and the data of a few does not leave them."""
    if not any(stand.inside is not None for stand in stands) or not all(stand.waits for stand in stands):
        return None
    lines = [line for line in _lines(stands) if _is_held_back(line)]
    senders = {line.stand.rank: line.stand for line in lines}
    if not senders or 2 * len(senders) > len(stands):
        return None
    waits = sum(line.fact.queued_bytes for line in lines)
    why = (
        f"what {_sides(senders.values())} sends does not leave: {waits} bytes wait in its TCP queues, while all "
        f"{len(stands)} ranks wait in a collective and the others' queues are empty"
    )
    otherwise = "nobody named, had its queues been empty or the others' as full"
    return Answer("link_cut", sorted(senders), 0.7, why, Patience.NETWORK, otherwise, _findings(lines))


def unmet(told: Mapping[str, Sequence[str]], first: str, *, round_: int, wall_s: float) -> Verdict | None:
    """Return the verdict on a round that never began, because nodes could not reach the one that has its store.

    Args:
        told: by node, the nodes it could not reach, by its runner's report; none, when it waited in the store for the
            others.
        first: the node that has the store.
        round_: which round.
        wall_s: the time now.
    """
    lost = sorted(node for node, others in told.items() if first in others)
    came = sorted(node for node, others in told.items() if node != first and not others)
    if not lost:
        return None
    if came:
        nodes, why = lost, f"{_some(lost)} can't reach {first}, which {_some(came)} reached"
    elif len(lost) > 1:
        nodes, why = [first], f"{first} is cut off from {_some(lost)}"
    else:
        nodes = sorted({first, *lost})
        why = f"{_some(nodes)} can't reach each other"
    findings = [
        Finding("not_reached", f"the runner of {node} could not reach {first}", "runner", node=node) for node in lost
    ]
    return Verdict(
        fault="link_cut",
        reason=f"{why}: the nodes of round {round_} did not meet, and none of its ranks began",
        confidence=CLEAR,
        nodes=tuple(nodes),
        since_wall_s=wall_s,
        round=round_,
        evidence=tuple(findings[:MOST_TOLD]),
        otherwise=f"no cut, had they all reached {first}",
    )


def lasts(verdict: Verdict, before: Verdict | None, step: int) -> Verdict:
    """Return the verdict on a round of which only ranks that lost a peer are known; the same, where it has a cause.

    After a cut that lasts the ranks can't connect, and each end reads as a victim's. If no rank died, the round
    before was cut, and no rank has made a step (``step`` is below 0) since, it is the same cut.
    """
    peers = [finding for finding in verdict.evidence if finding.name == "ended_peer"]
    if verdict.fault != "unknown" or not peers or before is None or before.fault != "link_cut" or step >= 0:
        return verdict
    lost = sorted(finding.rank for finding in peers)
    return msgspec.structs.replace(
        verdict,
        fault="link_cut",
        reason=(
            f"{named(lost)} lost a peer before the first step though no rank had died, and in the round before "
            f"{_some(before.nodes)} could not be reached: the network is still cut"
        ),
        confidence=0.7,
        culprits=before.culprits,
        nodes=before.nodes,
        otherwise="a step, or the end of a rank that the others lost",
    )


def _lines(stands: Sequence[RankWait]) -> Iterator[Line]:
    """Yield the connections between ranks in which data does not get on."""
    stuck = [stand for stand in stands if stand.look.stuck]
    if not stuck:
        return
    ends = {_end(stand.view.node, one.local): stand for stand in stuck for one in stand.look.stuck}
    nodes = _nodes_by_address(stands)
    for stand in stuck:
        own = stand.view.node
        for one in stand.look.stuck:
            peer = ends.get(_end(own, one.remote))
            host = one.remote.rpartition(":")[0]
            near = one.remote.startswith(_LOOPBACK)
            node = own if near else peer.view.node if peer is not None else nodes.get(host, "")
            if peer is not None or near or host in nodes:  # else: a connection to a host outside the job
                yield Line(stand, one, peer, node)


def _end(node: str, end: str) -> tuple[str, str]:
    """Return one end of a connection so that it is unique: every node has a loopback of its own."""
    return (node if end.startswith(_LOOPBACK) else "", end)


def _nodes_by_address(stands: Sequence[RankWait]) -> dict[str, str]:
    """Return the node of each address; "" where several nodes have the same (one machine, or a translated address)."""
    found: dict[str, str] = {}
    for stand in stands:
        for host in stand.look.addresses:
            name = f"[{host}]" if ":" in host else host
            found[name] = stand.view.node if found.get(name, stand.view.node) == stand.view.node else ""
    return found


def _is_held_back(line: Line) -> bool:
    """Return whether data waits at its sender, not on its way (it would be sent again) nor for its reader."""
    fact, peer = line.fact, line.peer
    if not fact.queued_bytes or fact.resent or line.stand.look.stuck_looks < LEAST_LOOKS:
        return False
    return peer is None or not any(one.unread_bytes for one in peer.look.stuck if one.local == fact.remote)


def _center(pairs: Iterable[frozenset[str]]) -> str:
    """Return the one node that is in every pair of several; "" where there is none, or where any of two could be it."""
    apart = [pair for pair in pairs if len(pair) > 1]
    if len(apart) < 2:
        return ""
    shared = frozenset.intersection(*apart)
    return next(iter(shared)) if len(shared) == 1 else ""


def _of_unknown_ends(
    lines: Sequence[Line], ends: Mapping[int, RankWait], stands: Sequence[RankWait]
) -> dict[int, RankWait]:
    """Return all ranks of nodes at the other ends of which no rank is known to be there."""
    told = {stand.view.node for stand in ends.values()}
    missing = {line.node for line in lines} - told
    return {stand.rank: stand for stand in stands if stand.view.node in missing}


def _sides(stands: Iterable[RankWait]) -> str:
    """Return ranks node by node, as a sentence begins."""
    by_node: dict[str, list[int]] = {}
    for stand in sorted(stands, key=lambda stand: stand.rank):
        by_node.setdefault(stand.view.node, []).append(stand.rank)
    return _some([f"{named(ranks)} on {node}" for node, ranks in by_node.items()])


def _some(texts: Sequence[str]) -> str:
    shown = [*texts[:4], f"{len(texts) - 4} more"] if len(texts) > 4 else list(texts)
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]


def _count(number: int) -> str:
    return f"what they send on {number} connections is" if number > 1 else "what is sent on one connection is"


def _findings(lines: Sequence[Line]) -> tuple[Finding, ...]:
    found = []
    for line in lines[:MOST_TOLD]:
        stand, fact = line.stand, line.fact
        to = f"rank {line.peer.rank} on {line.node}" if line.peer is not None else f"node {line.node or 'not known'}"
        text = (
            f"{fact.queued_bytes} bytes from rank {stand.rank} on {stand.view.node} to {to} ({fact.remote}) are not "
            f"acknowledged, sent again {fact.resent} times"
        )
        found.append(finding_of("not_acknowledged", text, "process", stand, fact.resent))
    return tuple(found)
