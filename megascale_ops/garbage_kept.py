# SPDX-License-Identifier: Apache-2.0
"""Import something large without looking for garbage meanwhile, and leave it out of every later look.

A module's functions and classes live to the end, so what Python's collector looks at during an import is no garbage,
and each look goes over all that has been imported so far. At the end of the process it goes over everything once more
and takes apart what the kernel would free at once. Of 1.6 s that a process takes in which ``import torch`` is all, the
looks during the import are 0.15 s and the end is 0.5 s.

Nothing is imported here but what every Python has loaded: a rank's first lines wait for this.
"""

import gc
import sys
from types import FrameType


class GarbageKept:
    """A ``with`` block in which the garbage collector is off; what lives at its end is never looked at again.

    A collector that was off stays off. A block that fails leaves nothing out of later looks.

    Args:
        freezes: False: what lives at the end is looked at as ever.
    """

    __slots__ = ("_freezes", "_was_on")

    def __init__(self, *, freezes: bool = True) -> None:
        self._freezes = freezes

    def __enter__(self) -> None:
        self._was_on = gc.isenabled()
        gc.disable()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._freezes and error is None:
            gc.freeze()
        if self._was_on:
            gc.enable()


def is_start_of_script(frame: FrameType | None = None) -> bool:
    """Say whether only modules are being executed: no function runs, so all that lives are modules and their own.

    Then what is left out of later looks can't be what a function of the script made and dropped.

    Args:
        frame: The innermost one to look at; None: the caller's.
    """
    frame = frame or sys._getframe(1)  # noqa: SLF001  inspect, which offers the same, takes 5 ms to import
    while frame is not None:
        code = frame.f_code
        if code.co_name != "<module>" and not code.co_filename.startswith("<frozen "):  # importlib, runpy
            return False
        frame = frame.f_back
    return True
