# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops trace JOB``: what all ranks did in their last steps, as a file for Perfetto."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from megascale_ops.cli.sources.boxes import find_meant, open_meant, read_ask
from megascale_ops.cli.terminal.interrupt import ctrl_c_noted
from megascale_ops.cli.terminal.options import FiniteRange, json_option, log_options
from megascale_ops.errors import UsageError

if TYPE_CHECKING:
    from megascale_ops.trace.gather import Boxes
    from megascale_ops.trace.picture import Picture
    from megascale_ops.trace.writing import Written

VIEWERS = {
    "perfetto": "open it at https://ui.perfetto.dev (the file stays on your machine)",
    "chrome": "open it at chrome://tracing or https://ui.perfetto.dev",
}


_FORMATS = "perfetto (default), or chrome: JSON, which needs no extra and opens without a network."


@click.command("trace")
@click.argument("job", required=False)
@click.option("--incident", metavar="ID", help="Read the black boxes that were kept of this incident.")
@click.option("--boxes", type=click.Path(), metavar="DIR", help="Read the black boxes below this folder.")
@click.option("--last", type=click.IntRange(1), default=20, show_default=True, help="So many steps, the newest.")
@click.option(
    "--ranks", default="auto", show_default=True, metavar="auto|all|0,3-5", help="auto: culprit, its peers, a control."
)
@click.option("--format", "format_name", type=click.Choice(["perfetto", "chrome"]), default="perfetto", help=_FORMATS)
@click.option("-o", "--output", type=click.Path(), metavar="FILE", help="Default: JOB (or ID) in this folder.")
@click.option(
    "--limit-mb", type=FiniteRange(0, min_open=True), default=500.0, show_default=True, help="Most MB to write."
)
@click.option("--box-root", type=click.Path(), envvar="MEGASCALE_BOX_ROOT", help="Where ranks keep their black boxes.")
@click.option("--run-dir", type=click.Path(), help="Folder of a run started with `run --run-dir`.")
@click.option("--controller", metavar="URL", help="Address of the controller; default: the job's own.")
@click.option("--token-file", type=click.Path(), help="File that holds the controller's token.")
@json_option
@log_options
def trace(
    job: str | None,
    incident: str | None,
    boxes: str | None,
    last: int,
    ranks: str,
    format_name: str,
    output: str | None,
    limit_mb: float,
    box_root: str | None,
    run_dir: str | None,
    controller: str | None,
    token_file: str | None,
    as_json: bool,
) -> int:
    """Write what the ranks of JOB did in their last steps into a trace: steps, collectives, who waited for whom.

    Reads the black boxes of the ranks that run on this machine; with --incident those that were kept of it; with
    --boxes those below a folder, of any machine. What can't be read is named, the rest is drawn; exits with 1 then.
    """
    from importlib import import_module

    from megascale_ops.trace.picture import compose
    from megascale_ops.trace.writing import FORMATS, write

    if format_name == "perfetto":
        import_module("perfetto")  # what is missing is reported before anything is read

    ask = read_ask(
        job=job,
        incident=incident,
        boxes=boxes,
        box_root=box_root,
        run_dir=run_dir,
        controller=controller,
        token_file=token_file,
    )
    found = find_meant(ask) if ask.incident else None
    opened = open_meant(ask, found)
    picture = compose(opened, ranks, last, found)
    path = _target(output, f"{ask.incident or picture.job or 'trace'}{FORMATS[format_name].suffix}")
    chosen = [one.rank for one in picture.chosen]
    with ctrl_c_noted() as ctrl_c:  # half a file would stay behind
        written = write(path, format_name, picture.draw, chosen, last, round(limit_mb * 1e6), ctrl_c.check)
    if as_json:
        _print_json(picture, written, opened)
    else:
        click.echo("\n".join(_sentences(picture, written, opened.notes)))
    for sentence in opened.unreadable:
        click.echo(f"not read: {sentence}", err=True)
    return int(bool(opened.unreadable))


def _target(output: str | None, name: str) -> Path:
    """Return the file to write.

    Raises:
        UsageError: it is a folder, or its folder is not there.
    """
    path = Path(output) if output else Path(name)
    if path.is_dir():
        raise UsageError(f"{path} is a folder: -o takes a file, such as {path / name}")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} to write {path.name} into")
    return path


def _sentences(picture: "Picture", written: "Written", notes: list[str]) -> list[str]:
    from megascale_ops.trace.choosing import sentence

    if written.first_step < 0:
        steps = "no finished step"
    elif written.first_step == written.last_step:
        steps = f"step {written.first_step}"
    else:
        steps = f"steps {written.first_step} to {written.last_step}"
    ranks = f"{len(written.ranks)} of {picture.seen} rank{'s' if picture.seen != 1 else ''}"
    chosen = [one for one in picture.chosen if one.rank in written.ranks]
    contents = f"{written.slices:,} slices, {written.arrows:,} arrows, {written.size_bytes / 1e6:,.2f} MB"
    return [
        f"{written.path}: {ranks}, {steps}, {contents}",
        f"ranks: {sentence(chosen)}",
        *(f"clocks: {line}" for line in picture.clocks.sentences()),
        *(f"left out: {line}" for line in written.left_out),
        *(f"note: {line}" for line in notes),
        VIEWERS[written.format],
    ]


def _print_json(picture: "Picture", written: "Written", opened: "Boxes") -> None:
    from megascale_ops.cli.terminal.output import print_json

    print_json(
        {
            "written": written,
            "job": picture.job,
            "incident": picture.incident.id if picture.incident else "",
            "chosen": picture.chosen,
            "clocks": picture.clocks,
            "notes": opened.notes,
            "unreadable": opened.unreadable,
        }
    )
