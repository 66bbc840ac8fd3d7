# SPDX-License-Identifier: Apache-2.0
"""Does the training thread's stack change between heartbeats while no step and no collective ends?

An evaluation that the script does not declare makes no step and no collective, and on a GPU it stands in one line
(``loss.item()``) nearly all the time. So does an endless loop. The difference: the evaluation is seen elsewhere now and
then. A place is the stack without the line of its innermost frame: a loop of two lines is one. The number of places is
no evidence: a small model is evaluated in two.

Sampled only when nothing has moved for a second, so a run that trains pays nothing.
"""

import sys
from types import FrameType

from megascale_ops.blackbox.writer import BoxWriter

# 1 s: ten heartbeats. A step of ten seconds is looked at for nine of them, 10 us each time.
QUIET_S = 1.0
# 64 frames: below lies how the script was started.
_MOST_FRAMES = 64


class StackWatch:
    """What is remembered from one heartbeat to the next. Owned by the monitor thread."""

    def __init__(self, box: BoxWriter) -> None:
        self._box = box
        self._place: tuple[int, ...] = ()
        self._times = 0

    def sample(self, thread: int, now_mono_s: float) -> None:
        """Note the place of a thread, unless something has moved within `QUIET_S`."""
        if now_mono_s - self._box.moved_mono_s < QUIET_S:
            if self._times:
                self._times = 0
                self._box.wandered(0, 0.0)
            self._place = ()
            return
        place = place_of(sys._current_frames().get(thread))  # noqa: SLF001  documented, and there is no other way
        if self._place and place and place != self._place:
            self._times += 1
            self._box.wandered(self._times, now_mono_s)
        self._place = place


def place_of(frame: FrameType | None) -> tuple[int, ...]:
    """Return where a stack is, as numbers: frames must not be kept alive."""
    if frame is None:
        return ()
    found = [id(frame.f_code)]
    outer = frame.f_back
    # The other thread keeps running: CPython 3.11 was seen to answer with a dict for a caller that had just returned.
    while isinstance(outer, FrameType) and len(found) < 2 * _MOST_FRAMES:
        found += (id(outer.f_code), outer.f_lasti)
        outer = outer.f_back
    return tuple(found)
