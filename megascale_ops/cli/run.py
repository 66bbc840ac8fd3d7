# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops run [options] -- SCRIPT [arguments]``: torchrun's options, supervised.

Spellings with underscores are accepted as torchrun accepts them. Options of torchrun that the controller makes
needless are taken and explained once, so that a launch line carries over unchanged.
"""

import logging
from pathlib import Path
from typing import Any

import click

from megascale_ops.cli.options import config_option, log_options

log = logging.getLogger(__name__)

_NEEDLESS = {
    "standalone": "a run without --controller is always alone",
    "rdzv_backend": "the controller is the rendezvous",
    "node_rank": "the controller gives ranks to nodes",
    "master_addr": "the controller tells every node where rank 0 is",
    "master_port": "every round gets a free port of its own",
    "start_method": "ranks are always programs of their own",
}


def _dashes(name: str) -> str:
    return name if not name.startswith("--") and "_" not in name else name.replace("_", "-")


@click.command(
    "run",
    context_settings={
        "token_normalize_func": _dashes,
        "ignore_unknown_options": False,
        "allow_interspersed_args": False,
    },
)
@click.option("--nproc-per-node", metavar="N", help="Ranks on this node: a number, or auto, gpu, cpu.  [1]")
@click.option("--nnodes", metavar="N|MIN:MAX", help="Nodes of the job; a range makes it elastic.  [1]")
@click.option("--job", "--rdzv-id", metavar="NAME", help="Name of the job.  [script and time]")
@click.option("--controller", "--rdzv-endpoint", metavar="URL", help="Controller to obey.  [one of this run's own]")
@click.option("--node-name", metavar="NAME", help="Name of this node.  [host name]")
@click.option("--token-file", metavar="FILE", help="File with the controller's token, mode 0600.")
@click.option("--run-dir", metavar="DIR", help="Journal, logs, incidents.  [~/.local/state/megascale-ops/JOB]")
@click.option("--box-root", metavar="DIR", help="Where black boxes live.  [/dev/shm/megascale-ops]")
@click.option("--checkpoint-dir", metavar="DIR", help="MEGASCALE_CHECKPOINT_DIR of the script.  [RUN_DIR/checkpoints]")
@click.option("--log-dir", metavar="DIR", help="Output of the ranks.  [RUN_DIR/logs]")
@click.option("--local-addr", metavar="ADDR", help="Address by which other nodes reach this one.")
@click.option("--role", metavar="NAME", help="Role of the ranks, as in torchrun.")
@click.option("--max-restarts", type=int, metavar="N", help="Restarts in all.  [only the hourly budgets count]")
@click.option(
    "--monitor-interval", "monitor_interval_s", type=float, metavar="S", help="Look at ranks every S s.  [0.02]"
)
@click.option("--stop-grace", "stop_grace_s", type=float, metavar="S", help="From SIGTERM to SIGKILL.  [5]")
@click.option("--warm", is_flag=True, default=None, help="Keep spare processes that have imported torch already.")
@click.option(
    "--wrap", is_flag=True, default=None, help="Supervise another launcher (deepspeed, a script) as one unit."
)
@click.option("-m", "--module", is_flag=True, default=None, help="SCRIPT is a module, as in `python -m`.")
@click.option("--no-python", is_flag=True, default=None, help="SCRIPT is a program, not Python.")
@click.option(
    "--nccl-profiler",
    type=click.Choice(["auto", "on", "off"]),
    help="Record every collective through NCCL's profiler interface.  auto: where there is a GPU.  [auto]",
)
@click.option(
    "--profile-every", type=click.IntRange(0), metavar="N", help="Time the kernels of one step in N (0: none).  [0]"
)
@click.option("-q", "--quiet", is_flag=True, default=None, help="Do not show what the ranks print (it is in the logs).")
@click.option("--local-ranks-filter", metavar="RANKS", help="Show the output of these local ranks only, as in 0,3.")
@click.option("-t", "--tee", metavar="STD", hidden=True)
@click.option("-r", "--redirects", metavar="STD", hidden=True)
@click.option(
    "--policy",
    "policy_items",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set one value of [run.policy]: silence_floor_s=10, frozen=warn.",
)
@click.option(
    "--dry-run", is_flag=True, default=None, help="Judge, say what would be done, and stop or restart nothing."
)
@click.option("--standalone", is_flag=True, default=None, hidden=True)
@click.option("--rdzv-backend", hidden=True)
@click.option("--node-rank", hidden=True)
@click.option("--master-addr", hidden=True)
@click.option("--master-port", hidden=True)
@click.option("--start-method", hidden=True)
@config_option
@log_options
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- SCRIPT [ARGUMENTS]...")
def run(command: tuple[str, ...], config_path: Path | None, **options: Any) -> int:  # noqa: ANN401  click hands over what the options above say
    """Launch a training script, watch every rank, restart from the newest good checkpoint.

    The script needs no change. Without --controller this run starts a controller and an agent of its own.
    """
    from megascale_ops.cli.configuration import load
    from megascale_ops.controller import tuning
    from megascale_ops.runner.main import run as start

    for name, reason in _NEEDLESS.items():
        if options.pop(name, None):
            log.info("--%s is not needed: %s", name.replace("_", "-"), reason)
    options.pop("tee", None)
    if str(options.pop("redirects", None) or "0") != "0":
        options["quiet"] = True
    if options.get("controller") and "//" not in options["controller"]:
        options["controller"] = f"http://{options['controller']}"
    options["policy"] = tuning.values(tuning.read(options.pop("policy_items")))
    if options.pop("dry_run"):
        options["policy"]["dry_run"] = True
    config, _origins = load("run", options, config_path)
    tuning.check_policy(config.policy)
    if config.policy.dry_run:
        log.warning("dry run: what would be done is only said; a rank that dies ends the job")
    return start(config, command, observe=_tell)


def _tell(kind: str, reply: Any) -> None:  # noqa: ANN401  JoinReply; importing it here would cost --help its start-up
    """Print what the controller decided, one line for each round that follows a fault."""
    if reply.verdict is None:
        return
    verdict = reply.verdict
    ranks = ", ".join(str(rank) for rank in verdict.culprits) or "none named"
    what = f"restarting as round {reply.round}" if kind == "go" else "stopping"
    log.warning(
        "%s (rank %s): %s; %s. `megascale-ops why %s` tells more",
        verdict.fault,
        ranks,
        verdict.reason,
        what,
        reply.incident,
    )
