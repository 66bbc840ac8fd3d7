# SPDX-License-Identifier: Apache-2.0
"""Evidence of an incident is bounded, and what is about the ranks to blame is never what is left out."""

from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_ops.controller.job.evidence_orders import EvidenceOrders
from megascale_ops.controller.job.incidents import MOST_EVIDENCE, add_evidence, judge
from megascale_ops.schema.events import Incident
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import EvidenceItem


def stack(rank: int, text: str = "") -> EvidenceItem:
    """One rank's stack."""
    return EvidenceItem("stacks", ok=True, rank=rank, text=text)


def test_the_culprits_evidence_stays_however_late_it_comes() -> None:
    """12,288 ranks answer, the culprit last: its stack is kept, and of the others those that came first."""
    incident = Incident("i", "job", 1, verdict=Verdict("silent", "because", 0.9, culprits=(9_000,)))

    for first in range(0, 12_288, 8):
        if first != 9_000:
            incident = add_evidence(incident, [stack(first + local) for local in range(8)])
    incident = add_evidence(incident, [stack(9_000 + local) for local in range(8)])

    ranks = [item.rank for item in incident.evidence]
    assert len(ranks) == MOST_EVIDENCE
    assert ranks == [9_000, *range(MOST_EVIDENCE - 1)]


def test_a_later_look_replaces_the_one_before() -> None:
    """Within the bound everything stays, in the order in which it came."""
    incident = Incident("i", "job", 1, verdict=Verdict("silent", "because", 0.9, culprits=(1,)))

    incident = add_evidence(incident, [stack(0, "first"), stack(1, "first")])
    incident = add_evidence(incident, [stack(0, "second")])

    assert [(item.rank, item.text) for item in incident.evidence] == [(1, "first"), (0, "second")]


@given(
    culprits=st.lists(st.integers(0, 900), max_size=3) | st.just(list(range(1_000))),
    later=st.lists(st.integers(0, 900), max_size=3),
    looks=st.lists(st.permutations(range(0, 1_000, 8)).map(lambda firsts: firsts[:100]), min_size=1, max_size=3),
)
@settings(max_examples=40, deadline=None)
def test_what_is_kept_in_mind_changes_nothing(culprits: list[int], later: list[int], looks: list[list[int]]) -> None:
    """Answers of many nodes, looks that come again and a verdict that changes: the same evidence in the same order."""
    orders = EvidenceOrders()
    plain = kept = Incident("i", "job", 1, verdict=Verdict("silent", "because", 0.9, culprits=tuple(culprits)))

    for number, firsts in enumerate(looks):
        for first in firsts:
            items = [stack(first + local, f"look {number}") for local in range(8)]
            plain, kept = add_evidence(plain, items), orders.add(kept, items)
        verdict = Verdict("sleeping", "because", 0.9, culprits=tuple(later))
        plain, kept = judge(plain, verdict), judge(kept, verdict)
        items = [EvidenceItem("stacks", ok=False, text="no answer from node-1")]
        plain, kept = add_evidence(plain, items), orders.add(kept, items)

    assert kept == plain


def test_an_answer_for_which_there_is_no_room_costs_nothing() -> None:
    """The incident stays the same object; one about a culprit displaces another piece all the same."""
    orders = EvidenceOrders()
    incident = Incident("i", "job", 1, verdict=Verdict("silent", "because", 0.9, culprits=(9_000,)))
    for rank in range(MOST_EVIDENCE):
        incident = orders.add(incident, [stack(rank)])

    left_out = orders.add(incident, [stack(5_000)])
    displaced = orders.add(incident, [stack(9_000)])

    assert left_out is incident
    assert [item.rank for item in displaced.evidence] == [9_000, *range(MOST_EVIDENCE - 1)]


def test_where_all_ranks_are_named_the_first_to_come_stay() -> None:
    """A wait of all for all: with a million ranks no answer is held against the whole list of them again."""
    orders = EvidenceOrders()
    incident = Incident("i", "job", 1, verdict=Verdict("silent", "because", 0.3, culprits=tuple(range(10_000))))
    for rank in range(MOST_EVIDENCE):
        incident = orders.add(incident, [stack(rank)])

    assert orders.add(incident, [stack(5_000)]) is incident
    assert orders.add(incident, [stack(7, "anew")]) == add_evidence(incident, [stack(7, "anew")])
