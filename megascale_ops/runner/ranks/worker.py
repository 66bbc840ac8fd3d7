# SPDX-License-Identifier: Apache-2.0
"""One rank of the current round, and how it is stopped: asked first, given time, killed for certain.

A rank without a SIGTERM handler of its own dies of the signal at once. One with a handler is given ``grace_s`` to save
what it has. Two kinds can't use that time. A frozen one (state T) hears nothing but SIGKILL, and gets it at once. One
that is blocked in native code (a collective whose peer is gone) has taken note of the signal, but Python runs handlers
between two of its own instructions only, and there is none until that call returns. Such a rank is recognised by its
main thread, which stands after ``stuck_s`` in the very system call, with the very stack pointer, where the signal found
it; while a handler runs the stack is another one. Where the round is only restarted it is killed then. Where the run is
ended from outside it keeps its grace: its peers leave, too, and may set it free.
"""

import logging
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from megascale_ops.runner.processes import RankPopen, handles, signal_group, start_ticks

log = logging.getLogger(__name__)

# 5 s: long enough for every call that a signal interrupts to return; as long as a restart has ever waited for a rank.
STUCK_S = 5.0
# 20 ms: the pace at which the engine looks at ranks; a death is seen as early as without a stop.
_LOOK_S = 0.02


class Worker:
    """One rank of the current round: what torch's engine knows as a ``SubprocessHandler``.

    Attributes:
        proc: The process.
        local_rank_id: Local rank, under the name torch's engine reads.
        rank: Global rank.
        stopped_by_us: A signal of ours reached it while it was still alive.
    """

    def __init__(  # what a rank is, and what its stop may take
        self,
        proc: RankPopen,
        local_rank: int,
        rank: int,
        paths: tuple[str, str],
        grace_s: float,
        *,
        is_ending: Callable[[], bool] = lambda: False,
        stuck_s: float = STUCK_S,
    ) -> None:
        self.proc = proc
        self.local_rank_id = local_rank
        self.rank = rank
        self.stdout_path, self.stderr_path = paths
        self.stopped_by_us = False
        self.ticks = start_ticks(proc.pid)
        self._grace_s = grace_s
        self._stuck_s = stuck_s
        self._is_ending = is_ending
        self._asked = signal.SIGTERM
        self._deadline_s = 0.0  # of the stop under way
        self._is_hurried = False
        self._to_tell = threading.Lock()  # taken by the thread that kills the rank

    def hurry(self) -> None:
        """Grant no more time, now or in the stop that follows; may be called by a signal's handler."""
        self._is_hurried = True

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Stop the rank: ``death_sig`` (default SIGTERM) now, SIGKILL when the grace has passed or it is frozen.

        Torch's engine asks for a SIGKILL after 30 s of its own; a longer grace is waited for first.
        """
        chosen = death_sig or signal.SIGTERM
        if chosen == signal.SIGKILL and self._deadline_s:
            with suppress(subprocess.TimeoutExpired):
                self.proc.wait(max(0.0, self._deadline_s - time.monotonic()))
            self._give_up()
        if self.proc.poll() is None:
            self.stopped_by_us = True
        if self._is_hurried:
            self._give_up()
            return
        if chosen == signal.SIGKILL or self.proc.is_stopped():
            signal_group(self.proc.pid, signal.SIGKILL)
            return
        place, asked_s, is_first = self.proc.place(), time.monotonic(), not self._deadline_s
        self._deadline_s = self._deadline_s or asked_s + self._grace_s
        self._asked = chosen
        signal_group(self.proc.pid, chosen)
        if is_first and self.proc.poll() is None:
            watch = threading.Thread(target=self._watch, args=(place, asked_s), name="stop", daemon=True)
            watch.start()

    def _watch(self, place: tuple[str, ...] | None, asked_s: float) -> None:
        """Look until the rank is gone; kill it, with a log line, when it can't end by itself."""
        looked_for_stuck = False
        while self.proc.poll() is None:
            now_s = time.monotonic()
            if self._is_hurried or now_s >= self._deadline_s:
                self._give_up()
                return
            if self.proc.is_stopped():
                self._kill(f"was frozen (state T) after {self._asked.name}")
                return
            if not looked_for_stuck and now_s - asked_s >= self._stuck_s and not self._is_ending():
                looked_for_stuck = True
                if place is not None and self.proc.place() == place and handles(self.proc.pid, self._asked):
                    self._kill(
                        f"had not moved in its system call for {self._stuck_s:g} s since {self._asked.name}, so that no"
                        " handler of its own could run"
                    )
                    return
            time.sleep(_LOOK_S)

    def _give_up(self) -> None:
        if self._is_hurried:
            self._kill(f"had not ended after {self._asked.name} when a second signal came")
        else:
            self._kill(f"had not ended {self._grace_s:g} s after {self._asked.name} (--stop-grace sets this time)")

    def _kill(self, why: str) -> None:
        """Kill the rank and log the reason; of two reasons at once, the first."""
        if self.proc.poll() is None and self._to_tell.acquire(blocking=False):
            log.warning("rank %d (process %d) %s, and was killed", self.rank, self.proc.pid, why)
            signal_group(self.proc.pid, signal.SIGKILL)
