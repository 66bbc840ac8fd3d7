# SPDX-License-Identifier: Apache-2.0
"""A report in few words, for those who are not on the node: findings, figures as medians and ranges, what is missing.

Pure: a report in, the schema's ``SelfCheck`` out, which fits into one message whatever the node has.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

from megascale_ops.diagnostics.card import findings_of, line_of
from megascale_ops.diagnostics.figures import KINDS
from megascale_ops.diagnostics.judgement import worst
from megascale_ops.diagnostics.report import CheckResult, Figure, NodeReport
from megascale_ops.schema.health import (
    MOST_FIGURES,
    MOST_FINDINGS,
    MOST_GPUS,
    MOST_UNMEASURED,
    CheckedFigure,
    CheckedFinding,
    SelfCheck,
)

# 400 characters: a sentence with its numbers; one of a kernel's log may be a paragraph.
_MOST_TEXT = 400
_MOST_NAME = 120
# Beside those that are compared with equals: what a person asks of a GPU that is slow.
_ALSO = ("gpu_clock", "gpu_power", "gpu_temperature", "throttled", "clock_offset", "space_free_share")


def summary(report: NodeReport) -> SelfCheck:
    """Return what of a report is told to others."""
    found = findings_of(report)
    of_check = {id(one): result.check for result in report.results for one in result.findings}
    made = sum(result.status != "unmeasured" for result in report.results)
    return SelfCheck(
        node=report.node,
        depth=report.depth,
        status=worst(found) if made else "unmeasured",
        began_wall_s=report.began_wall_s,
        seconds=report.seconds,
        made=made,
        findings=tuple(
            CheckedFinding(
                one.severity, one.of[:_MOST_NAME], one.text[:_MOST_TEXT], one.next[:_MOST_TEXT], of_check[id(one)]
            )
            for one in found[:MOST_FINDINGS]
        ),
        figures=tuple(_figures(report.results))[:MOST_FIGURES],
        unmeasured=tuple(dict.fromkeys(why[:_MOST_TEXT] for result in report.results for why in result.unmeasured))[
            :MOST_UNMEASURED
        ],
        gpus=dict(
            [
                (fact.of[:_MOST_NAME], fact.value[:_MOST_NAME])
                for result in report.results
                for fact in result.facts
                if fact.name == "uuid"
            ][:MOST_GPUS]
        ),
    )


def _figures(results: Sequence[CheckResult]) -> Iterator[CheckedFigure]:
    """Yield each kind of figure over its equals."""
    groups: defaultdict[tuple[str, str], list[Figure]] = defaultdict(list)
    for result in results:
        for figure in result.figures:
            kind = KINDS.get(figure.name)
            if kind is not None and (kind.bar or figure.name in _ALSO):
                groups[figure.name, figure.peers].append(figure)
    for (name, _), figures in groups.items():
        values = [one.value for one in figures]
        of = figures[0].of if len(figures) == 1 else f"{len(figures)} of them"
        yield CheckedFigure(
            name, of[:_MOST_NAME], median(values), min(values), max(values), line_of(name, figures)[:_MOST_TEXT]
        )
