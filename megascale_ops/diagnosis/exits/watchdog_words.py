# SPDX-License-Identifier: Apache-2.0
"""Where a rank was when NCCL's watchdog ended it, from the watchdog's own words.

The watchdog prints which collective it gave up and how far the rank had come in that group. The numbers are those of
the flight recorder and of the black box, so they can be compared with the calls of a rank that was not there: what C++
has started (DDP, FSDP) stands in no black box, and a rank that dies of SIGABRT leaves nothing else.

    [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, ...)
    [PG ID 0 PG GUID 0(default_pg) Rank 3] ... at work sequence id: 1580 ... last enqueued work: 1582, last ...

Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, torch 1.13 to 2.13. The first line names no group, the
others do from 2.3 on. Where no words of any rank do, and all have given up the same number, it is taken for one group
without a name: two groups of one job are rarely at one number.

Pure: exits in, the same exits with what their words add to their calls out.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from megascale_ops.diagnosis.hangs.call_order import UNNAMED
from megascale_ops.schema.messages import CollectiveFact, RankExit

# Numbers of at most twelve digits: texts may hold longer ones, which are no numbers of collectives.
_TIMED_OUT = re.compile(
    r"WorkNCCL\(SeqNum=(\d{1,12})(?!\d), OpType=(?P<operation>\w{1,60})"
    r"(?:, NumelIn=(?P<brought>\d{1,16}), NumelOut=(?P<made>\d{1,16})(?!\d))?"
    r"(?:, TensorShape=\[(?P<shape>[\d, ]{1,200})\])?"
)
# "[PG ID 0 PG GUID 0(default_pg) Rank 3]", "[PG 0 (default_pg) Rank 12]", "[PG 1 Rank 0]", by version.
_PLACE = re.compile(
    r"\[PG (?:ID \d+ PG GUID )?(?P<group>[^\s(\]]{1,80}) ?(?:\([^)]{0,200}\) ?)?Rank \d+\](?P<text>[^\n]{0,400})"
)
_RAN_FOR = re.compile(r"ran for (\d{1,12}) milliseconds before timing out")
_GAVE_UP = re.compile(r"(?:at NCCL work|by watchdog at work(?: sequence id)?): (\d{1,12})(?!\d)")
_DUMPS = re.compile(r"dump signal due to a collective timeout")
_ENQUEUED = re.compile(r"[Ll]ast enqueued (?:\w{1,10} )?work: (-?\d{1,12})(?!\d)")
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
# Backend names of sends and receives, whose SeqNum is that of the last collective before them.
_PAIRS = frozenset({"SEND", "RECV", "RECVANYSOURCE"})
# To these all ranks bring equally much. Lists may be uneven, and a batch tells of its last piece alone.
_ALIKE = frozenset({"ALLREDUCE", "BROADCAST", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE", "REDUCE"})
# 3: of two ranks in two groups the numbers may well be equal.
_FEWEST_UNNAMED = 3
# 64 calls: a group whose calls are further from the abandoned one is another group.
_NEAR = 64


class Given(NamedTuple):
    """The collective that a rank's watchdog gave up; ``group`` is "" where its words do not name it.

    Sizes are numbers of elements, as "[[8]]"; "" where the version tells none.
    """

    group: str
    seq: int
    function: str
    sizes: str = ""
    outputs: str = ""


def given_up(text: str) -> Given | None:
    """Return the collective that a watchdog has given up first, None without a time-out, or of a send or receive."""
    found = _TIMED_OUT.search(text)
    if found is None or found["operation"] in _PAIRS:
        return None
    seq = int(found[1])
    groups = {
        _group(place["group"])
        for place in _PLACE.finditer(text)
        if (work := _GAVE_UP.search(place["text"])) is not None and int(work[1]) == seq
    }
    brought = (found["brought"] or found["shape"]) if found["operation"] in _ALIKE else None
    sizes = f"[[{brought}]]" if brought else ""
    outputs = f"[[{found['made']}]]" if sizes and found["made"] and found["made"] != brought else ""
    function = _FUNCTIONS.get(found["operation"], "")
    return Given(groups.pop() if len(groups) == 1 else "", seq, function, sizes, outputs)


def is_of_one(text: str) -> bool:
    """Return whether a text tells of one time-out at most.

    Torch before 2.3 numbers ranks within each group: what is taken for one rank's may then be of several, each of which
    tells another time.
    """
    return len(set(_RAN_FOR.findall(text))) <= 1


def reached(text: str) -> list[CollectiveFact]:
    """Return how far a rank was in each group that its watchdog names, as the calls it had entered last."""
    facts: dict[str, CollectiveFact] = {}
    for place in _PLACE.finditer(text):
        entered, ended = _ENQUEUED.search(place["text"]), _COMPLETED.search(place["text"])
        if entered is None or not (_GAVE_UP.search(place["text"]) or _DUMPS.search(place["text"])):
            continue
        # -1: it had entered none; the first has number 1. 2.3 prints what was never set as a number of 17 digits.
        group, seq = _group(place["group"]), max(0, int(entered[1]))
        if group not in facts or facts[group].seq < seq:
            facts[group] = CollectiveFact(group, seq, "", done=ended is not None and int(ended[1]) >= int(entered[1]))
    return list(facts.values())


def with_positions(exits: Sequence[RankExit]) -> list[RankExit]:
    """Return exits whose calls include where each rank was by its watchdog's words."""
    given = [given_up(_text_of(exit_)) for exit_ in exits]
    told = [one for one in given if one is not None]
    # A call is entered and ended anew each time, so ranks of one group may be one apart.
    numbers = {one.seq for one in told}
    is_one = len(told) >= _FEWEST_UNNAMED and not any(one.group for one in told) and max(numbers) - min(numbers) <= 1
    unnamed = UNNAMED if is_one and not any(exit_.calls for exit_ in exits) else ""
    return [_with_position(exit_, one, exits, unnamed) for exit_, one in zip(exits, given, strict=True)]


def _text_of(exit_: RankExit) -> str:
    return f"{exit_.error.message if exit_.error is not None else ''}\n{exit_.stderr_tail}"


def _with_position(exit_: RankExit, given: Given | None, exits: Sequence[RankExit], unnamed: str) -> RankExit:
    known = list(exit_.calls)
    for fact in reached(_text_of(exit_)):
        if not any(call.group == fact.group and call.seq >= fact.seq for call in known):
            known.append(fact)
    group = (given.group or _only_near(given.seq, exits) or unnamed) if given is not None else ""
    if given is not None and group:
        # It is this one that did not end; what was entered after it (NCCL's are queued) waits behind it.
        known = [call for call in known if call.group != group or call.seq < given.seq]
        made = given.outputs
        known.append(CollectiveFact(group, given.seq, given.function, given.sizes, done=False, outputs=made))
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
