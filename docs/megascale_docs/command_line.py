# SPDX-License-Identifier: Apache-2.0
"""The reference of the command line, read from click's own commands: what ``--help`` says, verb by verb."""

from collections.abc import Iterator
from inspect import cleandoc

import click

from megascale_docs.markdown import code, page, prose, table
from megascale_ops.cli.main import VERBS, program
from megascale_ops.cli.terminal.options import PROGRAM

_EXIT_CODES = (
    ("0", "done"),
    ("1", "something failed, and one sentence says what"),
    ("2", "the command was given wrongly"),
    ("130", "interrupted"),
)


def command_line() -> str:
    """Return the page."""
    context = click.Context(program, info_name=PROGRAM)
    verbs = table(
        ("verb", ""),
        ((f"[{code(name)}](#{_anchor(f'{PROGRAM} {name}')})", prose(row.help)) for name, row in VERBS.items()),
    )
    sections = [text for name in VERBS for text in _sections(_command(program, context, name), context, name)]
    return page(
        "Command line",
        "Every verb answers `--help` with what stands here. `--log-level` and `--log-format` may stand before or "
        "behind the verb.",
        verbs,
        "Exit codes, but for `run` and `demo`, which pass on those of what they ran:",
        table(("code", "means"), _EXIT_CODES),
        *sections,
    )


def _sections(command: click.Command, above: click.Context, name: str) -> Iterator[str]:
    """Yield what is to be told of a command, and of those behind it."""
    context = click.Context(command, parent=above, info_name=name)
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"{'##' if above.parent is None else '###'} {context.command_path}"
    yield f"```text\n{context.command_path} {usage}\n```"
    yield _help(command.help or "")
    if rows := list(_options(command, context)):
        yield table(("option", "meaning"), rows)
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            yield from _sections(_command(command, context, inner), context, inner)


def _command(group: click.Group, context: click.Context, name: str) -> click.Command:
    found = group.get_command(context, name)
    assert found is not None, name
    return found


def _options(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """Yield a row for each option that is shown; logging and help are the same everywhere."""
    for one in command.get_params(context):
        record = one.get_help_record(context)
        if record is not None and one.name not in {"log_level", "log_format", "help"}:
            yield code(record[0]), prose(record[1])


def _help(text: str) -> str:
    r"""Return a help text: its paragraphs; what is marked with ``\b`` keeps its lines."""
    shown = []
    for paragraph in cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b\n"):
            shown.append(f"```text\n{cleandoc(paragraph.removeprefix(chr(8) + chr(10)))}\n```")
        else:
            shown.append(prose(" ".join(paragraph.split())))
    return "\n\n".join(shown)


def _anchor(heading: str) -> str:
    return heading.replace(" ", "-")
