# SPDX-License-Identifier: Apache-2.0
"""The table of verbs, and the boundary where an error becomes one sentence and an exit code.

A verb's module is imported when the verb is called, and the verb imports its program when it runs: ``--help`` of
the whole reads only this file (and click), so it answers within 0.2 s.

Exit codes: 0 done, 1 something of ours failed, 2 the command was given wrongly, 130 interrupted; a verb that wraps
a program (``run``, ``demo``) passes on that program's code.
"""

import errno
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import click

import megascale_ops
from megascale_ops.cli.terminal.groups import NamingGroup
from megascale_ops.cli.terminal.interrupt import EXIT_INTERRUPTED, ctrl_c_ends
from megascale_ops.cli.terminal.options import PROGRAM, log_options
from megascale_ops.errors import MegascaleError
from megascale_ops.suggest import unknown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from click.shell_completion import CompletionItem

EXIT_USAGE = 2

# What click calls a number, and what people do.
_NUMBERS = {
    "a valid float range": "a number",
    "a valid integer range": "a whole number",
    "a valid float": "a number",
    "a valid integer": "a whole number",
}
# Libraries that come with an extra only, so that a missing one can be named with its remedy.
EXTRAS = {
    "torch": "train",
    "triton": "kernels",
    "numpy": "controller",
    "plotly": "report",
    "perfetto": "report",
    "psycopg": "store",
    "grafana_client": "dashboards",
    "textual": "top",
}


class Verb(NamedTuple):
    """Where a verb lives: ``module`` holds a click command named ``attribute``."""

    module: str
    attribute: str
    help: str


VERBS = {
    "run": Verb("megascale_ops.cli.run", "run", "Launch a training script, watch every rank, bring it back."),
    "demo": Verb("megascale_ops.cli.demo.verb", "demo", "Train on this machine, break it, and watch it recover."),
    "status": Verb("megascale_ops.cli.status", "status", "Show jobs, nodes and ranks: step, phase, step time."),
    "top": Verb("megascale_ops.cli.top.verb", "top", "Watch a job in the terminal: verdict, progress, ranks."),
    "page": Verb("megascale_ops.cli.page", "page", "Tell where to see a job in a browser."),
    "jobs": Verb("megascale_ops.cli.jobs", "jobs", "List this machine's runs, living and past."),
    "logs": Verb("megascale_ops.cli.logs", "logs", "Show, search and follow what ranks printed."),
    "incidents": Verb("megascale_ops.cli.incidents", "incidents", "List what happened and what was done about it."),
    "why": Verb("megascale_ops.cli.why", "why", "Explain one incident: the verdict, its evidence and numbers."),
    "skew": Verb("megascale_ops.cli.skew", "skew", "Show who waits for whom in collectives, and what it costs."),
    "profile": Verb("megascale_ops.cli.profile", "profile", "Time the kernels of ranks, and name who is slower."),
    "bad-hardware": Verb("megascale_ops.cli.bad_hardware", "bad_hardware", "Show GPUs that failed before; forget one."),
    "nodes": Verb("megascale_ops.cli.nodes.verb", "nodes", "Show where nodes stand; take one out, release it, undo."),
    "policy": Verb("megascale_ops.cli.policy", "policy", "Show, change and replay what is done about each fault."),
    "inspect": Verb("megascale_ops.cli.inspect", "inspect", "Say what dead ranks last did, from their black boxes."),
    "whatif": Verb("megascale_ops.cli.whatif", "whatif", "Predict a step if a slow rank or link were not slow."),
    "trace": Verb("megascale_ops.cli.trace", "trace", "Draw what the ranks did in their last steps, for Perfetto."),
    "report": Verb("megascale_ops.cli.report", "report", "Write one HTML file: verdicts, who was late, lost time."),
    "controller": Verb("megascale_ops.cli.controller", "controller", "Serve the controller: judge and drive recovery."),
    "agent": Verb("megascale_ops.cli.agent", "agent", "Run this node's agent: read ranks and host, obey orders."),
    "token": Verb("megascale_ops.cli.token", "token", "Make a controller's token, or derive one that allows less."),
    "audit": Verb("megascale_ops.cli.runs.audit", "audit", "List who ordered a controller what, and from where."),
    "chaos": Verb("megascale_ops.cli.chaos.verb", "chaos", "Break a job on purpose, and score the verdicts."),
    "simulate": Verb("megascale_ops.cli.simulate.verb", "simulate", "Simulate a large cluster and its faults."),
    "recording": Verb("megascale_ops.cli.recording.verb", "recording", "Export what led to an incident; replay it."),
    "plan": Verb("megascale_ops.cli.plan.verb", "plan", "Choose spares, checkpoint interval, patience and checks."),
    "dashboards": Verb("megascale_ops.cli.dashboards", "dashboards", "Export, push and check the Grafana dashboards."),
    "targets": Verb("megascale_ops.cli.targets", "targets", "List whom Prometheus shall scrape."),
    "submit": Verb("megascale_ops.cli.submit.verb", "submit", "Hand a job in to Slurm or Kubernetes."),
    "slurm": Verb("megascale_ops.cli.slurm.nodes", "slurm", "Show, drain and resume nodes of a Slurm cluster."),
    "stop": Verb("megascale_ops.cli.runs.stop", "stop", "End a job in order, after a checkpoint where asked for."),
    "compare": Verb("megascale_ops.cli.runs.compare", "compare", "Show two runs side by side."),
    "checkpoint": Verb("megascale_ops.cli.checkpoint.verb", "checkpoint", "List, verify, compare, prune checkpoints."),
    "clean": Verb("megascale_ops.cli.clean", "clean", "Remove what runs that are over left behind."),
    "diagnose": Verb("megascale_ops.cli.diagnose.verb", "diagnose", "Measure this machine: is its hardware good?"),
    "doctor": Verb("megascale_ops.cli.doctor.verb", "doctor", "Say what of this machine's set-up is missing."),
    "completion": Verb("megascale_ops.cli.completion", "completion", "Print what lets a shell complete by Tab."),
    "examples": Verb("megascale_ops.cli.examples", "examples", "Copy example scripts and deployment files."),
    "notify": Verb("megascale_ops.cli.notify.verb", "notify", "Try how people are told of incidents."),
    "config": Verb("megascale_ops.cli.config.verb", "config", "Show every setting's value and where it came from."),
}


class VerbTable(NamingGroup):
    """A click group whose commands are the rows of a table, loaded when they are called."""

    what = "verb"

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs in the table's order: what a newcomer needs comes first."""
        del ctx
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one verb, or None when the table has no such row."""
        del ctx
        verb = VERBS.get(cmd_name)
        if verb is None:
            return None
        from importlib import import_module

        try:
            module = import_module(verb.module)
        except ModuleNotFoundError as error:
            raise click.ClickException(_missing(cmd_name, error)) from error
        command: click.Command = getattr(module, verb.attribute)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem]":
        """Offer verbs from the table, without importing one of them, and options of the whole."""
        from click.shell_completion import CompletionItem

        verbs = [CompletionItem(name, help=verb.help) for name, verb in VERBS.items() if name.startswith(incomplete)]
        return verbs + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print the verbs from the table, without importing one of them."""
        del ctx
        with formatter.section("Verbs"):
            formatter.write_dl([(name, verb.help) for name, verb in VERBS.items()])


def _missing(verb: str, error: ModuleNotFoundError) -> str:
    """Return the sentence for a verb whose module, or a library below it, is not installed."""
    name = (error.name or "a module").partition(".")[0]
    if name.startswith("megascale"):
        return f"`{verb}` is not part of this installation ({error.name} is missing): reinstall megascale-ops"
    remedy = f"pip install 'megascale-ops[{EXTRAS[name]}]'" if name in EXTRAS else f"pip install {name}"
    return f"`{verb}` needs {name}, which is not installed: {remedy}"


@click.group(
    PROGRAM,
    cls=VerbTable,
    subcommand_metavar="VERB ...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="`megascale-ops VERB --help` tells more about one verb.",
)
@click.version_option(megascale_ops.__version__, prog_name=PROGRAM)
@log_options
def program() -> None:
    """Keep large training jobs alive, and say what broke, with evidence."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command line and return its exit code; never raises for a mistake of the user's.

    Until a verb takes SIGINT for itself, Ctrl-C ends the process on the spot: there is nothing to tidy up yet.

    Args:
        arguments: what follows the program's name; None takes ``sys.argv``.
    """
    _print_anything()
    try:
        with ctrl_c_ends(EXIT_INTERRUPTED):
            outcome = program.main(arguments, prog_name=PROGRAM, standalone_mode=False, obj=_names)
        if sys.stdout is not None:  # None: the parent process closed it (`>&-`)
            sys.stdout.flush()
    except (click.Abort, KeyboardInterrupt) as error:
        if isinstance(error.__cause__, EOFError):  # click takes each for Ctrl-D: at a question it leaves no cause
            raise error.__cause__ from None
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _speak_to_nobody()  # the reader of the output has ended (`| head`)
        return 1
    except OSError as error:
        return _report(MegascaleError(_surroundings(error)))
    except UnicodeEncodeError:
        given = sys.argv[1:] if arguments is None else arguments
        foreign = next((word for word in given if not word.isprintable() and "\\udc" in ascii(word)), None)
        if foreign is None:
            raise
        return _report(click.UsageError(f"{foreign!r} can't be: it is not in UTF-8"))
    except (click.ClickException, MegascaleError, ModuleNotFoundError) as error:
        return _report(error)
    return outcome if isinstance(outcome, int) else 0


def _print_anything() -> None:
    """Let what the terminal's encoding lacks be written as an escape: a sign for people must not end a command."""
    if sys.stdout is not None and not sys.stdout.encoding.lower().startswith("utf"):
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a text stream, as at any start


def _names(kind: str, given: dict[str, Any]) -> "Iterable[tuple[str, str]]":
    """Return what a shell may complete to; asked for by Tab alone."""
    from megascale_ops.cli.sources.names import names

    return names(kind, given)


def _surroundings(error: OSError) -> str:
    """Return the sentence for what the system refused and no verb told: a file's name, an output, the current folder.

    A question whether a file exists raises this, too, where a folder is closed or a name too long.

    Raises:
        OSError: the same, where it names no file: that is a bug of ours.
    """
    if error.filename is not None:
        import logging

        logging.getLogger(__name__).debug("where the system refused", exc_info=error)
        return f"{os.fsdecode(error.filename)}: {error.strerror} (`--log-level debug` shows what it was needed for)"
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}:
        _speak_to_nobody()
        return f"what was to be printed can't be written: {error.strerror}"
    if _has_folder():
        raise error
    return "the current folder has been removed: change to another one (`cd ~`)"


def _has_folder() -> bool:
    """Say whether the folder in which the command was typed is still there; relative paths lead nowhere without it."""
    try:
        return bool(os.getcwd())  # noqa: PTH109  as above all that uses it
    except OSError:
        return False


def _speak_to_nobody() -> None:
    """Let stdout lead nowhere: Python would complain again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: click.ClickException | MegascaleError | ModuleNotFoundError) -> int:
    """Print one sentence for what went wrong and return the exit code; a bug of ours is raised again."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message())
        return EXIT_USAGE
    if isinstance(error, click.ClickException):
        sentence, code = _sentence(error), error.exit_code
    elif isinstance(error, MegascaleError):
        sentence, code = str(error), error.exit_code
    elif (error.name or "").partition(".")[0] in EXTRAS:
        sentence, code = _missing(PROGRAM, error), 1
    else:
        raise error
    from megascale_ops.schema.wording import escaped, shortened  # a mistake may take a millisecond more; --help may not

    click.echo(f"{PROGRAM}: {shortened(escaped(sentence))}", err=True)
    return code


def _sentence(error: click.ClickException) -> str:
    """Return one sentence for what click refused; its own wording is kept where it already is one."""
    if isinstance(error, click.NoSuchOption):
        options = [name for param in (error.ctx.command.params if error.ctx else []) for name in param.opts]
        return unknown("option", error.option_name, [*options, "--help"])
    text = " ".join(error.format_message().split()).rstrip(".")
    for theirs, ours in _NUMBERS.items():
        text = text.replace(theirs, ours)
    return text[:1].lower() + text[1:] if text[:2] != text[:2].upper() else text


if __name__ == "__main__":
    sys.exit(main())
