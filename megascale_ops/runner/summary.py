# SPDX-License-Identifier: Apache-2.0
"""The last lines of a run: how far it came, what it cost, and where to read on."""

import logging

from megascale_ops.errors import MegascaleError
from megascale_ops.link import BlockingLink
from megascale_ops.schema.events import JobStatus
from megascale_ops.schema.wording import duration, percent, printable, state_words

log = logging.getLogger(__name__)

# 2 s: a run's own controller answers in milliseconds; one that is away must not keep a run from ending.
_ANSWER_S = 2.0


def say_summary(
    url: str, token: str | None, job: str, wall_s: float, run_dir: str, where: str, failure: str = ""
) -> None:
    """Log one line about a run that has ended, with what its controller knows last; without it where it is away.

    Of a failure it is an error, and tells it once: in the controller's words, which the runner has from there.

    Args:
        url: the controller.
        token: what it asks for.
        job: the run's job.
        wall_s: how long the run took, seconds.
        run_dir: its run folder.
        where: the options by which verbs find it.
        failure: why the job has failed, as this node's runner was told; "" where it has not.
    """
    known: JobStatus | None = None
    try:
        with BlockingLink(url, token, timeout_s=_ANSWER_S) as link:
            known = next((one for one in link.status(job, brief=True).jobs if one.job == job), None)
    except MegascaleError as error:
        log.debug("the controller tells nothing of the end: %s", error)
    log.log(logging.ERROR if failure else logging.INFO, "%s", summary(known, job, wall_s, run_dir, where, failure))


def summary(known: JobStatus | None, job: str, wall_s: float, run_dir: str, where: str, failure: str = "") -> str:
    """Return the sentence."""
    facts = [duration(wall_s)]
    how, more = f"failed: {printable(failure)}" if failure else "ended", ""
    if known is not None:
        if known.state == "failed":
            how = f"failed: {printable(known.reason) or state_words(known.state)}"
        elif not failure:  # else the job goes on without this node, whose runner knows why
            how = printable(known.reason) or state_words(known.state)
        anew = "" if known.is_numbered or not known.restarts else " (counted from 0 in each round)"
        facts = [f"step {known.step:,}{anew}" if known.step >= 0 else "no step", *facts]
        facts += [f"{percent(known.goodput)} of it training"] if known.goodput >= 0 else []
        facts += [_counted(known.restarts, "restart"), _counted(known.incidents, "incident")]
        more = f"`megascale-ops why {where}` explains the last incident, " if known.incidents else ""
    read_on = f"{more}`megascale-ops report {where}` shows where the time went"
    return f"job {job}: {how}; {', '.join(facts)}; run folder {run_dir}; {read_on}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number or 'no'} {what}s"
