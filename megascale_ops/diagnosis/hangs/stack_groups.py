# SPDX-License-Identifier: Apache-2.0
"""Who is elsewhere, by nothing but a stack of each rank: what is left of a hung job that ran without us.

In a hang most ranks wait for peers. Those are alike, so the crowd shows what is right, and the few that are in another
place hold it up. What a stack shows is not all of it: a wait that Python sees as one line of the script
(``Work.wait()``, ``.item()``) may be a wait for peers, and a host that waits for its GPU may wait for a collective that
the GPU is in. So

- ranks in a collective or forming a group wait for peers, for certain; those in a backward pass, or in a wait for the
  GPU, perhaps; those in a data loader, in storage, in a compiler, at a lock, a child or a server do not;
- where certain waits are the crowd, all that are certainly not in one are named;
- where the crowd is in one line of the script, whatever it does there, only few that are certainly elsewhere are named;
- ranks that all wait are named by nothing, but for one alone in another call than a crowd of others: with little
  confidence, for tensor parallel peers of a rank that is elsewhere look the same.

One look is no proof that a rank does not go on, so no answer is surer than 0.9.

Pure: where each rank stands in, a verdict out.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megascale_ops.schema.fault_classes import FAULTS
from megascale_ops.schema.folding import fold, named
from megascale_ops.schema.health import Finding, Verdict


class Stood(NamedTuple):
    """Where one rank stood: a place of ``PLACES``, what it called there, and the script's own line."""

    place: str
    call: str = ""
    line: str = ""
    state: str = ""  # active or idle, where the tool tells
    note: str = ""  # of one without a stack: why
    moved: bool = False  # its stack was another one in a look before
    frames: tuple[str, ...] = ()


class _Place(NamedTuple):
    words: str
    fault: str
    sure: float


# A place, in words, what it is called where others wait for the rank, and how sure that is by one look.
PLACES = {
    "in_collective": _Place("waits in a collective", "not_joined", 0.5),
    "in_rendezvous": _Place("waits for a process group to form", "group_never_formed", 0.7),
    "in_backward": _Place("is in a backward pass, where C++ may wait in a collective", "not_joined", 0.5),
    "in_gpu_wait": _Place("waits for its GPU", "gpu_stuck", 0.6),
    "in_data_loader": _Place("waits for its data loader", "data_stall", 0.9),
    "in_storage": _Place("waits for storage", "storage_stall", 0.9),
    "in_compiler": _Place("compiles", "stuck", 0.7),
    "in_import": _Place("imports a module", "stuck", 0.7),
    "in_lock": _Place("waits for a lock, a thread or a queue", "sleeping", 0.85),
    "in_child": _Place("waits for a process that it started", "sleeping", 0.85),
    "in_network": _Place("waits for a server", "sleeping", 0.85),
    "in_sleep": _Place("sleeps", "sleeping", 0.9),
    "in_script": _Place("is in Python code of its own", "stuck", 0.8),
    "in_native": _Place("is in native code that no row knows", "stuck", 0.5),
    "gone": _Place("has no process any more", "not_joined", 0.8),
    "": _Place("left no stack that can be read", "not_joined", 0.5),
}
# The same behind "are in".
_AT = {
    "in_script": "Python code", "in_native": "native code", "in_collective": "a collective", "in_storage": "storage",
    "in_rendezvous": "the forming of a process group", "in_backward": "a backward pass",
    "in_gpu_wait": "a wait for the GPU",
    "in_data_loader": "the data loader", "in_compiler": "a compiler", "in_import": "an import",
    "in_lock": "a wait for a lock",
    "in_child": "a wait for a child", "in_network": "a wait for a server", "in_sleep": "sleep", "gone": "no process",
    "": "no stack",
}  # fmt: skip
_CERTAIN = frozenset({"in_collective", "in_rendezvous"})
_PERHAPS = frozenset({"in_backward", "in_gpu_wait"})
# Places that no rank that waits for peers is in. A line of the script may be such a wait, and so may native code.
_ELSEWHERE = frozenset(PLACES) - _CERTAIN - _PERHAPS - {"in_script", "in_native", ""}
# Functions of what one rank may rightly do while others wait: it goes on, and they wait for long.
_OWN_WORK = re.compile(
    r"^(?:\w{1,40}_)?(?:eval(?:uate|uation)?|validat(?:e|ion)|generate|inference|predict|benchmark)(?:_\w{1,40})? "
)
_OWN_WORK_SURE = 0.6
# Calls that ranks of a pipeline rightly make in different lines.
_PAIRS = ("send", "recv", "p2p", "batch_isend_irecv", "wait")
# A wait for peers that Python does not show: the crowd there is taken for waiting, with less confidence.
_GUESSED = 0.7
# A fourth of the crowd is few; more may be one stage of a pipeline.
_FEW = 4
_LONE = 0.5
_MOST_TOLD = 16


def judge(stood: Mapping[int, Stood], names: Mapping[int, str] | None = None) -> Verdict | None:
    """Return who is elsewhere, None for fewer than two ranks.

    Args:
        stood: where each rank stood, by its number.
        names: what the ranks are called where files carry no number of a rank: then no culprit is named by number.
    """
    if len(stood) < 2:
        return None
    crowd = _Crowd(stood)
    answer = (
        _outside_a_wait(crowd)
        or _missing(crowd, numbered=names is None)
        or _apart_from_a_line(crowd)
        or _in_another_call(crowd)
        or _in_another_line(crowd)
        or _nobody(crowd)
    )
    findings = tuple(_finding(rank, stood[rank]) for rank in answer.ranks[:_MOST_TOLD] if rank in stood)
    each = ": each" if len(answer.ranks) > 1 and not answer.why.startswith(("are ", "left ")) else ""
    reason = f"{_who(answer.ranks, names)}{each} {answer.why}" if answer.ranks else answer.why
    return Verdict(
        fault=answer.fault,
        reason=reason,
        confidence=answer.sure,
        culprits=tuple(answer.ranks) if names is None else (),
        evidence=(*findings, _folded(stood, names)),
        otherwise="a second look at the same ranks: who goes on is not stuck",
    )


class _Answer(NamedTuple):
    fault: str
    ranks: Sequence[int]
    sure: float
    why: str


class _Crowd:
    """All ranks, by where they are."""

    def __init__(self, stood: Mapping[int, Stood]) -> None:
        self.stood = stood
        self.certain = [rank for rank, one in stood.items() if one.place in _CERTAIN]
        self.perhaps = [rank for rank, one in stood.items() if one.place in _PERHAPS]
        self.elsewhere = [rank for rank, one in stood.items() if one.place in _ELSEWHERE]
        self.unclear = [rank for rank, one in stood.items() if one.place in ("in_script", "in_native")]
        self.unread = [rank for rank, one in stood.items() if not one.place]

    def most(self, ranks: Sequence[int]) -> tuple[Stood, list[int]]:
        """Return the place in which most of some ranks are, and who is there."""
        places = Counter((self.stood[rank].place, self.stood[rank].call, self.stood[rank].line) for rank in ranks)
        place = max(places, key=lambda one: (places[one], one))
        there = [rank for rank in ranks if self.stood[rank][:3] == place]
        return self.stood[there[0]], there


def _outside_a_wait(crowd: _Crowd) -> _Answer | None:
    """Name those that are not in the wait that the crowd is in."""
    waiting = [*crowd.certain, *crowd.perhaps]
    outside = [*crowd.elsewhere, *crowd.unclear]
    if not crowd.certain or len(crowd.certain) < len(outside):
        waiting_in_line = crowd.elsewhere and crowd.perhaps and len(waiting) > len(outside)
        if not waiting_in_line:
            return None
    if crowd.elsewhere and len(crowd.unclear) > len(crowd.elsewhere):
        # More in lines of the script than elsewhere: those may be waits as well, and the certain ones explain the hang.
        outside = crowd.elsewhere
    if not outside:
        return _behind_a_wait(crowd)
    share = 1.0 if crowd.certain else _GUESSED
    if len(outside) * 2 >= len(crowd.stood) - len(crowd.unread) and len(crowd.stood) > 2:
        share = min(share, 0.6)
    where = crowd.most(waiting)[0]
    return _by_place(crowd, outside, f"while {_count(waiting)} in {_in(where)}", share)


def _behind_a_wait(crowd: _Crowd) -> _Answer | None:
    """Name few that wait for their GPU or are in backward, where all others are in a collective."""
    behind = crowd.perhaps
    if not behind or len(behind) * 2 >= len(crowd.certain):
        return None
    where = crowd.most(crowd.certain)[0]
    return _by_place(crowd, behind, f"while {_count(crowd.certain)} in {_in(where)}", 1.0)


def _missing(crowd: _Crowd, *, numbered: bool) -> _Answer | None:
    """Name ranks without a stack, or without a process, where all others wait."""
    if crowd.elsewhere or len(crowd.certain) * 2 <= len(crowd.stood):
        return None
    absent = sorted(set(range(max(crowd.stood) + 1)) - set(crowd.stood)) if numbered else []
    lost = sorted([*absent, *crowd.unread])
    if not lost or len(lost) * 3 > len(crowd.certain):
        return None
    notes = {crowd.stood[rank].note for rank in crowd.unread if crowd.stood[rank].note}
    why = f"left no stack{f' ({min(notes)})' if notes else ''}, while {_count(crowd.certain)} in a collective"
    return _Answer("not_joined", lost, 0.6, why)


def _apart_from_a_line(crowd: _Crowd) -> _Answer | None:
    """Name few that are elsewhere, where the crowd is in one place in which it may wait for peers."""
    known = [rank for rank in crowd.stood if rank not in crowd.unread]
    if not known:
        return None
    where, there = crowd.most(known)
    few = [rank for rank in known if rank not in there and crowd.stood[rank].place in _ELSEWHERE]
    if len(there) * 2 <= len(known) or not few or len(few) * 3 > len(there) or where.place in _ELSEWHERE:
        return None
    return _by_place(crowd, few, f"while {_count(there)} in {_in(where)}", _GUESSED)


def _in_another_call(crowd: _Crowd) -> _Answer | None:
    """Name one that alone waits in another call than a crowd of others that all wait in one."""
    if len(crowd.certain) < 3 or len(crowd.certain) < len(crowd.stood) - len(crowd.unread):
        return None
    where, there = crowd.most(crowd.certain)
    odd = [rank for rank in crowd.certain if rank not in there]
    calls = {crowd.stood[rank].call for rank in odd} | {where.call}
    if len(odd) != 1 or any(part in call for call in calls for part in _PAIRS):
        return None
    one = crowd.stood[odd[0]]
    fault = "group_never_formed" if one.place == "in_rendezvous" else "collective_order"
    why = f"alone waits in {_in(one)}, while {_count(there)} in {_in(where)}"
    return _Answer(fault, odd, PLACES["in_rendezvous"].sure if fault == "group_never_formed" else _LONE, why)


def _in_another_line(crowd: _Crowd) -> _Answer | None:
    """Name few in other lines of the script than a crowd is in, which may wait for peers there."""
    known = [rank for rank in crowd.stood if rank not in crowd.unread]
    if len(known) < _FEW:
        return None
    where, there = crowd.most(known)
    few = [rank for rank in known if rank not in there]
    lines = where.line and all(crowd.stood[rank].place == "in_script" for rank in few)
    if where.place != "in_script" or not few or not lines or len(few) * _FEW > len(there):
        return None
    return _by_place(crowd, few, f"while {_count(there)} in {_in(where)}, which may be a wait for peers", _LONE)


def _nobody(crowd: _Crowd) -> _Answer:
    """Say where they are, where that names none."""
    known = [rank for rank in crowd.stood if rank not in crowd.unread]
    if not known:
        return _Answer("unknown", (), 0.1, f"none of {len(crowd.stood)} stacks can be read")
    where, there = crowd.most(known)
    total = len(crowd.stood)
    if len(crowd.certain) == len(known):
        alike = "all" if len(there) == len(known) else f"{len(there)} of {len(known)}"
        why = f"all {len(known)} ranks wait for each other, {alike} in {_in(where)}: their stacks name none"
        return _Answer("silent", (), 0.3, why)
    alone = {crowd.stood[rank].place for rank in known}
    if len(alone) == 1 and where.place in _ELSEWHERE:
        why = f"all {len(known)} ranks are alike: each {PLACES[where.place].words}, and none waits for another"
        return _Answer(PLACES[where.place].fault, (), 0.5, why)
    why = f"{len(there)} of {total} ranks are in {_in(where)}, the others elsewhere: that names none"
    if len(there) == total:
        why = f"all {total} ranks are in {_in(where)}: that names none"
    return _Answer("unknown", (), 0.2, why)


def _by_place(crowd: _Crowd, ranks: Sequence[int], ending: str, share: float) -> _Answer:
    """Name ranks by where they are: the class of most of them, and of several the surer one."""
    faults = {rank: _fault_of(crowd.stood[rank]) for rank in ranks}
    count = Counter(faults.values())
    fault = max(count, key=lambda name: (count[name], name))
    sure = max(_sure_of(crowd.stood[rank]) for rank in ranks if faults[rank] == fault)
    first = crowd.stood[next(rank for rank in ranks if faults[rank] == fault)]
    kinds: dict[str, list[int]] = {}
    for rank in ranks:
        kinds.setdefault(_does(crowd.stood[rank]), []).append(rank)
    what = _does(first) if len(kinds) == 1 else "; ".join(f"{named(who)} {text}" for text, who in kinds.items())
    if any(crowd.stood[rank].moved for rank in ranks):
        what, share = f"{what} (its stack was another one before, so it goes on)", min(share, 0.6)
    why = f"{what}, {ending}" if len(kinds) == 1 else f"are elsewhere ({what}), {ending}"
    return _Answer(fault, sorted(ranks), round(sure * share, 2), why)


def _works_on_its_own(one: Stood) -> bool:
    """Return whether a rank runs Python code of an evaluation or the like, which others may rightly wait for."""
    is_awake = one.place == "in_script" and not one.state.startswith("idle")
    return is_awake and any(_OWN_WORK.match(frame) for frame in one.frames)


def _sure_of(one: Stood) -> float:
    return _OWN_WORK_SURE if _works_on_its_own(one) else PLACES[one.place].sure


def _fault_of(one: Stood) -> str:
    if _works_on_its_own(one):
        return "busy"
    if one.place == "in_script" and one.state.startswith("idle"):
        return "sleeping"
    return PLACES[one.place].fault


def _does(one: Stood) -> str:
    at = f" in {one.line}" if one.line else f" in {one.frames[0]}" if one.frames else ""
    return f"{PLACES[one.place].words}{at}{f' ({one.note})' if one.note else ''}"


def _in(one: Stood) -> str:
    what = one.call or _AT.get(one.place, PLACES[one.place].words)
    return f"{what} at {one.line}" if one.line else what


def _count(ranks: Sequence[int]) -> str:
    return "another rank is" if len(ranks) == 1 else f"{len(ranks)} others are"


def _who(ranks: Sequence[int], names: Mapping[int, str] | None) -> str:
    if names is None:
        return named(sorted(ranks))
    shown = [names.get(rank, str(rank)) for rank in sorted(ranks)]
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def _finding(rank: int, one: Stood) -> Finding:
    frames = f": {' < '.join(one.frames[:4])}" if one.frames else ""
    return Finding(name="stack", text=f"rank {rank} {PLACES[one.place].words}{frames}", source="stacks", rank=rank)


def _folded(stood: Mapping[int, Stood], names: Mapping[int, str] | None) -> Finding:
    labels = {rank: _in(one) for rank, one in stood.items()}
    text = fold(labels) if names is None else "; ".join(f"{names[rank]}: {text}" for rank, text in labels.items())
    return Finding(name="places", text=text[:2000], source="stacks", value=float(len(stood)), unit="ranks")


assert all(place.fault in FAULTS for place in PLACES.values())
