# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops bad-hardware``: the GPUs that failed, as the controller remembers them; ``forget`` when mended."""

from collections.abc import Iterable, Mapping
from typing import ClassVar

import click

from megascale_ops.cli.sources.locate import Wanted
from megascale_ops.cli.terminal.groups import NamingGroup
from megascale_ops.cli.terminal.options import argument, json_option, log_options, where_options
from megascale_ops.schema.health import BadHardware


class _Words(NamingGroup):
    """The two words behind ``bad-hardware``."""

    what = "word behind bad-hardware"
    old_names: ClassVar[Mapping[str, str]] = {"clear": "forget"}


@click.group("bad-hardware", cls=_Words)
def bad_hardware() -> None:
    """Show the GPUs that failed before, and forget one that was mended.

    A GPU is remembered by its UUID, across restarts of the job, of its node and of the controller.
    """


@bad_hardware.command("list")
@where_options
@json_option
@log_options
def show(controller: str | None, job: str | None, run_dir: str | None, token_file: str | None, as_json: bool) -> None:
    """List the GPUs that are remembered as bad, newest last.

    Asks the running controller; when the run is over, reads the journal it left.
    """
    from megascale_ops.cli.sources.history import open_place
    from megascale_ops.cli.sources.locate import find_place, reader_of

    wanted = Wanted(controller or "", job or "", run_dir or "")
    place = find_place(wanted, journal_too=True)
    with open_place(place, token_file) as history:
        found = history.hardware()
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(found)
        return
    if not found.entries:
        click.echo("no GPU is remembered as bad")
        return
    click.echo("\n".join(lines_of(found.entries)))
    if place.journal is None:
        forget_it = reader_of(wanted, token_file, place).command("bad-hardware forget UUID")
        click.echo(f"\n`{forget_it}` forgets one that was mended or replaced")


@bad_hardware.command
@argument("uuid")
@where_options
@log_options
def forget(uuid: str, controller: str | None, job: str | None, run_dir: str | None, token_file: str | None) -> None:
    """Forget the GPU with this UUID, because it was mended or replaced; what happens from now on counts anew."""
    from megascale_ops.cli.sources.locate import find_place, read_token
    from megascale_ops.errors import RefusedError, UsageError
    from megascale_ops.link import BlockingLink
    from megascale_ops.suggest import unknown

    place = find_place(Wanted(controller or "", job or "", run_dir or ""), journal_too=False)
    with BlockingLink(place.url, read_token(token_file, place)) as link:
        known = sorted({one.uuid for one in link.hardware().entries})
        if uuid not in known:
            if not known:
                raise UsageError("no GPU is remembered as bad: there is nothing to forget")
            raise UsageError(unknown("GPU", uuid, known))
        try:
            link.mend_hardware(uuid)
        except RefusedError as error:
            raise UsageError(str(error)) from error
    click.echo(f"{uuid} is forgotten")


def lines_of(entries: Iterable[BadHardware]) -> list[str]:
    """Return the entries as people read them: one headline for each GPU, one line for each of its reasons."""
    from megascale_ops.schema.wording import clock, printable

    by_gpu: dict[str, list[BadHardware]] = {}
    for one in entries:
        by_gpu.setdefault(one.uuid, []).append(one)
    lines = []
    for uuid, reasons in by_gpu.items():
        serial = next((one.serial for one in reversed(reasons) if one.serial), "")
        known_as = f"{uuid}, serial number {printable(serial)}," if serial else uuid
        lines.append(f"{known_as} on {printable(reasons[-1].node)}")
        for one in reasons:
            times = "once" if one.count == 1 else f"{one.count} times since {clock(one.since_wall_s)}"
            lines.append(f"    {clock(one.last_wall_s)}  {printable(one.text)} ({one.reason}, {times})")
    return lines
