# SPDX-License-Identifier: Apache-2.0
"""When finished steps must go up before their turn: they are unlike those before, or soon too many for a heartbeat.

A slow rank shall be named within 20 steps, and of 50 ms steps a heartbeat a second carries just as many. So ten of them
are tested half-way (``ranks/step_change.py``): a job that goes on as it did costs one heartbeat a second. Once
something
has changed every five are tested: the first ten may hold too few slow ones to name a rank, and ten more would be too
many. That costs four heartbeats a second, until what is new has become usual.
"""

from collections.abc import Sequence

from megascale_agents.ranks.rank_watch import RankWatch
from megascale_agents.uplink.heartbeat import most_work_of

# Steps of 0.1 s and more are never looked at half-way.
WORTH_LOOKING_AT = 10
WORTH_LOOKING_AT_SOON = 5
# Three quarters of what a heartbeat has room for: the look after the next one would be too late.
_MOST_UNTOLD = 0.75


def cannot_wait(ranks: Sequence[RankWatch]) -> bool:
    """Return whether the steps of a job's ranks on this node are to be reported now."""
    # The ranks of a job step together, so what slows one of them down shows in the wall time of any other. Looking at
    # all of them would cost more than the heartbeat that it saves.
    lead = next((rank for rank in ranks if rank.box is not None), None)
    if lead is None or lead.unread_steps() < (WORTH_LOOKING_AT_SOON if lead.is_changing else WORTH_LOOKING_AT):
        return False
    if lead.untold_steps() >= _MOST_UNTOLD * most_work_of(len(ranks)):
        return True
    return lead.steps_are_news()
