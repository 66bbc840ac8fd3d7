# SPDX-License-Identifier: Apache-2.0
"""The references that are tables in the code already: metrics, classes of fault, faults to inject, recovery, alerts."""

import re
from collections.abc import Iterator
from pathlib import Path

from megascale_docs.markdown import code, page, prose, table
from megascale_ops.chaos.faults import BY_NAME
from megascale_ops.chaos.faults import Fault as Injected
from megascale_ops.chaos.legitimate import WAITS
from megascale_ops.controller.record.state_machine import TABLE, EventKind, State
from megascale_ops.schema.fault_classes import FAULTS
from megascale_ops.schema.metrics import EVERY, METRICS

ROOT = Path(__file__).parents[2]
RUNBOOKS = ROOT / "dashboards" / "runbooks"


def metrics() -> str:
    """Return the page of metrics, one table a program."""
    parts = []
    for component in dict.fromkeys(one.component for one in METRICS.values()):
        rows = (
            (code(one.name), one.kind.value, " ".join(map(code, one.labels)), prose(one.help))
            for one in METRICS.values()
            if one.component == component
        )
        parts += [
            f"## {'Every program' if component == EVERY else component.capitalize()}",
            table(("metric", "kind", "labels", "help"), rows),
        ]
    return page(
        "Metrics",
        "What agents and controller serve at `/metrics`. The label `job` is the training job: scrape with "
        "`honor_labels: true`. No label grows with time.",
        *parts,
    )


def fault_classes() -> str:
    """Return the page of what a verdict may say."""
    rows = (
        (
            f'<a id="{one.name}"></a>{code(one.name)}',
            one.blames.value,
            prose(one.meaning),
            code(one.action),
            prose(one.why),
        )
        for one in FAULTS.values()
    )
    return page(
        "Classes of fault",
        "What a verdict may say, whom it blames, and what is done unless the job's [policy](policy.md) says otherwise.",
        table(("class", "blames", "meaning", "action", "why"), rows),
    )


def chaos() -> str:
    """Return the page of what ``megascale-ops chaos`` can break."""
    faults = [one for one in BY_NAME.values() if one.name not in WAITS]
    waits = [one for one in BY_NAME.values() if one.name in WAITS]
    return page(
        "Faults to inject",
        "`megascale-ops chaos run NAME` breaks a small job of its own and holds the verdict against the truth; "
        "`chaos list` prints this table.",
        f"## {len(faults)} faults",
        table(("name", "kind", "what is done", "expected"), map(_injected, faults)),
        f"## {len(waits)} waits that are none",
        table(("name", "kind", "what is done", "expected"), map(_injected, waits)),
    )


def recovery_moves() -> str:
    """Return the table that the controller runs by, one row a move."""
    return table(("state", "event", "next state"), _moves())


def runbook_index() -> str:
    """Return the page that lists the alerts, worst first as in the rules."""
    text = (ROOT / "dashboards" / "rules" / "alerts.yml").read_text(encoding="utf-8")
    names = re.findall(r"^ +- alert: (\w+)$", text, re.MULTILINE)
    said = dict(zip(names, re.findall(r"severity: (\w+)", text), strict=True))
    return page(
        "Runbooks",
        "One page for each alert: symptom, meaning, the first three commands, what then, how to undo it, when it is a "
        "false alarm. The controller serves them, too, at `/runbooks/`.",
        table(
            ("alert", "severity", ""),
            ((f"[{name}]({name}.md)", said[name], prose(_first_line(name))) for name in names),
        ),
    )


def _first_line(name: str) -> str:
    """Return what a runbook says of its alert in the first paragraph, without the severity."""
    paragraph = (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8").split("\n\n")[1]
    return " ".join(re.sub(r"^\*\*\w+\*\*: ?", "", paragraph).split())


def _moves() -> Iterator[tuple[str, str, str]]:
    for state in State:
        for event in EventKind:
            if (move := TABLE.get((state, event))) is not None:
                yield code(state.value), code(event.value), code(move.state.value)


def _injected(one: Injected) -> tuple[str, str, str, str]:
    expected = " or ".join(code(name) for name in one.classes) if one.classes else "nothing"
    return code(one.name), one.kind.replace("_", " "), prose(one.text), expected
