# SPDX-License-Identifier: Apache-2.0
"""The verdict card: one incident on one screen, for people: in a terminal, a log, a message to the engineer on call.

What broke, which rank on which node, since when, how sure we are, on what evidence, what was done about it, and the
command to type next. ``card`` decides what is said (plain text, no layout); ``plain_incident`` lays it out for a log
and a message, ``cli/terminal/incident_panel.py`` for a terminal.

Texts come from ranks and may hold anything: they are never read as markup, and control characters are shown.
"""

import shlex
import textwrap
from collections.abc import Callable, Sequence
from datetime import tzinfo
from typing import NamedTuple

from megascale_ops.schema.courses import course_words
from megascale_ops.schema.events import Incident, Marks
from megascale_ops.schema.fault_classes import FAULTS, class_of
from megascale_ops.schema.folding import fold, ranges
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import EvidenceItem
from megascale_ops.schema.wording import certainty, clock, duration, printable

# 100 columns: fits beside a log on a laptop's terminal; a full-width terminal makes long lines hard to read.
WIDTH = 100
# 8 of them: the card stays on one screen; all evidence is in `why --json` and in the incident's folder.
MOST_EVIDENCE = 8
MOST_RANGES_NAMED = 8
# 180 characters: a traceback's last line can be a paragraph; two printed lines show where it is from.
MOST_CHARACTERS = 180

# Evidence that is taken of every rank: of ranks that are not to blame it is folded into one line.
_KERNEL = "kernel"
_NOTHING = {"stderr": "it wrote nothing"}
_OF_EVERYBODY = frozenset({"stacks", "flight_recorder", "collectives", "process", _KERNEL})


class Reader(NamedTuple):
    """From where a card is read, so that the command it ends with works there.

    Attributes:
        options: what stands behind a verb so that it finds this controller or run: ``--controller URL``.
        has: whether a file or folder is here, and not empty; another node's is not.
        is_live: a controller answers there.
    """

    options: str = ""
    has: Callable[[str], bool] = lambda _path: True
    is_live: bool = True

    def command(self, text: str) -> str:
        """Return a command of ours as it works for this reader."""
        return f"megascale-ops {text} {self.options}".rstrip()


class Row(NamedTuple):
    """One labelled entry of the card; more than one line makes a list."""

    label: str
    lines: tuple[str, ...]


def card(
    incident: Incident, zone: tzinfo | None = None, reader: Reader | None = None, *, leads_on: bool = True
) -> list[Row]:
    """Return what is to be said about an incident, in the order in which a person asks.

    Args:
        incident: as the controller or the journal gives it.
        zone: in which wall clock times are printed; None is the machine's own.
        reader: from where it is read; None: where the run is, with its controller the newest of this user.
        leads_on: with the command to type next; False where what that reads will be gone.
    """
    reader = reader or Reader()
    verdict = incident.verdict
    rows = [Row("what", (_what(verdict),)), Row("where", (_where(incident),)), Row("since", (_since(incident, zone),))]
    if verdict is not None:
        rows.append(Row("confidence", (certainty(verdict.confidence, verdict.sure_of),)))
        rows.append(Row("reason", (verdict.reason or "none given",)))
    if incident.course is not None:
        rows.append(Row("course", (course_words(incident.course, incident.marks.began),)))
    rows.append(Row("evidence", _evidence(incident, reader)))
    rows.append(Row("done", (incident.done or "nothing yet",)))
    if verdict is not None and verdict.otherwise:
        rows.append(Row("otherwise", (verdict.otherwise,)))
    rows.append(Row("times", (_times(incident),)))
    if leads_on:
        rows.append(Row("next", (next_command(incident, reader),)))
    return [Row(label, tuple(printable(line) for line in lines)) for label, lines in rows if any(lines)]


def plain_incident(
    incident: Incident, zone: tzinfo | None = None, reader: Reader | None = None, *, leads_on: bool = True
) -> str:
    """Return the card as text for logs and pipes; see ``card`` for the arguments.

    Lines have at most WIDTH columns, but for a path or a command that is longer by itself.
    """
    rows = card(incident, zone, reader, leads_on=leads_on)
    return plain_rows(f"incident {incident.id} · {incident.state}", rows)


def plain_rows(title: str, rows: Sequence[Row]) -> str:
    """Return a card's rows below its title as text; see ``plain_incident``. What is typed (``next``) stays whole."""
    margin = max(len(row.label) for row in rows) + 4
    text = [title]
    for label, lines in rows:
        lead = f"  {label}".ljust(margin)
        for line in lines:
            bullet = "- " if len(lines) > 1 else ""
            rest = " " * (margin + len(bullet))
            # Paths and commands stay whole, or they can't be copied.
            wrapped = textwrap.wrap(
                line,
                WIDTH,
                initial_indent=lead + bullet,
                subsequent_indent=rest,
                break_long_words=False,
                break_on_hyphens=False,
            )
            text.extend([lead + line] if label == "next" else wrapped)
            lead = " " * margin
    return "\n".join(text)


def next_command(incident: Incident, reader: Reader | None = None) -> str:
    """Return the command that tells this reader most about the incident now; what it names is there."""
    reader = reader or Reader()
    if reader.is_live and incident.state in ("open", "watching"):
        return reader.command(f"status --job {shlex.quote(incident.job)}")
    culprits = incident.verdict.culprits if incident.verdict else ()
    for kind in (*class_of(incident.verdict.fault if incident.verdict else "unknown").telling, "black_box"):
        for item in incident.evidence:
            is_meant = item.ok and item.path and item.kind == kind and (not culprits or item.rank in culprits)
            if is_meant and reader.has(item.path):
                verb = "megascale-ops inspect" if kind == "black_box" else "less"
                return f"{verb} {shlex.quote(item.path)}"
    if incident.folder and reader.has(incident.folder):
        return f"ls {shlex.quote(incident.folder)}"
    return reader.command(f"why {shlex.quote(incident.id)} --json")


def clipped(text: str) -> str:
    """Return ``text`` cut to MOST_CHARACTERS, with dots where something is missing."""
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 3] + "..."


def ranks_named(ranks: tuple[int, ...]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``; what goes beyond eight ranges is counted."""
    if not ranks:
        return "no rank"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks, MOST_RANGES_NAMED).replace(',', ', ')}"


def _what(verdict: Verdict | None) -> str:
    if verdict is None:
        return "not judged yet"
    return f"{verdict.fault}: {FAULTS[verdict.fault].meaning}" if verdict.fault in FAULTS else verdict.fault


def _where(incident: Incident) -> str:
    verdict = incident.verdict
    if verdict is None:
        return f"job {incident.job}, round {incident.round}"
    nodes = ", ".join(verdict.nodes)
    place = ranks_named(verdict.culprits) + (f" on {nodes}" if nodes else "")
    return f"{place}, job {incident.job}, round {incident.round}"


def _since(incident: Incident, zone: tzinfo | None) -> str:
    verdict = incident.verdict
    began = (verdict.since_wall_s if verdict else 0.0) or incident.marks.began or incident.marks.detected
    step = verdict.since_step if verdict and verdict.since_step >= 0 else incident.step_before
    when = clock(began, zone) if began else "not known"
    return f"{when}, step {step:,}" if step >= 0 else when


def _evidence(incident: Incident, reader: Reader) -> tuple[str, ...]:
    findings = incident.verdict.evidence if incident.verdict else ()
    lines = [clipped(f"{finding.source}: {finding.text}") for finding in findings]
    told = any(finding.name == "places" for finding in findings)
    folded = "" if told else _stacks_folded(incident)
    if folded:
        lines.append(f"stacks: {folded}")
    # First the kernel's record of a kill, since a killed process writes no more; then the culprits' evidence.
    blamed = incident.verdict.culprits if incident.verdict else ()
    for item in sorted(incident.evidence, key=lambda one: (one.kind != _KERNEL, one.rank not in blamed)):
        if (folded or told or item.kind == _KERNEL) and not _tells(incident, item):
            continue
        if item.kind == _KERNEL and item.text:  # its sentences are the evidence, and each names its subject
            lines += [clipped(line) for line in item.text.splitlines()]
            continue
        about = f" of rank {item.rank}" if item.rank >= 0 else ""
        is_file = item.ok and item.path and not (item.kind == "stderr" and not item.text)
        nothing = _NOTHING.get(item.kind, "nothing to see") if item.ok else "no answer"
        text = item.path if is_file else "; ".join(item.text.splitlines()) or nothing
        lines.append(f"{item.kind.replace('_', ' ')}{about}: {text}")
    if len(lines) > MOST_EVIDENCE:
        more = reader.command(f"why {shlex.quote(incident.id)} --json")
        lines[MOST_EVIDENCE:] = [f"{len(lines) - MOST_EVIDENCE:,} more: {more}"]
    return tuple(lines)


def _tells(incident: Incident, item: EvidenceItem) -> bool:
    """Return whether a piece of evidence has a line of its own beside the folded one."""
    blamed = incident.verdict.culprits if incident.verdict else ()
    if item.kind == _KERNEL and _KERNEL not in class_of(incident.verdict.fault if incident.verdict else "").telling:
        return False
    return item.rank in blamed or item.kind not in _OF_EVERYBODY


def _stacks_folded(incident: Incident) -> str:
    """Return where all ranks are in one line, "" when fewer than two have shown it."""
    places = {item.rank: item.frames[0] for item in incident.evidence if item.kind == "stacks" and item.frames}
    return fold(places) if len(places) > 1 else ""


def _times(incident: Incident) -> str:
    """Return how long each part took, as far as the incident has come."""
    marks: Marks = incident.marks
    start = marks.began or marks.detected
    parts = [
        f"{label} after {duration(max(0.0, mark - start))}"
        for label, mark in (
            ("detected", marks.detected),
            ("named", marks.named),
            ("stopped", marks.stopped),
            ("first new step", marks.stepped),
            ("caught up", marks.caught_up),
        )
        # A start equal to the time of detection is no measurement: no time to detect is printed.
        if start and mark > start
    ]
    if incident.step_before >= 0 and incident.step_after >= 0:
        lost = max(0, incident.step_before - incident.step_after)
        parts.append(f"{lost:,} {'step' if lost == 1 else 'steps'} lost (resumed at step {incident.step_after:,})")
    return ", ".join(parts)
