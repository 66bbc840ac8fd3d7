# SPDX-License-Identifier: Apache-2.0
"""A wrapped launcher has failed: which of its ranks ended first, and how. Pure.

What is known of each rank comes from three sides: the moment its process ended (and its status, where it was seen),
its black box, and the launcher's output. A rank that ended by a signal shortly after the first one was ended by the
launcher, as torchrun, deepspeed, MPI and Lightning do with the other ranks: no cause of its own.
"""

import signal
from collections.abc import Callable, Mapping, Sequence

import msgspec

from megascale_ops.blackbox.records import BoxIdentity
from megascale_ops.runner.wrapped.child_watch import Death
from megascale_ops.runner.wrapped.launcher_words import Said
from megascale_ops.schema.messages import RankExit
from megascale_ops.schema.progress import RankError

# 50 ms: two ranks that the kernel kills for lack of memory end within it; launchers send SIGTERM before they kill.
_AT_ONCE_S = 0.05
_BEFORE_S = 0.001  # before the first whose end was seen, for an order and not for a measure
_ASKED = frozenset({-signal.SIGTERM, -signal.SIGINT})
# What a launcher's signal makes of a rank that has a handler for it: an exit of Python's own.
_STOPPED = ("KeyboardInterrupt", "SystemExit", "SignalException")

_replace = msgspec.structs.replace


def rank_ends(
    launcher: RankExit,
    deaths: Sequence[Death],
    known: Mapping[int, BoxIdentity],
    said: Sequence[Said],
    look: Callable[[RankExit], tuple[RankExit, str]],
) -> tuple[RankExit, ...]:
    """Return how the launcher's ranks ended, first death first; the launcher's own end where no rank's explains it.

    Args:
        launcher: How the launcher itself ended.
        deaths: Ranks whose end was seen.
        known: The black boxes of this node, by rank.
        said: What the launcher printed about its ranks.
        look: Completes an exit from the rank's black box, and returns the box's state, "" without a box.
    """
    if launcher.code == 0 or launcher.by_us:
        return (launcher,)
    words = _by_rank(said, known)
    ends = [_of_death(death, words.get(death.identity.rank), launcher, look) for death in deaths]
    seen = {death.identity.rank for death in deaths}
    first_s = min((end.seen_mono_s for end in ends), default=launcher.seen_mono_s)
    for rank, one in words.items():
        lives = rank in known and rank not in seen and known[rank].pid != one.pid
        if rank not in seen and not (lives and one.pid >= 0):
            local_rank = one.local_rank if one.local_rank >= 0 else rank
            # Launchers name the rank that failed by itself; ranks that they ended went after that one.
            seen_s = launcher.seen_mono_s if one.code in _ASKED else first_s - _BEFORE_S
            end = RankExit(rank, local_rank, max(0, one.pid), one.code, seen_s, stderr_tail=one.line)
            ends.append(_with_error(end, one))
    ends.sort(key=lambda end: end.seen_mono_s)
    failed = [end for end in ends if end.code != 0]
    if not failed:
        return (launcher,)
    first = failed[0]
    return tuple(_replace(end, by_us=True) if _is_consequence(end, first) else end for end in ends)


def _by_rank(said: Sequence[Said], known: Mapping[int, BoxIdentity]) -> dict[int, Said]:
    """Return the launcher's words by global rank; of two lines about one rank the more specific one."""
    found: dict[int, Said] = {}
    for one in said:
        rank = _rank_of(one, known)
        before = found.get(rank)
        if before is None or one.error or not before.error:
            found[rank] = one
    return found


def _rank_of(one: Said, known: Mapping[int, BoxIdentity]) -> int:
    """Return the global rank that is meant: by its process, its rank, or its place among the ranks of this node."""
    by_pid = [rank for rank, identity in known.items() if identity.pid == one.pid]
    if by_pid:
        return by_pid[0]
    if one.rank >= 0:
        return one.rank
    by_local = [rank for rank, identity in known.items() if identity.local_rank == one.local_rank]
    if by_local:
        return by_local[0]
    here = sorted(known)
    is_whole = here and len(here) > one.local_rank >= 0
    return here[one.local_rank] if is_whole else max(0, one.local_rank)


def _of_death(
    death: Death, words: Said | None, launcher: RankExit, look: Callable[[RankExit], tuple[RankExit, str]]
) -> RankExit:
    """Return how a rank ended whose process was watched."""
    identity = death.identity
    code = launcher.code if identity.pid == launcher.pid else death.code
    if code is None and words is not None and words.pid in (-1, identity.pid):
        code = words.code
    local_rank = identity.local_rank if identity.local_rank >= 0 else identity.rank
    tail = words.line if words is not None else ""
    plain = RankExit(identity.rank, local_rank, identity.pid, code or 0, death.seen_mono_s, stderr_tail=tail)
    end, state = look(plain)
    if words is not None and end.error is None:
        end = _with_error(end, words)
    if code is None and (state != "exited" or end.error is not None):
        # The status was not seen. An interpreter that ends in order records it in its box; this one did not.
        end = _replace(end, code=1, vanished=end.error is None)
    return end


def _with_error(end: RankExit, words: Said) -> RankExit:
    """Return an exit with the exception that the launcher prints of it."""
    if not words.error:
        return end
    kind, _, message = words.error.partition(": ")
    return _replace(end, error=RankError(kind[:100], message[:500], step=end.step))


def _is_consequence(end: RankExit, first: RankExit) -> bool:
    """Return whether an exit that came after the first failure was the launcher's doing."""
    if end is first or end.code == 0:
        return False
    if end.error is not None:
        return end.error.type.rpartition(".")[2] in _STOPPED
    late = end.seen_mono_s - first.seen_mono_s > _AT_ONCE_S
    return end.vanished or end.code in _ASKED or (end.code == -signal.SIGKILL and late)
