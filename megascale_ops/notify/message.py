# SPDX-License-Identifier: Apache-2.0
"""What a notification says: a title, the incident's card, a link; and how each kind of target wants to have it.

Pure: an incident in, texts and JSON out. Texts come from ranks and may hold anything: titles are one printable line,
Slack's marks are escaped, and a mail's header takes no line break.
"""

from datetime import UTC, datetime
from email.message import EmailMessage
from email.policy import default
from email.utils import format_datetime, make_msgid

import msgspec

from megascale_ops.cards import Reader, card, plain_incident, ranks_named
from megascale_ops.schema.events import Incident
from megascale_ops.schema.fault_classes import Blames, class_of
from megascale_ops.schema.wording import printable

VERSION = 1
SOLVED = {"recovered": "solved", "harmless": "harmless", "over": "over", "ended": "ended"}
COLOURS = {"warning": "#d29922", "error": "#db6d28", "critical": "#cf222e", "solved": "#2da44e"}
# 200 characters: a subject that a phone shows; the card has all of it.
_MOST_TITLE = 200
# 7,000: Slack cuts an attachment beyond 8,000 characters.
_MOST_SLACK = 7_000
# 300: beyond it a subject is folded, which begins it with a space in some clients; 998 is what SMTP takes (RFC 5322).
_MOST_LINE = 300


class Message(msgspec.Struct, frozen=True):
    """One notification. ``event``: opened, solved, or test; ``left_out``: how many before it were not sent."""

    event: str
    severity: str
    title: str
    incident: Incident
    text: str
    link: str = ""
    left_out: int = 0
    wall_s: float = 0.0


def compose(event: str, severity: str, incident: Incident, *, link: str, wall_s: float, left_out: int = 0) -> Message:
    """Return the message about an incident; ``link`` is the page's address or "", where no page is to be reached."""
    # An incident that ended before its message is sent once: "error, solved".
    words = ([severity] if event != "solved" else []) + ([SOLVED[incident.state]] if incident.state in SOLVED else [])
    title = f"{', '.join(words)}: {_headline(incident)}"
    if event == "test":
        title = f"test: {title}"
    full = f"{link.rstrip('/')}/#incident={incident.id}" if link else ""
    # It is read on another machine: without the run's files, so that the address is needed.
    reader = elsewhere(link)
    parts = [plain_incident(incident, UTC, reader)]
    if left_out:
        noun = "message was" if left_out == 1 else "messages were"
        parts.append(f"{left_out} {noun} left out before this one: `{reader.command('incidents')}` lists all incidents")
    return Message(
        event, severity, printable(title)[:_MOST_TITLE], incident, "\n\n".join(parts), full, left_out, wall_s
    )


def elsewhere(page: str) -> Reader:
    """Return the reader of a message: without any of the run's files, with the controller's page."""
    return Reader(f"--controller {page.rstrip('/')}" if page else "", lambda _path: False)


def as_json(message: Message) -> dict[str, object]:
    """Return what a generic webhook gets; new keys may come, none goes away within a version."""
    incident, verdict = message.incident, message.incident.verdict
    reader = elsewhere(message.link.partition("/#")[0])
    return {
        "version": VERSION,
        "event": message.event,
        "severity": message.severity,
        "title": message.title,
        "job": incident.job,
        "incident": incident.id,
        "state": incident.state,
        "fault": verdict.fault if verdict else "",
        "action": verdict.action if verdict else "",
        "nodes": list(verdict.nodes) if verdict else [],
        "ranks": list(verdict.culprits) if verdict else [],
        "card": [{"label": row.label, "lines": list(row.lines)} for row in card(incident, UTC, reader)],
        "text": message.text,
        "link": message.link,
        "left_out": message.left_out,
        "wall_s": message.wall_s,
    }


def as_slack(message: Message) -> dict[str, object]:
    """Return a message as Slack's incoming webhooks take it, and what speaks their language (Mattermost, Rocket.Chat).

    An attachment and not blocks: those are Slack's alone. https://api.slack.com/reference/messaging/attachments
    """
    text = message.text if len(message.text) <= _MOST_SLACK else message.text[:_MOST_SLACK] + "..."
    colour = COLOURS["solved" if message.event == "solved" else message.severity]
    attachment: dict[str, object] = {
        "color": colour,
        "fallback": _slack(message.title),
        "text": f"```{_slack(text).replace('```', '` ` `')}```",
        "mrkdwn_in": ["text"],
    }
    if message.link:
        attachment |= {"title": _slack(message.incident.id), "title_link": message.link}
    return {"text": _slack(message.title), "attachments": [attachment]}


def as_mail(message: Message, sender: str, to: tuple[str, ...]) -> EmailMessage:
    """Return a message as a mail; those about one incident are one thread."""
    mail = EmailMessage(policy=default.clone(max_line_length=_MOST_LINE))
    domain = sender.rpartition("@")[2]
    mail["From"], mail["To"] = sender, ", ".join(to)
    mail["Subject"] = f"[megascale-ops] {message.title}"
    mail["Date"] = format_datetime(datetime.fromtimestamp(message.wall_s, UTC))
    mail["Message-ID"] = make_msgid(domain=domain)
    began = int(message.incident.marks.detected)
    name = "".join(char if char.isascii() and char.isalnum() else "-" for char in message.incident.id)
    mail["References"] = f"<{name}.{began}@megascale-ops.{domain}>"
    mail["Auto-Submitted"] = "auto-generated"
    mail["X-Megascale-Severity"] = message.severity
    mail.set_content(message.text + (f"\n\n{message.link}" if message.link else "") + "\n")
    return mail


def as_variables(message: Message) -> dict[str, str]:
    """Return what a command gets in its environment."""
    incident = message.incident
    return {
        "MEGASCALE_NOTIFY_EVENT": message.event,
        "MEGASCALE_NOTIFY_SEVERITY": message.severity,
        "MEGASCALE_NOTIFY_TITLE": message.title,
        "MEGASCALE_NOTIFY_JOB": incident.job,
        "MEGASCALE_NOTIFY_INCIDENT": incident.id,
        "MEGASCALE_NOTIFY_FAULT": incident.verdict.fault if incident.verdict else "",
        "MEGASCALE_NOTIFY_LINK": message.link,
    }


def _headline(incident: Incident) -> str:
    """Return one line for a phone: the job, who, and what."""
    verdict = incident.verdict
    if verdict is None:
        return f"job {incident.job}: not judged yet"
    row = class_of(verdict.fault)
    nodes = ", ".join(verdict.nodes[:3])
    if row.blames is Blames.JOB:
        return f"job {incident.job}: {row.says[:1].lower()}{row.says[1:]}"
    if row.blames is Blames.NODE:
        return f"job {incident.job}: {'node ' + nodes if nodes else 'a node'} {row.says}"
    who = ranks_named(verdict.culprits) if verdict.culprits else "a rank"
    return f"job {incident.job}: {who}{' on ' + nodes if nodes else ''} {row.says}"


def _slack(text: str) -> str:
    """Return text so that Slack obeys nothing in it: no mention of a channel, no link."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
