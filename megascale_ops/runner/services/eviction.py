# SPDX-License-Identifier: Apache-2.0
"""The engine takes this node away (SIGTERM to a pod): ask for a checkpoint, tell the controller, end the ranks here.

Kubernetes ends a pod in the same way whatever the reason: the eviction API, a taint that ends pods, a job of a higher
priority, Kueue's suspension of the job. SIGKILL comes terminationGracePeriodSeconds later. The job itself goes on, with
the nodes that are left or with the pod that takes this one's place. So the controller is told before the first rank
here is stopped: what the others then lose is no failure of theirs.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable

from megascale_ops.errors import MegascaleError
from megascale_ops.link import BlockingLink
from megascale_ops.runner.services.saving import save_now

log = logging.getLogger(__name__)

# 15 s of the time that is left, as at Slurm's limit: ranks get up to 5 s for their own end where they can't use more,
# tidying takes 3 s.
END_S = 15.0
# 2 s: a shell in between may hand the same SIGTERM on; a later one means that there is no time for anything.
_SAME_S = 2.0
_CLOSE_S = 1.0


class Eviction:
    """What a runner does about a SIGTERM of the engine that owns its node.

    Args:
        grace_s: From SIGTERM to SIGKILL.

    Attributes:
        signals: Those that it takes from the ranks.
        outcome: How the ranks ended, in the engine's word; set by the runner.
    """

    signals = (signal.SIGTERM,)

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._job = ""
        self._link: BlockingLink | None = None
        self._leave: Callable[[str, str], None] = lambda _outcome, _reason: None
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._given_up = False
        self._term_mono_s = 0.0
        self.outcome = ""

    def watch(self, job: str, link: BlockingLink, leave: Callable[[str, str], None]) -> None:
        """Begin: from now on there are ranks that could save.

        Args:
            job: Our name of it.
            link: To its controller.
            leave: Tells the controller that this runner leaves: the outcome's word, and why.
        """
        self._job, self._link, self._leave = job, link, leave

    def takes_sigterm(self) -> bool:
        """Return whether a SIGTERM that came just now is taken care of here; in a handler, so without waiting."""
        now_s = time.monotonic()
        if self._given_up or self._link is None:
            return False
        if self._term_mono_s:
            return now_s - self._term_mono_s < _SAME_S
        self._term_mono_s = now_s
        return True

    def hear(self, _number: int) -> None:
        """Begin with what follows a SIGTERM, once."""
        if self._link is None or self._thread is not None or self._done.is_set():
            return
        self._thread = threading.Thread(target=self._go, args=(self._link,), name="eviction", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for nothing any more: the ranks have ended."""
        self._done.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def end(self, code: int) -> int:
        """Return the exit code: 143 of a run that was evicted, which is what the runner ends with by itself."""
        return code

    def _go(self, link: BlockingLink) -> None:
        log.warning(
            "SIGTERM: this node is taken away in %g s; a checkpoint, and the job goes on without it", self._grace_s
        )
        try:
            save_now(link, self._job, max(0.0, self._grace_s - END_S), self._done)
        except MegascaleError as error:
            log.warning("no checkpoint was asked for: %s", error)
        if self._done.is_set():
            return
        self._leave("evicted", f"its engine has sent SIGTERM and takes it away within {self._grace_s:g} s")
        self._given_up = True
        os.kill(os.getpid(), signal.SIGTERM)
