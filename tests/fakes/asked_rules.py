# SPDX-License-Identifier: Apache-2.0
"""Tests of alerts for promtool, each beside the rules alone that what it asks depends on.

Promtool evaluates every rule of a test's files at each moment of its story, up to the last that is asked: of a
hundred rules a test asks for one or two. What an alert says depends on its own rule and on the recorded series that
this names, directly or through others (`needed`); a test that asks for alerts of any name keeps all rules.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.fakes.helm import LOADER
from tests.fakes.scrape_gaps import needed

_NAMED = re.compile(r'ALERTS\{[^}]*\balertname="(\w+)"')


def read(path: Path) -> dict[str, Any]:
    """Return a YAML file."""
    found: dict[str, Any] = yaml.load(path.read_bytes(), Loader=LOADER)  # noqa: S506 (safe, in C where there is one)
    return found


def asked(test: Mapping[str, Any]) -> set[str] | None:
    """Return the names of the alerts that a test asks for; None: of any name."""
    names = {one["alertname"] for one in test.get("alert_rule_test", ())}
    for one in test.get("promql_expr_test", ()):
        named = _NAMED.findall(one["expr"])
        if len(named) < one["expr"].count("ALERTS"):
            return None
        names |= set(named)
    return names


def beside(test: Mapping[str, Any], groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return of groups of rules what a test depends on, in the same groups and order."""
    names = asked(test)
    if names is None:
        return groups
    alerts = [rule for group in groups for rule in group["rules"] if rule.get("alert") in names]
    # What an alert says may ask for series of its own, beside its expression.
    texts = [*map(str, alerts), *(one["expr"] for one in test.get("promql_expr_test", ()))]
    recording = [{**group, "rules": [rule for rule in group["rules"] if "record" in rule]} for group in groups]
    recorded = [
        rule for group in needed({"expr": "\n".join(texts)}, {"groups": recording})["groups"] for rule in group["rules"]
    ]
    left = [
        {**group, "rules": [rule for rule in group["rules"] if rule in alerts or rule in recorded]} for group in groups
    ]
    return [group for group in left if group["rules"]]


def written(promises: Path, folder: Path) -> list[Path]:
    """Write each test of a file with its rules into a folder; return the files for ``promtool test rules``.

    The file itself where its tests ask for alerts of any name.
    """
    whole = read(promises)
    if all(asked(test) is None for test in whole["tests"]):
        return [promises]
    groups = [group for name in whole["rule_files"] for group in read(promises.parent / name)["groups"]]
    made = []
    for number, test in enumerate(whole["tests"]):
        kept = beside(test, groups)
        names = {group["name"] for group in kept}
        order = [name for name in whole["group_eval_order"] if name in names]
        rules = folder / f"{number}-rules.yml"
        rules.write_text(yaml.safe_dump({"groups": kept}), encoding="utf-8")
        alone = {**whole, "rule_files": [rules.name], "group_eval_order": order, "tests": [test]}
        made.append(folder / f"{number}.yml")
        made[-1].write_text(yaml.safe_dump(alone), encoding="utf-8")
    return made
