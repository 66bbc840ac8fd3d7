# SPDX-License-Identifier: Apache-2.0
"""The card of a self-check: is the node good, what was found, what was measured, what could not be, what to type next.

Pure: a report in, rows of text out; ``megascale_ops/cards.py`` and the terminal's panel lay them out.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from megascale_ops.cards import Row
from megascale_ops.diagnostics import equals
from megascale_ops.diagnostics.figures import KINDS, shown
from megascale_ops.diagnostics.report import CheckFinding, CheckResult, Figure, FleetReport, NodeReport, PairsReport
from megascale_ops.schema.wording import duration, printable

# 12 of them: the card stays on one screen; all are in the JSON.
_MOST_FINDINGS = 12
_MOST_NAMES = 4
_FOUND = ("bad", "warn")
# Beside those that are compared with equals.
_ALSO_TOLD = ("gpu_clock", "gpu_power", "gpu_temperature", "clock_offset")
_VERDICTS = {"good": "good", "warn": "good, with warnings", "bad": "bad"}


def verdict_of(findings: Iterable[CheckFinding]) -> str:
    """Return ``good``, ``warn`` or ``bad``."""
    severities = {one.severity for one in findings}
    return "bad" if "bad" in severities else "warn" if "warn" in severities else "good"


def findings_of(report: NodeReport) -> list[CheckFinding]:
    """Return what all checks found, the worst first."""
    order = {"bad": 0, "warn": 1, "note": 2}
    return sorted((one for result in report.results for one in result.findings), key=lambda one: order[one.severity])


def card(report: NodeReport) -> list[Row]:
    """Return what is to be said of a node, in the order in which a person asks."""
    found = findings_of(report)
    made = sum(result.status != "unmeasured" for result in report.results)
    verdict = _VERDICTS[verdict_of(found)]
    checks = "1 check" if made == 1 else f"{made} checks"
    what = f"node {report.node} is {verdict}: {checks} made in {duration(report.seconds)}"
    if not made:
        what = f"nothing could be measured on node {report.node}: that says neither good nor bad"
    rows = [
        Row("what", (what,)),
        Row("found", tuple(told(found, "--json has all"))),
        Row("measured", tuple(measured(report.results))),
        Row("not measured", tuple(_unmeasured(report.results))),
        Row("next", (_next(report, found),)),
    ]
    return [Row(label, tuple(map(printable, lines))) for label, lines in rows if any(lines)]


def fleet_card(report: FleetReport) -> list[Row]:
    """Return what is to be said of a fleet."""
    what = f"{len(report.nodes)} nodes, {report.figures:,} figures of {report.kinds} kinds compared"
    named = sorted({one.of.partition("/")[0] for one in report.findings if one.severity == "bad"})
    more = f" and {len(named) - _MOST_NAMES} more" if len(named) > _MOST_NAMES else ""
    says = f"{', '.join(named[:_MOST_NAMES])}{more} to be kept out" if named else "no node differs from the others"
    rows = [
        Row("what", (f"{what}: {says}",)),
        Row("found", tuple(told(report.findings, "--json has all"))),
        Row("not compared", report.incomparable),
    ]
    return [Row(label, tuple(map(printable, lines))) for label, lines in rows if any(lines)]


def pairs_card(report: PairsReport) -> list[Row]:
    """Return what is to be said of pairs of nodes."""
    rounds = "1 round" if report.rounds == 1 else f"{report.rounds} rounds"
    what = f"{len(report.nodes)} nodes, {report.tests:,} pairs in {rounds}, {duration(report.seconds)}"
    found = [f"node {node}: every way to it that was measured is bad" for node in report.bad_nodes]
    found += [f"switch {switch}: its nodes are good, and no way out of it is" for switch in report.bad_switches]
    found += [f"the way between {one} and {other}: both are good" for one, other in report.bad_links]
    unclear = [f"{node} {why}" for node, why in report.unclear.items()]
    says = "something is bad" if found else "not all can be told" if unclear else "all are good"
    measured_lines = [
        line_of(name, figures)
        for name in ("pair_rate", "pair_round_trip")
        if (figures := [one for one in report.figures if one.name == name])
    ]
    rows = [
        Row("what", (f"{what}: {says}",)),
        Row("found", tuple(_cut(found))),
        Row("unclear", tuple(_cut(unclear))),
        Row("failed", tuple(_cut([f"{pair}: {why}" for pair, why in report.failed.items()]))),
        Row("measured", tuple(measured_lines)),
    ]
    return [Row(label, tuple(map(printable, lines))) for label, lines in rows if any(lines)]


def _cut(lines: Sequence[str]) -> list[str]:
    """Return as many lines as a screen has room for, and how many more there are."""
    more = len(lines) - _MOST_FINDINGS
    return [*lines[:_MOST_FINDINGS], *([f"{more:,} more (--json has all)"] if more > 0 else [])]


def told(findings: Sequence[CheckFinding], rest: str) -> Iterator[str]:
    """Yield findings as sentences, with what to do; those without room are counted."""
    for one in findings[:_MOST_FINDINGS]:
        mark = "" if one.severity == "bad" else f"{'warning' if one.severity == 'warn' else 'note'}: "
        yield f"{mark}{one.text}{f' -> {one.next}' if one.next else ''}"
    if len(findings) > _MOST_FINDINGS:
        yield f"{len(findings) - _MOST_FINDINGS:,} more ({rest})"


def measured(results: Iterable[CheckResult]) -> Iterator[str]:
    """Yield a line for each kind of figure: one thing's value, or of several the median and the range."""
    groups: defaultdict[tuple[str, str], list[Figure]] = defaultdict(list)
    for result in results:
        for figure in result.figures:
            kind = KINDS.get(figure.name)
            if kind is not None and (kind.bar or figure.name in _ALSO_TOLD):
                groups[figure.name, figure.peers].append(figure)
    for (name, _), figures in groups.items():
        yield line_of(name, figures)


def line_of(name: str, figures: Sequence[Figure]) -> str:
    """Return the line of one kind of figure."""
    what, values = KINDS[name].what, [one.value for one in figures]
    if len(figures) == 1:
        return f"{what}, {figures[0].of}: {shown(name, values[0])}"
    least, most = shown(name, min(values)), shown(name, max(values))
    line = f"{what}, {len(figures)} of them: {shown(name, median(values))} ({least} to {most})"
    bars = [one.bar for one in equals.compare(figures)]
    return f"{line}, named from {bars[0]:.1%} below" if bars else line


def _unmeasured(results: Iterable[CheckResult]) -> Iterator[str]:
    """Yield each reason once, with the checks it holds for."""
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for result in results:
        for why in result.unmeasured:
            by_reason[why].append(result.check)
    for why, checks in by_reason.items():
        yield f"{', '.join(dict.fromkeys(checks))}: {why}"


def _next(report: NodeReport, found: Sequence[CheckFinding]) -> str:
    if any(one.severity in _FOUND for one in found) and report.depth == "quick":
        return "megascale-ops diagnose --full"
    if report.depth == "quick":
        return ""
    return f"megascale-ops diagnose --full --out {report.node}.json, on the other nodes too, then --compare *.json"
