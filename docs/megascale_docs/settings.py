# SPDX-License-Identifier: Apache-2.0
"""The reference of configuration and policy, read from the structs that programs read their settings into.

What an option does is its help; why a default is what it is stands as a comment beside the field, as CONTRIBUTING asks.
"""

import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import click
import msgspec

from megascale_docs.markdown import code, page, prose, table
from megascale_ops.cli.config.configuration import SECTIONS, SHARED_VARIABLES
from megascale_ops.cli.config.settings import settings_of
from megascale_ops.cli.main import program
from megascale_ops.schema.policy import ACTION_WORDS, SETTINGS, JobPolicy, text_of

_ANY = 1e6  # what may be more than this has a bound only so that nothing overflows
_BEFORE = (
    "Defaults, then a TOML file (`--config FILE` or `MEGASCALE_CONFIG`), then environment variables, then the command "
    "line. Unknown keys are refused, with the nearest right name. `megascale-ops config show` prints every effective "
    "value and where it came from."
)


def configuration() -> str:
    """Return the page of the three sections of a configuration file."""
    parts = []
    for section, place in SECTIONS.items():
        struct = getattr(import_module(place.module), place.struct)
        parts += [f"## [{section}]", table(("setting, option, variable", "default", "meaning"), _rows(section, struct))]
    shared = ((code(name), code(variable)) for name, variable in SHARED_VARIABLES.items())
    return page(
        "Configuration",
        _BEFORE,
        "Three settings have one variable for all programs; a program's own variable wins:",
        table(("setting", "variable"), shared),
        *parts,
    )


def policy() -> str:
    """Return the page of a job's policy."""
    why, helps = comments(JobPolicy), getattr(JobPolicy, "HELP", {})
    rows = (
        (code(name), code(text_of(value)), _range(name), _meaning(helps.get(name, ""), why.get(name, "")))
        for name, value in SETTINGS.items()
    )
    actions = ((code(word), prose(meaning)) for word, meaning in ACTION_WORDS.items())
    return page(
        "Policy",
        "How patient and how generous the controller is with one job: `run --policy NAME=VALUE`, section "
        "`[run.policy]` of a configuration, `megascale-ops policy set JOB NAME=VALUE` while the job lives. "
        "`policy show` prints what holds, `policy replay` decides again from the journal.",
        table(("setting", "default", "range", "meaning, and why this default"), rows),
        "## Actions",
        "`--policy CLASS=ACTION` says what is done about a [class of fault](fault-classes.md).",
        table(("action", "means"), actions),
    )


def comments(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return what is said beside each field of a struct: the comments above it, and the one behind it."""
    source = inspect.getsource(struct)
    beside = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found: dict[str, str] = {}
    above: list[str] = []
    for number, line in enumerate(source.splitlines(), 1):
        field = re.match(r"    (\w+): ", line)
        if line.strip().startswith("#"):
            above.append(beside[number])
            continue
        if field:
            found[field[1]] = " ".join([*above, beside.get(number, "")]).strip()
        above = []
    return found


def _rows(section: str, struct: type[msgspec.Struct]) -> Iterator[tuple[str, str, str]]:
    """Yield the settings of a section; those of the policy have a page of their own."""
    options = _options(section)
    why = comments(struct)
    for setting in settings_of(struct):
        if setting.path[0] == "policy":
            continue
        name = setting.name
        option, told = options.get(name, ("", ""))
        told = getattr(setting, "help", "") or told
        ways = [name, *([option] if option else []), f"MEGASCALE_{section}_{name}".upper()]
        yield "<br>".join(map(code, ways)), code(_shown(setting.default)), _meaning(told, why.get(name, ""))
    if any(field.name == "policy" for field in msgspec.structs.fields(struct)):
        yield "[`policy`](policy.md)", "", "How patient and how generous to be with the job."


def _options(verb: str) -> dict[str, tuple[str, str]]:
    """Return the option of a verb for each setting, with its help; defaults stand in a column of their own."""
    command = program.get_command(click.Context(program), verb)
    assert command is not None
    return {
        str(one.name): (_long(one), re.sub(r"\s+\[[^]]*\]$", "", one.help or ""))
        for one in command.params
        if isinstance(one, click.Option) and not one.hidden
    }


def _long(one: click.Option) -> str:
    """Return the first of an option's names that is a word."""
    return next(name for name in one.opts if name.startswith("--"))


def _meaning(told: str, why: str) -> str:
    """Return an option's help, and behind it the comment at the field where that says more."""
    if why.rstrip(".").lower() in told.lower():
        why = ""
    return "<br>".join(prose(text.strip()) for text in (told, why) if text) or "as in torchrun"


def _shown(value: Any) -> str:  # noqa: ANN401  any setting's default
    return '""' if value == "" else "" if value is None else text_of(value)


def _range(name: str) -> str:
    """Return what a number may be; of what is true or false, that."""
    if isinstance(SETTINGS[name], bool):
        return "true, false"
    info = msgspec.inspect.type_info(JobPolicy)
    assert isinstance(info, msgspec.inspect.StructType)
    kind = next(field.type for field in info.fields if field.name == name)
    assert isinstance(kind, msgspec.inspect.IntType | msgspec.inspect.FloatType)
    assert kind.ge is not None
    assert kind.le is not None
    return f"{kind.ge:g} or more" if kind.le > _ANY else f"{kind.ge:g} to {kind.le:g}"
