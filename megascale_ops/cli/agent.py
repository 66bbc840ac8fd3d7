# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops agent``: run this node's agent until SIGTERM or Ctrl-C."""

from typing import Any

import click

from megascale_ops.cli.terminal.options import config_option, log_options
from megascale_ops.garbage_kept import GarbageKept


@click.command
@click.option("--controller", metavar="URL", help="Address of the controller, or of several; or MEGASCALE_CONTROLLER.")
@click.option("--node", metavar="NAME", help="Name of this node.  [host name]")
@click.option("--box-root", metavar="DIR", help="Where black boxes live.  [/dev/shm/megascale-ops-UID]")
@click.option("--token-file", metavar="FILE", help="File with the controller's token, or one for this node, mode 0600.")
@click.option("--metrics-token-file", metavar="FILE", help="Token asked of who scrapes.  [that of --token-file]")
@click.option("--metrics-listen", metavar="HOST:PORT", help='Where to serve /metrics; "" for nowhere.  [auto]')
@click.option("--look-interval", "look_interval_s", type=float, metavar="S", help="Read ranks every S s.  [0.1]")
@click.option("--heartbeat-interval", "heartbeat_interval_s", type=float, metavar="S", help="Report every S s.  [1]")
@click.option("--sys-root", metavar="DIR", help="Where the node's /sys is mounted.  [/sys]")
@click.option("--proc-root", metavar="DIR", help="Where the node's /proc is mounted.  [/proc]")
@click.option("--fabric-exclude", metavar="PATTERNS", help='Adapters or counters never to read, as "mlx5_4,mlx5_b*".')
@click.option("--kernel-log", metavar="FILE", help='The kernel\'s log; "" for none.  [/dev/kmsg]')
@click.option("--exit-with-parent", type=int, metavar="PID", help="End when this process ends.")
@config_option
@log_options
def agent(config_path: str | None, **options: Any) -> int:  # noqa: ANN401  the options above, by field name
    """Run this node's agent: read the ranks' black boxes and the host, send heartbeats, obey orders."""
    from megascale_ops.cli.config.configuration import load

    config, _ = load("agent", options, config_path)
    from megascale_agents.startup import memory

    with GarbageKept():
        from megascale_agents.daemon import run_agent

    memory.take_one_arena()
    return run_agent(config)
