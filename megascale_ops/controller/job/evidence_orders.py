# SPDX-License-Identifier: Apache-2.0
"""The orders for evidence of one incident, and which of them were answered: void with the incident after the next."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megascale_ops.controller.job.incidents import MOST_EVIDENCE, add_evidence

if TYPE_CHECKING:
    from megascale_ops.schema.events import Incident
    from megascale_ops.schema.health import Verdict
    from megascale_ops.schema.messages import EvidenceItem


class EvidenceOrders:
    """Whose evidence is taken for one incident, late or not, and each answer once. Owned by the job."""

    def __init__(self, nodes: Mapping[str, str] | None = None) -> None:
        self.nodes = dict(nodes or {})  # by order id
        self.answered: set[str] = set()
        self._verdict: Verdict | None = None  # of which these are the culprits
        self._named: frozenset[int] = frozenset()
        self._evidence: tuple[EvidenceItem, ...] = ()  # of which these are the ranks
        self._ranks: frozenset[int] = frozenset()
        self._named_first = self._all_named = False

    def was_given(self, order_id: str, node: str) -> bool:
        """Return whether that node was given that order."""
        return self.nodes.get(order_id) == node

    def add(self, incident: "Incident", items: Sequence["EvidenceItem"]) -> "Incident":
        """Return the incident with these pieces, as ``add_evidence`` does.

        Of thousands of nodes that answer most change nothing, for there is no room left. So it is kept in mind which
        ranks the verdict names, which may be all, and which the evidence is about.
        """
        if len(incident.evidence) < MOST_EVIDENCE:
            return add_evidence(incident, items)
        self._look_at(incident)
        is_left_out = self._named_first and all(
            item.rank not in self._ranks and (self._all_named or item.rank not in self._named) for item in items
        )
        return incident if is_left_out else add_evidence(incident, items, self._named)

    def _look_at(self, incident: "Incident") -> None:
        verdict, evidence = incident.verdict, incident.evidence
        if verdict is self._verdict and evidence is self._evidence:
            return
        if verdict is not self._verdict:
            self._verdict = verdict
            self._named = frozenset(verdict.culprits if verdict is not None else ())
        self._evidence = evidence
        self._ranks = frozenset(one.rank for one in evidence)
        are_named = [one.rank in self._named for one in evidence]
        self._all_named = all(are_named)
        self._named_first = not any(are_named[sum(are_named) :])
