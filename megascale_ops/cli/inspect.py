# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops inspect PATH...``: say what ranks last did, and who is to blame, by what they left in files."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from megascale_ops.cli.terminal.options import argument, json_option, log_options
from megascale_ops.errors import MegascaleError, UsageError

if TYPE_CHECKING:
    from megascale_ops.blackbox.last_moments import LastMoments
    from megascale_ops.postmortem.examine import Examined


@click.command("inspect")
# readable=False: click would refuse all paths for the one that may not be read.
@argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, readable=False), metavar="PATH...")
@json_option
@log_options
def inspect(paths: tuple[Path, ...], *, as_json: bool) -> int:
    """Say what ranks last did, and who is to blame, by what they left: PATH is a file, or a folder with files.

    Black boxes (of an incident, say) tell what each rank last did. Of a job that ran without any of this, logs, stacks
    (py-spy, faulthandler, gdb, pystack) and dumps of torch's flight recorder are judged, in any mixture: a file for
    each rank, with its rank in its name or before its lines.

    Needs no controller and no living process. What cannot be read is named, the rest is shown, also of a box that was
    cut short; exits with 1 then.
    """
    from megascale_ops.blackbox import last_moments

    boxes, others = _apart(paths)
    if not boxes and others:
        from megascale_ops.postmortem.examine import examine

        return _show(examine(others), as_json=as_json)
    try:
        found = last_moments.find(tuple(boxes) or paths)
    except FileNotFoundError as error:
        raise UsageError(
            f"there is nothing at {error.args[0]}: give black boxes, logs, stacks or dumps, or a folder with some"
        ) from None
    read, unreadable = _read_all(found)
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(tuple(read))
    else:
        _tell(read)
    for sentence in unreadable:
        click.echo(f"not read: {sentence}", err=True)
    return int(bool(unreadable))


def _apart(paths: tuple[Path, ...]) -> tuple[list[Path], list[Path]]:
    """Return the paths in which there are black boxes, or that are taken for them, and all others."""
    from megascale_ops.blackbox import last_moments

    boxes: list[Path] = []
    others: list[Path] = []
    for path in paths:
        try:
            known = last_moments.find((path,)) if path.is_dir() else []
            is_box = bool(known) if path.is_dir() else path.name.endswith((".box", ".box.old")) or not path.is_file()
        except OSError:
            is_box = True  # the reader of boxes says why it can't be read
        (boxes if is_box else others).append(path)
    return boxes, others


def _tell(read: "list[LastMoments]") -> None:
    from megascale_ops.blackbox.inquest import sentences, summary

    for moments in read:
        click.echo("\n".join(sentences(moments)))
    if len(read) > 1:
        click.echo("\n".join(summary(read)))


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


def _show(examined: "Examined", *, as_json: bool) -> int:
    """Print what was found in files of others."""
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(examined)
    else:
        from megascale_ops.postmortem.words import lines_of

        click.echo("\n".join(lines_of(examined)))
    for note in examined.notes:
        click.echo(f"note: {note}", err=True)
    return 0
