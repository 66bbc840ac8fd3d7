# SPDX-License-Identifier: Apache-2.0
"""The wall clock as the controller uses it: it may be stepped, and no age changes by that.

Points in time are kept in wall clock seconds where people read them or where they must outlive the controller (the
journal). Ages between them decide things: budgets an hour, how long a node stays evicted. So a step of the wall clock
is noticed by comparing it with the monotonic clock, and every point in time that still counts is moved along with it.
Between a step and its being noticed the old time goes on, so the two are never mixed.

What was written before the controller's own last start cannot be moved: nothing shows then that the clock was stepped.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from megascale_ops.controller.job.job import Job
from megascale_ops.schema.events import Incident, Marks

# 2 s: a clock that is slewed drifts by half a millisecond a second; a virtual machine's pause is a step like any other.
STEP_S = 2.0


class WallClock:
    """Wall clock seconds that go on evenly until ``follow`` is called.

    Args:
        wall: the real one, which may jump.
        clock: monotonic seconds.
    """

    def __init__(self, wall: Callable[[], float], clock: Callable[[], float]) -> None:
        self._wall = wall
        self._clock = clock
        self._offset_s = wall() - clock()

    def __call__(self) -> float:
        """Return the time."""
        return self._clock() + self._offset_s

    def follow(self) -> float:
        """Take over the real clock's time; return by how much it was stepped, 0 when it was not."""
        step_s = self._wall() - self()
        if abs(step_s) < STEP_S:
            return 0.0
        self._offset_s += step_s
        return step_s


def shift(job: Job, step_s: float) -> None:
    """Move every point in time of a job that still counts."""
    record = job.record
    changes: dict[str, Any] = {
        name: _moved(getattr(record, name), step_s) for name in ("started_wall_s", "since_wall_s")
    }
    for name in ("restarts", "evictions", "tabs", "verdict", "left_alone"):
        if getattr(record, name, None):
            changes[name] = _moved_all(getattr(record, name), step_s)
    job.change(**changes)
    job.round.shift(step_s)


def shift_marks(incident: Incident, step_s: float) -> Incident:
    """Return an open incident with its marks moved: what it cost is computed from them."""
    marks = {name: _moved(getattr(incident.marks, name), step_s) for name in Marks.__struct_fields__}
    return msgspec.structs.replace(
        incident,
        marks=Marks(**marks),
        verdict=_moved_all(incident.verdict, step_s),
        course=_moved_all(incident.course, step_s),
    )


def _moved(wall_s: float, step_s: float) -> float:
    return wall_s + step_s if wall_s else wall_s


def _moved_all(thing: Any, step_s: float) -> Any:  # noqa: ANN401  whatever a record holds
    """Return ``thing`` with every field that ends in ``wall_s`` moved, however deep."""
    if isinstance(thing, tuple):
        return tuple(_moved_all(one, step_s) for one in thing)
    if isinstance(thing, dict):
        return {key: _moved_all(one, step_s) for key, one in thing.items()}
    if not isinstance(thing, msgspec.Struct):
        return thing
    changes = {
        name: _moved(getattr(thing, name), step_s) for name in thing.__struct_fields__ if name.endswith("wall_s")
    }
    return msgspec.structs.replace(thing, **changes) if changes else thing
