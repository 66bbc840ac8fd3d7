# SPDX-License-Identifier: Apache-2.0
"""Write down how the rank ends: the exception nobody caught, and that it left in order.

Both hooks call what stood there before. A script that replaces ``sys.excepthook`` without calling ours is caught at
exit: Python keeps the exception in ``sys.last_value`` before it calls any hook.
"""

import atexit
import sys
import sysconfig
import threading
import traceback
from types import TracebackType

from megascale_ops.recorder.aside import guarded
from megascale_ops.recorder.recording import Recording
from megascale_ops.schema.progress import RankError

_LIBRARIES = tuple(
    {
        path.rstrip("/") + "/"
        for key in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_paths().get(key))
    }
)
_OURS = __file__.rpartition("/")[0] + "/"


class Endings:
    """The hooks at the end of one recording."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._main_said = False
        self._anyone_said = False

    def install(self) -> None:
        """Put our hooks in front of those that are there, and note the exit."""
        before, before_thread = sys.excepthook, threading.excepthook
        note, leave = guarded("the exception hook", self._note), guarded("the exit hook", self._leave)

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            note(error, True)  # noqa: FBT003  guarded functions take no keywords
            before(kind, error, trace)

        def thread_hook(args: threading.ExceptHookArgs) -> None:
            note(args.exc_value, False)  # noqa: FBT003  as above
            before_thread(args)

        sys.excepthook, threading.excepthook = hook, thread_hook
        atexit.register(leave)

    def _note(self, error: BaseException | None, main: bool) -> None:
        """Write the exception down. One in another thread ends nothing by itself, so the main thread's comes first."""
        if error is None or not self._recording.live or (self._anyone_said and not main):
            return
        self._anyone_said = True
        self._main_said = self._main_said or main
        self._recording.box.set_error(describe(error, self._recording.step_number))

    def _leave(self) -> None:
        """Say that the rank leaves in order, as any exit that runs ``atexit`` does."""
        if not self._recording.live:
            return
        last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if not self._main_said:
            self._note(last, main=True)
        self._recording.box.set_state("exited")


def describe(error: BaseException, step: int) -> RankError:
    """Return ``error`` in words; ``where`` is its innermost frame that belongs to no library."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)]
    places = own or list(frames)
    try:
        message = str(error)
    except Exception as broken:  # noqa: BLE001  a user's __str__ may raise; its class then stands for the message
        message = f"(its message cannot be read: {type(broken).__name__})"
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    where = f"{places[-1].filename}:{places[-1].lineno} {places[-1].name}" if places else ""
    return RankError(type=name, message=message, where=where, step=step)


def _is_library(filename: str) -> bool:
    """Whether a frame's file is Python's, an installed package's, or ours."""
    return filename.startswith((*_LIBRARIES, _OURS, "<frozen"))
