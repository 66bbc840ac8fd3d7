# SPDX-License-Identifier: Apache-2.0
"""Evidence of an incident is bounded, and what is about the ranks to blame is never what is left out."""

from megascale_ops.controller.job.incidents import MOST_EVIDENCE, add_evidence
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
