# SPDX-License-Identifier: Apache-2.0
"""One program's configuration out of four sources: defaults, a TOML file, the environment, the command line.

Each program's settings are a msgspec struct that lives beside the program; this file knows only their names. A later
source wins per setting, not per section (of a table such as ``actions`` per key), and each setting's *origin* is kept,
so that ``megascale-ops config show`` can show where a value came from.

Names. The setting ``silence_floor_s`` of the run's policy is written

    [run.policy]                              in the file
    silence_floor_s = 8.0
    MEGASCALE_RUN_POLICY_SILENCE_FLOOR_S=8    in the environment
    {"policy": {"silence_floor_s": 8.0}}      as a value from the command line

A few settings mean the same to every program and have one variable for all: SHARED_VARIABLES. An empty variable
counts as not set.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from megascale_ops import foreign
from megascale_ops.cli.config.settings import (
    REQUIRED,
    Setting,
    convert,
    decode_path,
    flatten,
    lowered,
    nest,
    settings_of,
)
from megascale_ops.errors import UsageError
from megascale_ops.schema import environment
from megascale_ops.suggest import nearest, unknown


class Section(NamedTuple):
    """Where the struct of one section lives."""

    module: str
    struct: str


SECTIONS = {
    "run": Section("megascale_ops.runner.config", "RunConfig"),
    "controller": Section("megascale_ops.controller.config", "ControllerConfig"),
    "agent": Section("megascale_agents.config", "AgentConfig"),
}

# Read by every program, unless its own variable (MEGASCALE_AGENT_CONTROLLER) is set too.
SHARED_VARIABLES = {
    "controller": "MEGASCALE_CONTROLLER",
    "token_file": environment.TOKEN_FILE,
    "box_root": "MEGASCALE_BOX_ROOT",
    "otlp_endpoint": "OTEL_EXPORTER_OTLP_ENDPOINT",
}

# 1 MB: all settings with a page of comments each.
_MOST_BYTES = 1 << 20
_MOST_SHOWN = 200  # characters: longer than any path that is in use

DEFAULT = "default"
NOT_SET = "not set"
COMMAND_LINE = "command line"

# What the runner hands to its ranks: a program started inside a rank inherits these names, and they are no settings.
_HANDED_DOWN = frozenset(
    value for name, value in vars(environment).items() if name.isupper() and str(value).startswith("MEGASCALE_")
)


class Effective(NamedTuple):
    """One row of ``config show``."""

    section: str
    name: str
    value: Any
    origin: str
    help: str = ""


class _Given(NamedTuple):
    raw: Any
    origin: str
    below: "_Given | None" = None  # what a weaker source gave: keys of a table that this one does not name are its


_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def load(
    section: str,
    cli_values: Mapping[str, Any] | None = None,
    config_path: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[Any, dict[str, str]]:
    """Return one program's configuration and, by dotted name, the origin of each setting.

    Args:
        section: a key of SECTIONS.
        cli_values: what the command line gave, by field name; None values count as not given; nested structs as
            mappings.
        config_path: a TOML file, or None.
        environ: the environment; None takes the process's own.

    Raises:
        UsageError: an unknown key, a value of the wrong type, a required setting that is missing.
    """
    return load_struct(struct_of(section), section, cli_values, config_path, environ)


def load_struct(
    struct: type[_Struct],
    section: str,
    cli_values: Mapping[str, Any] | None = None,
    config_path: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[_Struct, dict[str, str]]:
    """Do what ``load`` does for a given struct; see there."""
    settings = settings_of(struct)
    given = _gather(section, settings, cli_values or {}, config_path, environ)
    for setting in settings:
        if setting.default is REQUIRED and setting.name not in given:
            raise UsageError(_required(section, setting))
    values = {
        setting.path: _value(section, setting, given[setting.name]) for setting in settings if setting.name in given
    }
    try:
        loaded = msgspec.convert(nest(values), struct, dec_hook=decode_path)
    except (msgspec.ValidationError, ValueError) as error:  # a struct's own __post_init__ raises ValueError
        raise UsageError(f"section [{section}]: {lowered(str(error))}") from error
    origins = {
        setting.name: _origin(values[setting.path], given[setting.name]) if setting.name in given else DEFAULT
        for setting in settings
    }
    return loaded, origins


def effective(config_path: str | Path | None = None, environ: Mapping[str, str] | None = None) -> list[Effective]:
    """Return every setting of every section with its value and origin, also the required ones that are missing.

    Raises:
        UsageError: as ``load`` does for what was given wrongly.
    """
    rows = []
    for section in SECTIONS:
        settings = settings_of(struct_of(section))
        given = _gather(section, settings, {}, config_path, environ)
        for setting in settings:
            value, origin = setting.default, DEFAULT
            if setting.name in given:
                value = _value(section, setting, given[setting.name])
                origin = _origin(value, given[setting.name])
            elif value is REQUIRED:
                value, origin = None, NOT_SET
            shown = value if setting.show is None else setting.show(setting.path[-1], value)
            rows.append(
                Effective(section, setting.name, msgspec.to_builtins(shown, enc_hook=str), origin, setting.help)
            )
    return rows


def struct_of(section: str) -> type[msgspec.Struct]:
    """Import and return the struct of one section."""
    from importlib import import_module

    struct: type[msgspec.Struct] = getattr(import_module(SECTIONS[section].module), SECTIONS[section].struct)
    return struct


def variables_of(section: str, setting: Setting) -> tuple[str, ...]:
    """Return the environment variables of one setting, the strongest first."""
    own = "_".join(("MEGASCALE", section, *setting.path)).upper()
    shared = SHARED_VARIABLES.get(setting.name)
    return (own, shared) if shared else (own,)


def read_file(config_path: str | Path) -> dict[str, Any]:
    """Return the tables of a configuration file whose sections are all known.

    Raises:
        UsageError: no such file, not TOML, an unknown section.
    """
    import tomllib  # 10 ms that a program without a file does not wait for

    where = f"configuration file {config_path}"
    try:
        tables = tomllib.loads(foreign.read(Path(config_path), _MOST_BYTES, follow=True).decode())
    except OSError as error:
        raise UsageError(f"{where}: {lowered(error.strerror or str(error))}") from error
    except (ValueError, RecursionError) as error:  # tomllib's own, no UTF-8, a number of thousands of digits, depth
        raise UsageError(f"{where} is not TOML: {lowered(str(error))}") from error
    for name, table in tables.items():
        if name not in SECTIONS:
            raise UsageError(f"{where}: {unknown('section', name, SECTIONS)}")
        if not isinstance(table, dict):
            raise UsageError(f"{where}: {name!r} must be a section, [{name}]")
    return tables


def _gather(
    section: str,
    settings: Sequence[Setting],
    cli_values: Mapping[str, Any],
    config_path: str | Path | None,
    environ: Mapping[str, str] | None,
) -> dict[str, _Given]:
    """Return what the three sources above the defaults gave, by dotted name; the later source wins."""
    given: dict[str, _Given] = {}
    if config_path is not None:
        table = read_file(config_path).get(section, {})
        flat = flatten(table, settings, f"configuration file {config_path}, section [{section}]")
        given.update({name: _Given(raw, f"file {config_path}") for name, raw in flat.items()})
    for name, own in _from_environment(section, settings, os.environ if environ is None else environ).items():
        given[name] = own._replace(below=given.get(name))
    for name, raw in flatten(cli_values, settings, f"options of {section}").items():
        if raw is not None:
            given[name] = _Given(raw, COMMAND_LINE, given.get(name))
    return given


def _from_environment(section: str, settings: Sequence[Setting], environ: Mapping[str, str]) -> dict[str, _Given]:
    found: dict[str, _Given] = {}
    known: set[str] = set()
    for setting in settings:
        names = variables_of(section, setting)
        known.update(names)
        for name in reversed(names):
            if environ.get(name):
                found[setting.name] = _Given(environ[name], f"environment {name}")
    prefix = f"MEGASCALE_{section.upper()}_"
    for name in environ:
        if name.startswith(prefix) and name not in known | _HANDED_DOWN:
            # Without the prefix that all share, or every name would look like every other.
            guess = nearest(name.removeprefix(prefix), [own.removeprefix(prefix) for own in known if prefix in own])
            said = f"unknown environment variable {name!r}"
            raise UsageError(f"{said}: did you mean {prefix + guess!r}?" if guess else said)
    return found


def _value(section: str, setting: Setting, given: _Given) -> Any:  # noqa: ANN401  any setting's value
    try:
        value = convert(setting, given.raw, lenient=given.origin.startswith("environment"))
    except ValueError as error:
        given_as = "" if setting.is_hidden else f" = {_shown(given.raw)}"
        raise UsageError(f"{section}.{setting.name}{given_as} ({given.origin}) can't be used: {error}") from (
            None if setting.is_hidden else error
        )
    if isinstance(value, dict) and given.below is not None:
        return {**_value(section, setting, given.below), **value}
    return value


def _origin(value: object, given: _Given) -> str:
    """Return where a value comes from; of a table every source, the weakest first."""
    if isinstance(value, dict) and given.below is not None:
        return f"{_origin(value, given.below)}, {given.origin}"
    return given.origin


def _shown(raw: object) -> str:
    """Return a value as a sentence shows it; Python writes no number of thousands of digits, which TOML has in hex."""
    try:
        shown = repr(raw)
    except ValueError:
        return "a number of thousands of digits"
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."


def _required(section: str, setting: Setting) -> str:
    option = "--" + setting.path[-1].replace("_", "-")
    variable = variables_of(section, setting)[-1]
    return f"`{section}` needs {setting.name}: give {option}, {variable}, or {setting.name} in [{section}] of --config"
