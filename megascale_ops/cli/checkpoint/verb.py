# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops checkpoint``: list, verify, compare and prune checkpoints; work out how often to save."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
import msgspec

from megascale_ops.cli.terminal.groups import NamingGroup
from megascale_ops.cli.terminal.options import (
    FiniteRange,
    argument,
    job_argument,
    json_option,
    log_options,
    where_options,
)

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from megascale_ops.checkpoint.deletion import Glance
    from megascale_ops.checkpoint.manifest import CheckpointReport, Manifest
    from megascale_ops.checkpoint.state.layout import Layout
    from megascale_ops.cli.checkpoint.places import Place


def _folders(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> "list[CompletionItem]":
    """Let the shell complete folders."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="dir")]


_path_argument = argument("path", metavar="PATH", type=click.Path(), shell_complete=_folders)
_SECONDS = FiniteRange(min=0)


@click.group(cls=NamingGroup)
def checkpoint() -> None:
    """Look after checkpoints: PATH is a folder of them, one of them, a run folder, a node's folder, or a URL."""


@checkpoint.command("ls", short_help="List checkpoints, with sizes and digests.")
@_path_argument
@json_option
@log_options
def ls(path: str, as_json: bool) -> None:
    """List checkpoints: step, when, size, digest, what is wrong by manifest and sizes; of a single one its files.

    Nothing is read but manifests; `checkpoint verify` reads all.
    """
    from megascale_ops.cli.checkpoint.meant import meant_by

    meant = meant_by(path)
    found, holder, reading = meant.glances(), meant.holder(), meant.readers()
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        rows = [
            {**_numbers(one), "files_elsewhere": meant.elsewhere(one), "readers": reading.get(one.step, ())}
            for one in found
        ]
        print_json({"path": meant.said, "held_by": holder, "checkpoints": rows})
        return
    from megascale_ops.cli.checkpoint.checkpoint_views import files_view, list_view
    from megascale_ops.cli.terminal.output import console
    from megascale_ops.cli.terminal.tables import data_size

    console().print(list_view(found, reading, meant))
    if meant.is_one:
        click.echo()
        console().print(files_view(found[0], meant))
    else:
        count = "1 checkpoint" if len(found) == 1 else f"{len(found)} checkpoints"
        click.echo(f"{count}, {data_size(sum(one.size_bytes for one in found))} in {meant.said}")
    for step, who in [(step, who) for step, named in reading.items() for who in named]:
        click.echo(f"step {step} is read by {who}")
    if holder:
        click.echo(f"held by {holder}")


@checkpoint.command(short_help="Read all files and compare their digests.")
@_path_argument
@json_option
@log_options
def verify(path: str, as_json: bool) -> int:
    """Read every file of every checkpoint and compare it with its digest. The exit code is 1 when one is damaged."""
    from megascale_ops.cli.checkpoint.meant import meant_by

    meant = meant_by(path)
    reports: list[CheckpointReport] = []
    for report in meant.verified():
        reports.append(report)
        if not as_json:
            _tell_verified(meant, report)
    whole = [report for report in reports if report.ok]
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        rows = [
            {"step": one.step, "path": one.path, "ok": one.ok, "bytes": _promised(one), "faults": one.faults}
            | {"mesh": _mesh(one.manifest)}
            | _told_in_numbers(meant, one)
            for one in reports
        ]
        print_json({"path": meant.said, "whole": len(whole), "checkpoints": rows})
    elif not meant.is_one:
        restart = f"a restart loads step {whole[0].step}" if whole else "a restart loads none"
        if meant.is_part:
            restart = "as far as they are on this node"
        click.echo(f"{len(whole)} of {len(reports)} whole; {restart}")
    return int(len(whole) < len(reports))


@checkpoint.command(short_help="Show which tensors changed, and how much.")
@_path_argument
@argument("other", metavar="[PATH]", required=False, type=click.Path(), shell_complete=_folders)
@json_option
@log_options
def diff(path: str, other: str | None, as_json: bool) -> None:
    """Show which tensors changed from the first PATH to the second, and by how much.

    Of a folder of checkpoints the newest whole one is meant; of a single PATH its two newest. `change` is the norm of
    the difference by the norm of the former. Both are verified before anything of them is loaded.
    """
    from megascale_ops.cli.checkpoint.meant import pair_of
    from megascale_ops.cli.terminal.needs import need
    from megascale_ops.cli.terminal.progress import bytes_bar
    from megascale_ops.errors import MegascaleError

    need("torch")
    (former, before), (later, after) = pair_of(path, other)
    from megascale_ops.checkpoint import differences

    try:
        with (
            former.fetched(before) as old,
            later.fetched(after) as new,
            bytes_bar("compared", differences.bytes_compared(old, new)) as told,
        ):
            found = differences.compare(old, new, told)
    except OSError as error:
        raise MegascaleError(f"{before} and {after} could not be compared: {error.strerror or error}") from error
    if as_json:
        from megascale_ops.cli.terminal.output import print_json, with_defaults

        print_json({"before": before, "after": after, **with_defaults(found)})
        return
    from megascale_ops.cli.checkpoint.checkpoint_views import differences_line, differences_view
    from megascale_ops.cli.terminal.output import console

    click.echo(f"from {before}\nto   {after}\n")
    console().print(differences_view(found))
    click.echo(differences_line(found))


@checkpoint.command(short_help="Delete those that no option keeps.")
@_path_argument
@click.option("--keep", type=click.IntRange(1), metavar="N", help="The newest N that are whole stay; 1 if not given.")
@click.option("--keep-every", type=click.IntRange(1), metavar="K", help="So does the first from each K steps on.")
@click.option("--keep-best", type=click.IntRange(1), metavar="N", help="So do the N with the best metric.")
@click.option("--higher-is-better", is_flag=True, help="Of the metric; lower is, if not given.")
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@json_option
@log_options
def prune(
    path: str,
    keep: int | None,
    keep_every: int | None,
    keep_best: int | None,
    *,
    higher_is_better: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Delete checkpoints that no option keeps, but never the newest whole one, nor one that a restore reads.

    A folder that a job writes to is refused.
    """
    if keep is None and keep_every is None and keep_best is None:
        raise click.UsageError("say what to keep: --keep N, --keep-every K or --keep-best N")
    from megascale_ops.checkpoint.retention import Rule
    from megascale_ops.cli.checkpoint import pruning
    from megascale_ops.cli.checkpoint.meant import meant_by
    from megascale_ops.errors import MegascaleError, UsageError

    meant = meant_by(path)
    if meant.is_one:
        raise UsageError(f"{path} is one checkpoint: give the folder that holds it")
    if not dry_run:
        pruning.require_no_writer(meant)
    try:
        rows = pruning.decide(meant, Rule(keep or 1, keep_every or 0, keep_best or 0, higher_is_better))
        rows = rows if dry_run else pruning.delete(meant, rows)
    except OSError as error:
        raise MegascaleError(f"{error.filename or meant.said} can't be deleted: {error.strerror or error}") from error
    _show_pruned(meant, rows, dry_run=dry_run, as_json=as_json)


@checkpoint.command(short_help="Work out how often a job should save.")
@job_argument
@where_options
@click.option("--stall", type=_SECONDS, metavar="SECONDS", help="Training stands still for so long when it saves.")
@click.option("--write", type=_SECONDS, metavar="SECONDS", help="It is written beside training for so long after that.")
@click.option("--between-failures", type=_SECONDS, metavar="SECONDS", help="Mean time between two failures of the job.")
@click.option("--restart", type=_SECONDS, metavar="SECONDS", help="From a failure until the first new step.")
@click.option("--step", type=_SECONDS, metavar="SECONDS", help="What a step takes.")
@json_option
@log_options
def plan(
    job: str | None,
    controller: str | None,
    run_dir: str | None,
    token_file: str | None,
    stall: float | None,
    write: float | None,
    between_failures: float | None,
    restart: float | None,
    step: float | None,
    as_json: bool,
) -> None:
    """Work out how often JOB should save, by what a save and a failure cost it; by Young and Daly.

    What no option gives is taken from the record of the job, which may live or be over.
    """
    from megascale_ops.cli.checkpoint import planning

    given = {
        "stall": stall,
        "write": write,
        "between-failures": between_failures,
        "restart": restart,
        "step": step,
    }
    where = {"job": job, "controller": controller, "run_dir": run_dir, "token_file": token_file}
    planned = planning.plan_for(given, where)
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(planning.numbers(planned))
        return
    from megascale_ops.cli.checkpoint.checkpoint_views import plan_view
    from megascale_ops.cli.terminal.output import console

    console().print(plan_view(planned, planning.shares(planned)))


def _numbers(one: "Glance") -> dict[str, Any]:
    """Return what is listed of a checkpoint, for programs."""
    from megascale_ops.checkpoint import manifest as manifests
    from megascale_ops.cli.checkpoint.checkpoint_views import digest_of

    manifest = one.manifest
    return {
        "step": one.step,
        "path": one.path,
        "size_bytes": one.size_bytes,
        "written_wall_s": manifest.written_wall_s if manifest is not None else None,
        "ranks": manifest.world_size if manifest is not None else None,
        "mesh": _mesh(manifest),
        "metric": manifests.metric_of(manifest) if manifest is not None else None,
        "code": (manifest.code or None) if manifest is not None else None,
        "parent": None if manifest is None or isinstance(manifest.parent, msgspec.UnsetType) else manifest.parent,
        "sha256": digest_of(one),
        "files": manifest.files if manifest is not None else (),
        "faults": one.faults,
    }


def _mesh(manifest: "Manifest | None") -> "Layout | None":
    """Return how the ranks that saved a checkpoint were laid out; None: not known."""
    return None if manifest is None or isinstance(manifest.mesh, msgspec.UnsetType) else manifest.mesh


def _promised(report: "CheckpointReport") -> int:
    return sum(entry.size_bytes for entry in report.manifest.files) if report.manifest is not None else 0


def _tell_verified(meant: "Place", report: "CheckpointReport") -> None:
    from megascale_ops.checkpoint import manifest as manifests
    from megascale_ops.cli.terminal.tables import data_size
    from megascale_ops.schema.wording import escaped

    if report.ok:
        has_mesh = report.manifest is not None and manifests.mesh_of(report.manifest)
        saved_by = f", saved by {manifests.saved_by(report.manifest)}" if report.manifest and has_mesh else ""
        click.echo(f"step {report.step}: whole, {data_size(_promised(report))}{saved_by}")
        for line in _told_at_its_save(meant, report):
            click.echo(f"  {line}")
        return
    click.echo(f"step {report.step}: " + click.style("damaged", fg="red"))
    for fault in report.faults:
        click.echo(f"  {escaped(fault.sentence())}")


def _told_in_numbers(meant: "Place", report: "CheckpointReport") -> dict[str, Any]:
    """Return the same for programs; nothing where the save did not look."""
    found = meant.findings(report.path) if report.ok else None
    return {} if found is None else {"alarms": found.alarms, "unchanged": found.unchanged, "since": found.since}


def _told_at_its_save(meant: "Place", report: "CheckpointReport") -> Iterator[str]:
    """Yield what the save of a whole checkpoint has found of what it saved."""
    from megascale_ops.cli.terminal.tables import MOST_ROWS
    from megascale_ops.schema.wording import escaped

    found = meant.findings(report.path)
    if found is None:
        return
    for alarm in found.alarms:
        yield click.style("when it was saved: ", fg="yellow") + escaped(alarm.text)
    if found.unchanged:
        count = len(found.unchanged)
        more = f" and {count - MOST_ROWS} more" if count > MOST_ROWS else ""
        names = ", ".join(map(escaped, found.unchanged[:MOST_ROWS]))
        noun = "parameter that trains has" if count == 1 else "parameters that train have"
        yield f"{count} {noun} not changed since step {found.since}: {names}{more}"


def _show_pruned(meant: "Place", rows: list[Any], *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json({"path": meant.said, "dry_run": dry_run, "checkpoints": [row._asdict() for row in rows]})
        return
    from megascale_ops.cli.checkpoint.checkpoint_views import prune_view
    from megascale_ops.cli.terminal.output import console
    from megascale_ops.cli.terminal.tables import data_size

    console().print(prune_view(rows, is_done=not dry_run))
    gone = [row for row in rows if (not row.reasons if dry_run else row.deleted)]
    word = "would be deleted" if dry_run else "deleted"
    click.echo(f"{len(gone)} of {len(rows)} checkpoints, {data_size(sum(row.size_bytes for row in gone))} {word}")
    holder = meant.holder() if dry_run else ""
    if holder:
        click.echo(f"note: held by {holder}; without --dry-run it would be refused", err=True)
