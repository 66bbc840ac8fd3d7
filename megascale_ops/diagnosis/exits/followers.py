# SPDX-License-Identifier: Apache-2.0
"""Ranks whose connection broke, or that wrapped the loss of a peer, beside a rank that ended otherwise: they followed.

Python's own errors of a connection say nothing of its other end: a store of data, a tracker, or another rank through a
queue, a pipe or a store of the script's own. Alone such an error is its rank's. Beside another rank that ended of
something else no later, it is what the others felt; and where several ranks had one and the same while another rank
ended without any word, that one is what they have in common, and none of them is to blame.

An exception that a script raises over a lost peer is one more of the consequences where several ranks have one. A rank
alone with such a one may have had a reason of its own.

Pure: judged ends in, judged ends out.
"""

import re
from collections.abc import Sequence

from megascale_ops.diagnosis.exits.classify import Judged
from megascale_ops.diagnosis.exits.last_traceback import before_it
from megascale_ops.diagnosis.exits.last_words import row_of_error
from megascale_ops.diagnosis.exits.word_rows import VICTIM
from megascale_ops.schema.fault_classes import FAULTS

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


def excuse_lost_connections(judged: Sequence[Judged]) -> list[Judged]:
    """Return the same ends; of those whose connection broke, the ones that followed another rank are victims."""
    lost = [one for one in judged if one.fault == "exception" and _lost(one)]
    if not lost:
        return list(judged)
    others = [one for one in judged if one not in lost]
    causes = [one for one in others if one.fault in FAULTS and one.fault != "unknown" and not one.was_asked]
    silent = [one for one in others if one.fault in ("by_us", "normal")]
    if causes:
        first_s = max(one.ended.age_s for one in causes)
        followed = [one for one in lost if one.ended.age_s - first_s <= _APART_S]
    else:
        followed = lost if silent and len(lost) > 1 and len(lost) > len(silent) else []
    return [one._replace(fault="peer", why=_WHY) if one in followed else one for one in judged]


def excuse_wrapped(judged: Sequence[Judged]) -> list[Judged]:
    """Return the same ends; several whose exception was raised over a lost peer are victims."""
    wrapped = [one for one in judged if one.fault == "exception" and _wraps_a_lost_peer(one)]
    if len(wrapped) < _SEVERAL:
        return list(judged)
    return [one._replace(fault="peer", why=f"{one.why}, over a lost peer") if one in wrapped else one for one in judged]


def _wraps_a_lost_peer(one: Judged) -> bool:
    chain = before_it(one.ended.exit.stderr_tail)
    return bool(chain) and row_of_error(chain[0].type, chain[0].message).role == VICTIM


def _lost(one: Judged) -> bool:
    error = one.ended.exit.error
    return error is not None and bool(_LOST.match(error.type)) and not _OF_A_SERVICE.search(error.message)
