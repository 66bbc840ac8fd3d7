# SPDX-License-Identifier: Apache-2.0
"""Which nodes of a job measure themselves before its next round; a new one, whole, with each round that is formed."""


class NodeChecks:
    """The checks between two rounds. Owned by the job.

    Args:
        asked: nodes that measure themselves, and until when that is waited for, this controller's clock.
        gpus_only: those of them that measure their GPUs alone.
        wants_all: all nodes do before the next round.
    """

    def __init__(self, asked: dict[str, float], gpus_only: set[str], *, wants_all: bool = False) -> None:
        self.asked = asked
        self.gpus_only = gpus_only
        self.done: set[str] = set()  # nodes that have, or whose time for it is over
        self.wants_all = wants_all
        self.told_out: set[str] = set()  # nodes that are there and out, and that was told
        self.accused: set[str] = set()  # nodes that a check by their agent has accused by now: not measured twice
