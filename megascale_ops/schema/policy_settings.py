# SPDX-License-Identifier: Apache-2.0
"""Settings of a job's policy as people write them: ``NAME=VALUE``, for a run that starts and for one that lives.

    silence_floor_s=10      a number
    dry_run=true            yes, on, 1 are the same
    frozen=warn             what to do about a class of fault; actions.frozen=warn is the same
    frozen=default          (of a run that lives) back to what it was started with

Pure: text in, a policy or one clear sentence out.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from megascale_ops.errors import UsageError
from megascale_ops.schema.fault_classes import FAULTS
from megascale_ops.schema.policy import ACTIONS_PREFIX, SETTINGS, JobPolicy, text_of, value_of
from megascale_ops.suggest import unknown

DEFAULT = "default"
DEFAULT_WORDS = "the default"  # what a person reads for an action that the policy does not name


def read_settings(items: Iterable[str]) -> dict[str, str]:
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
    return check_settings(settings)


def check_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Return settings by full name, every one known and every value possible; for those see ``read_settings``."""
    checked: dict[str, str] = {}
    for name, value in settings.items():
        full = _full_name(name)
        try:
            if value != DEFAULT:
                value_of(full, value)
        except ValueError as error:
            where = "" if full.startswith(ACTIONS_PREFIX) else f"{full}={value} can't be: "
            raise UsageError(f"{where}{error}") from None
        checked[full] = value
    return checked


def values_of(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return checked settings as a configuration takes them: values by field, actions as one table."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if value == DEFAULT:
            continue
        if name.startswith(ACTIONS_PREFIX):
            found.setdefault("actions", {})[name.removeprefix(ACTIONS_PREFIX)] = value
        else:
            found[name] = value_of(name, value)
    return found


def apply_settings(policy: JobPolicy, settings: Mapping[str, str]) -> JobPolicy:
    """Return ``policy`` with checked settings over it; its own actions stay unless a setting replaces them."""
    changes = values_of(settings)
    if "actions" in changes:
        changes["actions"] = {**policy.actions, **changes["actions"]}
    return msgspec.structs.replace(policy, **changes)


def merge_settings(before: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """Return what is changed by hand after a further change; "default" takes one back."""
    return {name: value for name, value in {**before, **settings}.items() if value != DEFAULT}


def check_policy(policy: JobPolicy) -> None:
    """Check a policy that was decoded as a whole: its numbers are in their ranges, its actions are any words so far.

    Raises:
        UsageError: an unknown class or action, a number that can't be.
    """
    check_settings(show_settings(policy))


def show_settings(policy: JobPolicy) -> dict[str, str]:
    """Return every setting as text, actions by their full names; ``check_settings`` takes it back as it was."""
    shown = {name: text_of(getattr(policy, name)) for name in SETTINGS}
    return shown | {f"{ACTIONS_PREFIX}{fault}": action for fault, action in sorted(policy.actions.items())}


class Difference(NamedTuple):
    """One setting in which two policies differ, as text."""

    name: str
    before: str
    after: str


def differences(before: JobPolicy, after: JobPolicy) -> tuple[Difference, ...]:
    """Return every setting in which two policies differ, by name."""
    was, now = show_settings(before), show_settings(after)
    return tuple(
        Difference(name, was.get(name, DEFAULT_WORDS), now.get(name, DEFAULT_WORDS))
        for name in sorted({*was, *now})
        if was.get(name) != now.get(name)
    )


class ClassAction(NamedTuple):
    """What is done about one class of fault, before budgets, and why."""

    fault: str
    meaning: str
    action: str
    why: str
    is_own: bool  # set in the job's policy, not in the table


def class_actions(policy: JobPolicy) -> tuple[ClassAction, ...]:
    """Return what is done about every class under a policy; of one that it names, also what the table would say."""
    rows = []
    for row in FAULTS.values():
        own = policy.actions.get(row.name)
        why = row.why if own is None else f"this job's policy says so; without it: {row.action}, {row.why}"
        rows.append(ClassAction(row.name, row.meaning, own or row.action, why, is_own=own is not None))
    return tuple(rows)


def default_of(name: str) -> str:
    """Return the default of a setting as text; "" for an action, whose default is the table's."""
    return text_of(SETTINGS[name]) if name in SETTINGS else ""


def _full_name(name: str) -> str:
    if name in SETTINGS:
        return name
    fault = name.removeprefix(ACTIONS_PREFIX)
    if fault in FAULTS:
        return f"{ACTIONS_PREFIX}{fault}"
    if name.startswith(ACTIONS_PREFIX):
        raise UsageError(unknown("class of fault", fault, FAULTS))
    raise UsageError(unknown("policy", name, [*SETTINGS, *FAULTS]))
