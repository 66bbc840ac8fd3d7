# SPDX-License-Identifier: Apache-2.0
"""A check that a verdict owes a GPU, and whether the next round waits for it.

``detectors/self_checks`` notes, begins and ends them; a round is formed when none is left that it must wait for. Where
the node's runner measures the whole node in the same pause (``recovery/checks``), that is the check. Of a GPU that did
not come to its collective the runner is asked first: its word keeps a node out also where its agent serves one job.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megascale_ops.schema.health import NodeCheck


# What tells of one GPU beside its equals, and of its health; the same product bit by bit, too.
GPU_CHECKS = ("gpu_health", "gemm", "hbm", "agreement")


class OwedCheck:
    """One check of one GPU. Owned by its job.

    Attributes:
        incident: Whose verdict called it slow, or says that it did not come to its collective.
        node, rank, gpu: Which it is; ``gpu`` is its UUID, "" where no agent has told it.
        since_s: When it came to be owed, the controller's clock.
        hung: It did not come to its collective.
        begun: Its node's agent has been ordered to make it.
        until_s: So long a round waits for it once its node is there; 0: it has not been looked at in a pause.
        instead: What the node's runner has measured before the agent was asked; it is not measured twice.
    """

    __slots__ = ("begun", "gpu", "hung", "incident", "instead", "node", "rank", "since_s", "until_s")

    def __init__(self, incident: str, node: str, rank: int, gpu: str, since_s: float, *, hung: bool = False) -> None:
        self.incident = incident
        self.node = node
        self.rank = rank
        self.gpu = gpu
        self.since_s = since_s
        self.hung = hung
        self.begun = False
        self.until_s = 0.0
        self.instead: NodeCheck | None = None

    @property
    def who(self) -> str:
        """Whose check it is, for sentences."""
        return f"the GPU of rank {self.rank} on {self.node}"

    @property
    def why(self) -> str:
        """What is said of it, for sentences."""
        return f"{self.who} {'did not come to its collective' if self.hung else 'is slow'}"


def are_awaited(owed: Iterable[OwedCheck], joined: Iterable[str], evicted: Iterable[str], now_s: float) -> bool:
    """Return whether a round that could be formed waits: a node that would be in it is to be checked, or being so.

    Args:
        owed: the job's.
        joined: nodes whose runners wait for the round.
        evicted: nodes that are kept out of it anyhow.
        now_s: the controller's clock.
    """
    here, out = set(joined), set(evicted)
    return any(one.node in here and one.node not in out and (not one.until_s or now_s < one.until_s) for one in owed)
