# SPDX-License-Identifier: Apache-2.0
"""Ranks that can't reach each other are named by what their kernels could not deliver, and none is without that."""

import pytest

from megascale_ops.diagnosis.hangs.partition import lasts, unmet
from megascale_ops.diagnosis.hangs.verdict import Judgement
from megascale_ops.schema.health import Finding, Verdict
from megascale_ops.schema.messages import EvidenceItem, StuckConnection
from tests.fakes.hung_job import WAITING, judge_job, made_calls, rank_view, said_of, stack_of

# Twice what a step may take: a network that flaps comes back, and TCP sends again by itself.
DOUBLE = 10.0


def host(rank: int, each: int = 2) -> str:
    """Where a rank is reached: `each` ranks a node."""
    return f"10.0.0.{rank // each + 1}"


def end(rank: int, peer: int) -> str:
    """The rank's end of its connection to a peer."""
    return f"{host(rank)}:{1000 + 10 * rank + peer}"


def sent(rank: int, *peers: int, resent: int = 3, queued: int = 96, unread: int = 0) -> tuple[StuckConnection, ...]:
    """What a rank has sent to peers in vain."""
    return tuple(StuckConnection(end(rank, peer), end(peer, rank), queued, unread, resent) for peer in peers)


def kernel(rank: int, *stuck: StuckConnection, addresses: tuple[str, ...] | None = None) -> EvidenceItem:
    """What a rank's kernel tells of its connections."""
    return EvidenceItem("process", ok=True, connections=stuck, addresses=addresses or (host(rank),))


def judge(stuck: dict[int, tuple[StuckConnection, ...]], size: int = 4, *, odd: int = -1, looks: int = 2) -> Judgement:
    """All ranks of nodes with two ranks each wait in all_reduce #41; ``odd`` has finished one less."""
    views = [rank_view(rank, node="abcdefgh"[rank // 2]) for rank in range(size)]
    behind = made_calls("all_reduce", "all_gather", last=40)
    evidence = [
        item
        for rank in range(size)
        for item in said_of(rank, behind if rank == odd else WAITING, *[kernel(rank, *stuck.get(rank, ()))] * looks)
    ]
    return judge_job(views, evidence)


def test_two_nodes_that_cannot_reach_each_other_are_both_named() -> None:
    """Neither end can tell whose cable it is: ranks and nodes of both, with the connections as evidence."""
    found = judge({1: sent(1, 2), 2: sent(2, 1, resent=5), 0: sent(0, 3), 3: sent(3, 0)})

    verdict = found.verdict
    assert (verdict.fault, verdict.culprits, verdict.nodes) == ("link_cut", (0, 1, 2, 3), ("a", "b"))
    assert verdict.reason.startswith("ranks 0-1 on a and ranks 2-3 on b can't reach each other: ")
    assert "4 connections" in verdict.reason
    assert "up to 5 times" in verdict.reason
    texts = [finding.text for finding in verdict.evidence if finding.name == "not_acknowledged"]
    assert "96 bytes from rank 1 on a to rank 2 on b (10.0.0.2:1021) are not acknowledged, sent again 3 times" in texts
    assert found.patience_s == DOUBLE


def test_a_node_that_several_others_cannot_reach_is_named_alone() -> None:
    """It is in every pair of nodes that can't reach each other; the others are victims."""
    found = judge({1: sent(1, 2), 2: sent(2, 1), 3: sent(3, 4), 4: sent(4, 3)}, size=6)

    assert (found.verdict.fault, found.verdict.culprits, found.verdict.nodes) == ("link_cut", (2, 3), ("b",))
    assert "ranks 2-3 on b is cut off from a and c" in found.verdict.reason


def test_two_separate_cuts_name_all_ends() -> None:
    """No node is in both pairs."""
    found = judge({1: sent(1, 2), 5: sent(5, 6)}, size=8)

    assert found.verdict.nodes == ("a", "b", "c", "d")


def test_a_peer_of_which_no_end_is_known_is_known_by_its_address() -> None:
    """Only one side had something to say when the cable went: the other's ranks are those of its node."""
    found = judge({1: sent(1, 2)})

    assert (found.verdict.fault, found.verdict.culprits, found.verdict.nodes) == ("link_cut", (1, 2, 3), ("a", "b"))


@pytest.mark.parametrize(
    "stuck",
    [
        {},
        {1: sent(1, 2, resent=0), 2: sent(2, 1, queued=0, unread=64, resent=0)},  # a reader that does not read
        {1: (StuckConnection("10.0.0.1:7", "192.168.9.9:2049", 4096, 0, 9),)},  # an address that is no rank's
        {rank: sent(rank, (rank + 1) % 4, resent=0) for rank in range(4)},  # all ranks' data waits
        {rank: sent(rank, (rank + 1) % 4, resent=1) for rank in range(4)},  # and a packet was lost here and there
    ],
)
def test_what_proves_no_cut_names_nobody(stuck: dict[int, tuple[StuckConnection, ...]]) -> None:
    """The negative controls: as without any evidence of connections."""
    found = judge(stuck)

    assert (found.verdict.fault, found.verdict.culprits) == ("silent", ())


def test_a_rank_whose_data_does_not_leave_it_is_named() -> None:
    """Nothing was sent again, and no other's data waits: it is its own link out; less sure than a cut."""
    found = judge({1: sent(1, 0, 2, resent=0)})

    assert (found.verdict.fault, found.verdict.culprits, found.verdict.nodes) == ("link_cut", (1,), ("a",))
    assert "192 bytes wait" in found.verdict.reason
    assert found.verdict.confidence < 0.9
    assert found.patience_s == DOUBLE


def test_data_that_was_seen_to_wait_once_may_be_on_its_way() -> None:
    """It was sent to a node that is cut off, and not sent again yet: its sender is a victim."""
    assert judge({1: sent(1, 2, resent=0)}, looks=1).verdict.culprits == ()
    assert judge({1: sent(1, 2, resent=1)}, looks=2).verdict.culprits == ()


def test_a_cut_explains_ranks_that_are_behind() -> None:
    """Who is still inside what the others have finished is a victim of the cut, not a suspect of its own."""
    found = judge({1: sent(1, 2), 2: sent(2, 1)}, odd=2)

    assert (found.verdict.fault, found.verdict.nodes) == ("link_cut", ("a", "b"))


def test_addresses_that_two_nodes_share_name_no_node() -> None:
    """One machine, or a translated address: such an address says nothing of who is at the other end."""
    views = [rank_view(rank, node="ab"[rank]) for rank in range(2)]
    lost = StuckConnection("172.17.0.2:50", "172.17.0.2:60", 96, 0, 3)
    evidence = [
        item
        for rank in range(2)
        for item in said_of(rank, WAITING, kernel(rank, *((lost,) if rank == 0 else ()), addresses=("172.17.0.2",)))
    ]

    assert judge_job(views, evidence).verdict.culprits == ()


def test_a_rank_that_is_missing_stays_the_culprit() -> None:
    """Others wait for a rank outside of all collectives: data that waits unsent changes nothing about that."""
    views = [rank_view(rank, waits=rank != 1, node="ab"[rank // 2]) for rank in range(4)]
    evidence = [
        item
        for rank in (0, 2, 3)
        for item in said_of(rank, WAITING, stack_of("in_collective"), *[kernel(rank, *sent(rank, 1, resent=0))] * 2)
    ]

    assert judge_job(views, evidence).verdict.culprits == (1,)


@pytest.mark.parametrize(
    ("told", "nodes", "why"),
    [
        ({"a": (), "b": ("a",)}, ("a", "b"), "a and b can't reach each other"),
        ({"b": ("a",)}, ("a", "b"), "a and b can't reach each other"),
        ({"a": (), "b": ("a",), "c": ()}, ("b",), "b can't reach a, which c reached"),
        ({"a": (), "b": ("a",), "c": ("a",)}, ("a",), "a is cut off from b and c"),
    ],
    ids=["two nodes", "the first says nothing", "one of two others", "all others"],
)
def test_nodes_that_do_not_meet_before_a_round_begins_are_named(
    told: dict[str, tuple[str, ...]], nodes: tuple[str, ...], why: str
) -> None:
    """Node a has the round's store; ranks that could not reach it accuse it, and those that did excuse it."""
    verdict = unmet(told, "a", round_=2, wall_s=100.0)

    assert verdict is not None
    assert (verdict.fault, verdict.nodes, verdict.round) == ("link_cut", nodes, 2)
    assert verdict.reason == f"{why}: the nodes of round 2 did not meet, and none of its ranks began"
    assert all(finding.name == "not_reached" for finding in verdict.evidence)


@pytest.mark.parametrize("told", [{}, {"a": (), "b": ()}, {"b": ("c",)}], ids=["nobody", "all reached", "no member"])
def test_nodes_that_are_only_late_are_not_cut_off(told: dict[str, tuple[str, ...]]) -> None:
    """Who waited in the store for the others has reached it, and whom it waited for may be slow."""
    assert unmet(told, "a", round_=2, wall_s=100.0) is None


CUT = Verdict(fault="link_cut", reason="", confidence=0.9, culprits=(0, 1), nodes=("a", "b"))
LOST_PEER = Verdict(
    fault="unknown", reason="", confidence=0.2, evidence=(Finding("ended_peer", "rank 1: ...", "exit status", rank=1),)
)


def test_ranks_that_lose_each_other_again_before_a_step_are_still_cut_off() -> None:
    """Gloo says of a connection that can't be made what it says of one whose other end has died."""
    verdict = lasts(LOST_PEER, CUT, -1)

    assert (verdict.fault, verdict.culprits, verdict.nodes) == ("link_cut", (0, 1), ("a", "b"))
    assert verdict.reason.startswith("rank 1 lost a peer before the first step though no rank had died")


@pytest.mark.parametrize(
    ("verdict", "before", "step"),
    [
        (LOST_PEER, CUT, 0),
        (LOST_PEER, None, -1),
        (LOST_PEER, Verdict(fault="killed", reason="", confidence=0.9, nodes=("b",)), -1),
        (Verdict(fault="unknown", reason="", confidence=0.2), CUT, -1),
        (Verdict(fault="killed", reason="", confidence=0.9, evidence=LOST_PEER.evidence), CUT, -1),
    ],
    ids=["steps were made", "first round", "another fault before", "nobody lost a peer", "somebody died"],
)
def test_a_lost_peer_alone_is_no_cut(verdict: Verdict, before: Verdict | None, step: int) -> None:
    """Without the cut in the round before, or with a step since, the verdict stays as it was."""
    assert lasts(verdict, before, step) is verdict


def test_one_end_alone_cannot_reach_each_other() -> None:
    """On one machine only the peer's own report identifies the other end; the sentence says where it is."""
    stuck = StuckConnection("127.0.0.1:1001", "127.0.0.1:1000", 96, 0, 3)

    found = judge({1: (stuck,)}, size=2)

    assert found.verdict.culprits == (1,)
    assert found.verdict.reason.startswith("rank 1 on a can't reach who is at 127.0.0.1:1000: ")
