# SPDX-License-Identifier: Apache-2.0
"""The settings of one msgspec struct: its leaves by dotted name, and how a raw value becomes one.

Works on any struct, nested ones included; knows nothing of files, environments or programs. A struct with a method
``read_setting(name, raw)`` reads its own leaves, so that they are the same wherever else they come from.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from megascale_ops.errors import UsageError
from megascale_ops.suggest import nearest, unknown

REQUIRED = msgspec.NODEFAULT


class Setting(NamedTuple):
    """One leaf of a struct; ``path`` has more than one part where structs are nested."""

    path: tuple[str, ...]
    kind: Any  # the field's annotation
    default: Any  # REQUIRED when it must be given
    read: Callable[[str, Any], Any] | None = None  # how its struct reads it itself, where it does
    show: Callable[[str, Any], Any] | None = None  # what of its value may be shown, where that is not all
    help: str = ""  # a line of its struct; where that has none it is its option's
    is_hidden: bool = False  # no sentence quotes what was given: it may hold a secret

    @property
    def name(self) -> str:
        """The dotted name, as origins and sentences spell it."""
        return ".".join(self.path)


def settings_of(struct: type[msgspec.Struct], path: tuple[str, ...] = ()) -> list[Setting]:
    """Return the leaves of a struct in the order of its fields, nested structs opened."""
    hints = get_type_hints(struct, include_extras=True)
    read, show = getattr(struct, "read_setting", None), getattr(struct, "show_setting", None)
    helps: dict[str, str] = getattr(struct, "HELP", {})
    hidden: frozenset[str] = getattr(struct, "HIDDEN", frozenset())
    leaves: list[Setting] = []
    for field in msgspec.structs.fields(struct):
        kind = hints[field.name]
        here = (*path, field.name)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            leaves.extend(settings_of(kind, here))
            continue
        default = field.default
        if default is REQUIRED and field.default_factory is not REQUIRED:
            default = field.default_factory()
        leaves.append(Setting(here, kind, default, read, show, helps.get(field.name, ""), field.name in hidden))
    return leaves


def flatten(table: Mapping[str, Any], settings: Sequence[Setting], where: str) -> dict[str, Any]:
    """Return a nested table by dotted names.

    Raises:
        UsageError: a name that is no setting, with the nearest one; ``where`` begins the sentence.
    """
    leaves = {setting.name for setting in settings}
    groups = {".".join(setting.path[:depth]) for setting in settings for depth in range(1, len(setting.path))}
    flat: dict[str, Any] = {}
    open_tables: list[tuple[str, Mapping[str, Any]]] = [("", table)]
    while open_tables:
        prefix, current = open_tables.pop()
        for key, value in current.items():
            name = prefix + key
            if name in leaves:
                flat[name] = value
            elif name in groups and isinstance(value, Mapping):
                open_tables.append((f"{name}.", value))
            elif name in groups:
                raise UsageError(f"{where}: {name!r} must be a table")
            else:
                raise UsageError(f"{where}: {_unknown_key(name, leaves | groups)}")
    return flat


def nest(flat: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Return values by path as the nested mappings that msgspec converts into a struct."""
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        table = nested
        for part in path[:-1]:
            table = table.setdefault(part, {})
        table[path[-1]] = value
    return nested


def convert(setting: Setting, raw: Any, *, lenient: bool) -> Any:  # noqa: ANN401  any setting's value
    """Return ``raw`` as the setting's type.

    Args:
        setting: which setting it is.
        raw: what was given.
        lenient: read text as a number, a boolean or a comma separated list, as an environment variable needs it.

    Raises:
        ValueError: what is wrong with it, one clause without a full stop.
    """
    if setting.read is not None:
        return setting.read(setting.path[-1], raw)
    kinds = {setting.kind, *get_args(setting.kind)}
    if lenient and isinstance(raw, str) and (get_origin(setting.kind) or setting.kind) in {tuple, list, frozenset}:
        raw = [part.strip() for part in raw.split(",") if part.strip()]
    try:
        if float in kinds and type(raw) is int:
            raw = float(raw)
        return msgspec.convert(raw, setting.kind, strict=not lenient, dec_hook=decode_path)
    except OverflowError:
        raise ValueError("it is a number beyond all measure") from None
    except msgspec.ValidationError as error:
        raise ValueError(lowered(str(error).replace("`", ""))) from error


def decode_path(kind: type, value: Any) -> Any:  # noqa: ANN401  msgspec's hook, for types that it does not support
    """Make a ``Path`` of text; every other foreign type is refused."""
    if isinstance(kind, type) and issubclass(kind, Path):
        if not isinstance(value, (str, Path)):
            raise ValueError("a path is given as text")  # noqa: TRY004  msgspec makes a sentence of ValueErrors
        return kind(value)
    raise NotImplementedError(f"{kind} can't be read from text")


def lowered(text: str) -> str:
    """Return a sentence of another library so that it can stand behind a colon."""
    return text[:1].lower() + text[1:].rstrip(".")


def _unknown_key(name: str, known: set[str]) -> str:
    """Return the sentence for an unknown key; a setting that lives one table deeper is found by its last part."""
    deeper = {full.rpartition(".")[2]: full for full in known}
    guess = nearest(name.rpartition(".")[2], deeper)
    if nearest(name, known) is None and guess is not None:
        return f"unknown key {name!r}: did you mean {deeper[guess]!r}?"
    return unknown("key", name, known)
