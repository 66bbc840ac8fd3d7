# SPDX-License-Identifier: Apache-2.0
"""Show the output of the ranks and of the runner itself: one thread, one mechanism, nothing dropped in silence.

Ranks write into files, so that their last output survives them and no rank ever waits for a reader. One thread copies
these files to the terminal as fast as it is read: what is not shown yet waits on disk, however much it is, and a round
that is over is read to its end before the next one's output. The runner's own stdout and stderr are such a file, too
(in memory), whatever writes to them: our log lines, torch's, a warning out of C++. So a pipe that is not read holds up
nothing but this thread.

``stop`` waits as long as the reader takes something. A reader that takes nothing for a while, or a second signal, ends
the wait; then one line names how much was left out and the files that hold it.
"""

import fcntl
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TextIO

from megascale_ops.runner.output.log_tail import LogTail, Source
from megascale_ops.runner.output.sink import Sink
from megascale_ops.schema.folding import listed

log = logging.getLogger(__name__)

# 0.05 s: words show up as soon as a person can see it.
_INTERVAL_S = 0.05
# 5 s without one byte taken: there is no reader. A reader that is slow is waited for.
_STALL_S = 5.0
# 0.5 s, and 2 s in all, once the end was requested a second time.
_HURRIED_STALL_S, _HURRIED_S = 0.5, 2.0


class OwnWords:
    """The runner's own stdout and stderr, caught in a file in memory as long as a console shows them."""

    def __init__(self) -> None:
        _flush()
        self.file = os.memfd_create("runner-words")
        fcntl.fcntl(self.file, fcntl.F_SETFL, os.O_APPEND)
        # A stream that was closed from the beginning stays so: its number may stand for another file by now.
        self.outputs = [_kept(sys.stdout), _kept(sys.stderr)]
        self._caught = [number for number, kept in zip((1, 2), self.outputs, strict=True) if kept is not None]
        for number in self._caught:
            os.dup2(self.file, number)

    def give_back(self) -> None:
        """Let them go where they went before."""
        _flush()
        for number in self._caught:
            kept = self.outputs[number - 1]
            assert kept is not None
            os.dup2(kept[0], number)

    def close(self) -> None:
        """Close what was kept."""
        for kept in self.outputs:
            if kept is not None:
                os.close(kept[0])
        os.close(self.file)


class Console:
    """Copies files to stdout and stderr until stopped; ``follow`` names those of the next round.

    Args:
        hurried: Whether the output left at the end is not to be waited for.
    """

    def __init__(self, hurried: Callable[[], bool] = lambda: False) -> None:
        self._own = OwnWords()
        pairs = zip(("stdout", "stderr"), self._own.outputs, strict=True)
        out, err = (Sink(name, *(kept or (None,))) for name, kept in pairs)
        # One terminal behind both: one last line, whole lines whichever rank writes them.
        self._out = err if out.identity is not None and out.identity == err.identity else out
        self._err = err
        self._sinks = [err] if self._out is err else [out, err]
        self._hurried = hurried
        self._voice = LogTail(Source(f"/proc/self/fd/{self._own.file}", to_stderr=True, prefix=""), err)
        self._followed: list[LogTail] = []
        self._coming: deque[Sequence[Source]] = deque()
        self._failure = ""
        self._told: set[str] = set()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._quit = threading.Event()
        self._moved_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def follow(self, sources: Sequence[Source]) -> None:
        """Follow ``sources`` from now on, after what is left of those before. Returns at once."""
        self._coming.append(tuple(sources))
        self._wake.set()

    def stop(self) -> None:
        """Show what is left as long as it is taken, report what was not, and end the thread."""
        self._own.give_back()
        self._stopping.set()
        self._wake.set()
        began_s, hurried_s = time.monotonic(), 0.0
        while self._thread.is_alive():
            self._thread.join(_INTERVAL_S)
            now_s = time.monotonic()
            hurried_s = hurried_s or (now_s if self._hurried() else 0.0)
            patience_s = _HURRIED_STALL_S if hurried_s else _STALL_S
            late = bool(hurried_s) and now_s - hurried_s > _HURRIED_S
            if late or now_s - max(began_s, self._moved_s) > patience_s:
                break
        self._quit.set()
        self._thread.join(_INTERVAL_S * 4)
        self._tell_what_is_left()
        for followed in (*self._followed, self._voice):
            followed.close()
        for sink in self._sinks:
            sink.close()
        self._own.close()

    def _run(self) -> None:
        try:
            self._copy()
        except Exception as error:  # noqa: BLE001  a run must not end for lack of a terminal; `stop` reports it
            self._failure = f"{type(error).__name__}: {error}"

    def _copy(self) -> None:
        while not self._quit.is_set():
            moved = self._turn(time.monotonic())
            if moved:
                self._moved_s = time.monotonic()
            elif waiting := next((sink for sink in self._sinks if sink.pending and not sink.trouble), None):
                waiting.poll_ready(_INTERVAL_S)
            elif self._stopping.is_set() and self._is_done():
                return
            else:
                self._wake.wait(_INTERVAL_S)
                self._wake.clear()

    def _is_done(self) -> bool:
        return self._voice.done and not any((self._coming, self._followed, *(sink.pending for sink in self._sinks)))

    def _turn(self, now_s: float) -> bool:
        """Prepare and write once for each output; return whether anything moved."""
        while self._coming:
            sources = self._coming.popleft()
            for followed in self._followed:
                followed.ending = True
            self._followed += [LogTail(one, self._err if one.to_stderr else self._out) for one in sources]
        if self._stopping.is_set():
            for followed in self._followed:
                followed.ending = True
            self._voice.ending = not self._followed  # the last word
        moved = False
        for sink in self._sinks:
            if not sink.pending:
                moved |= self._prepare(sink, now_s)
            moved |= sink.push() > 0
            if sink.closed and sink.name not in self._told and not self._stopping.is_set():
                self._told.add(sink.name)
                log.warning("%s is closed (%s): what goes there is only in the log files", sink.name, sink.closed)
        ended = [followed for followed in self._followed if followed.done]
        self._followed = [followed for followed in self._followed if not followed.done]
        for followed in ended:
            followed.close()
        return moved

    def _prepare(self, sink: Sink, now_s: float) -> bool:
        """Gather what shall be written next: of the oldest rounds of which something is left, and our own words."""
        gathered = []
        mine = [followed for followed in self._followed if followed.sink is sink]
        earlier = [followed for followed in mine if followed.ending]
        read = False
        ours = [self._voice] if sink is self._err and (self._voice.ending or not self._stopping.is_set()) else []
        for followed in (*ours, *(earlier or mine)):
            words = followed.words(now_s)
            read |= bool(words)
            if words:
                gathered.append(sink.line.show(followed, followed.prefix, words, now_s))
        sink.pending = b"".join(gathered)
        return read

    def _tell_what_is_left(self) -> None:
        """Report, on an output that is still read, how much was not shown and where it is."""
        left = [(one, one.left()) for one in (*self._followed, self._voice) if not one.sink.closed]
        paths = [followed.source.path for followed, count in left if count > 0 and followed is not self._voice]
        waiting = sum(len(sink.pending) for sink in self._sinks)
        count = sum(max(0, count) for _, count in left) + waiting
        if not count:
            return
        reasons = [self._failure, *(sink.trouble for sink in self._sinks)]
        trouble = next((f" ({reason})" for reason in reasons if reason), "")
        where = listed(paths, 4) if paths else "the log files"
        line = f"{count} bytes of output were not taken{trouble} and are left out here: all of it is in {where}\n"
        for sink in reversed(self._sinks):
            if not sink.pending and not sink.closed:
                sink.pending = sink.line.show(self, b"", line.encode(sink.encoding, "backslashreplace"), 0.0)
                if sink.push():
                    return


def _kept(stream: TextIO | None) -> tuple[int, str] | None:
    """Return a descriptor of our own, and the encoding, of what one of Python's streams goes to; None: it is closed."""
    if stream is not None:
        with suppress(OSError, ValueError):  # closed, or no file at all
            return os.dup(stream.fileno()), stream.encoding
    return None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # AttributeError: there is none
            stream.flush()
