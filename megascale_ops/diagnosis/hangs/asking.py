# SPDX-License-Identifier: Apache-2.0
"""Which ranks are to be looked at once more, while thousands of them wait for one?

A look at a rank costs it a tenth of a second and the controller a judgement of what it says. A rank that was seen to
wait in a collective, and of which every heartbeat since tells the same, is where it was: looking again shows that
again. What is not known so is asked: who is named, who does not wait, who gave no answer, whose data did not leave it,
whose kernels wait for tiles, whose calls went on between two looks, and of whom a heartbeat has told anything new.

Pure: reports, evidence and names in, ranks out.
"""

from collections.abc import Collection, Mapping, Sequence

from megascale_ops.diagnosis.hangs.evidence import NOTHING, Look
from megascale_ops.diagnosis.hangs.standing import has_changed
from megascale_ops.diagnosis.hangs.wait_graph import stand_of
from megascale_ops.diagnosis.rank_view import RankView

# 2 looks at all ranks: the second tells whether stacks, calls and tiles have stayed as they were.
WHOLE_LOOKS = 2
# 8: each eighth look is at all ranks again. What no heartbeat tells (a GPU that works off its queue) is seen then.
WHOLE_EVERY = 8


def is_whole(looks_taken: int, named: Collection[int]) -> bool:
    """Return whether the next look is at all ranks: one of the first, each eighth, and any while no rank is named."""
    return looks_taken < WHOLE_LOOKS or looks_taken % WHOLE_EVERY == 0 or not named


def asked_again(
    ranks: Sequence[RankView], looks: Mapping[int, Look], known: Mapping[int, RankView], named: Collection[int]
) -> set[int]:
    """Return the ranks of which another look may show something else.

    Args:
        ranks: all ranks of the round that have been reported.
        looks: the evidence on each rank; those that are missing gave none.
        known: each rank as its heartbeats described it when it was looked at last.
        named: the ranks that are blamed.
    """
    blamed = frozenset(named)
    return {
        view.report.rank
        for view in ranks
        if view.report.rank in blamed
        or _is_open(looks.get(view.report.rank, NOTHING))
        or _is_new(known.get(view.report.rank), view)
        or not stand_of(view, looks).waits
    }


def _is_open(look: Look) -> bool:
    """Return whether a look was not answered, or shows what another look decides."""
    return (
        look is NOTHING
        or "no_answer" in look.marks
        or bool(look.stuck or look.tiles)
        or look.went_on
        or look.tiles_went_on
    )


def _is_new(before: RankView | None, now: RankView) -> bool:
    """Return whether heartbeats have told something new since a rank was looked at."""
    if before is None or before.report is now.report:
        return before is None
    progress = before.report.progress
    # A recorder that was silent then, and beats now, tells that; one that has beaten all the time tells nothing.
    told_mono_s = progress.moved_mono_s + before.silent_s if progress is not None else 0.0
    return has_changed(before.report, now.report, told_mono_s)
