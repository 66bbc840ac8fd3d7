# SPDX-License-Identifier: Apache-2.0
"""Ask for a checkpoint before an engine ends the ranks, and wait for one as long as time permits."""

import logging
import threading
import time

from megascale_ops.link import BlockingLink

log = logging.getLogger(__name__)

_LOOK_S = 0.5


def save_now(link: BlockingLink, job: str, patience_s: float, done: threading.Event) -> None:
    """Ask for a checkpoint; wait until one is there, the script's own included, but no longer than that.

    Args:
        link: To the job's controller, whose agents tell the ranks.
        job: Our name of it.
        patience_s: How long a checkpoint is waited for.
        done: Set when the ranks have ended, which ends the wait.

    Raises:
        MegascaleError: the controller did not take the request.
    """
    asked = link.ask_checkpoint(job)
    until_s = time.monotonic() + patience_s
    told = False
    while not done.wait(min(_LOOK_S, max(0.0, until_s - time.monotonic()))):
        view = link.checkpoint(job)
        if view.saved_wall_s > asked.asked_wall_s:
            log.info("a checkpoint was written %.1f s after it was asked for", view.saved_wall_s - view.asked_wall_s)
            return
        if not told and not view.waiting and not view.told:
            told = True
            why = next(iter(view.refused.values()), "no rank is known to run")
            log.warning("no rank takes SIGUSR1 (%s): the script's own next checkpoint is waited for", why)
        if time.monotonic() >= until_s:
            log.warning("no checkpoint was seen within %.0f s: the newest one is from before the signal", patience_s)
            return
