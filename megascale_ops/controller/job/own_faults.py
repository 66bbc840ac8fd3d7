# SPDX-License-Identifier: Apache-2.0
"""A fault of ours in judging one job: journaled, that job goes unjudged for a while, the others are not affected.

One controller watches many jobs. What it reckons with comes from their processes, and whatever escapes all checks must
cost one job its judge for some seconds, not all jobs their controller. So every place where one job is looked at stands
inside :meth:`OwnFaults.contain`. Training goes on meanwhile, and what is journaled is given out as ever. Pure but for
the log: the time is an argument.
"""

import logging
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

log = logging.getLogger(__name__)

# 5 s: what could not be reckoned with is followed by another heartbeat; a fault that stays is met 12 times an hour.
FIRST_PAUSE_S, MOST_PAUSE_S = 5.0, 300.0
# 10 min without a fault: the next one is a new one.
FORGIVEN_S = 600.0


class _Pause(NamedTuple):
    until_s: float
    length_s: float
    text: str


class OwnFaults:
    """Which jobs are not judged now, and why.

    Args:
        clock: monotonic seconds.
        tell: journals one sentence about a job; what it raises is logged.
    """

    def __init__(self, clock: Callable[[], float], tell: Callable[[str, str], None]) -> None:
        self._clock = clock
        self._tell = tell
        self._pauses: dict[tuple[str, str], _Pause] = {}  # by job ("": what belongs to none), and what is only shown
        self.total: Counter[str] = Counter()  # by job

    def is_paused(self, job: str) -> bool:
        """Return whether a job is not to be judged now."""
        pause = self._pauses.get((job, ""))  # nearly always None: tested with every heartbeat
        return pause is not None and self._clock() < pause.until_s

    def contain(self, job: str, doing: str, *, is_shown: bool = False) -> "_Contained":
        """Let what is done for one job fail alone.

        Args:
            job: whose it is.
            doing: ends the sentence "a fault of ours while".
            is_shown: it is only shown to people and programs: the job goes on being judged.
        """
        return _Contained(self, job, doing, is_shown=is_shown)

    def note(self, job: str, doing: str, error: Exception, *, is_shown: bool = False) -> None:
        """Take note of a fault; one in judging a job pauses its judgement, each time twice as long."""
        now_s = self._clock()
        self.total[job] += 1
        key = (job, doing if is_shown else "")
        before = self._pauses.get(key)
        if is_shown and before is not None and now_s < before.until_s:
            return  # reported a moment ago: pages poll every second
        is_again = before is not None and now_s - before.until_s < FORGIVEN_S
        length_s = min(MOST_PAUSE_S, 2 * before.length_s) if before is not None and is_again else FIRST_PAUSE_S
        whose = f"job {job} goes unjudged for {length_s:.0f} s, the others do not"
        if is_shown or not job:
            whose = f"of job {job} it is not shown" if is_shown else "it is tried again"
        text = f"a fault of ours while {doing} ({type(error).__name__}: {error}): {whose}"
        self._pauses[key] = _Pause(now_s + length_s, length_s, text)
        log.error("%s", text, exc_info=error, extra={"job": job})
        if job:
            try:
                self._tell(job, text)
            except Exception:  # the journal's record of this job may be what fails
                log.exception("the fault of job %s can't be journaled", job)

    def now(self) -> tuple[str, ...]:
        """Return what is wrong now, a sentence each; the oldest first."""
        now_s = self._clock()
        return tuple(pause.text for pause in self._pauses.values() if now_s < pause.until_s)

    @property
    def unjudged(self) -> int:
        """How many jobs are not judged now."""
        return sum(self.is_paused(job) for job, shown in self._pauses if job and not shown)

    def forget(self, known: Callable[[str], bool]) -> None:
        """Let go of jobs that are not there any more."""
        for key in [key for key in self._pauses if key[0] and not known(key[0])]:
            del self._pauses[key]


class _Contained:
    """A block whose exceptions end here; what cancels or ends the program goes on."""

    __slots__ = ("_doing", "_faults", "_is_shown", "_job")

    def __init__(self, faults: OwnFaults, job: str, doing: str, *, is_shown: bool) -> None:
        self._faults = faults
        self._job = job
        self._doing = doing
        self._is_shown = is_shown

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._faults.note(self._job, self._doing, error, is_shown=self._is_shown)
        return True
