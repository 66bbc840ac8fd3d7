# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops simulate``: a cluster of any size around the real controller, on virtual time."""

from typing import Any

import click

from megascale_ops.cli.terminal.options import FiniteRange, json_option, log_options


@click.command
@click.option("--ranks", type=int, default=12_288, show_default=True, help="GPUs of the job.")
@click.option("--hours", type=FiniteRange(), default=24.0, show_default=True, help="How long, virtual time.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same one gives the same output.")
@click.option(
    "--faults",
    default="llama3",
    show_default=True,
    metavar="LAW,...",
    help="By which published failure rates nodes fail: llama3, byterobust, meta-rsc1, fail-slow; none.",
)
@click.option(
    "--fault", "named", multiple=True, metavar="KIND@HOURS", help="Inject this one too, as in hang@1.5; repeatable."
)
@click.option("--ranks-per-node", type=int, default=8, show_default=True, help="GPUs of a node.")
@click.option("--spares", type=int, default=-1, help="Nodes that wait; default: as many as fail in a day, with 99 %.")
@click.option("--tp", type=int, default=0, help="Ranks of a tensor parallel group; default: those of a node.")
@click.option("--pp", type=int, default=0, help="Pipeline stages; default: 8, or as many as fit.")
@click.option("--step-s", type=FiniteRange(), default=6.34, show_default=True, help="Seconds of a step.")
@click.option("--noise", type=FiniteRange(), default=0.01, show_default=True, help="Spread of each rank's own work.")
@click.option(
    "--checkpoint-every-s", type=FiniteRange(), default=1800.0, show_default=True, help="Seconds between checkpoints."
)
@click.option(
    "--checkpoint-stall-s", type=FiniteRange(), default=4.0, show_default=True, help="What ranks wait for each."
)
@click.option("--start-s", type=FiniteRange(), default=60.0, show_default=True, help="Seconds until ranks are up.")
@click.option("--load-s", type=FiniteRange(), default=60.0, show_default=True, help="Seconds to read a checkpoint.")
@click.option(
    "--coded",
    default="",
    metavar="s=N,kind=KIND",
    help="A gradient code over the replicas: fractional, cyclic (also pieces=M), clustered, multi (also messages=C).",
)
@click.option("--policy", multiple=True, metavar="NAME=VALUE", help="A setting of the job's policy; repeatable.")
@click.option("--compare", multiple=True, metavar="NAME=VALUE", help="Run again under this setting; repeatable.")
@click.option("--every-heartbeat", is_flag=True, help="One a second also while nothing happens: slower, same result.")
@click.option("--plot", type=click.Path(dir_okay=False), metavar="FILE.svg", help="Draw the run into this file.")
@json_option
@log_options
def simulate(
    faults: str,
    named: tuple[str, ...],
    policy: tuple[str, ...],
    compare: tuple[str, ...],
    plot: str | None,
    as_json: bool,
    **numbers: Any,  # noqa: ANN401  options that are fields of Settings
) -> None:
    """Simulate hours of training on thousands of GPUs, with the faults that were published, in minutes.

    The controller is the real one, with its detectors, policy and journal; agents, runners and ranks are simulated, and
    so is time. Prints the effective training time ratio with its parts, whether each verdict named the class and the
    rank of the fault that was injected, and with --compare what other policies would have made of the same faults.
    """
    from importlib import import_module
    from pathlib import Path

    import_module("numpy")  # what is missing is reported before anything begins
    from megascale_ops.errors import UsageError
    from megascale_ops.schema.policy import JobPolicy
    from megascale_ops.schema.policy_settings import read_settings, values_of
    from megascale_ops.sim import simulate as simulation
    from megascale_ops.sim.faults import read_faults
    from megascale_ops.sim.report import sentences
    from megascale_ops.sim.settings import Settings

    laws = tuple(name.strip() for name in faults.split(",") if name.strip() not in ("", "none"))
    settings = Settings(faults=laws, policy=JobPolicy(**values_of(read_settings(policy))), **numbers)
    if plot is not None and not Path(plot).absolute().parent.is_dir():
        raise UsageError(f"the picture can't be written to {plot}: there is no such folder")
    answer = simulation.compare(settings, read_faults(named), compare)
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(answer)
    else:
        click.echo("\n".join(sentences(answer)))
    if plot is not None:  # last: on a full disk nothing else is lost
        from megascale_ops.sim.plot import draw
        from megascale_ops.whole_file import write_whole

        write_whole(Path(plot), draw(answer.run).encode(), follow=True)
