# SPDX-License-Identifier: Apache-2.0
"""From stacks and flight recorder dumps to a verdict on a hang, by the judge that a controller asks.

Where there are dumps, they say which collective each rank waits in, and stacks say what the others do: that is what
agents hand in, and it is judged alike. Without a dump the stacks are grouped (``diagnosis/hangs/stack_groups``).
"""

import re
from collections.abc import Mapping

import msgspec
from megascale_agents.evidence import flight_recorder, stack_places, stack_texts

from megascale_ops.diagnosis import watchdog
from megascale_ops.diagnosis.exits.last_words import heard_in
from megascale_ops.diagnosis.exits.watchdog_words import given_up, is_of_one
from megascale_ops.diagnosis.exits.word_rows import NOBODY
from megascale_ops.diagnosis.hangs import stack_groups
from megascale_ops.diagnosis.hangs.evidence import gather
from megascale_ops.diagnosis.hangs.stack_groups import Stood
from megascale_ops.diagnosis.hangs.verdict import judge
from megascale_ops.diagnosis.rank_view import RankView
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import MARKS, EvidenceItem
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import UNSEEN, ProcessReading, Progress, RankReport

# It is not known how long a rank has stood; an hour is beyond all patience.
_SILENT_S = 3600.0
# As much of a log as its end is looked for in.
_SOUGHT = 64_000
# Places in which a rank sleeps.
_ASLEEP = frozenset({"in_lock", "in_child", "in_network", "in_sleep"})
_GONE = re.compile(
    r"[Nn]o such process|[Ff]ailed to (?:find|open) process|\b(?:process|pid|PID) \d{1,9} (?:is )?not found"
)
_REFUSED = re.compile(r"^(?:Error: )?(?:Permission [Dd]enied|ptrace\b|Failed to (?:suspend|get stack|copy|merge))")


def stand_of(text: str) -> Stood | None:
    """Return where the newest look of a text shows a rank, None where it holds no stack."""
    looks = stack_texts.looks(text)
    if not looks:
        return None
    places = [stack_places.where(look.main.frames) for look in looks]
    newest, state = places[-1], looks[-1].main.state
    moved = any(one.frames[1:] != newest.frames[1:] for one in places[:-1] if one.frames)
    return Stood(newest.place, newest.call, newest.line, state, moved=moved, frames=newest.frames)


def unread(text: str) -> Stood | None:
    """Return the stand of a rank of whose stack only the tool's complaint is left, None where it is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or len(lines) > 8:
        return None
    complaint = next((line for line in lines if _GONE.search(line)), "")
    if complaint:
        return Stood("gone", note=complaint[:120])
    return Stood("", note=lines[-1][:120]) if _REFUSED.search(lines[-1]) else None


def waiting_by_words(logs: Mapping[int, str]) -> dict[int, Stood]:
    """Return the ranks whose watchdog gave up a collective as its end: they stood in it, whatever stack they left.

    Nor a rank of which a cause of its own is told, nor a text of several processes.
    """
    waiting: dict[int, Stood] = {}
    for rank, whole in logs.items():
        text = whole[-_SOUGHT:]
        call = given_up(text) if is_of_one(text) else None
        if call is not None and all(one.row.consequence or one.row.role == NOBODY for one in heard_in(text)):
            waiting[rank] = Stood("in_collective", call.function)
    return waiting


def judge_hang(
    dumps: Mapping[int, flight_recorder.Summary], stands: Mapping[int, Stood], names: Mapping[int, str] | None
) -> Verdict | None:
    """Return the verdict, None where there is too little for one."""
    if not dumps:
        return stack_groups.judge(stands, names)
    items = []
    for rank, dump in dumps.items():
        items.append(
            EvidenceItem("flight_recorder", ok=True, rank=rank, collectives=dump.collectives, groups=dump.groups)
        )
    for rank, one in stands.items():
        place = "in_syscall" if one.place in _ASLEEP else one.place
        marks = (place,) if place in MARKS else ()
        items.append(EvidenceItem("stacks", ok=True, rank=rank, marks=marks, frames=one.frames))
    ranks = range(1 + max((*dumps, *stands)))
    views = [_view(rank) for rank in ranks if rank in dumps or rank in stands]
    policy = JobPolicy(absent_patience_s=0.0)
    suspicion = watchdog.judge(views, policy, 0.0)
    if suspicion is None:
        return None
    verdict = judge(suspicion, views, gather(items), len(ranks), policy).verdict
    return msgspec.structs.replace(verdict, since_wall_s=0.0, nodes=())


def _view(rank: int) -> RankView:
    """Return a rank as a heartbeat would have shown it: silent, and nothing else known."""
    progress = Progress(
        state="running", step=1, steps_seen=100, phase="forward", moved_mono_s=1.0, beat_mono_s=_SILENT_S,
        step_p50_s=1.0, step_p99_s=1.0,
    )  # fmt: skip
    report = RankReport(rank, rank, 1 + rank, 1, 0, progress=progress, process=ProcessReading(state=UNSEEN))
    return RankView("", report, _SILENT_S, 0.0, _SILENT_S, 0.0)
