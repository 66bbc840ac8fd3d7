# SPDX-License-Identifier: Apache-2.0
"""torchrun's launch line under ``megascale-ops run``: every option of it, its abbreviations and its PET_ variables.

An option that changes nothing here is taken all the same: where what it asks for is so in any case that is said once,
and where it is not done a warning is logged. So a launch line carries over unchanged and no user relies on what is not
there. torchrun's parser is argparse, which takes any beginning of a name that is no other name's beginning too
(``--redirect=3``); so does ours, for torchrun's names.

torchrun takes each option from PET_<NAME> where the line does not give it, a flag as a number. So do we; a variable of
ours (MEGASCALE_RUN_<NAME>) is the more particular one and wins over it.
"""

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from megascale_ops.errors import UsageError
from megascale_ops.schema.policy import value_of

log = logging.getLogger(__name__)

_Command = TypeVar("_Command", bound=click.Command)

# What the option requests is done in any case.
NEEDLESS = {
    "standalone": "a run without --controller is always alone",
    "start_method": "ranks are always programs of their own",
    "run_path": "a script always runs in a Python of its own",
    "use_env": "every rank has its LOCAL_RANK in the environment",
}
# What the option requests is not done.
WITHOUT_EFFECT = {
    "event_log_handler": "events are in the controller's journal: `megascale-ops incidents` lists them",
    "duplicate_stdout_filters": "the whole output of every rank is in its log file, to be searched there",
    "duplicate_stderr_filters": "the whole output of every rank is in its log file, to be searched there",
    "numa_binding": "ranks are bound to no processors; start the script by numactl (--no-python) where that is wanted",
    "signals_to_handle": "SIGTERM, SIGINT, SIGQUIT and SIGHUP end a run in order, SIGUSR1 and SIGUSR2 go to the ranks",
}
FLAGS = frozenset({"standalone", "run_path", "use_env"})
# Options of torchrun's that no PET_ variable gives (torch 2.11 to 2.15).
WITHOUT_VARIABLE = frozenset({"logs_specs", "numa_binding", "print_completion", "use_env"})
# Options that do here what they do there, under torchrun's names; a test compares all of these with torchrun's parser.
TAKEN = (
    *("nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "max_restarts"),
    *("monitor_interval", "role", "module", "no_python", "log_dir", "redirects", "tee", "local_ranks_filter"),
    *("log_line_prefix_template", "print_completion"),  # since torch 2.14
    *("node_rank", "master_addr", "master_port", "local_addr", "logs_specs", "shutdown_timeout", "virtual_local_rank"),
)
NAMES = frozenset({*TAKEN, *NEEDLESS, *WITHOUT_EFFECT})
# rdzv_conf: torchrun's key -> the runner's. "timeout" is the older word for join_timeout.
_WAITS = {"join_timeout": "join_timeout_s", "timeout": "join_timeout_s", "last_call_timeout": "last_call_s"}
# torch's entry points for log settings: torch's own one requests what is done anyway.
_LOGS_GROUP, _LOGS_DEFAULT = "torchrun.logs_specs", "default"


def _speller(command: click.Command) -> Callable[[str], str]:
    """Return what writes an option's name as ``command`` has it: dashes for underscores, abbreviations written out."""
    ours = {flag.removeprefix("--") for param in command.params for flag in param.opts if flag.startswith("--")}
    theirs = {name.replace("_", "-") for name in NAMES}

    def spelled(name: str) -> str:
        dashed = name.replace("_", "-")
        if len(dashed) < 2 or dashed in ours:
            return dashed
        longer = [whole for whole in ours if whole.startswith(dashed)]
        return longer[0] if len(longer) == 1 and longer[0] in theirs else dashed

    return spelled


class TorchrunCommand(click.Command):
    """A command that names the variable when a refused value came from one: click names only the option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the line."""
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            variable = str(error.param.envvar) if error.param is not None else ""
            if repr(os.environ.get(variable)) in error.message:
                said = f"{variable}={os.environ[variable]}: {error.message}"
                raise click.BadParameter(said, error.ctx, error.param, error.param_hint) from error
            raise


def take_torchruns_own(command: _Command) -> _Command:
    """Take every option of torchrun's, the needless ones unseen in --help, and all of them from PET_ variables."""
    for name in (*NEEDLESS, *WITHOUT_EFFECT):
        option = click.Option([f"--{name.replace('_', '-')}"], is_flag=name in FLAGS, default=None, hidden=True)
        command.params.append(option)
    for param in command.params:
        of_torchrun = {flag.removeprefix("--").replace("-", "_") for flag in param.opts} & (NAMES - WITHOUT_VARIABLE)
        if of_torchrun:
            param.envvar = f"PET_{of_torchrun.pop().upper()}"
    command.context_settings["token_normalize_func"] = _speller(command)
    return command


def prefer_our_variables(ctx: click.Context, options: dict[str, Any], environ: Mapping[str, str] = os.environ) -> None:
    """Leave out what a PET_ variable gave where a variable of ours gives it too."""
    for name in options:
        from_variable = ctx.get_parameter_source(name) is click.core.ParameterSource.ENVIRONMENT
        if from_variable and environ.get(f"MEGASCALE_RUN_{name.upper()}"):
            options[name] = None


def explain(options: dict[str, Any]) -> None:
    """Take out what only torchrun needs, with one line for each that was given.

    Raises:
        UsageError: ``--logs-specs`` names nothing that is installed, as under torchrun.
    """
    if options["standalone"]:
        options["rdzv_backend"] = options["rdzv_endpoint"] = None  # as torchrun: it then uses no rendezvous
    for name, reason in NEEDLESS.items():
        if options.pop(name):
            log.info("--%s is not needed: %s", name.replace("_", "-"), reason)
    for name, reason in WITHOUT_EFFECT.items():
        if options.pop(name) is not None:
            log.warning("--%s has no effect: %s", name.replace("_", "-"), reason)
    _explain_logs(options.pop("logs_specs"))


def _explain_logs(name: str | None) -> None:
    if name is None:
        return
    from importlib.metadata import entry_points

    known = {point.name for point in entry_points(group=_LOGS_GROUP)} | {_LOGS_DEFAULT}
    if name not in known:
        raise UsageError(f"--logs-specs {name!r} can't be used: no installed package offers it under {_LOGS_GROUP}")
    said = log.info if name == _LOGS_DEFAULT else log.warning
    word = "is not needed" if name == _LOGS_DEFAULT else "has no effect"
    said("--logs-specs %s: output is always kept in files, one folder for each round: --log-dir says where", word)


def waits_of(conf: str | None) -> dict[str, object]:
    """Return the policy settings that torchrun's ``--rdzv-conf`` asks for; what it holds besides is said.

    Raises:
        UsageError: it can't be read.
    """
    waits: dict[str, object] = {}
    unused: list[str] = []
    for item in filter(None, (conf or "").strip("'\"").split(",")):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key:
            raise UsageError(f"--rdzv-conf {item!r} can't be read: give KEY=VALUE, with commas between several")
        if key not in _WAITS:
            unused.append(key)
            continue
        try:
            waits[_WAITS[key]] = value_of(_WAITS[key], value)
        except ValueError as error:
            raise UsageError(f"--rdzv-conf {item!r} can't be read: {error}") from error
    if unused:
        log.warning("--rdzv-conf %s has no effect: the controller is the rendezvous", ",".join(unused))
    return waits
