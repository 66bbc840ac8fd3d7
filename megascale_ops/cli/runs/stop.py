# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops stop JOB``: end a job in order, on all its nodes, after a checkpoint where that is asked for.

The controller tells every runner, as it does at the end of any job. A checkpoint is asked for by SIGUSR1, which the
agents send to ranks that have a handler for it; then nothing is stopped until one was seen to be written.
"""

import time
from typing import TYPE_CHECKING

import click

from megascale_ops.cli.terminal.interrupt import ctrl_c_noted
from megascale_ops.cli.terminal.options import FiniteRange, argument, log_options, where_options
from megascale_ops.errors import ControllerUnreachableError, MegascaleError
from megascale_ops.suggest import unknown

if TYPE_CHECKING:
    from collections.abc import Callable

    from megascale_ops.link import BlockingLink
    from megascale_ops.schema.events import JobStatus
    from megascale_ops.schema.messages import CheckpointView

_LOOK_S = 0.5
_FINAL = ("failed", "finished")
# 60 s for a checkpoint of some GB a rank; 90 s for the end: 30 from SIGTERM to SIGKILL, and what is tidied up.
_SAVE_S, _END_S = 60.0, 90.0


@click.command
@argument("name", metavar="JOB")
@click.option("--checkpoint", is_flag=True, help="Ask for one first (SIGUSR1), and stop only when it was written.")
@click.option("--wait", "wait_s", type=FiniteRange(0), default=_SAVE_S, metavar="S", help="For the checkpoint.  [60]")
@where_options
@log_options
def stop(
    name: str,
    controller: str | None,
    job: str | None,
    run_dir: str | None,
    token_file: str | None,
    *,
    checkpoint: bool,
    wait_s: float,
) -> None:
    """End JOB in order: its runners stop their ranks and leave, and its result is "stopped".

    The exit code is 1, and nothing is stopped, where a checkpoint was asked for and none came.
    """
    from megascale_ops.cli.sources.locate import Wanted, find_place, read_token
    from megascale_ops.errors import UsageError
    from megascale_ops.link import BlockingLink

    if job and job != name:
        raise UsageError(f"two jobs are named: {name!r} and --job {job!r}")
    wanted = Wanted(controller or "", "" if controller or run_dir else name, run_dir or "")
    place = find_place(wanted, journal_too=False)
    with ctrl_c_noted() as ctrl_c, BlockingLink(place.url, read_token(token_file, place)) as link:
        known = [one.job for one in link.status().jobs]
        if name not in known:
            raise UsageError(unknown("job", name, known))
        if checkpoint and not _saved(link, name, wait_s, ctrl_c.check):
            click.echo(f"{name} ended by itself after the signal")
            return
        link.stop(name, "stopped by hand: megascale-ops stop")
        click.echo(f"{name} is told to end")
        _see_it_end(link, name, ctrl_c.check)


def _saved(link: "BlockingLink", name: str, wait_s: float, check: "Callable[[], None]") -> bool:
    """Ask for a checkpoint and wait for it; False: the job ended by itself, as scripts do that save and leave.

    Raises:
        MegascaleError: no rank takes the signal, or no checkpoint was seen in time; nothing was stopped.
    """
    asked = link.ask_checkpoint(name)
    click.echo(f"{name} is asked for a checkpoint")
    until_s = time.monotonic() + wait_s
    while True:
        check()
        view, state = link.checkpoint(name), _state(link, name)
        if state is None or state.state in _FINAL:
            return False
        if view.saved_wall_s > asked.asked_wall_s:
            click.echo(f"a checkpoint was written {view.saved_wall_s - asked.asked_wall_s:.1f} s later")
            return True
        if not view.waiting and not view.told:
            raise MegascaleError(
                f"no checkpoint, and nothing was stopped: {_why_none(view)}; without --checkpoint it ends as it is"
            )
        if time.monotonic() >= until_s:
            raise MegascaleError(
                f"no checkpoint was seen within {wait_s:g} s of the signal to {len(view.told)} ranks, and nothing was "
                "stopped: --wait S waits longer, without --checkpoint it ends as it is"
            )
        time.sleep(_LOOK_S)


def _why_none(view: "CheckpointView") -> str:
    """Return why no rank was told."""
    if not view.refused:
        return "no rank is known to run"
    who, why = next(iter(view.refused.items()))
    more = f" (and {len(view.refused) - 1} more)" if len(view.refused) > 1 else ""
    return f"{'rank ' if who.isdigit() else 'node '}{who}{more}: {why}"


def _state(link: "BlockingLink", name: str) -> "JobStatus | None":
    """Return how a job stands; None once its controller is gone, which a run's own is when the run is over."""
    try:
        return next((one for one in link.status(name).jobs if one.job == name), None)
    except ControllerUnreachableError:
        return None


def _see_it_end(link: "BlockingLink", name: str, check: "Callable[[], None]") -> None:
    """Wait until the job is over and no rank of it is heard any more."""
    until_s = time.monotonic() + _END_S
    while time.monotonic() < until_s:
        check()
        status = _state(link, name)
        running = [one.report.rank for one in status.ranks if one.report.process.state] if status is not None else []
        if status is None or (status.state in _FINAL and not running):
            click.echo(f"{name} has ended")
            return
        time.sleep(_LOOK_S)
    click.echo(f"{name} is over, and its ranks have not ended within {_END_S:.0f} s: their runners go on stopping them")
