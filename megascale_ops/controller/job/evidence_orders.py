# SPDX-License-Identifier: Apache-2.0
"""The orders for evidence of one incident, and which of them were answered: void with the incident after the next."""

from collections.abc import Mapping


class EvidenceOrders:
    """Whose evidence is taken for one incident, late or not, and each answer once. Owned by the job."""

    def __init__(self, nodes: Mapping[str, str] | None = None) -> None:
        self.nodes = dict(nodes or {})  # by order id
        self.answered: set[str] = set()

    def was_given(self, order_id: str, node: str) -> bool:
        """Return whether that node was given that order."""
        return self.nodes.get(order_id) == node
