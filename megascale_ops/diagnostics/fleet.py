# SPDX-License-Identifier: Apache-2.0
"""Judge the reports of several nodes together: rates against the fleet's median, versions against its majority.

What one node can't know of itself: that all its GPUs are slow, that its disk or its collectives are, that it has
another VBIOS than the others. The figures are those of the reports; nothing is measured anew.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from megascale_ops import foreign
from megascale_ops.diagnostics import equals
from megascale_ops.diagnostics.gpu.agreement import disagreeing
from megascale_ops.diagnostics.judgement import told_slow
from megascale_ops.diagnostics.report import (
    MOST_REPORT_BYTES,
    VERSION,
    CheckFinding,
    Fact,
    Figure,
    FleetReport,
    NodeReport,
)
from megascale_ops.errors import UsageError

# Facts that ought to be equal, and of which a difference is bad by itself.
_DIGEST = "product_digest"
_MOST_NAMED = 3


def read_report(path: Path) -> NodeReport:
    """Read a report that ``diagnose --out`` wrote.

    Raises:
        UsageError: there is none, or it is none.
    """
    try:
        data = foreign.read(path, MOST_REPORT_BYTES, follow=True)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"{path} can't be read ({why}): give files that `diagnose --out` wrote") from error
    try:
        report = msgspec.json.decode(data, type=NodeReport)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"{path} is no report of a self-check ({error}): give files that `diagnose --out` wrote"
        ) from error
    if report.version != VERSION:
        raise UsageError(
            f"{path} has version {report.version}, and this program reads {VERSION}: check that node again"
        )
    return report


def compare(reports: Sequence[NodeReport]) -> FleetReport:
    """Judge reports of different nodes against each other.

    Raises:
        UsageError: fewer than two, or two of one node.
    """
    if len(reports) < 2:
        raise UsageError("--compare needs the reports of two nodes or more: diagnose --compare a.json b.json")
    counts = Counter(report.node for report in reports)
    node, times = counts.most_common(1)[0]
    if times > 1:
        raise UsageError(f"{times} reports are of node {node}: give one of each, or name nodes with `diagnose --name`")
    comparisons = equals.compare(_figures(reports))
    findings = [told_slow(one, comparison) for comparison in comparisons for one in comparison.slow]
    facts = list(_facts(reports))
    findings += _bad_alone(reports, {one.of for one in findings})
    findings += _drifted(facts)
    digests: dict[str, dict[str, str]] = {}
    for fact in facts:
        if fact.name == _DIGEST:
            digests.setdefault(fact.peers, {})[fact.of] = fact.value
    for group in digests.values():
        findings += disagreeing(group)
    order = {"bad": 0, "warn": 1, "note": 2}
    findings.sort(key=lambda one: order[one.severity])
    return FleetReport(
        VERSION,
        tuple(report.node for report in reports),
        tuple(findings),
        sum(one.size for one in comparisons),
        len(comparisons),
        tuple(_incomparable(reports, comparisons)),
    )


def _figures(reports: Sequence[NodeReport]) -> Iterator[Figure]:
    """Yield all figures, named after their nodes; of full and of quick checks they are no equals."""
    for report in reports:
        for result in report.results:
            for one in result.figures:
                if one.peers:
                    peers = f"{one.peers}, {report.depth}"
                    yield Figure(one.name, f"{report.node}/{one.of}", one.value, one.samples, peers)


def _facts(reports: Sequence[NodeReport]) -> Iterator[Fact]:
    for report in reports:
        for result in report.results:
            for one in result.facts:
                if one.peers:
                    yield Fact(one.name, f"{report.node}/{one.of}", one.value, one.peers)


def _bad_alone(reports: Sequence[NodeReport], named: set[str]) -> list[CheckFinding]:
    """Return what a node has found bad of itself, less what the fleet names: damage, checks that hung, slow parts."""
    return [
        CheckFinding("bad", f"{report.node}/{one.of}", f"{report.node}: {one.text}", one.next)
        for report in reports
        for result in report.results
        for one in result.findings
        if one.severity == "bad" and f"{report.node}/{one.of}" not in named
    ]


def _drifted(facts: Sequence[Fact]) -> list[CheckFinding]:
    """Return a warning for each node with another version than the majority."""
    found = []
    names = dict.fromkeys((one.name, one.peers) for one in facts if one.name != _DIGEST)
    for name, peers in names:
        values = {one.of: one.value for one in facts if (one.name, one.peers) == (name, peers)}
        counts = Counter(values.values()).most_common()
        usual, votes = counts[0]
        if len(counts) < 2:
            continue
        what = name.replace("_", " ")
        for other, _ in counts[1:]:
            having = [of for of, value in values.items() if value == other]
            more = f" and {len(having) - _MOST_NAMED} more" if len(having) > _MOST_NAMED else ""
            text = (
                f"{', '.join(having[:_MOST_NAMED])}{more}: {what} {other}, where {votes} of {len(values)} have {usual}"
            )
            found.append(CheckFinding("warn", having[0], text, f"give them the {what} of the others"))
    return found


def _incomparable(reports: Sequence[NodeReport], comparisons: Sequence[equals.Comparison]) -> Iterator[str]:
    """Yield why some reports have no equals among the others."""
    depths = Counter(report.depth for report in reports)
    if len(depths) > 1:
        quick, full = depths["quick"], depths["full"]
        yield f"{quick} reports are of quick checks and {full} of full ones: each is compared with its own kind"
    if not comparisons:
        yield "no figure is of two nodes: other models, other checks, or nothing was measured"
