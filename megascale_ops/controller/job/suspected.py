# SPDX-License-Identifier: Apache-2.0
"""A suspicion while it lasts: the evidence on the suspects, and what was announced of the coming action.

It begins when a rank falls silent and ends when the suspects move, are left alone or are stopped, as the state
requires: ``Transitions.move`` puts a new one in its place, whole. Which ranks stand still now is ``Round.silence``.
"""

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from megascale_ops.controller.record.state_machine import State
from megascale_ops.diagnosis.hangs.evidence import NOTHING, gather, see
from megascale_ops.schema.messages import EvidenceItem

if TYPE_CHECKING:
    from megascale_ops.controller.job.round import SilenceCheck
    from megascale_ops.diagnosis.hangs.verdict import Judgement
    from megascale_ops.diagnosis.rank_view import RankView

SUSPECTING = frozenset({State.SUSPECT, State.CONFIRMING})


class Suspected:
    """The suspects of a job. Owned by the job.

    Args:
        wanted: ids of orders for evidence whose answers are awaited.
        evidence: what a controller before this one had received.
    """

    def __init__(self, wanted: Iterable[str] = (), evidence: Iterable[EvidenceItem] = ()) -> None:
        self.age_s = 0.0  # how long the suspects had been silent when they were last judged
        self.evidence_wanted = set(wanted)
        self.looks = gather(evidence)  # the ranks by the evidence
        self.looks_taken = 0
        self.look_at_s = 0.0  # when they are looked at again, the controller's clock
        self.asks: frozenset[str] | None = None  # the nodes that the next look is at; None: all
        self.seen: dict[int, RankView] = {}  # of large jobs: ranks by their heartbeats, when they were looked at
        self.planned_wall_s = 0.0  # when the suspects are acted upon, as was last announced; 0: not announced
        self.judged: tuple[SilenceCheck, Judgement] | None = None  # confidence of the suspicion, with this evidence

    def begin_look(self, wanted: Iterable[str]) -> None:
        """Note that evidence was asked for."""
        self.looks_taken += 1
        self.evidence_wanted = set(wanted)
        self.asks = None

    def ingest_evidence(self, items: Iterable[EvidenceItem]) -> None:
        """Take evidence in; what the suspicion was worth without it does not count any more."""
        for item in items:
            if item.rank < 0:
                continue
            self.looks[item.rank] = see(self.looks.get(item.rank, NOTHING), item)
        self.judged = None

    def end_waiting(self, ids: Collection[str]) -> bool:
        """Note that orders are executed or void; return whether they were the last that were awaited."""
        awaited = bool(self.evidence_wanted)
        self.evidence_wanted -= set(ids)
        return awaited and not self.evidence_wanted
