# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops controller``: serve the controller until SIGTERM or Ctrl-C."""

from typing import Any

import click

from megascale_ops.cli.terminal.options import FiniteRange, config_option, log_options
from megascale_ops.garbage_kept import GarbageKept


@click.command
@click.option("--listen", metavar="HOST:PORT", help="Where to serve; port 0 takes a free one.  [127.0.0.1:7070]")
@click.option("--store", metavar="URL", help="Journal: sqlite:///FILE or postgresql://...  [sqlite:///ops.db]")
@click.option("--journal-mb", type=int, metavar="MB", help="Bound of the journal; the oldest goes first.  [1024]")
@click.option("--store-wait-s", type=float, metavar="S", help="Wait so long for a PostgreSQL that is away.  [60]")
@click.option("--advertise", metavar="URL", help="Address by which clients reach it, beside another controller.")
@click.option("--token-file", metavar="FILE", help="File with the token; needed to listen beyond loopback.")
@click.option("--open-page", is_flag=True, default=None, help="Let whoever reaches the port read the page; no token.")
@click.option("--port-file", metavar="FILE", help="Write the port that was bound into this file.")
@click.option("--run-dir", metavar="DIR", help="Where incidents keep their evidence.")
@click.option("--record", metavar="DIR", help="Record what comes in there.  [recording, beside the journal]")
@click.option("--record-mb", type=int, metavar="MB", help="Bound of recordings; 0: nothing is recorded.  [64]")
@click.option("--record-minutes", type=FiniteRange(0, min_open=True), metavar="N", help="Keep them so long.  [60]")
@click.option("--tls-cert", metavar="FILE", help="Serve https with this certificate.")
@click.option("--tls-key", metavar="FILE", help="The certificate's key.")
@click.option("--tls-client-ca", metavar="FILE", help="Ask clients for a certificate of this authority (mutual TLS).")
@click.option("--otlp-endpoint", metavar="URL", help="OpenTelemetry collector to send incidents and steps to, or none.")
@click.option(
    "--engine",
    type=click.Choice(["auto", "slurm", "kubernetes", "none"]),
    help="Whose nodes are drained when a verdict puts one out.  [auto: Slurm's, inside of a Slurm job]",
)
@click.option(
    "--node-states-s", type=FiniteRange(0), metavar="S", help="Read so often which nodes it has out; 0: never.  [60]"
)
@click.option("--exit-with-parent", type=int, metavar="PID", help="End when this process ends.")
@config_option
@log_options
def controller(config_path: str | None, **options: Any) -> int:  # noqa: ANN401  the options above, by field name
    """Serve the controller: gather heartbeats, judge them, drive recovery, keep the journal."""
    from megascale_ops.cli.config.configuration import load

    config, _ = load("controller", options, config_path)
    with GarbageKept():  # 0.1 s of CPU while it is imported, and at its end 0.1 s more
        from megascale_ops.controller.main import serve

    return serve(config)
