# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops notify``: try what a controller would do to tell people of incidents.

The targets are those of ``[controller.notify]``, read as a controller reads them; no controller is asked, and none has
to run.
"""

import time
from typing import TYPE_CHECKING

import click

from megascale_ops.cli.terminal.groups import NamingGroup
from megascale_ops.cli.terminal.options import argument, config_option, json_option, log_options
from megascale_ops.errors import UsageError
from megascale_ops.suggest import unknown

if TYPE_CHECKING:
    from megascale_ops.notify.config import NotifyConfig
    from megascale_ops.notify.message import Message

_NONE = (
    "no target is configured: [controller.notify.targets.NAME] of --config FILE has kind (slack, webhook, email or "
    "command) and how it is reached"
)


@click.group(cls=NamingGroup)
def notify() -> None:
    """Try how people are told of incidents."""


@notify.command()
@argument("target", required=False, metavar="[TARGET]")
@config_option
@json_option
@log_options
def test(target: str | None, config_path: str | None, as_json: bool) -> int:
    """Send a sample card to TARGET, or to every target, and say in one sentence each what became of it.

    One attempt each, within the target's own deadline. The exit code is 1 when one of them did not take it.
    """
    from megascale_ops.cli.config.configuration import load

    config = load("controller", None, config_path)[0].notify
    if not config.targets:
        raise UsageError(_NONE)
    if target is not None and target not in config.targets:
        raise UsageError(unknown("target", target, config.targets))
    names = [target] if target is not None else list(config.targets)
    outcomes = [(name, *_send(config, name)) for name in names]
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        rows = [{"target": name, "took_s": took_s, "error": error} for name, took_s, error in outcomes]
        print_json({"targets": rows})
    else:
        for name, took_s, error in outcomes:
            said = f"not sent: {error}" if error else f"sent in {took_s:.2f} s"
            click.echo(f"{name} ({config.targets[name].kind}): {said}")
    return int(any(error for _, _, error in outcomes))


def _send(config: "NotifyConfig", name: str) -> tuple[float, str]:
    """Return how long the sample took to one target, and what went wrong, "" for nothing."""
    import asyncio

    from megascale_ops.notify.outbox import attempt
    from megascale_ops.notify.ways import Way

    target = config.targets[name]
    began_s = time.monotonic()
    try:
        error = asyncio.run(attempt(Way(target), _sample(config), target.timeout_s))
    except UsageError as refused:  # a file with a secret: the other targets are tried all the same
        return 0.0, str(refused)
    return time.monotonic() - began_s, str(error or "")


def _sample(config: "NotifyConfig") -> "Message":
    """Return a message about nothing that has happened."""
    from megascale_ops.notify.message import compose
    from megascale_ops.schema.events import Incident, Marks
    from megascale_ops.schema.health import Verdict

    now_s = time.time()
    sample = Incident(
        id="sample-1",
        job="sample",
        round=1,
        state="recovered",
        marks=Marks(began=now_s - 20.0, detected=now_s - 19.5, named=now_s - 19.0, stepped=now_s - 5.0),
        verdict=Verdict(
            "killed",
            "this is a test of `megascale-ops notify test`: no rank was killed",
            1.0,
            culprits=(3,),
            nodes=("node-a",),
            round=1,
            action="restart",
        ),
        done="nothing was done, since nothing has happened",
        step_before=1200,
        step_after=1200,
    )
    return compose("test", "error", sample, link=config.page, wall_s=now_s)
