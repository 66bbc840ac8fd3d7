# SPDX-License-Identifier: Apache-2.0
"""Ranks that followed another one: ended by a framework's observer or by Slurm, or that only felt its end.

Lightning starts the ranks of a node from its first one and watches them. When one ends with a status, it writes which
one and kills all others, itself last, with SIGKILL or SIGTERM. By their signals those would be the hardest causes of
all, and the one that failed a mere exception. The note names the ranks, so they are no causes.

Slurm ends what is left of a step when one of its nodes fails, and says so on the others. Where a node of the round is
missing, that node is the cause.

Python's own errors of a connection say nothing of its other end: a store of data, a tracker, or another rank through a
queue, a pipe or a store of the script's own. Alone such an error is its rank's. Beside another rank that ended of
something else no later, it is what the others felt; and where several ranks had one and the same while another rank
ended without any word, that one is what they have in common, and none of them is to blame.

An exception that a script raises over a lost peer is one more of the consequences where several ranks have one. A rank
alone with such a one may have had a reason of its own.

Pure: judged ends in, judged ends out.
"""

import re
import signal
from collections.abc import Sequence

from megascale_ops.diagnosis.exits.classify import Judged, text_of
from megascale_ops.diagnosis.exits.exit_status import signal_of
from megascale_ops.diagnosis.exits.last_traceback import before_it
from megascale_ops.diagnosis.exits.last_words import row_of_error
from megascale_ops.diagnosis.exits.word_rows import VICTIM
from megascale_ops.schema.fault_classes import FAULTS

# lightning/fabric/strategies/launchers/subprocess_script.py; it counts within its node. Any number has nine digits at
# most: a text may hold longer ones.
_NOTE = re.compile(
    r"\[rank: (\d{1,9})\] Child process with PID \d{1,9} terminated with code (-?\d{1,9})\. Forcefully terminating all"
)
_BY = (signal.SIGKILL, signal.SIGTERM)
_NODE_FAILED = "DUE TO NODE FAILURE"
# 1 s: which of two ends came first is certain beyond it.
_APART_S = 1.0
# 2 ranks: what one alone raised over a lost peer may have another reason.
_SEVERAL = 2
_LOST = re.compile(
    r"^(?:[\w.]{0,80}\.)?(?:ConnectionResetError|BrokenPipeError|ConnectionRefusedError|ConnectionAbortedError|EOFError"
    r"|\w{0,40}Connection(?:Reset|Lost|Closed|Refused)\w{0,20}|_?(?:InactiveRpc|MultiThreadedRendezvous)\w{0,20})$"
)
# An address of a service says whose connection it was.
_OF_A_SERVICE = re.compile(r"https?://|\bhost=|\bport=443\b|\.(?:com|org|net|co|io)\b")
_WHY = "its connection broke as another rank ended"


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


def excuse_lost_connections(judged: Sequence[Judged]) -> list[Judged]:
    """Return the same ends; of those whose connection broke, the ones that followed another rank are victims."""
    lost = [one for one in judged if one.fault == "exception" and _lost(one)]
    if not lost:
        return list(judged)
    # By identity: a hundred thousand ranks may have lost one peer, and a search for each among all would take minutes.
    are_lost = set(map(id, lost))
    others = [one for one in judged if id(one) not in are_lost]
    causes = [one for one in others if one.fault in FAULTS and one.fault != "unknown" and not one.was_asked]
    silent = [one for one in others if one.fault in ("by_us", "normal")]
    if causes:
        first_s = max(one.ended.age_s for one in causes)
        followed = [one for one in lost if one.ended.age_s - first_s <= _APART_S]
    else:
        followed = lost if silent and len(lost) > 1 and len(lost) > len(silent) else []
    followers = set(map(id, followed))
    return [one._replace(fault="peer", why=_WHY) if id(one) in followers else one for one in judged]


def excuse_wrapped(judged: Sequence[Judged]) -> list[Judged]:
    """Return the same ends; several whose exception was raised over a lost peer are victims."""
    wrapped = [one for one in judged if one.fault == "exception" and _wraps_a_lost_peer(one)]
    if len(wrapped) < _SEVERAL:
        return list(judged)
    are_wrapped = set(map(id, wrapped))
    over = "over a lost peer"
    return [one._replace(fault="peer", why=f"{one.why}, {over}") if id(one) in are_wrapped else one for one in judged]


def _wraps_a_lost_peer(one: Judged) -> bool:
    chain = before_it(one.ended.exit.stderr_tail)
    return bool(chain) and row_of_error(chain[0].type, chain[0].message).role == VICTIM


def _lost(one: Judged) -> bool:
    error = one.ended.exit.error
    return error is not None and bool(_LOST.match(error.type)) and not _OF_A_SERVICE.search(error.message)
