# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops nodes``: where the nodes of a cluster stand, how they came there, and a person's word on one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

import click

from megascale_ops.cli.terminal.groups import NamingGroup
from megascale_ops.cli.terminal.options import FiniteRange, json_option, log_options, where_options

if TYPE_CHECKING:
    from megascale_ops.diagnosis.statistics.spares import Spares
    from megascale_ops.link import BlockingLink
    from megascale_ops.schema.nodes import FleetFailures, NodeLife, NodeMoves, NodesView

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
    click.echo("\n".join(lines_of(view)))


@nodes.command
@click.argument("node")
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
    click.echo("\n".join(history_of(found)))


@nodes.command
@click.argument("node")
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
@click.argument("node")
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
@click.argument("node")
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
@click.option("--out", "out_h", type=FiniteRange(0, min_open=True), help="Hours that a node is out.  [measured]")
@where_options
@json_option
@log_options
def spares(
    places: int | None,
    rate: float | None,
    out_h: float | None,
    controller: str | None,
    job: str | None,
    run_dir: str | None,
    token_file: str | None,
    as_json: bool,
) -> None:
    """Say how many spare nodes keep all places filled 99 % of the time, and what that rests on.

    With --nodes, --rate and --out no controller is asked.
    """
    from megascale_ops.diagnosis.statistics.spares import spares_for

    measured = None
    known = 0
    if places is None or rate is None or out_h is None:
        with _link(controller, job, run_dir, token_file) as link:
            view = link.nodes()
        measured, known = view.failures, view.known
    per_day, is_bound, whence = _rate(rate, measured)
    answer = spares_for(_places(places, known), per_day, _out_s(out_h, measured), is_bound=is_bound)
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(answer._asdict())
        return
    click.echo("\n".join(spares_lines(answer, whence, is_out_given=out_h is not None)))


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
        raise UsageError("no node that was out has come back yet: give --out, the hours that a repair takes")
    return measured.out_s


def spares_lines(answer: "Spares", whence: str, *, is_out_given: bool) -> list[str]:
    """Return the answer and all that it rests on."""
    from megascale_ops.schema.wording import duration

    last = answer.shares[-1]
    out_whence = "given by --out" if is_out_given else "the median so far"
    fewer = f"; {answer.spares - 1} would be enough {answer.shares[-2]:.2%}" if answer.spares else ""
    return [
        f"{answer.spares} spare nodes for {answer.nodes:,}: all places are filled {last:.2%} of the time{fewer}",
        f"    failures: {answer.rate:.3g} a node and day ({whence})",
        f"    out for:  {duration(answer.out_s)} each time ({out_whence})",
        f"    so a node is out with p = {answer.p_out:.3g}; how many are at once is binomial (n = {answer.nodes:,})",
        "    faults of several nodes at once (a switch, a rack) come on top",
    ]


def lines_of(view: "NodesView") -> list[str]:
    """Return where nodes stand as people read it: the worst first."""
    from megascale_ops.schema.nodes import NODE_STATES

    order = list(NODE_STATES)
    shown = sorted(view.nodes, key=lambda life: (order.index(life.state) if life.state in order else -1, life.node))
    lines = [line for life in shown for line in _life_lines(life)]
    if not lines:
        lines = ["every node is healthy"]
    lines += [
        "",
        f"{view.known:,} nodes are known; {view.moved_out} of at most {view.most_out} a day went by themselves",
    ]
    if view.spared:
        lines.append(
            f"{', '.join(view.spared)} would be out, had that limit not been reached: `megascale-ops nodes quarantine "
            "NODE` or `release NODE` decides"
        )
    return lines


def _life_lines(life: "NodeLife") -> Iterator[str]:
    from megascale_ops.schema.nodes import NODE_STATES
    from megascale_ops.schema.wording import clock, printable

    until = "until it is released" if life.is_held else f"until {clock(life.until_wall_s)}" if life.until_wall_s else ""
    yield f"{printable(life.node)}  {life.state} {until}".rstrip() + f"  ({NODE_STATES.get(life.state, '')})"
    yield f"    since {clock(life.since_wall_s)} by {printable(life.by)}: {printable(life.reason)}"


def history_of(found: "NodeMoves") -> list[str]:
    """Return a node's moves as people read them, oldest first, and where it stands."""
    from megascale_ops.schema.wording import clock, printable

    lines = []
    for move in found.moves:
        what = move.event.replace("_", " ")
        led = (
            f"{move.before.state} -> {move.after.state}" if move.before.state != move.after.state else move.after.state
        )
        of_job = f" (job {printable(move.job)})" if move.job else ""
        lines.append(f"{move.number:>5}  {clock(move.wall_s)}  {led}: {what}, by {printable(move.by)}{of_job}")
        lines += [f"       {printable(move.reason)}"] if move.reason else []
        lines += [f"       - {printable(text)}" for text in move.evidence]
    if not lines:
        lines = [f"{printable(found.node.node)} has never been anything but healthy"]
    else:
        lines += ["", *_life_lines(found.node)]
    return lines


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
    from megascale_ops.schema.nodes import NodeAsk

    try:
        by = getpass.getuser()
    except (OSError, KeyError):  # a user without an entry in the password file
        by = "somebody"
    try:
        found = link.ask_node(node, NodeAsk(do, reason[:500], by[:100], for_s))
    except RefusedError as error:
        raise UsageError(str(error)) from error
    return "\n".join(_life_lines(found.node))
