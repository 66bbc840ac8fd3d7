# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops run [options] -- SCRIPT [arguments]``: torchrun's options, supervised.

torchrun's whole launch line is taken, with all its spellings and its PET_ variables: see ``terminal/torchrun.py``.
"""

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megascale_ops.cli.terminal.completion import SHELLS, offers, print_completion
from megascale_ops.cli.terminal.options import FiniteRange, config_option, log_options
from megascale_ops.cli.terminal.renamed import note
from megascale_ops.cli.terminal.torchrun import (
    TorchrunCommand,
    explain,
    prefer_our_variables,
    take_torchruns_own,
    waits_of,
)
from megascale_ops.errors import MegascaleError, UsageError

if TYPE_CHECKING:
    import queue

log = logging.getLogger(__name__)

_BOTH = 3  # torchrun's number for both streams: 1 is stdout, 2 is stderr, 0 neither
_BY_SIGNAL = 128  # exit codes from here on mean one
_OTHERS = -1  # local ranks that are not listed
_MOST_RANKS = 8  # in a line of the terminal


@take_torchruns_own
@click.command("run", cls=TorchrunCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "--nproc-per-node", metavar="N", help="Ranks on this node: a number, or auto, gpu, cpu.  [1; a Slurm step's GPUs]"
)
@click.option(
    "--nnodes", metavar="N|MIN:MAX", help="Nodes of the job; a range makes it elastic.  [1, or a Slurm step's]"
)
@click.option("--job", "--rdzv-id", metavar="NAME", help="Name of the job.  [script and time]")
@click.option("--controller", metavar="URL", help="Controller to obey, or several: A,B.  [one of this run's own]")
@click.option("--rdzv-endpoint", metavar="HOST:PORT", help="Where nodes meet, as in torchrun: the controller is there.")
@click.option("--rdzv-backend", metavar="NAME", hidden=True)
@click.option("--rdzv-conf", metavar="KEY=VALUE,...", hidden=True)
@click.option("--node-rank", type=int, metavar="N", hidden=True)
@click.option("--master-addr", metavar="HOST", help="As in torchrun: with --master-port, where rank 0 is reached.")
@click.option("--master-port", type=click.IntRange(0, 65535), metavar="N", help="Port of rank 0's store.  [a free one]")
@click.option("--virtual-local-rank", is_flag=True, default=None, help="Each rank sees one GPU, as LOCAL_RANK 0.")
@click.option("--logs-specs", metavar="NAME", hidden=True)
@click.option("--node", "node_name", metavar="NAME", help="Name of this node.  [host name]")
@click.option("--node-name", "old_node_name", metavar="NAME", hidden=True)
@click.option(
    "--controller-wait",
    "controller_wait_s",
    type=FiniteRange(0),
    metavar="S",
    help="For a controller that does not answer yet.  [60]",
)
@click.option("--token-file", metavar="FILE", help="File with the controller's token, mode 0600.")
@click.option("--run-dir", metavar="DIR", help="Journal, logs, incidents.  [~/.local/state/megascale-ops/JOB]")
@click.option("--box-root", metavar="DIR", help="Where black boxes live.  [/dev/shm/megascale-ops-UID]")
@click.option(
    "--checkpoint-dir", metavar="DIR|URL", help="MEGASCALE_CHECKPOINT_DIR of the script.  [RUN_DIR/checkpoints]"
)
@click.option("--log-dir", metavar="DIR", help="Output of the ranks; of several nodes in DIR/NODE.  [RUN_DIR/logs]")
@click.option("--local-addr", metavar="ADDR", help="Address by which other nodes reach this one.")
@click.option("--role", metavar="NAME", help="Role of the ranks, as in torchrun.")
@click.option("--max-restarts", type=int, metavar="N", help="Restarts in all.  [only the hourly budgets count]")
@click.option(
    "--requeues",
    type=click.IntRange(0),
    metavar="N",
    help="Slurm: when the job's time is up, save and go back into the queue, N times in all.  [0]",
)
@click.option(
    "--eviction-grace",
    "eviction_grace_s",
    type=FiniteRange(0),
    metavar="S",
    help="A pod: SIGTERM means that it is evicted within S s; save, and let the job go on without it.  [0: it stops]",
)
@click.option(
    "--monitor-interval", "monitor_interval_s", type=float, metavar="S", help="Look at ranks every S s.  [0.02]"
)
@click.option(
    "--stop-grace",
    "--shutdown-timeout",
    "stop_grace_s",
    type=float,
    metavar="S",
    help="From SIGTERM to SIGKILL.  [30]",
)
@click.option(
    "--child-grace",
    "child_grace_s",
    type=click.FloatRange(0),
    metavar="S",
    help="For what ranks that ended well left running; inf: until it ends.  [30]",
)
@click.option(
    "--preflight",
    type=click.Choice(["none", "quick", "full"]),
    help="Measure each node before it joins, and keep bad ones out (`diagnose`).  [none]",
)
@click.option(
    "--warm-gpu",
    is_flag=True,
    default=None,
    help="--warm, and each has made its CUDA context; with --nccl-profiler off it has used NCCL, too.",
)
@click.option("--warm", is_flag=True, default=None, help="Keep spare processes that have imported torch already.")
@click.option(
    "--wrap",
    is_flag=True,
    default=None,
    help="Supervise another launcher (deepspeed, mpirun, a script) and its ranks.",
)
@click.option("--hosts", metavar="FILE", help="Start on these hosts by ssh; one a line, as `node1 slots=8`.")
@click.option("--ssh", metavar="COMMAND", help="With --hosts: ssh with options of its own.  [ssh]")
@click.option("--remote-python", metavar="PATH", help="With --hosts: Python there.  [the path of this one]")
@click.option("--handed-over", is_flag=True, hidden=True)
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
@click.option("--log-line-prefix-template", metavar="TEXT", hidden=True)
@click.option(
    "--print-completion",
    type=click.Choice(SHELLS),
    is_eager=True,
    expose_value=False,
    hidden=True,
    callback=print_completion,
)
@click.option(
    "--policy",
    "policy_items",
    multiple=True,
    metavar="NAME=VALUE",
    shell_complete=offers("setting"),
    help="Set one value of [run.policy]: silence_floor_s=10, frozen=warn.",
)
@click.option(
    "--dry-run", is_flag=True, default=None, help="Judge, say what would be done, and stop or restart nothing."
)
@config_option
@log_options
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- SCRIPT [ARGUMENTS]...")
@click.pass_context
def run(
    ctx: click.Context,
    /,
    command: tuple[str, ...],
    config_path: Path | None,
    **options: Any,  # noqa: ANN401  click passes the options above
) -> int:
    """Launch a training script, watch every rank, restart from the newest good checkpoint.

    The script needs no change. Without --controller this run starts a controller and an agent of its own.
    """
    from megascale_ops.runner.interrupts import signals_kept

    with signals_kept() as came:
        return _run_handed_over(came) if options.pop("handed_over") else _run(ctx, command, config_path, options, came)


def _run(
    ctx: click.Context,
    command: tuple[str, ...],
    config_path: Path | None,
    options: dict[str, Any],
    came: "queue.SimpleQueue[int]",
) -> int:
    """Run what the command line says."""
    from megascale_ops.cli.config.configuration import load
    from megascale_ops.cli.terminal.needs import need
    from megascale_ops.runner.main import run as start
    from megascale_ops.schema.policy_settings import read_settings, values_of

    prefer_our_variables(ctx, options)
    explain(options)
    waits = waits_of(options.pop("rdzv_conf"))
    options.update(_shown(options.pop("redirects"), options.pop("tee"), options["local_ranks_filter"]))
    if options.get("controller"):
        given = options["controller"].split(",")
        options["controller"] = ",".join(one if "//" in one else f"http://{one.strip()}" for one in given)
    _name_node(ctx, options)
    options["policy"] = {**waits, **values_of(read_settings(options.pop("policy_items")))}
    if options.pop("dry_run"):
        options["policy"]["dry_run"] = True
    config, _origins = load("run", options, config_path)
    if not config.hosts and (options["ssh"] is not None or options["remote_python"] is not None):
        raise UsageError("--ssh and --remote-python are for --hosts FILE, which is missing")
    if config.hosts:
        from megascale_ops.runner.hosts.launch import over_hosts

        need(*(() if config.controller else ("numpy",)))
        return over_hosts(config, command, os.environ)
    # A wrapped launcher has torch where it runs; a controller on another machine has its own NumPy.
    need(*(() if config.wrap else ("torch",)), *(() if config.controller else ("numpy",)))
    if config.policy.dry_run:
        log.warning("dry run: what would be done is only said; a rank that dies ends the job")
    code = start(config, command, observe=_report_reply, config_file=str(config_path or ""), came=came)
    if code < _BY_SIGNAL:  # after a signal the user waits for the prompt
        _tidy(config.keep_days, config.keep_runs)
    return code


def _run_handed_over(came: "queue.SimpleQueue[int]") -> int:
    """Run what `run --hosts` on another machine has written to stdin."""
    from megascale_ops.cli.terminal.needs import need
    from megascale_ops.runner.hosts.handed_over import handed_over
    from megascale_ops.runner.main import run as start

    with handed_over() as (handed, lost):
        need(*(() if handed.config.wrap else ("torch",)))
        return start(handed.config, handed.command, observe=_report_reply, is_lost=lost.is_set, came=came)


def _tidy(keep_days: float, keep_runs: int) -> None:
    """Let go what old runs have left behind, and say so."""
    from megascale_ops.cli.sources.retention import tidy
    from megascale_ops.cli.terminal.tables import data_size

    try:
        freed = tidy(keep_days, keep_runs)
    except MegascaleError as error:
        log.warning("what old runs have left behind could not be removed: %s", error)
        return
    if freed.runs:
        log.info(
            "removed what %d old runs have left behind, %s, but not their checkpoints (keep_days = %g, keep_runs = %d)",
            freed.runs,
            data_size(freed.size_bytes),
            keep_days,
            keep_runs,
        )


def _name_node(ctx: click.Context, options: dict[str, Any]) -> None:
    """Take the node's name by its old option, too; what torchrun takes as the beginning of --node-rank is refused.

    Raises:
        UsageError: --node is given a number.
    """
    old = options.pop("old_node_name")
    given = options["node_name"]
    if given is not None and given.isdigit():
        raise UsageError(f"--node {given} names the node: its number is --node-rank {given}")
    if old is not None:
        note(ctx, "--node-name", "--node")
        options["node_name"] = given or old


def _streams(option: str, text: str) -> dict[int, int]:
    """Read what torchrun takes: one number for all local ranks, or 0:3,1:1 for some; _OTHERS stands for the rest."""
    if re.fullmatch(r"[0-3]", text):
        return {_OTHERS: int(text)}
    if not re.fullmatch(r"[0-9]{1,6}:[0-3](,[0-9]{1,6}:[0-3])*", text):
        raise UsageError(f"{option} {text!r} can't be read: give 0, 1, 2 or 3, or that for local ranks, as in 0:3,1:1")
    return {_OTHERS: 0, **{int(rank): int(number) for rank, number in (one.split(":") for one in text.split(","))}}


def _shown(redirects: str | None, tee: str | None, ranks_filter: str | None) -> dict[str, Any]:
    """Return the options of ours that show what ``--redirects`` and ``--tee`` leave on torchrun's terminal.

    Output is in files in any case. So --redirects asks only to show less, and --tee to show that nevertheless.

    Raises:
        UsageError: when one of them can't be read.
    """
    from megascale_ops.runner.plan import parse_ranks

    hidden, kept = _streams("--redirects", redirects or "0"), _streams("--tee", tee or "0")
    if tee and not any(hidden.values()):
        log.info("--tee is not needed: what ranks print is always kept in files, and shown unless an option hides it")
    left = {
        rank: _BOTH & ~hidden.get(rank, hidden[_OTHERS]) | kept.get(rank, kept[_OTHERS]) for rank in {**hidden, **kept}
    }
    if set(left.values()) == {_BOTH}:
        return {}
    if set(left.values()) <= {0, _BOTH} and left[_OTHERS] == 0:
        wanted = parse_ranks(ranks_filter or "") or tuple(left)
        ranks = sorted(rank for rank, streams in left.items() if streams and rank in wanted)
        return {"local_ranks_filter": ",".join(map(str, ranks))} if ranks else {"quiet": True}
    log.warning(
        "--redirects %s has no effect: what ranks print is in files and on the terminal; -q or --local-ranks-filter "
        "hides whole ranks, not one stream",
        redirects,
    )
    return {}


def _report_reply(kind: str, reply: Any, where: str) -> None:  # noqa: ANN401  JoinReply; importing it here would cost --help its start-up
    """Print what the controller decided, one line for each round that follows a fault, and what it only warns of.

    Of a job that has failed the run's last line tells why.
    """
    if kind == "notice":
        _report_notice(reply, where)
        return
    if reply.verdict is None or (kind == "stop" and reply.exit_code):
        return
    verdict = reply.verdict
    what = f"restarting as round {reply.round}" if kind == "go" else "stopping"
    named = _named(verdict.fault, verdict.culprits, verdict.reason)
    log.warning("%s; %s. `megascale-ops why %s %s` tells more", named, what, reply.incident, where)


def _report_notice(notice: Any, where: str) -> None:  # noqa: ANN401  Notice; as above
    """Print what is seen and not acted upon yet, or that it has passed."""
    if notice.state in ("harmless", "over"):
        ranks, why = _ranks(notice.culprits), notice.done or "it does not hold any more"
        log.info("%s (%s) has passed: %s", notice.fault, ranks, why)
        return
    named = _named(notice.fault, notice.culprits, notice.reason)
    done = notice.done or "it is told only"
    log.warning("%s; %s. `megascale-ops why %s %s` tells more", named, done, notice.incident, where)


def _named(fault: str, culprits: tuple[int, ...], reason: str) -> str:
    """Name the class, the ranks and the reason; the ranks once: many a reason begins with just these."""
    ranks = _ranks(culprits)
    begins = re.match(rf"{re.escape(ranks)}(?!\d|-\d|, \d| and \d)\b", reason)
    return f"{fault}: {reason}" if begins else f"{fault} ({ranks}): {reason}"


def _ranks(culprits: tuple[int, ...]) -> str:
    """Name ranks; of thousands the first few."""
    if not culprits:
        return "no rank named"
    some = ", ".join(map(str, culprits[:_MOST_RANKS]))
    more = f" and {len(culprits) - _MOST_RANKS} more" if len(culprits) > _MOST_RANKS else ""
    return f"{'rank' if len(culprits) == 1 else 'ranks'} {some}{more}"
