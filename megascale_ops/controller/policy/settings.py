# SPDX-License-Identifier: Apache-2.0
"""Settings of a job's policy as people write them: ``NAME=VALUE``, for a run that starts and for one that lives.

    silence_floor_s=10      a number
    dry_run=true            yes, on, 1 are the same
    frozen=warn             what to do about a class of fault; actions.frozen=warn is the same
    frozen=default          (of a run that lives) back to what it was started with

Pure: text in, a policy or one clear sentence out.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from megascale_ops.controller.policy.actions import WORDS
from megascale_ops.errors import UsageError
from megascale_ops.schema.health import FAULTS
from megascale_ops.schema.messages import JobPolicy

DEFAULT = "default"
DEFAULT_WORDS = "the default"  # what a person reads for an action that the policy does not name
ACTIONS_PREFIX = "actions."
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_DEFAULTS = JobPolicy()
# The settings and their defaults; their types are those of the defaults.
SETTINGS: dict[str, Any] = {name: getattr(_DEFAULTS, name) for name in JobPolicy.__struct_fields__ if name != "actions"}
# -1 means "no limit of this kind" there; nothing else makes sense below 0.
_MAY_BE_MINUS_ONE = ("max_restarts",)


def read(items: Iterable[str]) -> dict[str, str]:
    """Return ``NAME=VALUE`` texts by full name, each checked as far as it can be without the rest.

    Raises:
        UsageError: no such form, an unknown name (with the nearest), a value that can't be.
    """
    settings: dict[str, str] = {}
    for item in items:
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not name or not value:
            raise UsageError(f"policy {item!r} can't be read: give NAME=VALUE, as in silence_floor_s=10 or frozen=warn")
        settings[name] = value
    return check(settings)


def check(settings: Mapping[str, str]) -> dict[str, str]:
    """Return settings by full name, every one known and every value possible; for those see ``read``."""
    checked: dict[str, str] = {}
    for name, value in settings.items():
        full = _full_name(name)
        if value != DEFAULT:
            _value(full, value)
        checked[full] = value
    return checked


def values(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return checked settings as a configuration takes them: values by field, actions as one table."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if value == DEFAULT:
            continue
        if name.startswith(ACTIONS_PREFIX):
            found.setdefault("actions", {})[name.removeprefix(ACTIONS_PREFIX)] = value
        else:
            found[name] = _value(name, value)
    return found


def apply(policy: JobPolicy, settings: Mapping[str, str]) -> JobPolicy:
    """Return ``policy`` with checked settings over it; its own actions stay where none of them says otherwise."""
    changes = values(settings)
    if "actions" in changes:
        changes["actions"] = {**policy.actions, **changes["actions"]}
    return msgspec.structs.replace(policy, **changes)


def merge(before: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """Return what is changed by hand after a further change; "default" takes one back."""
    return {name: value for name, value in {**before, **settings}.items() if value != DEFAULT}


def check_policy(policy: JobPolicy) -> None:
    """Check a policy that came from elsewhere, such as a configuration file.

    Raises:
        UsageError: an unknown class or action, a number that can't be.
    """
    for fault, action in policy.actions.items():
        check({f"{ACTIONS_PREFIX}{fault}": action})
    for name in SETTINGS:
        _value(name, str(getattr(policy, name)))


def show(policy: JobPolicy) -> dict[str, str]:
    """Return every setting as text, actions by their full names."""
    shown = {name: _text(getattr(policy, name)) for name in SETTINGS}
    return shown | {f"{ACTIONS_PREFIX}{fault}": action for fault, action in sorted(policy.actions.items())}


class Difference(NamedTuple):
    """One setting in which two policies differ, as text."""

    name: str
    before: str
    after: str


def differences(before: JobPolicy, after: JobPolicy) -> tuple[Difference, ...]:
    """Return every setting in which two policies differ, by name."""
    was, now = show(before), show(after)
    return tuple(
        Difference(name, was.get(name, DEFAULT_WORDS), now.get(name, DEFAULT_WORDS))
        for name in sorted({*was, *now})
        if was.get(name) != now.get(name)
    )


def default_of(name: str) -> str:
    """Return the default of a setting as text; "" for an action, whose default is the table's."""
    return _text(SETTINGS[name]) if name in SETTINGS else ""


def _full_name(name: str) -> str:
    if name in SETTINGS:
        return name
    fault = name.removeprefix(ACTIONS_PREFIX)
    if fault in FAULTS:
        return f"{ACTIONS_PREFIX}{fault}"
    if name.startswith(ACTIONS_PREFIX):
        raise UsageError(_unknown("class of fault", fault, FAULTS))
    raise UsageError(_unknown("policy", name, [*SETTINGS, *FAULTS]))


def _value(name: str, text: str) -> float | int | bool | str:
    """Return the value that ``text`` stands for."""
    if name.startswith(ACTIONS_PREFIX):
        fault = name.removeprefix(ACTIONS_PREFIX)
        if text not in WORDS:
            raise UsageError(f"{_unknown('action', text, WORDS)}; {fault} takes {', '.join(WORDS)}".replace("?;", "?"))
        return text
    default = SETTINGS[name]
    if isinstance(default, bool):
        if text.lower() not in _TRUE + _FALSE:
            raise UsageError(f"{name}={text} can't be: give true or false")
        return text.lower() in _TRUE
    try:
        number = float(text)
    except ValueError:
        raise UsageError(f"{name}={text} can't be: a number is needed, as in {name}={_text(default)}") from None
    least = -1 if name in _MAY_BE_MINUS_ONE else 0
    if not math.isfinite(number) or number < least:
        raise UsageError(f"{name}={text} can't be: it must be {least} or more")
    if isinstance(default, int) and not number.is_integer():
        raise UsageError(f"{name}={text} can't be: a whole number is needed")
    value = int(number) if isinstance(default, int) else number
    try:
        msgspec.convert({name: value}, JobPolicy)
    except msgspec.ValidationError:  # beyond what a join may carry, so a run could not even begin
        raise UsageError(f"{name}={text} can't be: it is too large") from None
    return value


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the sentence for an unknown name, with the nearest one when there is one."""
    from difflib import get_close_matches

    close = get_close_matches(name.lower().replace("-", "_"), list(known), n=1)
    return f"unknown {kind} {name!r}" + (f": did you mean {close[0]!r}?" if close else "")
