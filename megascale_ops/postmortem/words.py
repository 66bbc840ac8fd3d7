# SPDX-License-Identifier: Apache-2.0
"""What was found in files, as lines for people: a verdict as a card has it, without what only a live job knows.

Texts come from files of others: control characters are shown and not obeyed.
"""

import textwrap
from collections.abc import Iterator

from megascale_ops.postmortem.examine import Examined
from megascale_ops.schema.fault_classes import FAULTS
from megascale_ops.schema.folding import ranges
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.wording import printable

_WIDTH = 100
_LABEL = 12
_MOST_EVIDENCE = 8
_MOST_CHARACTERS = 300


def lines_of(examined: Examined) -> list[str]:
    """Return the text of all verdicts, the likeliest cause first."""
    lines = [f"read: {_read(examined)}"]
    for number, verdict in enumerate(examined.verdicts):
        lines.append("verdict" if number == 0 else "and beside it")
        lines += [line for label, text in _rows(verdict) for line in _wrapped(label, text)]
    return lines


def _read(examined: Examined) -> str:
    parts = (
        (examined.dumps, "flight recorder dump"),
        (examined.stacks, "stack"),
        (examined.logs, "log"),
    )
    return ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for count, name in parts if count)


def _rows(verdict: Verdict) -> Iterator[tuple[str, str]]:
    yield "what", f"{verdict.fault}: {FAULTS[verdict.fault].meaning}"
    if verdict.culprits:
        yield "where", f"{'rank' if len(verdict.culprits) == 1 else 'ranks'} {ranges(verdict.culprits)}"
    yield "confidence", f"{verdict.confidence:.0%}"
    yield "reason", verdict.reason
    for finding in verdict.evidence[:_MOST_EVIDENCE]:
        yield "evidence", finding.text
    if len(verdict.evidence) > _MOST_EVIDENCE:
        yield "", f"{len(verdict.evidence) - _MOST_EVIDENCE} more: --json"
    if verdict.otherwise:
        yield "otherwise", verdict.otherwise


def _wrapped(label: str, text: str) -> list[str]:
    shown = printable(text)
    shown = shown if len(shown) <= _MOST_CHARACTERS else f"{shown[: _MOST_CHARACTERS - 3]}..."
    first, rest = f"  {label:<{_LABEL}}", " " * (_LABEL + 2)
    return textwrap.wrap(shown, _WIDTH, initial_indent=first, subsequent_indent=rest) or [first.rstrip()]
