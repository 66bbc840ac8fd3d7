# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops diagnose``: measure this node's hardware, and judge it against its equals, or compare nodes' reports.

Exit codes: 0 nothing bad (warnings included), 1 something bad was found, 2 given wrongly.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from megascale_ops.cli.diagnose.telling import begun, done, ended, show, silent, writable, write
from megascale_ops.cli.terminal.options import PROGRAM, argument, either, json_option, log_options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megascale_ops.diagnostics.between.meeting import Place
    from megascale_ops.diagnostics.examination import Plan

# Bytes go so long each way: a pair takes twice that, and a round as long as a pair.
_SECONDS = {False: 0.5, True: 3.0}
# Others that each node is measured with: with one a node that is bad with some passes as well as not.
_PARTNERS = {False: 1, True: 3}
_STYLES = {"good": "green", "warn": "yellow", "bad": "red", "unmeasured": "dim"}


@click.command
@argument("files", nargs=-1, type=click.Path(dir_okay=False))
@either("--quick/--full", "quick", default=None, help="Half a minute (default), or up to 10 min and thorough.")
@click.option("--node", metavar="NODE", help="Check that node, through its agent; the controller is asked.")
@click.option("--preempt", is_flag=True, help="With --node: also where a job trains; it is slower meanwhile.")
@click.option("--controller", metavar="URL", help="With --node: address of the controller.  [the newest running one]")
@click.option("--token-file", type=click.Path(), help="With --node: file that holds the controller's token.")
@click.option("--name", metavar="NAME", help="Name of this node in the report.  [host name]")
@click.option("--summary-for", type=int, hidden=True, help="Print a summary, and die with this process.")
@click.option(
    "--path", "paths", multiple=True, metavar="DIR", help="Folder whose disk is measured; repeatable.  [runs, /tmp]"
)
@click.option(
    "--check", "names", multiple=True, metavar="CHECK", help="Only this check (cpu, disk, gemm, ...); repeatable."
)
@click.option("--out", type=click.Path(dir_okay=False), help="Write the report as JSON into this file, too.")
@click.option(
    "--resume", is_flag=True, help="Slurm: put this node back into service if it is good and a verdict had drained it."
)
@click.option("--compare", is_flag=True, help="Judge the reports FILES of several nodes against each other.")
@click.option("--between", metavar="HOST:PORT", help="Measure pairs of nodes: start it on each; node 0 listens there.")
@click.option("--nnodes", type=click.IntRange(2), envvar="SLURM_NNODES", metavar="N", help="Nodes of --between.")
@click.option("--node-rank", type=click.IntRange(0), envvar="SLURM_NODEID", metavar="N", help="This one's number.")
@click.option("--switch", default="", metavar="NAME", help="Switch that this node is below, for --between.")
@json_option
@log_options
def diagnose(
    files: tuple[str, ...],
    quick: bool | None,
    node: str | None,
    preempt: bool,
    controller: str | None,
    token_file: str | None,
    name: str | None,
    summary_for: int | None,
    paths: tuple[str, ...],
    names: tuple[str, ...],
    out: str | None,
    resume: bool,
    compare: bool,
    between: str | None,
    nnodes: int | None,
    node_rank: int | None,
    switch: str,
    as_json: bool,
) -> None:
    """Measure this machine's hardware: is this node good?

    Host, GPUs and the links between them, each check in a process of its own with a deadline. What is slower than its
    equals is named; what can't be measured here is said and held against no one. Nothing is changed or left behind,
    and nothing is installed. On a node that trains, training is slower meanwhile and looks slow.

    With --node NODE the agent of that node makes the check, as far as its rights go, and the result comes back here.

    With --compare FILES, the reports that nodes wrote with --out are judged together: rates against the fleet's median,
    versions against its majority.

    With --between HOST:PORT, started on every node (srun, pdsh), pairs of nodes measure the way between them over TCP,
    in rounds that name bad nodes and bad links. A node that is bad ends with 1, and node 0 when any is.

    With --resume nothing happens on a node that no verdict of ours has drained in Slurm; one that has been is measured,
    and put back into service if it is good. So it may be a HealthCheckProgram.

    Exit code 1 where something bad was found, 0 also with warnings.
    """
    told = {"FILES": files, "--path": paths, "--check": names, "--name": name, "--out": out, "--compare": compare}
    told |= {"--between": between, "--quick/--full": quick is not None, "--resume": resume}
    theirs = {"--preempt": preempt, "--controller": controller, "--token-file": token_file}
    thorough = quick is False
    if node is not None:
        _leave_out(told, "--path --name --out --resume --compare --between FILES", "--node is for another node's agent")
        _elsewhere(node, names, (controller, token_file), thorough=thorough, preempt=preempt, as_json=as_json)
        return
    _leave_out(theirs, " ".join(theirs), "no other node is named with --node")
    if compare or between is not None:
        _leave_out(told, "--resume", "--resume is for a node that measures itself")
    if compare:
        _leave_out(told, "--quick/--full --path --check --name", "--compare reads reports and measures nothing")
        _compare(files, out, as_json=as_json)
    elif between is not None:
        _leave_out(told, "FILES --path --check", "--between measures the ways between nodes alone")
        _between(_place(between, nnodes, node_rank, name, switch, thorough=thorough), out, as_json=as_json)
    else:
        place = writable(out)
        _here(_plan(name, thorough, paths, names, files), place, summary_for, resume=resume, as_json=as_json)


def _here(plan: "Plan", place: Path | None, summary_for: int | None, *, resume: bool, as_json: bool) -> None:
    if summary_for is not None:
        _summarise(plan, summary_for)
    elif not resume:
        _examine(plan, place, as_json=as_json)
    elif _is_ours(plan.node):
        _examine(plan, place, as_json=as_json)  # a bad node ends it with 1
        from megascale_ops.engines.slurm.nodes import SlurmNodes

        click.echo(SlurmNodes().resume(plan.node), err=as_json)


def _is_ours(node: str) -> bool:
    """Return whether a verdict of ours has drained this node in Slurm; all others are not measured, and told why.

    Raises:
        EngineError: Slurm does not say.
    """
    from megascale_ops.engines.actuator import EngineError, find
    from megascale_ops.engines.slurm.nodes import SlurmNodes

    known = find(SlurmNodes().states(), node)
    if known is None:
        raise EngineError(f"Slurm has no node {node}: --name NAME says its name there")
    if not known.is_ours:
        click.echo(f"node {known.name} is {known.words}, and not by a verdict of ours: nothing is measured", err=True)
    return known.is_ours and known.words.lower().startswith("drain")


def _leave_out(given: "Mapping[str, object]", names: str, why: str) -> None:
    """Refuse options that mean nothing here.

    Raises:
        UsageError: one of ``names`` was given.
    """
    from megascale_ops.errors import UsageError

    wrong = next((name for name in names.split() if given[name]), "")
    if wrong:
        raise UsageError(f"{why}: leave {wrong} out")


def _elsewhere(
    node: str,
    names: tuple[str, ...],
    where: tuple[str | None, str | None],
    *,
    thorough: bool,
    preempt: bool,
    as_json: bool,
) -> None:
    """Have another node checked."""
    from megascale_ops.cli.diagnose.remote import check_node
    from megascale_ops.schema.health import CheckAsk

    ask = CheckAsk("full" if thorough else "quick", _known(names), preempt=preempt)
    check_node(node, ask, where, as_json=as_json)


def _known(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return checks by name.

    Raises:
        UsageError: there is no such check.
    """
    from megascale_ops.diagnostics.table import modules
    from megascale_ops.errors import UsageError
    from megascale_ops.suggest import unknown

    for name in names:
        if name not in modules():
            raise UsageError(f"{unknown('check', name, modules())}; there are {', '.join(modules())}")
    return names


def _plan(
    node: str | None, thorough: bool, paths: tuple[str, ...], names: tuple[str, ...], files: tuple[str, ...] = ()
) -> "Plan":
    """Check what was given, before anything is measured.

    Raises:
        UsageError: one sentence.
    """
    import socket

    import megascale_ops
    from megascale_ops.diagnostics.examination import Plan
    from megascale_ops.errors import UsageError
    from megascale_ops.schema.identity import check_name

    if files:
        raise UsageError(f"{files[0]} is no option: reports are compared with `diagnose --compare {' '.join(files)}`")
    _known(names)
    if node:
        check_name("node", node)
    chosen = _folders(paths) if paths else _usual_folders()
    program = f"{PROGRAM} {megascale_ops.__version__}"
    return Plan(node or socket.gethostname(), thorough, chosen, names, program)


def _folders(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return the folders that were named; one that does not answer stays, since its check will say so.

    Raises:
        UsageError: there is no such folder, or it can't be written to.
    """
    from megascale_ops.diagnostics.examination import look_at
    from megascale_ops.diagnostics.host.paths import FORBIDDEN, MISSING
    from megascale_ops.errors import UsageError

    for path, (state, _) in look_at(tuple(dict.fromkeys(paths))).items():
        if state == MISSING:
            raise UsageError(f"--path {path} is not a folder: give one whose disk is to be measured")
        if state == FORBIDDEN:
            raise UsageError(f"--path {path} can't be written to, so its disk can't be measured: give another one")
    return tuple(dict.fromkeys(paths))


def _usual_folders() -> tuple[str, ...]:
    """Return where runs are kept and where temporary files are; of two on one disk the first."""
    import tempfile

    from megascale_ops.diagnostics.examination import look_at
    from megascale_ops.diagnostics.host.paths import MISSING
    from megascale_ops.link.whereabouts import state_root

    root = state_root()
    try:
        temporary = tempfile.gettempdir()
    except OSError:  # no folder takes a file: the check of file systems says more
        temporary = ""
    found = look_at([*map(str, (root, *root.parents)), *filter(None, (temporary,))])
    runs = next(str(folder) for folder in (root, *root.parents) if found[str(folder)][0] != MISSING)
    if not temporary:
        return (runs,)
    return (runs,) if found[runs][1] == found[temporary][1] else (runs, temporary)


def _examine(plan: "Plan", place: Path | None, *, as_json: bool) -> None:
    from megascale_ops.diagnostics.card import card, findings_of, verdict_of
    from megascale_ops.diagnostics.examination import Progress, examine

    report = examine(plan, Progress(begun, done if plan.thorough else silent))
    ended()
    if place is not None:
        write(place, report)
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(report)
    else:
        verdict = verdict_of(findings_of(report))
        show(f"self-check {plan.node} · {report.depth}", card(report), _STYLES[verdict])
    if verdict_of(findings_of(report)) == "bad":
        click.get_current_context().exit(1)


def _summarise(plan: "Plan", parent: int) -> None:
    """Check for an agent: nothing but a summary on stdout, and no life without the agent."""
    from megascale_ops.cli.terminal.output import print_json
    from megascale_ops.diagnostics.child import die_with
    from megascale_ops.diagnostics.examination import Progress, examine
    from megascale_ops.diagnostics.summary import summary

    die_with(parent)
    found = summary(examine(plan, Progress(silent, silent)))
    print_json(found)
    if found.status == "bad":
        click.get_current_context().exit(1)


def _compare(files: tuple[str, ...], out: str | None, *, as_json: bool) -> None:
    from megascale_ops.diagnostics.card import fleet_card, verdict_of
    from megascale_ops.diagnostics.fleet import compare, read_report

    place = writable(out)
    report = compare([read_report(Path(name)) for name in files])
    if place is not None:
        write(place, report)
    verdict = verdict_of(report.findings)
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(report)
    else:
        show("fleet", fleet_card(report), _STYLES[verdict])
    if verdict == "bad":
        click.get_current_context().exit(1)


def _place(
    between: str, nnodes: int | None, node_rank: int | None, node: str | None, switch: str, *, thorough: bool
) -> "Place":
    """Check what was given for ``--between``.

    Raises:
        UsageError: one sentence.
    """
    import socket

    from megascale_ops.cli.terminal.needs import need
    from megascale_ops.diagnostics.between.meeting import Place
    from megascale_ops.errors import UsageError
    from megascale_ops.runner.membership import local_address
    from megascale_ops.schema.identity import check_name

    host, _, port = between.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"--between {between} is no HOST:PORT: give the address of node 0 and a free port there")
    if nnodes is None or node_rank is None:
        raise UsageError("--between needs --nnodes N and --node-rank N (under srun they are known)")
    if node:
        check_name("node", node)
    if node_rank >= nnodes:
        raise UsageError(f"--node-rank {node_rank} is not below --nnodes {nnodes}")
    need("torch")
    seconds = _SECONDS[thorough]
    address = local_address(f"http://{between}")
    partners = _PARTNERS[thorough]
    name = node or socket.gethostname()
    return Place((host, int(port)), node_rank, nnodes, name, switch, address, seconds, partners)


def _between(place: "Place", out: str | None, *, as_json: bool) -> None:
    from megascale_ops.diagnostics.between.meeting import take_part
    from megascale_ops.diagnostics.card import pairs_card

    target = writable(out)
    report = take_part(place, lambda number, pairs: begun([f"round {number}, {pairs} pairs"]))
    ended()
    is_bad = bool(report.bad_nodes or report.bad_links or report.bad_switches)
    if target is not None:
        write(target, report)
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(report)
    elif place.rank == 0:
        style = _STYLES["bad" if is_bad else "warn" if report.unclear else "good"]
        show("between nodes", pairs_card(report), style)
    if (is_bad and place.rank == 0) or place.name in report.bad_nodes:
        click.get_current_context().exit(1)
