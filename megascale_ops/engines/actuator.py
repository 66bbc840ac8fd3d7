# SPDX-License-Identifier: Apache-2.0
"""What a controller may do with the nodes of a cluster that its administrators own, whatever engine runs it.

An engine is an actuator: what a node's state is here, the controller keeps in its journal and never there. Each call
waits for the engine's own program, with a deadline, so it belongs into a thread.
"""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Protocol

from megascale_ops.errors import MegascaleError

# Before each reason of ours: it says who has drained a node, and who may take that back.
PREFIX = "megascale-ops: "
# 200 characters: one line of `sinfo -R`.
_MOST_REASON = 200


class EngineError(MegascaleError):
    """The engine was not reached, did not answer in time, or refused; the sentence is for the user."""


class RightsError(EngineError):
    """The engine refused since the right for it lacks; the sentence names the right."""


class ForeignError(EngineError):
    """An administrator has the node out of service, and no program of ours takes that back."""


class EngineNode(NamedTuple):
    """How the engine sees one node.

    ``words``: its own words for the state, as in ``drained``. ``reason``: why it is out of service, "" where it is not;
    ``by``: who said so. ``is_usable``: whether a job may be put there, or go on there after a restart.
    """

    name: str
    words: str
    is_usable: bool
    reason: str = ""
    by: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether it is out of service by a verdict of ours."""
        return self.reason.startswith(PREFIX)


class Nodes(Protocol):
    """The nodes of one cluster.

    Attributes:
        title: The engine's name for people.
    """

    title: ClassVar[str]

    def drain(self, node: str, reason: str) -> str:
        """Let no new job onto a node; what runs there goes on. One that is out of service already stays as it is.

        Args:
            node: Our name of it.
            reason: Why, without the prefix.

        Returns:
            What was done, in one sentence.

        Raises:
            EngineError: it was not done.
            RightsError: it may not be done.
        """

    def resume(self, node: str) -> str:
        """Take back what ``drain`` did; what a person has taken out of service stays so.

        Returns:
            What was done, in one sentence.

        Raises:
            ForeignError: an administrator has taken it out of service.
            EngineError: it was not done.
        """

    def states(self) -> Mapping[str, EngineNode]:
        """Return every node of the cluster by the engine's name.

        Raises:
            EngineError: there was no answer.
        """


def reason_of(text: str) -> str:
    """Return a reason as an engine gets it: with the prefix, in one line, and short enough."""
    line = " ".join(text.split())
    return PREFIX + (line if len(line) <= _MOST_REASON else line[: _MOST_REASON - 3] + "...")


def find(states: Mapping[str, EngineNode], node: str) -> EngineNode | None:
    """Return the state of a node by our name of it: the engine's own, or a host name that begins with that."""
    return states.get(node) or states.get(node.partition(".")[0])
