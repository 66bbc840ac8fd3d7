# SPDX-License-Identifier: Apache-2.0
"""A job from a file and from options of the same names: one option for each field of its description."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click

from megascale_ops.errors import UsageError
from megascale_ops.suggest import unknown

if TYPE_CHECKING:
    from collections.abc import Mapping

    import msgspec

    Job = TypeVar("Job", bound=msgspec.Struct)

_MOST_BYTES = 1 << 20
_MOST_SHOWN = 60


def options_of(kind: "type[msgspec.Struct]") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what adds an option for each field of a job, but for its command.

    Args:
        kind: The description; ``HELP`` has a line for each field. A tuple is an option that may be repeated, a
            boolean a flag.
    """
    helps: Mapping[str, str] = kind.HELP  # type: ignore[attr-defined]  # of both descriptions
    hints = get_type_hints(kind)

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for name, default in reversed([*zip(kind.__struct_fields__, kind.__struct_defaults__, strict=True)]):
            if name == "command":
                continue
            option, text = f"--{name.replace('_', '-')}", helps[name]
            if hints[name] is bool:
                command = click.option(option, name, is_flag=True, default=None, help=text)(command)
            elif isinstance(default, tuple):
                command = click.option(option, name, multiple=True, metavar="TEXT", help=f"{text} Repeatable.")(command)
            else:
                is_number = isinstance(default, int)
                said = f"{text}  [{default}]" if is_number else text
                metavar = "N" if is_number else "TEXT"
                click_type = click.IntRange(0) if is_number else click.STRING
                command = click.option(option, name, type=click_type, metavar=metavar, help=said)(command)
        return command

    return add


def split(given: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the file, "" for none, and the command; both may be given, the file first."""
    if given and given[0].endswith(".toml"):
        return given[0], given[1:]
    return "", given


def read_job(kind: "type[Job]", given: tuple[str, ...], options: "Mapping[str, Any]") -> "Job":
    """Return the job; what options say counts for more than what the file says.

    Args:
        kind: Its description.
        given: File and command, as they stand on the command line.
        options: The options by field; None and () are not given.

    Raises:
        UsageError: the file can't be read, or says what can't be.
    """
    import msgspec

    from megascale_ops import foreign

    file, command = split(given)
    values: dict[str, Any] = {}
    if file:
        try:
            values = msgspec.toml.decode(foreign.read(Path(file), _MOST_BYTES, follow=True), type=dict[str, Any])
        except OSError as error:
            raise UsageError(f"{file} can't be read: {error.strerror or error}") from None
        except foreign.UNREADABLE as error:
            raise UsageError(f"{file} is no TOML: {error}") from None
    for name in values:
        if name not in kind.__struct_fields__:
            raise UsageError(f"{file}: {unknown('setting', name, kind.__struct_fields__)}")
    values.update({name: value for name, value in options.items() if value not in (None, ())})
    if command:
        values["command"] = command
    hints = get_type_hints(kind, include_extras=True)
    for name, value in values.items():
        try:
            msgspec.convert(value, hints[name])
        except msgspec.ValidationError:
            is_option = options.get(name) not in (None, ())
            where = f"--{name.replace('_', '-')} {value}" if is_option else f"{file}: {name} = {_as_toml(value)}"
            raise UsageError(f"{where} can't be: it takes {_taken(name, hints[name])}") from None
    return msgspec.convert(values, kind)


def _as_toml(value: object) -> str:
    """Return a value as it stands in the file; of a long one the begin."""
    text = str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _taken(name: str, hint: Any) -> str:  # noqa: ANN401  a type as an annotation has it
    """Return in words what a field takes."""
    plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if plain is int:
        limits = get_args(hint)[1]
        return f"a whole number from {limits.ge} to {limits.le:,}"
    if plain is bool:
        return "true or false"
    if get_origin(plain) is Literal:
        return f"one of {', '.join(one for one in get_args(plain) if one)}"
    if get_origin(plain) is tuple:
        return f'a list of texts, as in {name} = ["...", "..."]'
    return f'text, as in {name} = "..."'


def check_run_options(options: tuple[str, ...]) -> None:
    """Look now whether `run` takes its options: on the nodes it would refuse them after hours in the queue.

    Raises:
        UsageError: one of them is none, or what follows is no value of its own.
    """
    root = click.get_current_context().find_root()
    run = root.command.get_command(root, "run") if isinstance(root.command, click.Group) else None
    if run is None:
        raise AssertionError("the program has no verb `run`")
    if "--help" in options:
        raise UsageError("options: --help ends `run` at once, and nothing would train")
    try:
        context = run.make_context("run", [*options, "--", "script"])
    except click.ClickException as error:
        raise UsageError(f"options: {error.format_message()}") from None
    if context.params["command"] != ("script",):
        raise UsageError(
            f"options: {context.params['command'][0]!r} is no option of `megascale-ops run`: write --NAME=VALUE, each "
            "as a text of its own"
        )
