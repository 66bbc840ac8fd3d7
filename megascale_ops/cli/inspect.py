# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops inspect PATH...``: read the black boxes of dead processes and print what each rank last did."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from megascale_ops.cli.terminal.options import argument, json_option, log_options
from megascale_ops.errors import MegascaleError, UsageError

if TYPE_CHECKING:
    from megascale_ops.blackbox.last_moments import LastMoments


@click.command("inspect")
# readable=False: click would refuse all paths for the one that may not be read.
@argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, readable=False), metavar="PATH...")
@json_option
@log_options
def inspect(paths: tuple[Path, ...], *, as_json: bool) -> int:
    """Say what each rank last did, from its black box: PATH is a box, or a folder with boxes (of an incident, say).

    Needs no controller and no living process. What cannot be read is named, the rest is shown, also of a box that was
    cut short; exits with 1 then.
    """
    from megascale_ops.blackbox import last_moments
    from megascale_ops.blackbox.inquest import sentences, summary

    try:
        boxes = last_moments.find(paths)
    except FileNotFoundError as error:
        raise UsageError(f"there is nothing at {error.args[0]}: give a black box or a folder with some") from None
    if not boxes:
        raise UsageError(f"there is no black box (*.box) in {', '.join(map(str, paths))}")
    read, unreadable = _read_all(boxes)
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(tuple(read))
    else:
        for moments in read:
            click.echo("\n".join(sentences(moments)))
        if len(read) > 1:
            click.echo("\n".join(summary(read)))
    for sentence in unreadable:
        click.echo(f"not read: {sentence}", err=True)
    return int(bool(unreadable))


def _read_all(boxes: list[Path]) -> "tuple[list[LastMoments], list[str]]":
    """Read all boxes; the sentences name those that could not be read, and why."""
    from megascale_ops.blackbox import last_moments

    read, unreadable = [], []
    for box in boxes:
        try:
            read.append(moments := last_moments.read(box))
            if moments.torn:
                unreadable.append(f"{moments.torn}; what it still holds is shown")
        except MegascaleError as error:
            unreadable.append(str(error))
    return read, unreadable
