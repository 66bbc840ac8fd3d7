# SPDX-License-Identifier: Apache-2.0
"""Slurm signals that a job's time is up: ask for a checkpoint, end the job in order, put it back into the queue.

Node 0 of the step does it for all: the signal comes to every node at once, and a thousand calls of scontrol would be
worse than none. It asks the controller, whose agents tell the ranks; the other runners learn the end from the
controller, as they learn any. Their own SIGTERM stops their ranks only if that does not come.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping

from megascale_ops.engines.actuator import EngineError
from megascale_ops.engines.slurm.answers import JobView, Settings, read_job, read_settings
from megascale_ops.engines.slurm.commands import ask
from megascale_ops.engines.slurm.requeue import END_S, Ending, decide
from megascale_ops.errors import MegascaleError
from megascale_ops.link import BlockingLink
from megascale_ops.runner.services.saving import save_now
from megascale_ops.runner.slurm_step import Step

log = logging.getLogger(__name__)

_CLOSE_S = 1.0
# 2 s: srun and slurmd may each send the same SIGTERM; a later one means that there is no time for anything.
_SAME_S = 2.0
_NO_CODES = Settings(30.0, ())


class TimeUp:
    """What one runner does about the end of its Slurm job.

    Args:
        step: The step that it is a task of.
        budget: How often the job may be requeued in all.
        environ: The environment; what Slurm has told in it is believed where scontrol does not answer.

    Attributes:
        signals: Those that it takes from the ranks.
        outcome: How the ranks ended, in the engine's word; set by the runner.
    """

    signals = (signal.SIGUSR1, signal.SIGTERM)

    def __init__(self, step: Step, budget: int, environ: Mapping[str, str]) -> None:
        self._step = step
        self._budget = budget
        self._environ = environ
        # Of the components of a heterogeneous job the first one's number is that of the whole.
        self._job_id = environ.get("SLURM_HET_JOB_ID") or str(step.job)
        self._job = ""
        self._link: BlockingLink | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._given_up = False
        self._term_mono_s = 0.0
        self._ending: Ending | None = None
        self._number = 0
        self._early = 0  # a signal that came before there was a controller to tell
        self._settings = _NO_CODES
        self.outcome = ""

    def watch(self, job: str, link: BlockingLink, _leave: Callable[[str, str], None]) -> None:
        """Begin: from now on there are ranks that could save. ``job``: our name of it; ``link``: to its controller."""
        with self._lock:
            self._job, self._link = job, link
            early = self._early
        if early:
            self.hear(early)

    def takes_sigterm(self) -> bool:
        """Return whether a SIGTERM that came just now is taken care of here; in a handler, so without waiting."""
        now_s = time.monotonic()
        if self._given_up or self._link is None:
            return False
        if self._term_mono_s:
            return now_s - self._term_mono_s < _SAME_S
        self._term_mono_s = now_s
        return True

    def hear(self, number: int) -> None:
        """Begin with what follows a signal, once."""
        with self._lock:
            if self._link is None:
                self._early = number
                log.warning(
                    "%s came before any rank ran: it is seen to as soon as they may", signal.Signals(number).name
                )
                return
            if self._thread is not None or self._done.is_set():
                return
            work = self._leave if self._step.node == 0 else self._wait
            self._number = number
            self._thread = threading.Thread(target=work, args=(number,), name="time-up", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait for nothing any more: the ranks have ended."""
        self._done.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _wait(self, number: int) -> None:
        """On another node than the first: see the end come from the controller, or stop the ranks by ourselves."""
        if number == signal.SIGTERM and not self._done.wait(END_S):
            log.warning("no word from the controller within %g s of SIGTERM: the ranks here are stopped", END_S)
            self._give_up()

    def _give_up(self) -> None:
        """Let the SIGTERM do what it would have done."""
        self._given_up = True
        os.kill(os.getpid(), signal.SIGTERM)

    def _leave(self, number: int) -> None:
        name = signal.Signals(number).name
        ending = decide(name, self._job_view(), self._settings, self._budget, time.time())
        if ending.kind == "cancelled":
            self._give_up()
            return
        log.warning("%s from Slurm to job %s: %s", name, self._job_id, ending.said)
        self._ending = ending
        link = self._link
        if link is None:  # `hear` has looked
            return
        try:
            save_now(link, self._job, ending.save_s, self._done)
        except MegascaleError as error:
            log.warning("no checkpoint was asked for: %s", error)
        if self._done.is_set():
            return
        try:
            link.stop(self._job, f"{name} from Slurm: {ending.said}")
        except MegascaleError as error:
            log.warning("the controller does not end the job, so its ranks get SIGTERM: %s", error)
            self._give_up()

    def _job_view(self) -> JobView:
        """Return Slurm's record of the job; what its environment tells where Slurm does not answer."""
        try:
            self._settings = read_settings(ask("scontrol", "show", "config"))
            return read_job(ask("scontrol", "--oneliner", "show", "job", str(self._step.job)))
        except EngineError as error:
            log.warning("Slurm does not tell of job %s (%s); its environment must do", self._job_id, error)
            restarts, ends = (self._environ.get(f"SLURM_{name}", "") for name in ("RESTART_COUNT", "JOB_END_TIME"))
            is_limit = ends.isdigit() and int(ends) - time.time() < END_S
            return JobView(
                "RUNNING",
                "TimeLimit" if is_limit else "",
                may_requeue=True,
                restarts=int(restarts) if restarts.isdigit() else 0,
                ends_wall_s=float(ends) if ends.isdigit() else 0.0,
                preempted_wall_s=0.0,
            )

    def end(self, code: int) -> int:
        """Requeue the job where that was decided, the last thing of all; return the exit code.

        Args:
            code: What the run would end with.
        """
        ending = self._ending
        if ending is None:
            return code
        if self.outcome == "succeeded":
            log.info("the script has ended well by itself: job %s is not requeued", self._job_id)
            return code
        if ending.requeue:
            try:
                ask("scontrol", "requeue", self._job_id)
            except EngineError as error:
                if self._settings.requeue_codes:
                    log.warning("%s; the exit code is one after which this Slurm requeues (RequeueExit)", error)
                    return self._settings.requeue_codes[0]
                log.error("job %s is not requeued: %s", self._job_id, error)  # noqa: TRY400  the sentence is complete
            else:
                log.warning("Slurm job %s is requeued", self._job_id)
        return code or 128 + self._number
