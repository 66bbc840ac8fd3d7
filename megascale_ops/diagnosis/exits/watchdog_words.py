# SPDX-License-Identifier: Apache-2.0
"""Where a rank was when NCCL's watchdog ended it, from the watchdog's own words.

The watchdog prints which collective it gave up and how far the rank had come in that group. The numbers are those of
the flight recorder and of the black box, so they can be compared with the calls of a rank that was not there: what C++
has started (DDP, FSDP) stands in no black box, and a rank that dies of SIGABRT leaves nothing else.

    [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, ...)
    [PG ID 0 PG GUID 0(default_pg) Rank 3] ... at work sequence id: 1580 ... last enqueued work: 1582, last ...

Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, torch 2.2 to 2.13. The first line names no group, the
others do.

Pure: exits in, the same exits with what their words add to their calls out.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from megascale_ops.schema.messages import CollectiveFact, RankExit

# Numbers of at most twelve digits: texts may hold longer ones, which are no numbers of collectives.
_TIMED_OUT = re.compile(r"WorkNCCL\(SeqNum=(\d{1,12})(?!\d), OpType=(\w{1,60})")
# "[PG ID 0 PG GUID 0(default_pg) Rank 3]", "[PG 0 (default_pg) Rank 12]", "[PG 1 Rank 0]", by version.
_PLACE = re.compile(
    r"\[PG (?:ID \d+ PG GUID )?(?P<group>[^\s(\]]{1,80}) ?(?:\([^)]{0,200}\) ?)?Rank \d+\](?P<text>[^\n]{0,400})"
)
_GAVE_UP = re.compile(r"(?:at NCCL work|by watchdog at work(?: sequence id)?): (\d{1,12})(?!\d)")
_DUMPS = re.compile(r"dump signal due to a collective timeout")
_ENQUEUED = re.compile(r"[Ll]ast enqueued (?:\w{1,10} )?work: (\d{1,12})(?!\d)")
_COMPLETED = re.compile(r"[Ll]ast completed (?:\w{1,10} )?work: (-?\d{1,12})(?!\d)")
# As the black box cuts names of groups.
_GROUP_BYTES = 23
# Backend names of operations -> the names that facts have.
_FUNCTIONS = {
    "ALLREDUCE": "all_reduce", "ALLREDUCE_COALESCED": "all_reduce", "BROADCAST": "broadcast",
    "_BROADCAST_OOP": "broadcast", "REDUCE": "reduce", "_REDUCE_OOP": "reduce", "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "all_gather", "ALLGATHER_COALESCED": "all_gather",
    "ALLGATHER_INTO_TENSOR_COALESCED": "all_gather", "GATHER": "gather", "SCATTER": "scatter",
    "REDUCE_SCATTER": "reduce_scatter", "_REDUCE_SCATTER_BASE": "reduce_scatter",
    "REDUCE_SCATTER_TENSOR_COALESCED": "reduce_scatter", "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all", "BARRIER": "barrier", "COALESCED": "",
}  # fmt: skip
# 64 calls: a group whose calls are further from the abandoned one is another group.
_NEAR = 64


class Given(NamedTuple):
    """The collective that a rank's watchdog gave up; ``group`` is "" where its words do not name it."""

    group: str
    seq: int
    function: str


def given_up(text: str) -> Given | None:
    """Return the collective that a watchdog has given up first, None without a time-out."""
    found = _TIMED_OUT.search(text)
    if found is None:
        return None
    seq = int(found[1])
    groups = {
        _group(place["group"])
        for place in _PLACE.finditer(text)
        if (work := _GAVE_UP.search(place["text"])) is not None and int(work[1]) == seq
    }
    return Given(groups.pop() if len(groups) == 1 else "", seq, _FUNCTIONS.get(found[2], ""))


def reached(text: str) -> list[CollectiveFact]:
    """Return how far a rank was in each group that its watchdog names, as the calls it had entered last."""
    facts: dict[str, CollectiveFact] = {}
    for place in _PLACE.finditer(text):
        entered, ended = _ENQUEUED.search(place["text"]), _COMPLETED.search(place["text"])
        if entered is None or ended is None or not (_GAVE_UP.search(place["text"]) or _DUMPS.search(place["text"])):
            continue
        group, seq = _group(place["group"]), int(entered[1])
        if seq >= 0 and (group not in facts or facts[group].seq < seq):
            facts[group] = CollectiveFact(group, seq, "", done=int(ended[1]) >= seq)
    return list(facts.values())


def with_positions(exits: Sequence[RankExit]) -> list[RankExit]:
    """Return exits whose calls include where each rank was by its watchdog's words."""
    return [_with_position(exit_, exits) for exit_ in exits]


def _with_position(exit_: RankExit, exits: Sequence[RankExit]) -> RankExit:
    text = f"{exit_.error.message if exit_.error is not None else ''}\n{exit_.stderr_tail}"
    given = given_up(text)
    known = list(exit_.calls)
    for fact in reached(text):
        if not any(call.group == fact.group and call.seq >= fact.seq for call in known):
            known.append(fact)
    group = (given.group or _only_near(given.seq, exits)) if given is not None else ""
    if given is not None and group:
        # It is this one that did not end; what was entered after it (NCCL's are queued) waits behind it.
        known = [call for call in known if call.group != group or call.seq < given.seq]
        known.append(CollectiveFact(group, given.seq, given.function, done=False))
    return exit_ if tuple(known) == exit_.calls else msgspec.structs.replace(exit_, calls=tuple(known))


def _only_near(seq: int, exits: Sequence[RankExit]) -> str:
    """Return the only group in which ranks are near a number, "" where there are several or none."""
    newest: dict[str, int] = {}
    for call in (call for exit_ in exits for call in exit_.calls):
        newest[call.group] = max(call.seq, newest.get(call.group, -1))
    near = [group for group, last in newest.items() if last >= 0 and abs(last - seq) <= _NEAR]
    return near[0] if len(near) == 1 else ""


def _group(name: str) -> str:
    return name.encode()[:_GROUP_BYTES].decode("utf-8", "ignore")
