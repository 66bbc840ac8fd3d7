# SPDX-License-Identifier: Apache-2.0
"""The one door to all decisions: a question in, the decision out.

Asked when a round has ended (``policy``), when a hang is about to be stopped (``policy``), and each second that a
warning holds (``ski_rental``); and again when the journal is replayed.

Pure: all that an answer depends on stands in its question.
"""

import msgspec

from megascale_ops.controller.policy import actions, ski_rental
from megascale_ops.controller.policy.decision import Decision, Question


def answer(question: Question) -> Decision:
    """Return what to do; in a dry run the answer is the same, marked as not to be done."""
    decision = ski_rental.weigh(question) if question.kind == "warning" else actions.decide(question)
    dry = question.policy.dry_run and decision.action not in actions.GO_ON
    return msgspec.structs.replace(decision, dry_run=True) if dry else decision
