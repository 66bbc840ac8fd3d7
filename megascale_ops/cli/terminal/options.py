# SPDX-License-Identifier: Apache-2.0
"""Options that several verbs take, each said once: logging, configuration file, output for programs, which controller.

``--log-format`` and ``--log-level`` may stand before or behind the verb; behind it wins.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from megascale_ops.cli.terminal.completion import offers

PROGRAM = "megascale-ops"

_Command = TypeVar("_Command", bound=Callable[..., Any])

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")


class FiniteRange(click.FloatRange):
    """A number within bounds; NaN is within all of them, and infinity within open ones, so both are refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401  as in click
        """Return the number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number", param, ctx)
        return number


class _Given(click.Argument):
    """An argument that is something: a shell's variable that is not set is "", which would be the current folder."""

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:  # noqa: ANN401  as in click
        """Refuse nothing, and return the value as its type."""
        if "" in (value if isinstance(value, (tuple, list)) else (value,)):
            raise click.BadParameter("it is empty: is a variable of the shell not set?", ctx, self)
        return super().type_cast_value(ctx, value)


argument = functools.partial(click.argument, cls=_Given)
"""``click.argument`` for a name or a path: "" is refused."""


class _Either(click.Option):
    """A pair of flags of which one alone may be given: click takes the last of them, silently."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:  # noqa: ANN401  click's own parser, not public
        """Have the parser keep each flag that is given."""
        del ctx
        for flags, value in ((self.opts, True), (self.secondary_opts, False)):
            parser.add_option(obj=self, opts=flags, dest=self.name, action="append_const", const=value)

    def process_value(self, ctx: click.Context, value: Any) -> Any:  # noqa: ANN401  as in click
        """Return the one that is given; refuse both."""
        if isinstance(value, list):
            if len(set(value)) > 1:
                both = " and ".join((*self.opts, *self.secondary_opts))
                raise click.UsageError(f"{both} are two ways to do it: give one of them", ctx)
            value = value[0]
        return super().process_value(ctx, value)


either = functools.partial(click.option, cls=_Either)
"""``click.option`` for ``--this/--that``: both at once are refused."""


def _configure_logs(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Set up logging with what is known so far; what stands behind the verb comes later and wins."""
    chosen: dict[str, str] = ctx.find_root().meta.setdefault("megascale_ops.logs", {})
    if ctx.resilient_parsing or (value is None and chosen):
        return
    if value is not None:
        chosen[str(param.name)] = value
    from megascale_ops.cli.terminal import logs

    logs.configure(chosen.setdefault("log_level", "info"), chosen.setdefault("log_format", "text"))


def log_options(command: _Command) -> _Command:
    """Add ``--log-level`` and ``--log-format`` (or MEGASCALE_LOG_LEVEL, MEGASCALE_LOG_FORMAT)."""
    level = click.option(
        "--log-level",
        type=click.Choice(LOG_LEVELS, case_sensitive=False),
        envvar="MEGASCALE_LOG_LEVEL",
        expose_value=False,
        callback=_configure_logs,
        help="Least severe lines that are logged to stderr.",
    )
    form = click.option(
        "--log-format",
        type=click.Choice(LOG_FORMATS, case_sensitive=False),
        envvar="MEGASCALE_LOG_FORMAT",
        expose_value=False,
        callback=_configure_logs,
        help="Sentences for people (text) or one JSON object a line (json).",
    )
    return level(form(command))


def config_option(command: _Command) -> _Command:
    """Add ``--config FILE`` (or MEGASCALE_CONFIG): a TOML file with the sections [run], [controller] and [agent]."""
    return click.option(
        "--config",
        "config_path",
        type=click.Path(dir_okay=False),
        envvar="MEGASCALE_CONFIG",
        help="TOML file with the sections [run], [controller], [agent].",
    )(command)


def json_option(command: _Command) -> _Command:
    """Add ``--json``: output for programs."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for programs instead of a table.")(command)


def job_option(command: _Command) -> _Command:
    """Add ``--job JOB``."""
    return click.option("--job", metavar="JOB", help="Only this job.", shell_complete=offers("job"))(command)


def job_argument(command: _Command) -> _Command:
    """Add ``[JOB]``, which is ``--job`` without its name: a verb that is about one job takes either.

    To stand above ``where_options`` or ``job_option``; the verb is given one ``job``.
    """

    @functools.wraps(command)
    def merged(*args: Any, named: str | None, **given: Any) -> Any:  # noqa: ANN401  whatever the verb takes
        if named and given["job"] and named != given["job"]:
            raise click.UsageError(f"two jobs are named: {named!r} and --job {given['job']!r}")
        given["job"] = named or given["job"]
        return command(*args, **given)

    named = argument("named", required=False, metavar="[JOB]", shell_complete=offers("job"))
    return named(merged)  # type: ignore[return-value]  # a verb, as it was


def where_options(command: _Command) -> _Command:
    """Add the options that choose a controller, or a finished run."""
    for option in (
        click.option("--token-file", type=click.Path(), help="File that holds the controller's token."),
        click.option("--run-dir", type=click.Path(), help="Folder of a run started with `run --run-dir`."),
        job_option,
        click.option("--controller", metavar="URL", help="Address of the controller; default: the newest running one."),
    ):
        command = option(command)
    return command
