# SPDX-License-Identifier: Apache-2.0
"""An alert's own tests once more, with scrapes that are missing: what monitoring does is no news of what it watches.

From a test for promtool (``dashboards/rules/tests``) three kinds of variants are made:

    lost scrape            one target gives nothing at one moment
    restarted exporter     one target gives nothing for a minute; then its counters begin at 0, and what it remembers
                           of events is gone
    restarted Prometheus   no target has samples for five minutes

A gap begins where a value changes (the event falls into it), one sample later, in the midst of the waiting, and at each
moment that the alert's expression looks back to. A test that expects nothing has to
stay silent all the time; one that expects an alert has to see it with its labels after the gap, late by the gap, by
what the alert waits for and by five minutes, which the longest ``rate`` needs. Prometheus marks the series of a failed
scrape as gone, so the first missing sample is ``stale``; rules that are evaluated within a restart of Prometheus do not
exist, and see nothing here.

Promtool takes as long for each variant as for the story that it is made from: thirty rules, asked every half minute.
So variants of an alert live in one run, each with a label of its own that no rule drops (`apart`).
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megascale_ops.schema.metrics import METRICS, Kind

Sample = float | str | None  # a value, "stale", nothing

# The journal keeps these: a controller that starts again counts on.
JOURNALED = {
    "megascale_restarts_total",
    "megascale_incidents_total",
    "megascale_incident_seconds_total",
    "megascale_wall_seconds",
}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_NUMBER = r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_WORD = re.compile(rf"(?P<value>{_NUMBER}|_|stale)(?:(?P<step>[+-]\d+(?:\.\d+)?(?:e[+-]?\d+)?))?(?:x(?P<times>\d+))?")
_RATES_S = 300
_VARIANT = "variant"  # no metric has such a label
# Promtool refuses an expression that has 10,000 samples in memory; some have the same series three times.
_MOST_SAMPLES = 3_000
_FINEST_S = 30  # between two samples of a range
_WHOLE = r"(?<![:\w])(sum|min|max|avg|count|group|stddev|stdvar)(\s*\()"
_MIXED = re.compile(r"\b(vector|scalar|absent|absent_over_time)\s*\(|\bcount_values|\b(topk|bottomk|quantile)\s*\(")


class Kinds(NamedTuple):
    """One kind of gap."""

    name: str
    length_s: int  # 0: a single sample
    is_all: bool  # of all targets, not of one
    resets: bool


GAPS = (
    Kinds("lost scrape", 0, is_all=False, resets=False),
    Kinds("restarted exporter", 60, is_all=False, resets=True),
    Kinds("restarted Prometheus", 300, is_all=True, resets=False),
)


class Variant(NamedTuple):
    """A test that was made from an alert's own."""

    gap: str  # its kind; "": none, as a control
    fires: bool  # the alert is expected
    is_beside: bool  # it begins one sample behind the event, or half-way between that and what is asked
    test: dict[str, Any]  # for promtool


class Series(NamedTuple):
    """One input series, a sample for each interval."""

    name: str
    labels: Mapping[str, str]
    text: str  # as it is selected
    samples: tuple[Sample, ...]
    changes: tuple[int, ...]  # where its values take another course
    steps: tuple[float, ...]  # by which a value differs from the one before

    @property
    def target(self) -> str:
        """Its source: the controller, a node's agent, or an unrelated target."""
        if self.name == "up":
            where = self.labels.get("node") or self.labels.get("instance", "")
            return {"megascale-controller": "controller"}.get(self.labels["job"], f"agent {where}")
        if METRICS[self.name].component == "controller":
            return "controller"
        return f"agent {self.labels.get('node', '')}"


def seconds(text: str) -> int:
    """Return a duration as promtool writes it in seconds."""
    return sum(int(count) * _SECONDS[unit] for count, unit in re.findall(r"(\d+)([smhd])", text))


def parsed(series: str, values: str) -> Series:
    """Return a series of a test; ValueError for a notation that is not known here."""
    name, _, inside = series.partition("{")
    samples: list[Sample] = []
    steps: list[float] = []
    changes = []
    for word in values.split():
        found = _WORD.fullmatch(word)
        if found is None:
            raise ValueError(f"{series}: {word!r} is no value of a series")
        changes.append(len(samples))
        times, step = int(found["times"] or 0), float(found["step"] or 0)
        if found["value"] in ("_", "stale"):
            count = max(1, times) if found["value"] == "_" else 1
            samples += [None if found["value"] == "_" else "stale"] * count
            steps += [0.0] * count
        else:
            samples += [float(found["value"]) + step * number for number in range(times + 1)]
            steps += [step] * (times + 1)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', inside))
    return Series(name, labels, series, tuple(samples), tuple(changes), tuple(steps))


def held(series: Series, until: int, count: int) -> Series:
    """Return a series that goes on after sample ``until`` as it went there, for ``count`` samples in all."""
    samples = list(series.samples[: until + 1])
    if until < len(series.samples):
        last, step = samples[-1], series.steps[until]
        more = range(1, count - until)
        samples += [last + step * number if isinstance(last, float) else None for number in more]
    return series._replace(samples=tuple(samples[:count]))


def cut(series: Series, kind: Kinds, first: int, interval_s: int, target: str) -> Series:
    """Return a series without what a gap from sample ``first`` on takes away."""
    if not kind.is_all and series.target != target:
        return series
    after = first + max(1, -(-kind.length_s // interval_s))
    samples = list(series.samples)
    if series.name == "up" and not kind.is_all:
        samples[first:after] = [0.0] * len(samples[first:after])
        return series._replace(samples=tuple(samples))
    there = samples[first:after]
    samples[first:after] = (["stale"] + [None] * (len(there) - 1)) if there else []
    if kind.resets:
        samples[after:] = [
            _restarted(series, place, series.samples[place], first, interval_s) for place in range(after, len(samples))
        ]
    return series._replace(samples=tuple(samples))


def _restarted(series: Series, place: int, sample: Sample, first: int, interval_s: int) -> Sample:
    """Return a sample of a program that was started anew at ``first``."""
    if not isinstance(sample, float) or series.name == "up" or series.name in JOURNALED:
        return sample
    if series.name.endswith("_age_seconds"):  # what happened up to the last scrape before the gap is forgotten
        return sample if sample <= (place - first + 1) * interval_s else None
    if METRICS[series.name].kind in (Kind.COUNTER, Kind.HISTOGRAM):
        before = [one for one in series.samples[:first] if isinstance(one, float)]
        grown = sample - (before[-1] if before else 0.0)
        return grown if grown >= 0 else sample
    return sample


def is_down(series: Iterable[Series], target: str, first: int, ends: int) -> bool:
    """Say whether a target was down for a moment shortly before or after a gap: both are one that is longer."""
    near = [
        set(one.samples[max(0, first - 2) : ends + 2])
        for one in series
        if one.name == "up" and target in (one.target, "all")
    ]
    return any({0.0, 1.0} <= values for values in near)


def written(series: Series) -> dict[str, str]:
    """Return a series as promtool reads it."""
    words = [one if isinstance(one, str) else "_" if one is None else f"{one:.10g}" for one in series.samples]
    return {"series": series.text, "values": " ".join(words)}


def windows_s(*expressions: str) -> set[int]:
    """Return how far back expressions look: their ranges and offsets."""
    return {seconds(found) for text in expressions for found in re.findall(r"(?:\[|offset )(\d+[smhd])", text)}


def places(all_series: Iterable[Series], until: int) -> tuple[int, int, int]:
    """Return where gaps begin: at the last change up to a sample, one later, and half-way between it and the sample."""
    changes = {change for series in all_series for change in series.changes if 0 < change <= until}
    last = max(changes, default=max(1, until // 2))
    return last, last + 1, (last + until) // 2


def variants(test: Mapping[str, Any], rule: Mapping[str, Any], back_s: set[int]) -> Iterator[Variant]:
    """Yield the tests of an alert that are made from one of its own.

    Args:
        test: of promtool, as read from YAML.
        rule: the alert.
        back_s: how far back it looks, itself and through recorded series.
    """
    alert, wait_s = rule["alert"], seconds(rule["for"])
    cases = [case for case in test.get("alert_rule_test", ()) if case["alertname"] == alert]
    if not cases:
        return
    fires = [case for case in cases if case["exp_alerts"]]
    last = (fires or cases)[-1]
    interval_s = seconds(test["interval"])
    at = seconds(last["eval_time"]) // interval_s
    inputs = [parsed(one["series"], str(one["values"])) for one in test["input_series"]]
    asked = _after(alert, last, 0, at * interval_s)
    yield Variant("", bool(fires), is_beside=False, test=_made(test, inputs, alert, asked, "as it was"))
    targets = sorted({series.target for series in inputs})
    for kind in GAPS:
        # What an expression looks back to is there or is not; how its counters went on since is nothing to it.
        looked = set() if kind.resets else {at - length_s // interval_s for length_s in back_s}
        event, *beside = places(inputs, at)
        for first in sorted({event, *beside} | {place for place in looked if place > 0}):
            is_beside = first in set(beside) - looked - {event}
            ends = first + max(1, -(-kind.length_s // interval_s))
            until = max(at, ends) + -(-(kind.length_s + wait_s + _RATES_S) // interval_s) if fires else at
            longer = [held(series, at, until + 1) for series in inputs]
            for target in ["all"] if kind.is_all else targets:
                if not fires and is_down(inputs, target, first, ends):
                    continue
                gapped = [cut(series, kind, first, interval_s, target) for series in longer]
                asked = _after(alert, last, ends * interval_s, until * interval_s)
                what = f"{kind.name} ({target}) at {first * interval_s / 60:g}m"
                yield Variant(kind.name, bool(fires), is_beside, _made(test, gapped, alert, asked, what))


def long_story(test: Mapping[str, Any], kind: Kinds, every_s: int) -> dict[str, Any]:
    """Return a test with a gap every now and then, of one target after another: what it expects stays as it is."""
    interval_s = seconds(test["interval"])
    inputs = [parsed(one["series"], str(one["values"])) for one in test["input_series"]]
    targets = ["all"] if kind.is_all else sorted({series.target for series in inputs})
    gapped = inputs
    for number, first in enumerate(range(5, max(len(one.samples) for one in inputs), every_s // interval_s)):
        target = targets[number % len(targets)]
        ends = first + max(1, kind.length_s // interval_s)
        if not is_down(inputs, target, first, ends):
            gapped = [cut(series, kind, first, interval_s, target) for series in gapped]
    return {
        **test,
        "name": f"{kind.name} every {every_s // 60} minutes: {test['name']}",
        "input_series": [written(series) for series in gapped],
        "promql_expr_test": [one for one in test["promql_expr_test"] if not one["exp_samples"]],
    }


def _made(
    test: Mapping[str, Any], inputs: Sequence[Series], alert: str, asked: list[dict[str, Any]], what: str
) -> dict[str, Any]:
    return {
        "name": f"{alert}, {what}: {test['name']}",
        "interval": test["interval"],
        "input_series": [written(series) for series in inputs],
        "promql_expr_test": asked,
    }


def _after(alert: str, case: Mapping[str, Any], from_s: int, until_s: int) -> list[dict[str, Any]]:
    """Return what is asked: nothing ever, or each alert with its labels at some moment after the gap."""
    firing = f'alertname="{alert}", alertstate="firing"'
    if not case["exp_alerts"]:
        expr = f"count_over_time(ALERTS{{{firing}}}[{until_s + 60}s])"
        return [{"expr": expr, "eval_time": f"{until_s}s", "exp_samples": []}]
    asked = []
    for one in case["exp_alerts"]:
        labels = ", ".join(f'{name}="{value}"' for name, value in sorted(one["exp_labels"].items()))
        expr = f"count(count_over_time(ALERTS{{{firing}, {labels}}}[{max(1, until_s - from_s)}s]))"
        asked.append({"expr": expr, "eval_time": f"{until_s}s", "exp_samples": [{"labels": "{}", "value": 1}]})
    return asked


def apart(expression: str) -> str | None:
    """Return an expression that judges the series of each variant as it would if there were no others.

    Every aggregation and every match keeps the variant's label; what has no labels at all belongs to nobody: None.
    """
    if _MIXED.search(expression):
        return None
    text = re.sub(_WHOLE, rf"\1 by ({_VARIANT})\2", expression)
    text = re.sub(r"\b(on|by)\s*\(\s*\)", rf"\1 ({_VARIANT})", text)
    return re.sub(rf"\b(on|by)\s*\((?!{_VARIANT}\))\s*", rf"\1 ({_VARIANT}, ", text)


def together(
    groups: Sequence[Mapping[str, Any]], tests: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return groups of rules and one test for each interval that find what all of these tests find one by one.

    Unchanged where a rule has an expression that would mix the tests.
    """
    kept = [[apart(rule["expr"]) for rule in group["rules"]] for group in groups]
    if any(expr is None for exprs in kept for expr in exprs):
        return [dict(group) for group in groups], [dict(test) for test in tests]
    parted = [
        {**group, "rules": [{**rule, "expr": expr} for rule, expr in zip(group["rules"], exprs, strict=True)]}
        for group, exprs in zip(groups, kept, strict=True)
    ]
    joined = []
    back_s = max(windows_s(*(rule["expr"] for group in groups for rule in group["rules"])), default=0)
    for some in _in_runs(tests, back_s // _FINEST_S + 1):
        own = [(test, f"{_VARIANT}={json.dumps(f'{number}, ' + test['name'])}") for number, test in enumerate(some)]
        series = [
            {**one, "series": _labelled(one["series"], label)} for test, label in own for one in test["input_series"]
        ]
        asked = [
            {**one, "expr": one["expr"].replace("ALERTS{", f"ALERTS{{{label}, ")}
            for test, label in own
            for one in test["promql_expr_test"]
        ]
        joined.append({"interval": some[0]["interval"], "input_series": series, "promql_expr_test": asked})
    return parted, joined


def _in_runs(tests: Sequence[Mapping[str, Any]], most: int) -> Iterator[list[Mapping[str, Any]]]:
    """Yield tests of one interval each, as many as promtool takes with ``most`` samples a series."""
    some: list[Mapping[str, Any]] = []
    held: Counter[str] = Counter()
    for test in sorted(tests, key=lambda one: str(one["interval"])):
        more = Counter[str]()
        for one in test["input_series"]:
            more[one["series"].partition("{")[0]] += min(most, len(one["values"].split()))
        if some and (some[0]["interval"] != test["interval"] or max((held + more).values()) > _MOST_SAMPLES):
            yield some
            some, held = [], Counter()
        some.append(test)
        held += more
    if some:
        yield some


def _labelled(series: str, label: str) -> str:
    name, _, inside = series.partition("{")
    return f"{name}{{{', '.join(filter(None, (label, inside.rstrip('} '))))}}}"


def needed(alert: Mapping[str, Any], recording: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recording rules that an alert asks for, directly or through others, in their groups."""
    rules = {rule["record"]: rule for group in recording["groups"] for rule in group["rules"]}
    wanted: set[str] = set()
    texts = [str(alert["expr"])]
    while texts:
        text = texts.pop()
        for name in rules:
            if name in text and name not in wanted:
                wanted.add(name)
                texts.append(str(rules[name]["expr"]))
    groups = [
        {**group, "rules": [rule for rule in group["rules"] if rule["record"] in wanted]}
        for group in recording["groups"]
    ]
    return {"groups": [group for group in groups if group["rules"]]}
