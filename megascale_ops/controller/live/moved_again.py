# SPDX-License-Identifier: Apache-2.0
"""Suspects that moved again by themselves: said for a while, and as one thing when it happens again and again.

A rank that is stopped and continued in turn is suspected and cleared every few seconds. A headline that followed each
turn would not be read: after the first it says that the rank moves again, from the second on that it does so in turn.

Pure: told what the controller knows and what time it is.
"""

from collections.abc import Sequence

from megascale_ops.controller.job.job import Job
from megascale_ops.controller.live.words import what
from megascale_ops.controller.record.state_machine import State
from megascale_ops.schema.events import Incident
from megascale_ops.schema.live import Headline

# 15 s: long enough to be read, and no turn of a rank that is stopped and continued takes longer.
HOLD_S = 15.0
# A minute: what happened twice in it happens again and again.
AGAIN_S = 60.0
_WHILE = (State.RUNNING, State.DEGRADED, State.SUSPECT, State.CONFIRMING, State.CATCHING_UP)


def moved_again(job: Job, mine: Sequence[Incident], wall_s: float) -> Headline | None:
    """Return what to say of suspects that move again, or do so in turn; None when there are none of late.

    Args:
        job: as the loop knows it.
        mine: its incidents, the newest last.
        wall_s: now.
    """
    last = job.incident or (mine[-1] if mine else None)
    if job.state not in _WHILE or last is None or last.verdict is None or not last.verdict.culprits:
        return None
    culprits = last.verdict.culprits
    of_late = [
        one
        for one in mine
        if one.state == "harmless"
        and one.round == job.record.round
        and one.verdict is not None
        and one.verdict.culprits == culprits
        and wall_s - one.marks.detected < AGAIN_S
    ]
    moves = job.incident is None
    if not of_late or (moves and (last not in of_late or wall_s - job.record.since_wall_s > HOLD_S)):
        return None
    times = len(of_late) + (not moves)
    if times == 1 and not moves:
        return None
    them = "they move" if len(set(culprits)) > 1 else "it moves"
    said = what(last.verdict, past=True)
    return Headline(
        level="watch",
        sentence=f"{said} and {them} again." if times == 1 else f"{said} again and again; {them} in between.",
        reason=last.verdict.reason,
        fault=last.verdict.fault,
        culprits=culprits,
        since_wall_s=of_late[0].marks.began or of_late[0].marks.detected,
        incident=last.id,
        done=last.done,
        command=f"megascale-ops why {last.id}",
    )
