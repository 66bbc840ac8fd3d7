# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops nodes``: where the nodes of a cluster stand, how they came there, and a person's word on one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

import click

from megascale_ops.cli.terminal.groups import NamingGroup
from megascale_ops.cli.terminal.options import FiniteRange, argument, json_option, log_options, where_options

if TYPE_CHECKING:
    from megascale_ops.link import BlockingLink
    from megascale_ops.schema.health import FleetFailures, NodeMoves

_HOUR_S, _DAY_S = 3600.0, 86_400.0
_reason = click.option("--reason", default="", metavar="TEXT", help="Why, for whoever looks later.")


class _Words(NamingGroup):
    """The words behind ``nodes``."""

    what = "word behind nodes"
    old_names: ClassVar[Mapping[str, str]] = {}


@click.group(cls=_Words)
def nodes() -> None:
    """Show where nodes stand as machines, whatever job runs on them; take one out, release it, undo.

    What is known of a node outlives jobs as long as they use the same controller.
    """


@nodes.command("list")
@where_options
@json_option
@log_options
def show(controller: str | None, job: str | None, run_dir: str | None, token_file: str | None, as_json: bool) -> None:
    """List the nodes that are not simply healthy, with the reason, and how much of the day's limit is used."""
    with _link(controller, job, run_dir, token_file) as link:
        view = link.nodes()
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(view)
        return
    from megascale_ops.cli.nodes.node_words import lines_of

    click.echo("\n".join(lines_of(view)))


@nodes.command
@argument("node")
@where_options
@json_option
@log_options
def history(
    node: str, controller: str | None, job: str | None, run_dir: str | None, token_file: str | None, as_json: bool
) -> None:
    """Show every move of NODE: when, by whom, why, and on what evidence."""
    with _link(controller, job, run_dir, token_file) as link:
        found = _asked(link, node)
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(found)
        return
    from megascale_ops.cli.nodes.node_words import history_of

    click.echo("\n".join(history_of(found)))


@nodes.command
@argument("node")
@_reason
@click.option(
    "--for", "hours", type=FiniteRange(0, 24 * 365), default=0, metavar="HOURS", help="Then it ends by itself."
)
@where_options
@log_options
def quarantine(
    node: str,
    reason: str,
    hours: float,
    controller: str | None,
    job: str | None,
    run_dir: str | None,
    token_file: str | None,
) -> None:
    """Take NODE out: no round that is formed from now on has it; what runs on it runs on until its round ends.

    Without --for it stays out until it is released, which people are reminded of each day.
    """
    with _link(controller, job, run_dir, token_file) as link:
        click.echo(_done(link, node, "quarantine", reason, hours * _HOUR_S))


@nodes.command
@argument("node")
@_reason
@where_options
@log_options
def release(
    node: str, reason: str, controller: str | None, job: str | None, run_dir: str | None, token_file: str | None
) -> None:
    """Declare NODE healthy: what happened before is forgiven, and it takes part again."""
    with _link(controller, job, run_dir, token_file) as link:
        click.echo(_done(link, node, "release", reason))


@nodes.command
@argument("node")
@_reason
@where_options
@log_options
def undo(
    node: str, reason: str, controller: str | None, job: str | None, run_dir: str | None, token_file: str | None
) -> None:
    """Take the newest move of NODE back, whoever made it: it stands exactly where it stood before."""
    with _link(controller, job, run_dir, token_file) as link:
        click.echo(_done(link, node, "undo", reason))


@nodes.command
@click.option("--nodes", "places", type=click.IntRange(1, 131_072), help="Nodes that the job needs.  [those known]")
@click.option("--rate", type=FiniteRange(0), help="Failures a node and day.  [measured by the controller]")
@click.option("--repair", "repair_h", type=FiniteRange(0, min_open=True), help="Hours that a node is out.  [measured]")
@where_options
@json_option
@log_options
def spares(
    places: int | None,
    rate: float | None,
    repair_h: float | None,
    controller: str | None,
    job: str | None,
    run_dir: str | None,
    token_file: str | None,
    as_json: bool,
) -> None:
    """Say how many spare nodes keep all places filled 99 % of the time, and what that rests on.

    With --nodes, --rate and --repair no controller is asked.
    """
    from megascale_ops.diagnosis.statistics.spares import spares_for

    measured = None
    known = 0
    if places is None or rate is None or repair_h is None:
        with _link(controller, job, run_dir, token_file) as link:
            view = link.nodes()
        measured, known = view.failures, view.known
    per_day, is_bound, whence = _rate(rate, measured)
    answer = spares_for(_places(places, known), per_day, _out_s(repair_h, measured), is_bound=is_bound)
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(answer._asdict())
        return
    from megascale_ops.cli.nodes.node_words import spares_lines

    click.echo("\n".join(spares_lines(answer, whence, is_repair_given=repair_h is not None)))


def _rate(given: float | None, measured: "FleetFailures | None") -> tuple[float, bool, str]:
    """Return failures a node and day, whether that is an upper bound, and where it comes from."""
    from megascale_ops.diagnosis.statistics.spares import rate_of
    from megascale_ops.errors import UsageError

    if given is not None:
        return given, False, "given by --rate"
    if measured is None or measured.node_days <= 0:
        raise UsageError("no rate of failures is known yet: no job has run on this controller; give --rate")
    rate, is_bound = rate_of(measured.moves_out, measured.node_days)
    if is_bound:
        return rate, True, f"none failed in {measured.node_days:,.1f} node-days of jobs: 3 over that, the 95 % bound"
    return rate, False, f"{measured.moves_out} failures in {measured.node_days:,.1f} node-days of jobs"


def _places(given: int | None, known: int) -> int:
    from megascale_ops.errors import UsageError

    if given is None and not known:
        raise UsageError("this controller knows no node yet: give --nodes")
    return given or known


def _out_s(given: float | None, measured: "FleetFailures | None") -> float:
    from megascale_ops.errors import UsageError

    if given is not None:
        return given * _HOUR_S
    if measured is None or not measured.out_s:
        raise UsageError("no node that was out has come back yet: give --repair, the hours that a repair takes")
    return measured.out_s


@contextmanager
def _link(
    controller: str | None, job: str | None, run_dir: str | None, token_file: str | None
) -> "Iterator[BlockingLink]":
    from megascale_ops.cli.sources.locate import Wanted, find_place, read_token
    from megascale_ops.link import BlockingLink

    place = find_place(Wanted(controller or "", job or "", run_dir or ""), journal_too=False)
    with BlockingLink(place.url, read_token(token_file, place)) as link:
        yield link


def _asked(link: "BlockingLink", node: str) -> "NodeMoves":
    from megascale_ops.errors import RefusedError, UsageError

    try:
        return link.node_moves(node)
    except RefusedError as error:
        raise UsageError(str(error)) from error


def _done(link: "BlockingLink", node: str, do: str, reason: str, for_s: float = 0.0) -> str:
    """Have it done, and return the sentence on where the node stands then."""
    import getpass

    from megascale_ops.errors import RefusedError, UsageError
    from megascale_ops.schema.health import NodeAsk
    from megascale_ops.schema.wording import printable

    try:
        by = getpass.getuser()
    except (OSError, KeyError):  # a user without an entry in the password file
        by = "a person"
    try:
        found = link.ask_node(node, NodeAsk(do, reason[:500], by[:100], for_s))
    except RefusedError as error:
        raise UsageError(str(error)) from error
    from megascale_ops.cli.nodes.node_words import life_lines

    lines = [*life_lines(found.node)]
    if do == "quarantine" and found.is_unheard:
        lines.append(f"    no agent and no runner of a node {printable(node)} is heard: look whether that is its name")
    return "\n".join(lines)
