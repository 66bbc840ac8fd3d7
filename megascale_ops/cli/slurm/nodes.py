# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops slurm``: nodes of the cluster as Slurm has them, drained and resumed as a controller would.

For people and for HealthCheckProgram; never for prologs, whose calls would come from thousands of nodes at once.
"""

from typing import TYPE_CHECKING

import click

from megascale_ops.cli.terminal.groups import NamingGroup
from megascale_ops.cli.terminal.options import argument, json_option, log_options

if TYPE_CHECKING:
    from megascale_ops.engines.slurm.nodes import SlurmNodes


def _nodes() -> "SlurmNodes":
    from megascale_ops.engines.slurm.nodes import SlurmNodes

    return SlurmNodes()


@click.group(cls=NamingGroup)
def slurm() -> None:
    """Show, drain, resume and restart nodes of a Slurm cluster."""


@slurm.command()
@click.option("--all", "show_all", is_flag=True, help="Also those that are in service.")
@json_option
@log_options
def nodes(*, show_all: bool, as_json: bool) -> None:
    """List the nodes that are out of service, why, and by whom: by a verdict of ours, or by a person."""
    from megascale_ops.cli.terminal.output import print_json

    states = _nodes().states()
    shown = [one for _, one in sorted(states.items()) if show_all or not one.is_usable]
    if as_json:
        print_json({"nodes": [{**one._asdict(), "is_ours": one.is_ours} for one in shown]})
        return
    for one in shown:
        whose = "ours" if one.is_ours else one.by
        click.echo(" · ".join(filter(None, (one.name, one.words, whose, one.reason))))
    if not shown:
        click.echo("the one node is in service" if len(states) == 1 else f"all {len(states)} nodes are in service")


@slurm.command()
@argument("node")
@argument("reason")
@log_options
def drain(node: str, reason: str) -> None:
    """Let no new job onto NODE, with REASON behind our prefix; what runs there goes on."""
    click.echo(_nodes().drain(node, reason))


@slurm.command()
@argument("node")
@log_options
def resume(node: str) -> None:
    """Put NODE back into service where a verdict of ours has drained it."""
    click.echo(_nodes().resume(node))


@slurm.command()
@argument("node")
@click.option("--reason", default="restart", metavar="TEXT", help="Why, behind our prefix.  [restart]")
@log_options
def reboot(node: str, reason: str) -> None:
    """Restart NODE as soon as it runs nothing (`scontrol reboot ASAP`); it comes back into service by itself."""
    click.echo(_nodes().reboot(node, reason))
