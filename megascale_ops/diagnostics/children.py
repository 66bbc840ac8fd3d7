# SPDX-License-Identifier: Apache-2.0
"""Start the processes of checks, give them the word, and end each at its deadline.

A check may hang where no signal reaches it: a disk that never answers holds its caller inside the kernel. So a process
that does not die is left behind after ``_GIVEN_UP_S``, with the place where the kernel holds it as the evidence. One
thread waits for all; no wait is longer than the next deadline.
"""

import contextlib
import errno
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from megascale_ops.diagnostics.check import Check, Task
from megascale_ops.diagnostics.child import Answer, Loads, Order
from megascale_ops.errors import MegascaleError
from megascale_ops.foreign import UNREADABLE

# 60 s: importing torch takes 2 s from a warm disk and half a minute from a cold network file system.
START_S = 60.0
# 2 s: a killed process of a well kernel is gone in milliseconds, one with 80 GB of pinned memory in a second.
_GIVEN_UP_S = 2.0
# 8 MiB: the largest reading (192 cores, 10 repetitions) has 100 KB.
_MOST_ANSWER_BYTES = 8 << 20
_LAST_WORDS_BYTES = 4096
_READY = b"ready\n"


class Planned(NamedTuple):
    """A check that is to be made: its module, its row, its task."""

    module: str
    check: Check
    task: Task


class Outcome(NamedTuple):
    """How a check ended.

    Attributes:
        answer: What its process answered; None: it hung or died.
        trouble: Then what happened, a sentence's predicate: "was killed at its deadline of 5 s ...".
        seconds: From the word to the answer.
    """

    answer: Answer | None
    trouble: str
    seconds: float


class Child:
    """A process that makes checks. Used by the thread that made it: the process dies with that thread.

    Args:
        loads: What it loads before it is ready.

    Attributes:
        planned: The check that it was asked for last.
        outcome: Of that check, or of the start that failed; None while it works.
    """

    def __init__(self, loads: Sequence[str] = ()) -> None:
        self.planned: Planned | None = None
        self.outcome: Outcome | None = None
        self.is_ready = False
        self._got = b""
        try:
            # In memory: a machine without room for temporary files is one that is to be checked.
            self._words: BinaryIO = os.fdopen(os.memfd_create("last-words"), "w+b")
            reading, writing = os.pipe()
        except OSError as error:
            raise MegascaleError(_not_started(error)) from error
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "megascale_ops.diagnostics.child", str(os.getpid()), str(writing)],
                stdin=subprocess.PIPE,
                stdout=self._words,
                stderr=self._words,
                pass_fds=(writing,),
                start_new_session=True,  # what it starts is killed with it
            )
        except BaseException as error:
            os.close(reading)
            self._words.close()
            if isinstance(error, OSError):
                raise MegascaleError(_not_started(error)) from error
            raise
        finally:
            os.close(writing)
        self.answers = reading
        self._began_s = time.monotonic()
        self.deadline_s = self._began_s + START_S
        self._say(msgspec.json.encode(Loads(tuple(loads))))

    @property
    def is_usable(self) -> bool:
        """Whether it can be asked for another check: it has not been ended, and its last one did not fail."""
        failed = self.outcome is not None and (self.outcome.answer is None or bool(self.outcome.answer.error))
        return self.answers >= 0 and not failed

    def ask(self, planned: Planned) -> None:
        """Give the word to make a check; nothing else is being made."""
        self.planned, self.outcome = planned, None
        self._began_s = time.monotonic()
        self.deadline_s = self._began_s + planned.task.deadline_s
        self._say(msgspec.json.encode(Order(planned.module, planned.task)))

    def hear(self) -> None:
        """Read what has come; the descriptor has something."""
        part = os.read(self.answers, 1 << 16)
        self._got += part
        if not self.is_ready and self._got.startswith(_READY):
            self.is_ready, self._got = True, self._got[len(_READY) :]
        if self._got.endswith(b"\n"):
            self._take()
        elif not part or len(self._got) > _MOST_ANSWER_BYTES:
            self._end(f"ended without an answer ({self._how_it_ended()})")

    def pass_deadline(self) -> None:
        """Kill it, since its time is over."""
        doing = "measured" if self.planned else "loaded what it needs"
        limit_s = self.planned.task.deadline_s if self.planned else START_S
        where = _held_in(self._process.pid)
        last = self._last_words() if self.planned else ""
        self._kill()
        left = "" if self._process.poll() is not None else "; it does not die: the kernel holds it"
        self._end(
            f"was killed at its deadline of {limit_s:g} s while it {doing}{f' ({last})' if last else ''}{where}{left}"
        )

    def end(self) -> None:
        """Kill it where it still runs, and let go of everything."""
        if self.answers < 0:
            return
        self._kill()
        with contextlib.suppress(OSError):  # bytes for a process that reads no more
            self._process.stdin and self._process.stdin.close()
        os.close(self.answers)
        self.answers = -1
        self._words.close()

    def _take(self) -> None:
        seconds = time.monotonic() - self._began_s
        try:
            self.outcome = Outcome(msgspec.json.decode(self._got, type=Answer), "", seconds)
        except UNREADABLE as error:
            self.outcome = Outcome(None, f"answered nonsense ({error})", seconds)
        self._got = b""

    def _end(self, trouble: str) -> None:
        self.outcome = Outcome(None, trouble, time.monotonic() - self._began_s)
        self.end()

    def _say(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died; its other end says so
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GIVEN_UP_S)

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GIVEN_UP_S)
        code = self._process.returncode
        last = self._last_words()
        how = "it still runs" if code is None else _signal_of(code) if code < 0 else f"exit code {code}"
        return f"{how}: {last}" if last else how

    def _last_words(self) -> str:
        """Return the last line that it has written: what it was about to do, or why it died."""
        # Read by place: the process writes on at the offset that this descriptor shares with it.
        size = os.fstat(self._words.fileno()).st_size
        tail = os.pread(self._words.fileno(), _LAST_WORDS_BYTES, max(0, size - _LAST_WORDS_BYTES))
        return next(reversed(tail.decode("utf-8", "replace").strip().splitlines()), "")


def _not_started(error: OSError) -> str:
    """Return why no process makes checks, and what to do."""
    what = f"no process can be started for a check ({error.strerror})"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{what}: raise the limit of open files (ulimit -n), 64 are enough"
    if error.errno in (errno.EAGAIN, errno.ENOMEM):
        return f"{what}: raise the limit of processes or of memory (ulimit -u, ulimit -v, the control group)"
    return what


def _signal_of(code: int) -> str:
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"


def _held_in(pid: int) -> str:
    """Return where the kernel holds a process that does not run: its evidence when it hangs there."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
        where = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii", errors="replace").strip()
    except (OSError, IndexError):
        return ""
    named = f" in {where}" if where not in ("", "0") else ""
    return f" (state {state}{named})" if state == "D" or named else ""


def end_all(children: Iterable[Child]) -> None:
    """End what still runs."""
    for child in children:
        child.end()


def await_ready(children: Sequence[Child]) -> None:
    """Wait until each has loaded what it needs, has died, or took too long."""
    _await(children, lambda child: child.is_ready)


def run_together(children: Sequence[Child], planned: Sequence[Planned]) -> Iterator[tuple[Planned, Outcome]]:
    """Have each process make its check, all at once, and yield each when its outcome is known."""
    await_ready(children)
    waiting = dict(zip(children, planned, strict=True))
    for child, one in waiting.items():
        if child.outcome is None or child.is_usable:
            child.ask(one)
    while waiting:
        _await([*waiting], lambda child: child.outcome is not None, most=1)
        for child in [child for child in waiting if child.outcome is not None]:
            assert child.outcome is not None
            yield waiting.pop(child), child.outcome


def _await(children: Sequence[Child], is_done: Callable[[Child], bool], most: int = 0) -> None:
    """Wait until that is so of all, or of ``most``; an outcome counts as done."""
    with selectors.DefaultSelector() as selector:
        for child in children:
            if child.outcome is None:
                selector.register(child.answers, selectors.EVENT_READ, child)
        done = 0
        while True:
            waiting = [child for child in children if child.outcome is None and not is_done(child)]
            done = len(children) - len(waiting)
            if not waiting or (most and done >= most):
                return
            rest_s = min(child.deadline_s for child in waiting) - time.monotonic()
            for key, _ in selector.select(max(0.0, rest_s)):
                child = key.data
                if child.outcome is None:
                    _heard(selector, child)
            now_s = time.monotonic()
            for child in waiting:
                if child.outcome is None and not is_done(child) and now_s >= child.deadline_s:
                    selector.unregister(child.answers)
                    child.pass_deadline()


def _heard(selector: selectors.BaseSelector, child: Child) -> None:
    """Hear a child; its descriptor leaves the selector before it is closed."""
    answers = child.answers
    selector.unregister(answers)
    child.hear()
    if child.outcome is None:
        selector.register(answers, selectors.EVENT_READ, child)
