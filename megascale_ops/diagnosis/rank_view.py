# SPDX-License-Identifier: Apache-2.0
"""One rank as its agent described it, with ages that judgement goes by. Pure."""

from typing import NamedTuple

from megascale_ops.schema.progress import RankReport

GONE = ("", "Z", "X")


class Reached(NamedTuple):
    """How far a rank is, in numbers that only grow."""

    step: int
    completed: int  # collectives


class RankView(NamedTuple):
    """One rank for judgement; ages in seconds of its own node's clock."""

    node: str
    report: RankReport
    silent_s: float
    stopped_s: float  # in state T for so long, 0 when it runs
    phase_s: float
    heard_age_s: float
    left: bool = False  # it has ended, and its runner, which lives, reports no failure

    @property
    def gone(self) -> bool:
        """The process is no more."""
        return self.report.process.state in GONE
