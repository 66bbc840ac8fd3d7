# SPDX-License-Identifier: Apache-2.0
"""Is the training thread somewhere else from beat to beat, while nothing tells that it moves?

An evaluation that the script does not declare makes no step and no collective, and on a GPU it stands in one line
(``loss.item()``) nearly all the time. So does a loop without an end. What tells them apart is that the evaluation is
seen elsewhere now and then, in ever other places of the model: a loop that asks again and again whether it may go on
knows two or three. A place is the stack without the line of its innermost frame: a loop of two lines is one.

Looked at only when nothing has moved for a second, so a run that trains pays nothing.
"""

import sys
from types import FrameType

from megascale_ops.blackbox.writer import BoxWriter

# 1 s: ten beats. A step of ten seconds is looked at for nine of them, 10 us each time.
QUIET_S = 1.0
# 64 places: who was in so many needs no more.
_MOST_PLACES = 64
# 64 frames: below lies how the script was started.
_MOST_FRAMES = 64


class Wander:
    """What is remembered from one beat to the next. Owned by the beat's thread."""

    def __init__(self, box: BoxWriter) -> None:
        self._box = box
        self._place = 0
        self._places: set[int] = set()  # since anything moved

    def look(self, thread: int, now_mono_s: float) -> None:
        """Look where a thread is, unless something has moved of late."""
        if now_mono_s - self._box.moved_mono_s < QUIET_S:
            if len(self._places) > 1:
                self._box.wandered(0, 0.0)
            self._places.clear()
            self._place = 0
            return
        place = _place_of(sys._current_frames().get(thread))  # noqa: SLF001  documented, and there is no other way
        if not place:
            return
        if len(self._places) < _MOST_PLACES:
            self._places.add(place)
        if self._place and place != self._place:
            self._box.wandered(len(self._places) - 1, now_mono_s)
        self._place = place


def _place_of(frame: FrameType | None) -> int:
    """Return where a stack is as one number, 0 without one: frames must not be kept alive."""
    if frame is None:
        return 0
    found = [id(frame.f_code)]
    outer = frame.f_back
    while outer is not None and len(found) < 2 * _MOST_FRAMES:
        found += (id(outer.f_code), outer.f_lasti)
        outer = outer.f_back
    return hash(tuple(found))
