# SPDX-License-Identifier: Apache-2.0
"""Ask the decisions of the past again: the same functions, the same inputs, and perhaps another policy.

A question in the journal carries all that the answer depended on, so the answer must come out as it was recorded;
where it does not, another version of the rules gave it. With another policy, the answers that differ show what it
would have changed: each decision by itself, for what would have followed from it is unknown.

Pure: events in, decisions out.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from megascale_ops.controller.policy.answer import answer
from megascale_ops.controller.policy.decision import Decision, Question, from_event
from megascale_ops.schema.events import Event
from megascale_ops.schema.policy_settings import apply_settings


class Replayed(NamedTuple):
    """One decision of the past, as it was and as it would be now."""

    event: Event
    question: Question
    recorded: Decision
    now: Decision

    @property
    def differs(self) -> bool:
        """Something else would have been done."""
        return _deed(self.recorded) != _deed(self.now)


def replay(events: Iterable[Event], settings: Mapping[str, str] | None = None) -> list[Replayed]:
    """Return every decision among ``events``, asked again with checked ``settings`` over its policy."""
    found = []
    for event in events:
        known = from_event(event)
        if known is None:
            continue
        question, recorded = known
        asked = msgspec.structs.replace(question, policy=apply_settings(question.policy, settings or {}))
        found.append(Replayed(event, question, recorded, answer(asked)))
    return found


def _deed(decision: Decision) -> tuple[object, ...]:
    """Return what of a decision is seen from outside; to ignore and to warn leave the job alone alike."""
    action = "warn" if decision.action == "ignore" else decision.action
    return action, decision.fault, decision.nodes, decision.dry_run
