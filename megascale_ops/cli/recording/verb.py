# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops recording``: export what led to an incident, look at it, send it, replay it.

A controller records what it takes in beside its journal, and a recording is exported from there while it runs and when
it is gone. Without its disk the blocks are asked of the controller; all else is done here either way.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from megascale_ops.cli.terminal.completion import offers
from megascale_ops.cli.terminal.groups import NamingGroup
from megascale_ops.cli.terminal.options import FiniteRange, argument, json_option, log_options, where_options

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from megascale_ops.replay.drive import Replayed
    from megascale_ops.replay.export import Contents, Exported
    from megascale_ops.replay.files import Recording
    from megascale_ops.replay.verdicts import Judged

# 120 s: starts, or two dozen steps of a large model, before what went wrong; a straggler's beginning lies further back.
_BEFORE_S = 120.0
# 256 MB: four times what a controller keeps by default.
_MOST_FETCHED_BYTES = 256 * 1024 * 1024
# 15 s: evidence that came late, and the orders that followed.
_AFTER_S = 15.0


@click.group(cls=NamingGroup)
def recording() -> None:
    """Export what a controller took in around an incident, make it anonymous, and replay it."""


@recording.command
@argument("named", required=False, metavar="[INCIDENT|JOB]", shell_complete=offers("incident"))
@click.option("-o", "--out", type=click.Path(), metavar="FILE", help="The file to write.  [INCIDENT.recording]")
@click.option("--from", "folder", type=click.Path(), metavar="DIR", help="A controller's folder with its recordings.")
@where_options
@click.option("--before", type=FiniteRange(0), default=_BEFORE_S, show_default=True, metavar="SECONDS",
              help="From so long before an incident began.")  # fmt: skip
@click.option("--after", type=FiniteRange(0), default=_AFTER_S, show_default=True, metavar="SECONDS",
              help="Until so long after it last changed.")  # fmt: skip
@click.option("--as-it-is", is_flag=True, help="Keep names, paths, addresses and texts.")
@click.option("--whole", is_flag=True, help="Keep also what changes no verdict.")
@json_option
@log_options
def export(
    named: str | None,
    out: str | None,
    folder: str | None,
    controller: str | None,
    token_file: str | None,
    run_dir: str | None,
    job: str | None,
    before: float,
    after: float,
    *,
    as_it_is: bool,
    whole: bool,
    as_json: bool,
) -> None:
    """Write what led to INCIDENT into one file that can be sent; of a JOB all that is kept; by default of the newest.

    Names, paths, addresses and texts are replaced, and what changes no verdict is left out; what stays is listed. The
    recordings are those beside the newest run's journal, in the folder that is given, or of the controller that is.
    """
    from megascale_ops.replay.export import contents
    from megascale_ops.replay.export import export as make
    from megascale_ops.replay.files import write_recording

    _require_numpy()
    url = controller or ("" if folder or run_dir else os.environ.get("MEGASCALE_CONTROLLER", ""))
    if url and (folder or run_dir):
        raise click.UsageError("--controller asks a controller, --from and --run-dir read a folder: give one of them")
    files = _fetched(url, token_file) if url else _kept(_folder(folder, run_dir, job, named))
    name, cut = _cut(named, job, files, before, after)
    place = Path(out or ".")
    if place.is_dir():
        from megascale_ops.schema.recording.entries import SUFFIX

        # The job's name is the user's too: an anonymous file is not called by it.
        place /= f"{name if as_it_is else 'incident'}{SUFFIX}"
    _require_folder(place)
    made = make(cut, is_anonymous=not as_it_is, is_thinned=not whole, tell=_tell)
    size_bytes = write_recording(place, made.recording)
    (_print_export if as_json else _say_export)(made, contents(made.recording), place, size_bytes)


@recording.command
@argument("file", type=click.Path())
@click.option("--texts", is_flag=True, help="Print every text and name that is in it.")
@json_option
@log_options
def show(file: str, *, texts: bool, as_json: bool) -> None:
    """Say what is in FILE: whose, how long, which messages, what was said of it."""
    from megascale_ops.replay.export import contents
    from megascale_ops.replay.files import read_recording
    from megascale_ops.replay.verdicts import judged, recorded_incidents

    _require_numpy()
    found = read_recording(Path(file))
    held = contents(found)
    said = judged(recorded_incidents(found))
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json({**held._asdict(), "recorded": [one._asdict() for one in said]})
        return
    _print_contents(held, texts=texts)
    _print_verdicts("recorded", said)


@recording.command
@argument("file", type=click.Path())
@click.option("-o", "--out", type=click.Path(), metavar="FILE", help="The file to write.  [FILE, in its place]")
@log_options
def anonymize(file: str, out: str | None) -> None:
    """Replace names, paths, addresses and texts in FILE, and hold that a replay says the same."""
    from megascale_ops.replay.export import export as make
    from megascale_ops.replay.files import read_recording, write_recording

    _require_numpy()
    place = Path(out or file)
    _require_folder(place)
    made = make(read_recording(Path(file)), is_thinned=False, tell=_tell)
    size_bytes = write_recording(place, made.recording)
    for note in made.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"{place}: {_size(size_bytes)}, without names and texts")


@recording.command
@argument("file", type=click.Path())
@click.option("--speed", type=FiniteRange(0, min_open=True), metavar="N",
              help="So many times as fast as it happened.  [as fast as possible]")  # fmt: skip
@click.option("--policy", "items", multiple=True, metavar="NAME=VALUE", help="Under this setting; repeatable.")
@click.option("--expect", is_flag=True, help="Exit with 1 when it says something else than was recorded.")
@json_option
@log_options
def replay(file: str, speed: float | None, items: tuple[str, ...], *, expect: bool, as_json: bool) -> int:
    """Hand what is in FILE to a controller of this version, and print what it says.

    The controller is the real one, on a virtual clock. Where it decides otherwise than was decided then, what follows
    in the recording is no answer to it: what would have come of it, nobody knows.
    """
    from megascale_ops.replay.drive import replay as play
    from megascale_ops.replay.files import read_recording
    from megascale_ops.replay.verdicts import compare, judged, recorded_incidents
    from megascale_ops.schema.policy_settings import read_settings

    _require_numpy()
    settings = read_settings(items)
    found = read_recording(Path(file))
    recorded = judged(recorded_incidents(found))
    done = play(found, settings, speed=speed or 0.0)
    said = judged(done.incidents)
    difference = compare(recorded, said)
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(
            {
                "incidents": done.incidents,
                "recorded": [one._asdict() for one in recorded],
                "replayed": [one._asdict() for one in said],
                "same": difference.is_none,
                "span_s": done.span_s,
                "took_s": done.took_s,
                "refused": done.refused,
            }
        )
    else:
        _print_replay(done, items)
        for one in difference.missing:
            click.echo(f"recorded, and not said now: {one}")
        for one in difference.new:
            click.echo(f"said now, and not recorded: {one}")
        if difference.is_none:
            click.echo("the same as was recorded" if recorded else "nothing, as was recorded")
    return int(expect and not difference.is_none)


def _require_numpy() -> None:
    """Report what is missing before anything begins."""
    from importlib import import_module

    import_module("numpy")


def _require_folder(place: Path) -> None:
    """Refuse before minutes of work a file that can't be written.

    Raises:
        UsageError: there is no folder for it.
    """
    if not place.absolute().parent.is_dir():
        from megascale_ops.errors import UsageError

        raise UsageError(f"the recording can't be written to {place}: there is no such folder")


def _tell(text: str) -> None:
    if sys.stderr.isatty():
        click.echo(text, err=True)


def _folder(folder: str | None, run_dir: str | None, job: str | None, named: str | None) -> Path:
    """Return the folder with the blocks.

    Raises:
        UsageError: there is none.
    """
    from megascale_ops.cli.sources.locate import Wanted, narrowed, run_folders
    from megascale_ops.errors import UsageError
    from megascale_ops.link.whereabouts import state_root
    from megascale_ops.schema.recording.entries import FOLDER

    if folder is not None:
        if not Path(folder).is_dir():
            raise UsageError(f"there is no folder {folder}: --from takes a folder with a controller's recordings")
        return Path(folder)
    wanted = narrowed(Wanted(job=job or "", run_dir=run_dir or ""), named or "")
    if not (wanted.job or wanted.run_dir) and named and (state_root() / named).is_dir():
        wanted = wanted._replace(job=named)
    folders = run_folders(wanted)
    for one in folders:
        if (one / FOLDER).is_dir():
            return one / FOLDER
    where = ", ".join(str(one) for one in folders[:3]) or str(state_root())
    raise UsageError(
        f"nothing is recorded in {where}: give --run-dir DIR, or --from DIR, the folder `{FOLDER}` beside a "
        "controller's journal"
    )


def _kept(folder: Path) -> "list[tuple[Path, bytes]]":
    """Return the blocks in a folder."""
    from megascale_ops.replay.files import read_blocks
    from megascale_ops.schema.recording.entries import BLOCK_SUFFIX

    return read_blocks(folder, BLOCK_SUFFIX)


def _fetched(url: str, token_file: str | None) -> "list[tuple[Path, bytes]]":
    """Return the blocks that a controller has.

    Raises:
        UsageError: they are more than is taken over a network.
        MegascaleError: there are none.
    """
    from megascale_ops.cli.sources.locate import Place, read_token
    from megascale_ops.errors import MegascaleError, RefusedError, UsageError
    from megascale_ops.link import BlockingLink

    found: list[tuple[Path, bytes]] = []
    with BlockingLink(url, read_token(token_file, Place(url=url))) as link:
        blocks = link.recordings().blocks
        size_bytes = sum(one.bytes for one in blocks)
        if size_bytes > _MOST_FETCHED_BYTES:
            raise UsageError(
                f"the controller at {link.url} has {size_bytes >> 20} MB of recordings, and no more than "
                f"{_MOST_FETCHED_BYTES >> 20} are fetched: export them where its disk is, with --from DIR"
            )
        for number, one in enumerate(blocks, start=1):
            _tell(f"fetching block {number} of {len(blocks)}")
            try:
                found.append((Path(one.id), link.recorded_block(one.id)))
            except RefusedError:  # the oldest goes meanwhile
                continue
        if not found:
            raise MegascaleError(f"the controller at {link.url} has recorded nothing yet: it writes each half a minute")
    return found


def _cut(
    named: str | None, job: str | None, files: "Sequence[tuple[Path, bytes]]", before_s: float, after_s: float
) -> "tuple[str, Recording]":
    """Return what is wanted, and its name.

    Raises:
        UsageError: there is no such incident or job.
    """
    from megascale_ops.errors import UsageError
    from megascale_ops.replay.cutting import Window, blocks_of, cut, find
    from megascale_ops.replay.files import jobs_of, parse

    blocks, found = blocks_of(files)
    if job is not None:
        found = {name: one for name, one in found.items() if one.incident.job == job}
    whole = named if named is not None and named not in found else job if named is None and not found else None
    if named is None and found:
        named = list(found)[-1]
    if named is not None and named in found:
        one = find(found, named)
        window = Window(one.began_wall_s - before_s, one.ended_wall_s + after_s)
        return named, cut(blocks, one.incident.job, window)
    known = {name for block in blocks for name in jobs_of(parse(block.raw, block.name))}
    if whole is None and len(known) == 1:
        whole = known.pop()
        known.add(whole)
    if whole is None:
        raise UsageError(f"which job? Recorded are {', '.join(sorted(known)) or 'none'}, and no incident")
    if whole not in known:
        from megascale_ops.suggest import unknown

        raise UsageError(unknown("recorded incident or job", whole, [*found, *sorted(known)]))
    return whole, cut(blocks, whole)


def _print_contents(held: "Contents", *, texts: bool) -> None:
    from megascale_ops.schema.wording import counted, duration, printable

    click.echo(
        f"job {printable(held.job) or 'several'}: {counted(held.ranks, 'rank')} on {counted(len(held.nodes), 'node')}, "
        f"{duration(held.span_s)}"
    )
    click.echo("  " + ", ".join(f"{number} {kind}" for kind, number in held.entries.items()))
    state = "names, paths, addresses and texts are replaced" if held.is_anonymous else "NOT anonymous"
    thinned = f"thinned: {held.thinned}" if held.thinned else "nothing left out"
    click.echo(f"  {state}; {thinned}")
    if not texts:
        return
    for field, found in held.texts.items():
        click.echo(f"  {field}:")
        for text in found:
            click.echo(f"    {printable(text)}")


def _print_verdicts(when: str, said: "Sequence[Judged]") -> None:
    click.echo(f"{when}: " + ("; ".join(map(str, said)) or "nothing went wrong"))


def _print_replay(done: "Replayed", items: "Iterable[str]") -> None:
    from megascale_ops.cards import Reader, plain_incident
    from megascale_ops.schema.wording import duration, printable

    for incident in done.incidents:
        click.echo(plain_incident(incident, reader=Reader(has=lambda _path: False, is_live=False), leads_on=False))
        click.echo("")
    under = ", ".join(items)
    faster = done.span_s / max(done.took_s, 1e-9)
    click.echo(
        f"{duration(done.span_s)} replayed in {done.took_s:.2f} s, {faster:.0f} times as fast as it happened"
        + (f", under {under}" if under else "")
    )
    for refused in done.refused:
        click.echo(f"refused: {printable(refused)}")


def _print_export(made: "Exported", held: "Contents", place: Path, size_bytes: int) -> None:
    from megascale_ops.cli.terminal.output import print_json

    print_json(
        {
            "file": str(place),
            "bytes": size_bytes,
            "contents": held._asdict(),
            "recorded": [one._asdict() for one in made.recorded],
            "replayed": [one._asdict() for one in made.replayed],
            "notes": made.notes,
        }
    )


def _say_export(made: "Exported", held: "Contents", place: Path, size_bytes: int) -> None:
    click.echo(f"{place}: {_size(size_bytes)}")
    _print_contents(held, texts=False)
    for note in made.notes:
        click.echo(f"note: {note}")
    _print_verdicts("recorded", made.recorded)
    _print_verdicts("replayed", made.replayed)
    click.echo(f"look at all that it says before you send it: megascale-ops recording show --texts {place}")


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1000:.1f} kB"
