# SPDX-License-Identifier: Apache-2.0
"""Record how the rank ends: the uncaught exception, its thread and time, or an orderly exit.

An exception in the main thread ends the process. One in another thread ends that thread, and the process may live on
for days: so the newest of these stands until the main thread has one of its own, and each names its thread.

Both hooks call the hook that was installed before. A script that replaces ``sys.excepthook`` without calling ours is
caught at exit: Python keeps the exception in ``sys.last_value`` before it calls any hook. Where ours is still installed
it has seen every exception, and ``sys.last_value`` was caught, by a console in the script, for instance.
"""

import atexit
import sys
import sysconfig
import threading
import traceback
from time import monotonic
from types import TracebackType

from megascale_ops.recorder.hook_guard import guarded
from megascale_ops.recorder.recording.recording import Recording
from megascale_ops.schema.progress import RankError

_LIBRARIES = tuple(
    {
        path.rstrip("/") + "/"
        for key in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_paths().get(key))
    }
)
_CARRIED = "Traceback (most recent call last):"
_PACKAGES = ("/site-packages/", "/dist-packages/")
_OURS = __file__.rpartition("/recording/")[0] + "/"  # the recorder
# The box holds 711 bytes: most of them for what was raised last, the rest for what it came from.
_OWN_CHARACTERS, _CAUSE_CHARACTERS = 440, 260
# 16: a longer chain of exceptions is a circle, or adds nothing.
_LONGEST_CHAIN = 16


class Endings:
    """The hooks at the end of one recording."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._main_said = False
        self._hook: object = None

    def install(self) -> None:
        """Put our hooks in front of those that are there, and note the exit."""
        before, before_thread = sys.excepthook, threading.excepthook
        note, leave = guarded("the exception hook", self._note), guarded("the exit hook", self._leave)

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            note(error, "")
            before(kind, error, trace)

        def thread_hook(args: threading.ExceptHookArgs) -> None:
            if not issubclass(args.exc_type, SystemExit):  # a thread that ends so has not failed; Python is silent
                note(args.exc_value, args.thread.name if args.thread is not None else "a thread that has ended")
            before_thread(args)

        self._hook = sys.excepthook = hook
        threading.excepthook = thread_hook
        atexit.register(leave)

    def note_main(self, error: BaseException) -> None:
        """Record an exception that ends the main thread without a call of ``sys.excepthook``."""
        self._note(error, "")

    def _note(self, error: BaseException | None, thread: str) -> None:
        """Write an exception down; ``thread`` is "" for the main thread's, after which no other counts."""
        if error is None or not self._recording.live or (self._main_said and thread):
            return
        self._main_said = self._main_said or not thread
        self._recording.box.set_error(describe(error, self._recording.step_number, thread, monotonic()))

    def _leave(self) -> None:
        """Record an orderly exit, which is any exit that runs ``atexit``."""
        if not self._recording.live:
            return
        last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if not self._main_said and sys.excepthook is not self._hook:
            self._note(last, "")
        self._recording.box.set_state("exited")


def describe(error: BaseException, step: int, thread: str = "", raised_mono_s: float = 0.0) -> RankError:
    """Return ``error`` in words; ``where`` is its innermost frame that belongs to no library.

    The message ends with the exception that it came from, if there is one: a script that wraps what its peers' death
    brought it into an exception of its own is still their victim.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)]
    places = own or list(frames)
    message = _message(error)
    first = _first_of(error)
    if first is not None:
        came = "while handling" if first is error.__context__ and error.__cause__ is None else "from"
        cause = f"{_name(first)}: {_message(first)}"[:_CAUSE_CHARACTERS]
        message = f"{message[:_OWN_CHARACTERS]} ({came} {cause})"
    where = f"{places[-1].filename}:{places[-1].lineno} {places[-1].name}" if places else ""
    return RankError(_name(error), message, where, step, thread, raised_mono_s)


def _first_of(error: BaseException) -> BaseException | None:
    """Return the exception at the other end of the chain that Python would print, or None."""
    first = error
    for _ in range(_LONGEST_CHAIN):
        before = first.__cause__ or (None if first.__suppress_context__ else first.__context__)
        if before is None or before is error:
            break
        first = before
    return first if first is not error else None


def _message(error: BaseException) -> str:
    try:
        return _without_frames(str(error))
    except Exception as broken:  # noqa: BLE001  a user's __str__ may raise; its class then stands for the message
        return f"(its message cannot be read: {type(broken).__name__})"


def _without_frames(message: str) -> str:
    """Return a message without the frames of a traceback that it carries, as torch's data loader sends a worker's.

    They would fill the box, and what the worker raised stands behind them.
    """
    if _CARRIED not in message:
        return message
    lines = message.splitlines()
    return "\n".join(line for line in lines if _CARRIED not in line and not line.startswith(("  ", "\t")) and line)


def _name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _is_library(filename: str) -> bool:
    """Whether a frame's file is Python's, a package's (another environment's, too, that is on the path), or ours."""
    return filename.startswith((*_LIBRARIES, _OURS, "<frozen")) or any(part in filename for part in _PACKAGES)
