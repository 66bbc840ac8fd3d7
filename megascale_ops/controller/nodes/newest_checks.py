# SPDX-License-Identifier: Apache-2.0
"""The newest self-check of each node, as long as it says anything, over jobs and controllers.

Pure: results in, what is to be journaled out.
"""

from collections.abc import Container, Iterable

from megascale_ops.schema.health import CheckedNode, SelfCheckView

# 4,096 nodes: 20 MB at worst, 4 KB each as a rule; the oldest goes first.
MOST_KEPT = 4096
# 30 days: what a machine did before that tells nothing of how it is, and of a node that is gone it would stay for ever.
KEPT_S = 30 * 86_400.0
MOST_LINE = 400  # characters: a sentence with its numbers


class NewestChecks:
    """The newest result of each node. Owned by the loop.

    Args:
        views: those that the journal has.
        most: so many nodes at most.
    """

    def __init__(self, views: Iterable[SelfCheckView] = (), most: int = MOST_KEPT) -> None:
        self._most = most
        self._by_node: dict[str, SelfCheckView] = {}  # that which was asked for last at the end
        for view in sorted(views, key=lambda one: one.asked_wall_s):
            if view.check is not None:
                self.keep(view)

    def of(self, node: str) -> SelfCheckView:
        """Return a node's newest result; one without a check where there is none."""
        return self._by_node.get(node) or SelfCheckView(node, "none")

    def all(self) -> tuple[SelfCheckView, ...]:
        """Return the newest result of every node that has one, the oldest first."""
        return tuple(self._by_node.values())

    def keep(self, view: SelfCheckView) -> tuple[SelfCheckView, ...]:
        """Keep a result; return what is to be journaled: it, and those that are dropped for it, without their check."""
        self._by_node.pop(view.node, None)
        self._by_node[view.node] = view
        dropped = list(self._by_node)[: max(0, len(self._by_node) - self._most)]
        return view, *map(self._drop, dropped)

    def forget(self, wall_s: float) -> tuple[SelfCheckView, ...]:
        """Drop what is too old by now; return what is to be journaled."""
        old = []
        for view in self._by_node.values():
            if view.asked_wall_s > wall_s - KEPT_S:
                break  # those behind it are newer
            old.append(view.node)
        return tuple(map(self._drop, old))

    def _drop(self, node: str) -> SelfCheckView:
        del self._by_node[node]
        return SelfCheckView(node, "none")


def checked_nodes(views: Iterable[SelfCheckView], wanted: Container[str]) -> tuple[CheckedNode, ...]:
    """Return a line on each newest check, by name: of these nodes, and of all where it is bad."""
    lines = [
        CheckedNode(view.node, view.check.status, view.asked_wall_s, view.check.worst[:MOST_LINE])
        for view in views
        if view.check is not None and (view.node in wanted or view.check.status == "bad")
    ]
    return tuple(sorted(lines, key=lambda one: one.node))
