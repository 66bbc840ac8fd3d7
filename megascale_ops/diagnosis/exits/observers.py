# SPDX-License-Identifier: Apache-2.0
"""Ranks that a framework's own observer ended because another rank of their node had failed.

Lightning starts the ranks of a node from its first one and watches them. When one ends with a status, it writes which
one and kills all others, itself last, with SIGKILL or SIGTERM. By their signals those would be the hardest causes of
all, and the one that failed a mere exception. The note names the ranks, so they are no causes.

Slurm ends what is left of a step when one of its nodes fails, and says so on the others. Where a node of the round is
missing, that node is the cause.

Pure: judged ends in, judged ends out.
"""

import re
import signal
from collections.abc import Sequence

from megascale_ops.diagnosis.exits.classify import Judged, text_of
from megascale_ops.diagnosis.exits.exit_status import signal_of

# lightning/fabric/strategies/launchers/subprocess_script.py; it counts within its node. Any number has nine digits at
# most: a text may hold longer ones.
_NOTE = re.compile(
    r"\[rank: (\d{1,9})\] Child process with PID \d{1,9} terminated with code (-?\d{1,9})\. Forcefully terminating all"
)
_BY = (signal.SIGKILL, signal.SIGTERM)
_NODE_FAILED = "DUE TO NODE FAILURE"


def excuse(judged: Sequence[Judged], missing: Sequence[str] = ()) -> list[Judged]:
    """Return the same ends; those that an observer brought about are blamed on the rank or node that it saw fail."""
    if missing:
        judged = [_left_by_a_node(one) for one in judged]
    failed: dict[str, int] = {}  # the local rank that failed first, by node
    for one in judged:
        if found := _NOTE.search(text_of(one.ended.exit)):
            failed.setdefault(one.ended.node, int(found[1]))
    return [_excused(one, failed[one.ended.node]) if one.ended.node in failed else one for one in judged]


def _left_by_a_node(one: Judged) -> Judged:
    if one.fault != "killed" or _NODE_FAILED not in text_of(one.ended.exit):
        return one
    return one._replace(fault="peer", why="ended by Slurm, since another node of its step had failed")


def _excused(one: Judged, failed: int) -> Judged:
    exit_ = one.ended.exit
    if one.fault != "killed" or exit_.local_rank == failed or signal_of(exit_.code) not in _BY:
        return one
    why = f"killed by its framework, whose observer had seen local rank {failed} of its node fail"
    return one._replace(fault="peer", why=why)
