# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops policy``: what is done about each fault of a job; shown, changed while it lives, and replayed.

``set`` asks the running controller, which journals the change; it holds for all rounds of the run. ``replay`` reads
the journal alone: each decision of the past with its reason, and where another policy would have decided otherwise.
"""

from typing import TYPE_CHECKING

import click

from megascale_ops.cli.terminal.completion import offers
from megascale_ops.cli.terminal.groups import NamingGroup
from megascale_ops.cli.terminal.options import argument, job_argument, json_option, log_options, where_options
from megascale_ops.suggest import unknown

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from megascale_ops.controller.policy.replay import Replayed
    from megascale_ops.link import BlockingLink
    from megascale_ops.schema.events import Event
    from megascale_ops.schema.messages import PolicyView


@click.group(cls=NamingGroup)
def policy() -> None:
    """Show, change and replay what is done about each fault: patience, budgets, actions."""


@policy.command
@job_argument
@where_options
@json_option
@log_options
def show(
    controller: str | None,
    job: str | None,
    run_dir: str | None,
    token_file: str | None,
    as_json: bool,
) -> None:
    """Print the policy that JOB lives under: settings with what they are, and what is done about each class and why."""
    with _open_link(controller, job, run_dir, token_file) as link:
        view = link.policy(_job_of(link, job))
    _print_policy(view, as_json=as_json)


@policy.command("set")
@argument("name", metavar="JOB", shell_complete=offers("job"))
@argument("items", nargs=-1, metavar="NAME=VALUE...", shell_complete=offers("setting"))
@where_options
@json_option
@log_options
def set_(
    name: str,
    items: tuple[str, ...],
    controller: str | None,
    job: str | None,
    run_dir: str | None,
    token_file: str | None,
    as_json: bool,
) -> None:
    """Change the policy of JOB while it lives: silence_floor_s=10, dry_run=true, frozen=warn.

    NAME=default takes a change back. It holds until the job's name is started anew.
    """
    from megascale_ops.schema.policy_settings import read_settings

    if job is not None and "=" in name:  # the option names the job, so all behind the verb are settings
        name, items = job, (name, *items)
    if job not in {None, name}:
        raise click.UsageError(f"two jobs are named: {name!r} and --job {job!r}")
    if not items and "=" not in name:
        raise click.UsageError("missing argument 'NAME=VALUE...'")
    if "=" in name:
        raise click.UsageError(f"{name!r} is a setting, not a job: megascale-ops policy set JOB NAME=VALUE")
    settings = read_settings(items)
    with _open_link(controller, name, run_dir, token_file) as link:
        view = link.set_policy(_job_of(link, name), settings)
    _print_policy(view, as_json=as_json)


@policy.command
@job_argument
@click.option("--policy", "items", multiple=True, metavar="NAME=VALUE", help="Ask again with this setting.")
@click.option(
    "--store", metavar="URL", help="Read this journal, sqlite:///FILE or postgresql+psycopg://USER@HOST/DATABASE."
)
@where_options
@json_option
@log_options
def replay(
    items: tuple[str, ...],
    store: str | None,
    controller: str | None,
    job: str | None,
    run_dir: str | None,
    token_file: str | None,
    as_json: bool,
) -> None:
    """Print each decision that was made about JOB, and where another policy would have decided otherwise.

    Reads the journal in the run folder, or the one that --store names; of a run that lives, too. Each decision is asked
    again by itself: what would have followed from another one, nobody knows.
    """
    from megascale_ops.controller.policy.replay import replay as ask_again
    from megascale_ops.schema.policy_settings import read_settings

    if controller or token_file:
        raise click.UsageError("a replay reads a journal: give JOB, --run-dir or --store, no controller")
    if store and run_dir:
        raise click.UsageError("which journal? Give --run-dir or --store, not both")
    settings = read_settings(items)
    wanted = job
    decisions = [
        replayed
        for known, events in _read_journal(store or _journal_of(wanted, run_dir), wanted)
        for replayed in ask_again(events, settings)
    ]
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json({"decisions": [_as_data(replayed) for replayed in decisions]})
        return
    for replayed in decisions:
        _print_decision(replayed)
    changed = sum(replayed.differs for replayed in decisions)
    under = f" under {', '.join(items)}" if items else ""
    click.echo(f"{len(decisions)} decisions, {changed} of them otherwise{under}" if decisions else "no decisions")


def _open_link(controller: str | None, job: str | None, run_dir: str | None, token_file: str | None) -> "BlockingLink":
    """Return a link to the controller that is meant."""
    from megascale_ops.cli.sources.locate import Wanted, find_place, read_token
    from megascale_ops.link import BlockingLink

    place = find_place(Wanted(controller or "", job or "", run_dir or ""), journal_too=False)
    return BlockingLink(place.url, read_token(token_file, place))


def _job_of(link: "BlockingLink", name: str | None) -> str:
    """Return the job that is meant: the one named, or the only one there is.

    Raises:
        UsageError: there is none of that name (the nearest is named), or there are several and none was named.
    """
    from megascale_ops.errors import UsageError

    known = [job.job for job in link.status().jobs]
    if name is not None and name in known:
        return name
    if name is not None:
        raise UsageError(unknown("job", name, known))
    if len(known) != 1:
        raise UsageError(f"which job? The controller has {', '.join(sorted(known)) or 'none yet'}")
    return known[0]


def _journal_of(job: str | None, run_dir: str | None) -> str:
    """Return the address of the newest run folder's journal.

    Raises:
        UsageError: there is none.
    """
    from megascale_ops.cli.sources.locate import JOURNAL_FILE, Wanted, run_folders
    from megascale_ops.errors import UsageError
    from megascale_ops.link.whereabouts import state_root

    folders = run_folders(Wanted("", job or "", run_dir or ""))
    path: Path | None = next((folder / JOURNAL_FILE for folder in folders if (folder / JOURNAL_FILE).is_file()), None)
    if path is None:
        where = ", ".join(str(folder) for folder in folders[:3]) or str(state_root())
        raise UsageError(f"there is no journal in {where}: give JOB, --run-dir DIR or --store URL")
    return f"sqlite:///{path}"


def _read_journal(url: str, wanted: str | None) -> "Iterator[tuple[str, list[Event]]]":
    """Yield the jobs of a journal, or the one that is wanted, with their events.

    Raises:
        UsageError: the journal can't be read, or knows no such job.
    """
    from megascale_ops.controller.journal.store import open_store
    from megascale_ops.errors import UsageError

    store = open_store(url, readonly=True)
    try:
        names = sorted(store.jobs())
        if wanted and wanted not in names:
            raise UsageError(unknown("job", wanted, names))
        for name in [wanted] if wanted else names:
            yield name, store.events(name)
    finally:
        store.close()


def _print_policy(view: "PolicyView", *, as_json: bool) -> None:
    from megascale_ops.schema.policy_settings import class_actions

    if as_json:
        import msgspec

        from megascale_ops.cli.terminal.output import print_json

        actions = [row._asdict() for row in class_actions(view.policy)]
        print_json({**msgspec.to_builtins(view), "classes": actions})
        return
    from megascale_ops.cli.terminal.output import console
    from megascale_ops.cli.terminal.policy_table import actions_view, settings_view

    screen = console()
    click.echo(f"policy of {view.job}")
    screen.print(settings_view(view.policy, view.changed))
    screen.print(actions_view(class_actions(view.policy), view.changed))
    for node, left_s in view.evicted.items():
        click.echo(f"{node} is evicted for another {left_s:.0f} s")
    if view.prices_s:
        count = len(view.prices_s)
        click.echo(f"the last {count} restarts have cost " + ", ".join(f"{price_s:.1f} s" for price_s in view.prices_s))


def _print_decision(replayed: "Replayed") -> None:
    from megascale_ops.schema.wording import clock, printable

    event, now = replayed.event, replayed.now
    about = event.incident or event.job
    click.echo(f"{clock(event.wall_s)}  {about}  {replayed.question.verdict.fault}: {printable(event.text)}")
    if replayed.differs:
        dry = "would only say " if now.dry_run else ""
        click.echo(f"    otherwise now: {dry}{now.action}: {printable(now.reason)}")


def _as_data(replayed: "Replayed") -> dict[str, object]:
    return {
        "wall_s": replayed.event.wall_s,
        "job": replayed.event.job,
        "incident": replayed.event.incident,
        "question": replayed.question,
        "recorded": replayed.recorded,
        "now": replayed.now,
        "differs": replayed.differs,
    }
