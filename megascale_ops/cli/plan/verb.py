# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops plan``: spares, checkpoints, patience and checks for a job, from rates and costs."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from megascale_ops.cli.terminal.options import FiniteRange, job_argument, json_option, log_options, where_options

_Command = TypeVar("_Command", bound=Callable[..., Any])
# The option of each number of ``planning.inputs.Job``, and what it is.
_NUMBERS = {
    "nodes": "Nodes of the job.",
    "failures": "Failures of a node and day.",
    "hang_share": "Share of these that show as silence, 0 to 1.",
    "machine_share": "Share of these that take a machine away, 0 to 1.",
    "hidden": "Faults of a node and day that only a check finds.",
    "repair_s": "Seconds for which a machine is away.",
    "stall_s": "Seconds for which a checkpoint halts the training.",
    "write_s": "Seconds for which it is written beside the training after that.",
    "step_s": "Seconds of a step.",
    "restart_s": "Seconds from a stop to the first new step.",
    "detect_s": "Seconds until a failure that is no silence is seen.",
    "silences": "Silences of nothing wrong a day that no phase was declared for.",
    "silence_s": "Seconds for which these last, in the mean.",
    "check_s": "Seconds for which all nodes check themselves.",
}


def _number_options(command: _Command) -> _Command:
    for name, words in reversed(_NUMBERS.items()):
        flag = "--" + name.removesuffix("_s").replace("_", "-")
        metavar = "SECONDS" if name.endswith("_s") else "NUMBER"
        command = click.option(flag, name, type=FiniteRange(), metavar=metavar, help=words)(command)
    return command


@click.command
@job_argument
@where_options
@_number_options
@click.option(
    "--faults", "law", default="llama3", show_default=True, metavar="LAW",
    help="Published rates for what is not known: llama3, byterobust, meta-rsc1.",
)  # fmt: skip
@click.option("--ranks-per-node", type=click.IntRange(1, 1024), default=8, show_default=True, help="GPUs of a node.")
@json_option
@log_options
def plan(
    job: str | None,
    controller: str | None,
    run_dir: str | None,
    token_file: str | None,
    law: str,
    ranks_per_node: int,
    as_json: bool,
    **options: float | None,
) -> None:
    """Choose spares, checkpoint interval, patience and checks for a job, and show how much depends on each number.

    What no option gives is taken from the record of JOB, if one is named, else from published failure rates and
    assumptions; every number is shown with its source.
    """
    from megascale_ops.cli.plan import views
    from megascale_ops.cli.plan.job import numbers_of
    from megascale_ops.planning.choices import choose, lost
    from megascale_ops.planning.inputs import job_of
    from megascale_ops.planning.sensitivity import otherwise

    where = {"job": job, "controller": controller, "run_dir": run_dir, "token_file": token_file}
    planned, known = job_of(numbers_of(options, law, ranks_per_node, where))
    best = choose(planned)
    told = (planned, known, best, lost(planned, best), list(otherwise(planned, best)))
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(views.numbers(*told))
        return
    from megascale_ops.cli.terminal.output import console

    console().print(views.plan_view(*told))
