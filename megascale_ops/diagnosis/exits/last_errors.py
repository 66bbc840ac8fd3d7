# SPDX-License-Identifier: Apache-2.0
"""A rank whose script has failed and whose process lives on: named with the script's own error, after a short grace.

The main thread is over once its exception was not caught; what lives is Python's exit: a thread that it waits for, a
function of ``atexit``. The black box holds the error from the first moment, so whatever else the process looks like
(asleep, or inside a collective that ``atexit`` calls), this is what happened, and the others wait for this rank in
vain.

Pure: ranks' reports in, a suspicion that carries the error, or None, out.
"""

from collections.abc import Sequence

from megascale_ops.diagnosis.exits.classify import class_of_error, is_interrupt
from megascale_ops.diagnosis.exits.error_records import words
from megascale_ops.diagnosis.exits.tile_timeouts import missed_of, tile_ends
from megascale_ops.diagnosis.hangs.suspicion import Suspicion, nodes_of, numbers_of, rank_finding, step_of, who
from megascale_ops.diagnosis.rank_view import RankView
from megascale_ops.schema.health import Finding, Verdict
from megascale_ops.schema.progress import RankError

# 2 s: Python's exit takes less, on a busy machine too; until then the runner's word of the end is awaited.
EXIT_S = 2.0
# 15 s: what is flushed and uploaded at exit takes seconds, and all others wait meanwhile.
GRACE_S = 15.0
# 40 s: a rank that gets a signal (Ctrl-C, a batch system) is stopped by its runner, which grants 30 and reports it.
INTERRUPTED_S = 40.0
# The name of the finding of such a suspicion: evidence of stacks and calls does not count in it.
FAILED_AND_LIVES = "failed_and_lives"


def judge_failed(ranks: Sequence[RankView], wall_s: float) -> Suspicion | None:
    """Return whose script has failed while its process lives, or None.

    Args:
        ranks: all ranks of the round that have been reported.
        wall_s: the time now, for the verdict's ``since_wall_s``.
    """
    failed = [(rank, error, age_s(rank, error)) for rank in ranks if (error := fatal(rank)) is not None]
    failed = [one for one in failed if one[2] > (INTERRUPTED_S if is_interrupt(one[1]) else EXIT_S)]
    if not failed:
        return None
    # A rank that only met the end of a peer is its victim, as at any end.
    causes = [one for one in failed if class_of_error(one[1]) != "peer"]
    first, error, longest_s = max(causes or failed, key=lambda one: one[2])
    of_tiles = _whose_tile(ranks, causes or failed, wall_s)
    if of_tiles is not None:
        return _suspicion(of_tiles, longest_s)
    if not causes:
        return _of_victims(ranks, failed, wall_s)
    views = [rank for rank, _, _ in causes]
    findings = [_finding(*one) for one in causes[:16]]
    verdict = Verdict(
        fault=class_of_error(error),
        reason=(
            f"{who([first])}: {words(error)}; its process lives on for {longest_s:.1f} s: something runs at its exit "
            f"(a thread, atexit), for which {GRACE_S:g} s are granted"
        ),
        confidence=0.95,
        culprits=numbers_of(views),
        nodes=nodes_of(views),
        since_wall_s=wall_s - longest_s,
        since_step=step_of(views),
        round=first.report.round,
        evidence=tuple(findings),
        otherwise=f"nothing else; had its process ended within {GRACE_S:g} s, nothing would have been stopped for it",
    )
    return _suspicion(verdict, longest_s)


def _suspicion(verdict: Verdict, longest_s: float) -> Suspicion:
    """Return a suspicion of those whose scripts have failed: acted upon when the grace is over."""
    lost = longest_s > GRACE_S
    return Suspicion(lost, verdict, longest_s, GRACE_S, GRACE_S, held=True, name_s=GRACE_S, is_proven=True)


def _of_victims(
    ranks: Sequence[RankView], failed: Sequence[tuple[RankView, RankError, float]], wall_s: float
) -> Suspicion | None:
    """Accuse no rank where all that failed met the end of a peer: that end is awaited, which runners report.

    On a busy machine the report of a rank's end comes later than its peers' errors do. Only when no rank has ended
    within
    the grace are they stopped: their connections broke, and it is not known why.
    """
    first, error, longest_s = max(failed, key=lambda one: one[2])
    if longest_s <= GRACE_S or any(rank.gone and not rank.left for rank in ranks):
        return None
    views = [rank for rank, _, _ in failed]
    verdict = Verdict(
        fault="exception",
        reason=(
            f"{who(views)} lost a connection to a peer and live on for {longest_s:.1f} s, and no end of a peer is "
            f"known of; first {who([first])}: {words(error)}"
        ),
        confidence=0.5,
        nodes=nodes_of(views),
        since_wall_s=wall_s - longest_s,
        since_step=step_of(views),
        round=first.report.round,
        evidence=tuple(_finding(*one) for one in failed[:16]),
        otherwise=f"nothing; had their processes ended within {GRACE_S:g} s, nothing would have been stopped for it",
    )
    return _suspicion(verdict, longest_s)


def _whose_tile(
    ranks: Sequence[RankView], failed: Sequence[tuple[RankView, RankError, float]], wall_s: float
) -> Verdict | None:
    """Name the rank whose tile never came, where all that failed had waited for it; None where not, or not known.

    The rank that they name lives on as well: its own evidence would show what it does, but nothing is to be gained by
    waiting for it, since those that gave up are at their end.
    """
    missed = [missed for rank, error, _ in failed for missed in missed_of(rank.report.rank, error)]
    told = tile_ends(missed)
    if told is None or not told[0]:
        return None
    culprits, why = told
    named = frozenset(culprits)
    views = [rank for rank in ranks if rank.report.rank in named]
    return Verdict(
        fault="tile_timeout",
        reason=f"{why}; {len(failed)} of them live on although their scripts have failed",
        confidence=0.9,
        culprits=culprits,
        nodes=nodes_of(views),
        since_wall_s=wall_s - max(ago_s for _, _, ago_s in failed),
        since_step=step_of(views) if views else -1,
        round=failed[0][0].report.round,
        evidence=tuple(_finding(*one) for one in failed[:16]),
        otherwise=f"nothing else; had they ended within {GRACE_S:g} s, nothing would have been stopped for it",
    )


def _finding(rank: RankView, error: RankError, ago_s: float) -> Finding:
    text = f"rank {rank.report.rank} met {words(error)} {ago_s:.1f} s ago; its process {rank.report.pid} is still there"
    return rank_finding(FAILED_AND_LIVES, text, "black box", rank, ago_s, "s")


def fatal(rank: RankView) -> RankError | None:
    """Return the exception that has ended a living rank's main thread; None: none known, or a step since."""
    return None if rank.gone else uncaught(rank)


def uncaught(rank: RankView) -> RankError | None:
    """Return the exception that has ended a rank's main thread, whether its process is there or not."""
    error, progress = rank.report.error, rank.report.progress
    if progress is None or error is None or not error.type or error.thread or not error.raised_mono_s:
        return None
    return error if progress.step <= error.step else None


def age_s(rank: RankView, error: RankError) -> float:
    """Return how long ago the error was raised; both clocks are those of the rank's own node."""
    progress = rank.report.progress
    return rank.silent_s + progress.moved_mono_s - error.raised_mono_s if progress is not None else 0.0
