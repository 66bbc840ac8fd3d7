# SPDX-License-Identifier: Apache-2.0
"""The parts of a report as HTML, each a plain function from what is shown to text.

Texts come from ranks and may hold anything: every one of them goes through ``escape``.
"""

import shlex
from collections.abc import Iterable, Sequence
from html import escape

from megascale_ops.ledger import US
from megascale_ops.schema.events import Incident
from megascale_ops.schema.fault_classes import class_of
from megascale_ops.schema.folding import named as ranks_named
from megascale_ops.schema.wording import clock, duration, percent, printable
from megascale_ops.trace.report_facts import HOLDS, Report, Setting, Told, in_order

# 12 cards are read; the list below them has every incident.
MOST_CARDS = 12
OPEN_CARDS = 2
_TONES = {
    "open": "bad", "watching": "warn", "ended": "bad", "recovered": "good", "harmless": "calm", "over": "calm",
    "failed": "bad", "finished": "calm", "stopped": "calm", "running": "good",
}  # fmt: skip


def text(value: object) -> str:
    """Return a value as it may stand in the page."""
    return escape(printable(str(value)))


def headline(report: Report) -> str:
    """The one sentence that is read first: what goes on, or what was last."""
    told = in_order(report.gathered.told)
    if not told:
        return '<div class="headline good"><span class="said">No incident was noticed.</span></div>'
    incident = told[0].incident
    holds = incident.state in HOLDS
    lead = "Now" if holds else "Nothing is open. The last incident"
    verdict = incident.verdict
    why = report.gathered.reader.command(f"why {shlex.quote(incident.id)}")
    reason = f"<br><span>{text(verdict.reason)}</span>" if verdict is not None and verdict.reason else ""
    return (
        f'<div class="headline {tone(incident.state)}"><span class="said">{lead}: {text(_what(incident))}</span>'
        f"{reason}<br><span class=faint>{text(incident.id)} · {text(incident.state)} · "
        f"since {text(clock(_began(incident), report.gathered.zone))} · "
        f"<code>{text(why)}</code></span></div>"
    )


def tiles(report: Report) -> str:
    """The numbers that are asked for first."""
    gathered, ledger = report.gathered, report.ledger
    facts = gathered.history.facts if gathered.history is not None else None
    reached = max(report.times.reached) if report.times is not None else -1
    stopped = sum(1 for told in gathered.told if told.incident.marks.stopped or told.incident.marks.ordered)
    shown = [
        ("wall time", duration(ledger.wall_us / US)),
        ("training", percent(report.goodput) if report.goodput >= 0 else "not known"),
        ("typical step", duration(report.step_s) if report.step_s else "not known"),
        ("furthest step", f"{reached:,}" if reached >= 0 else "not known"),
        ("ranks on nodes", _size(report) if facts is not None else "not known"),
        ("incidents", f"{len(gathered.told):,}"),
        ("stops", f"{stopped:,}"),
    ]
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><span class="faint">{name}</span><b>{text(value)}</b></div>' for name, value in shown
        )
        + "</div>"
    )


def notes(sentences: Iterable[str]) -> str:
    """What could not be read, and why."""
    return "".join(f'<div class="note">{text(sentence)}</div>' for sentence in sentences)


def cards(report: Report) -> str:
    """The verdict cards: what goes on first, then the newest."""
    told = in_order(report.gathered.told)
    if not told:
        return "<p>None: nothing was noticed that is worth a word.</p>"
    shown = [_card(one, is_open=number < OPEN_CARDS) for number, one in enumerate(told[:MOST_CARDS])]
    left = len(told) - MOST_CARDS
    return "".join(shown) + (f'<p class="faint">{left:,} more are in the list below.</p>' if left > 0 else "")


def incidents(report: Report) -> str:
    """Every incident, also those for which nothing was done."""
    rows = []
    for told in sorted(report.gathered.told, key=lambda one: _began(one.incident)):
        incident, marks = told.incident, told.incident.marks
        cost = duration(max(0.0, marks.stepped - _began(incident))) if marks.stepped else ""
        lost = incident.step_before - incident.step_after if min(incident.step_before, incident.step_after) >= 0 else -1
        rows.append(
            (incident.id, clock(_began(incident), report.gathered.zone), _what(incident), incident.state, cost,
             f"{lost:,}" if lost >= 0 and marks.stepped else "", incident.done or "nothing")
        )  # fmt: skip
    heads = ("incident", "since", "what", "state", "until it stepped", "steps lost", "what was done")
    return table(heads, rows, numbers=(4, 5)) if rows else "<p>None.</p>"


def settings(report: Report) -> str:
    """Every setting of the job's policy."""
    rows = [
        (setting.name, setting.value, _default(setting), "changed while it lived" if setting.is_changed else "")
        for setting in report.gathered.settings
    ]
    return table(("setting", "value", "", ""), rows) if rows else "<p>They are not known.</p>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Return a table; columns in ``numbers`` stand to the right."""
    kind = [' class="number"' if column in numbers else "" for column in range(len(heads))]
    head = "".join(f"<th{kind[column]}>{text(name)}</th>" for column, name in enumerate(heads))
    lines = "".join(
        "<tr>" + "".join(f"<td{kind[column]}>{text(value)}</td>" for column, value in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{lines}</table></div>'


def _card(told: Told, *, is_open: bool) -> str:
    incident = told.incident
    rows = "".join(f"<dt>{text(label)}</dt><dd>{_lines(label, lines)}</dd>" for label, lines in told.rows)
    return (
        f'<details class="card"{" open" if is_open else ""}><summary><b>{text(incident.id)}</b> '
        f'<span class="pill {tone(incident.state)}">{text(incident.state)}</span> {text(_what(incident))}</summary>'
        f"<dl>{rows}</dl></details>"
    )


def _lines(label: str, lines: Sequence[str]) -> str:
    shown = [f"<code>{text(line)}</code>" if label == "next" else text(line) for line in lines]
    return shown[0] if len(shown) == 1 else "<ul>" + "".join(f"<li>{line}</li>" for line in shown) + "</ul>"


def _what(incident: Incident) -> str:
    verdict = incident.verdict
    if verdict is None:
        return "not judged yet"
    who = ranks_named(verdict.culprits) + (f" on {', '.join(verdict.nodes)}" if verdict.nodes else "")
    return f"{verdict.fault}: {class_of(verdict.fault).meaning} ({who})"


def _default(setting: Setting) -> str:
    if setting.value == setting.default:
        return ""
    return f"default {setting.default}" if setting.default else "over the table of actions"


def _size(report: Report) -> str:
    facts = report.gathered.history.facts if report.gathered.history is not None else None
    ranks = facts.world_size if facts is not None else 0
    nodes = len({place.node for place in report.places})
    return f"{ranks or len(report.places):,} on {nodes:,}" if nodes else f"{ranks:,}"


def tone(state: str) -> str:
    """Return the colour class for a state of a job or an incident."""
    return _TONES.get(state, "warn")


def _began(incident: Incident) -> float:
    return incident.marks.began or incident.marks.detected
