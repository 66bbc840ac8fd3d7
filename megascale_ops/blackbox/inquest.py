# SPDX-License-Identifier: Apache-2.0
"""Black boxes in words: what each rank last did, and which rank was behind when the others waited.

A collective completes on all ranks or on none. So where most ranks entered number 41 of a group and one only ever
completed number 40, that one is where to look first; the text names it, and claims no more than the boxes hold.
"""

from collections import Counter
from collections.abc import Sequence

from megascale_ops.blackbox.last_moments import LastMoments, OpenCollective
from megascale_ops.schema.folding import fold, named, named_missing
from megascale_ops.schema.tiles import describe
from megascale_ops.schema.wording import printable

# A model has a workspace for each kind of layer, and perhaps one beside it for gathers in backward.
MOST_BOARDS = 4


def sentences(moments: LastMoments) -> list[str]:
    """Return the text on one rank: a heading and indented lines, whatever characters its box holds."""
    heading, *lines = map(printable, _said(moments))
    return [heading, *(f"  {line}" for line in lines)]


def _said(moments: LastMoments) -> list[str]:
    """Return the same without indentation, as it stands in the box."""
    identity, progress = moments.identity, moments.progress
    who = f"rank {identity.rank} of {identity.world_size} on {identity.node or '?'}, job {identity.job or '?'}"
    lines = [f"{who}, round {identity.round}, pid {identity.pid}: {progress.state} ({moments.path})"]
    step = f"after step {progress.step}" if progress.step >= 0 else "before its first step"
    lines.append(
        f"{step}, for {moments.phase_s:.3f} s in phase {progress.phase}; last moved {moments.silent_s:.3f} s before "
        "the box's last time stamp"
    )
    for one in moments.unfinished:
        doing = "in" if moments.in_call else "in no collective, but handed over and not ended is"
        lines.append(f"{doing} {_collective(one)}, entered {one.before_s:.3f} s before")
    if _waits_unseen(moments):
        lines.append(_waiting(moments))
    elif not moments.unfinished and moments.ended is not None:
        ended = moments.ended
        lines.append(f"in no collective; the last that ended was {ended.function} #{ended.seq} of {ended.communicator}")
    lines += moments.nccl
    if moments.steps:
        lines.append(f"last steps: {', '.join(f'{one.step}: {one.wall_s:.3f} s' for one in moments.steps)}")
    if moments.gpu is not None:
        gpu = moments.gpu
        times = [(name, getattr(gpu, f"{name}_s")) for name in ("data", "forward", "backward", "optimizer")]
        parts = ", ".join(f"{name} {gpu_s:.3f} s" for name, gpu_s in (*times, *gpu.phases))
        lines.append(f"the GPU needed {gpu.wall_s:.3f} s for step {gpu.step}: {parts}")
    lines += [f"overlapped kernels: {describe(fact)}" for fact in moments.tiles[:MOST_BOARDS]]
    if len(moments.tiles) > MOST_BOARDS:
        lines.append(f"and {len(moments.tiles) - MOST_BOARDS} workspaces more")
    if moments.error is not None:
        error = moments.error
        where = f" at {error.where}" if error.where else ""
        lines.append(f"died of {error.type}: {error.message}{where}")
    return lines


def summary(all_moments: Sequence[LastMoments]) -> list[str]:
    """Return the text on several ranks together: for each job and round, which ranks waited where."""
    lines = []
    rounds = sorted({(one.identity.job, one.identity.round) for one in all_moments})
    for job, round_ in rounds:
        of_round = [one for one in all_moments if (one.identity.job, one.identity.round) == (job, round_)]
        lines.append(printable(f"together, job {job or '?'}, round {round_}: {len(of_round)} ranks"))
        lines += [f"  {printable(line)}" for line in (*_missing(of_round), *_places(of_round), *_behind(of_round))]
    return lines


def _missing(of_round: Sequence[LastMoments]) -> list[str]:
    """Name ranks without a box: theirs may be the one that matters."""
    world_size = max(one.identity.world_size for one in of_round)
    missing = named_missing((one.identity.rank for one in of_round), world_size)
    return [f"no box of {missing}"] if missing else []


def _places(of_round: Sequence[LastMoments]) -> list[str]:
    """Fold where ranks were into ranges, the most common place first."""
    return [fold({one.identity.rank: _place(one) for one in of_round})]


def _place(moments: LastMoments) -> str:
    if moments.error is not None:
        return f"died of {moments.error.type}"
    if moments.unfinished and moments.in_call:
        return f"in {_collective(moments.unfinished[0])}"
    if _waits_unseen(moments):
        return _waiting(moments)
    return f"{moments.progress.state}, in phase {moments.progress.phase}"


def _behind(of_round: Sequence[LastMoments]) -> list[str]:
    """Name ranks that never entered the collective that most of the others were in."""
    waiting = Counter(
        (one.unfinished[0].group, one.unfinished[0].seq) for one in of_round if one.unfinished and one.in_call
    )
    if not waiting:
        return []
    (group, seq), count = waiting.most_common(1)[0]
    if count * 2 <= len(of_round):
        return []
    behind = [one.identity.rank for one in of_round if not _has_entered(one, group, seq)]
    if not behind:
        return [f"every rank had entered #{seq} of group {group}: the boxes blame nobody"]
    return [f"{named(sorted(behind))} never entered #{seq} of group {group}, in which {count} waited: look there first"]


def _waits_unseen(moments: LastMoments) -> bool:
    """Say whether a rank waited for a collective of which no record is open: another group's has ended since."""
    position = moments.position
    return not moments.unfinished and position is not None and position.enqueued > position.completed


def _waiting(moments: LastMoments) -> str:
    position = moments.position
    assert position is not None
    of_what = f"a collective of {position.name}" if position.name else "a collective"
    return f"waits in {of_what}: it has entered {position.enqueued}, and {position.completed} have ended"


def _has_entered(moments: LastMoments, group: str, seq: int) -> bool:
    """Return whether a rank has reached a collective; a group that it never used counts as reached."""
    seen = [one.seq for one in moments.unfinished if one.group == group]
    if moments.ended is not None and moments.ended.communicator == group:
        seen.append(moments.ended.seq)
    return not seen or max(seen) >= seq


def _collective(one: OpenCollective) -> str:
    return f"{one.function} #{one.seq} of group {one.group} ({one.bytes_moved} bytes)"
