# SPDX-License-Identifier: Apache-2.0
"""How a warning went: at its worst, for how long, what it cost. Kept when it is over, when its numbers have faded."""

import msgspec

from megascale_ops.schema.health import Verdict
from megascale_ops.schema.wording import duration, percent

HOUR_S = 3600.0


class Course(msgspec.Struct, frozen=True, omit_defaults=True):
    """The course of one warning since it was opened. All ranks wait for a slow one, so each of them pays."""

    worst: Verdict | None = None  # as it was when it cost most
    worst_wall_s: float = 0.0
    paid_s: float = 0.0  # what it has cost each rank: cost of a step x its time, summed over the steps
    rank_hours: float = 0.0  # the same of all ranks
    unit: str = "rank"  # "GPU" where ranks are known to have one each
    until_wall_s: float = 0.0  # when it ended; 0: it holds


def is_worse(verdict: Verdict, than: Verdict | None) -> bool:
    """Say whether a verdict on a slow rank is worse than another one: by what it costs, then by its excess."""
    return than is None or (verdict.cost, verdict.excess) > (than.cost, than.excess)


def course_words(course: Course, began_wall_s: float) -> str:
    """Return the course in one sentence, with the window that its numbers are of.

    Args:
        course: of a warning.
        began_wall_s: when that began.
    """
    parts = []
    if course.until_wall_s and began_wall_s:
        parts.append(f"lasted {duration(max(0.0, course.until_wall_s - began_wall_s))}")
    worst = course.worst
    if worst is not None and worst.cost > 0:
        above = f"{percent(worst.excess)} more work than its equals, " if worst.excess > 0 else ""
        parts.append(f"at worst {above}{percent(worst.cost)} of every step")
    if course.paid_s > 0:
        hours = f"{course.rank_hours:.2f}" if course.rank_hours >= 0.1 else f"{course.rank_hours:.2g}"
        parts.append(f"cost each rank {duration(course.paid_s)}, {hours} {course.unit} hours in all")
    return ", ".join(parts)
