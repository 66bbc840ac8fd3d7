# SPDX-License-Identifier: Apache-2.0
"""What verdicts say that slow ranks cost, for a verb that reckons the same from black boxes.

A figure of one and a figure of the other are of different steps: who sees both is told of which each is.
"""

from collections.abc import Iterable
from typing import NamedTuple

from megascale_ops.cli.sources.boxes import Ask
from megascale_ops.cli.sources.history import open_history
from megascale_ops.errors import MegascaleError
from megascale_ops.schema.events import Incident

# 64: a rank that is slow now has one of the newest warnings.
_NEWEST = 64


class Told(NamedTuple):
    """What a verdict says that a rank costs."""

    incident: str
    cost: float  # share of every step
    since_step: int


def told_costs(ask: Ask, meant: Incident | None) -> dict[int, Told]:
    """Return by rank what the verdicts say that hold, or the one that is meant; nothing where none can be asked."""
    if meant is not None:
        return _costs([meant])
    if ask.boxes or ask.incident:
        return {}
    try:
        with open_history(ask.where, ask.token_file) as history:
            found = history.incidents(ask.job, _NEWEST).incidents
    except (MegascaleError, OSError):
        return {}  # black boxes are read without a controller, too
    return _costs(one for one in found if one.state == "watching")


def _costs(incidents: Iterable[Incident]) -> dict[int, Told]:
    return {
        one.verdict.culprits[0]: Told(one.id, one.verdict.cost, one.verdict.since_step)
        for one in incidents
        if one.verdict is not None and one.verdict.fault == "straggler" and len(one.verdict.culprits) == 1
    }
