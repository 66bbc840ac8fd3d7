# SPDX-License-Identifier: Apache-2.0
"""What a message says to each kind of target, whatever a rank has put into it."""

import msgspec

from megascale_ops.notify.message import Message, as_json, as_mail, as_slack, as_variables, compose
from megascale_ops.schema.events import Incident, Marks
from megascale_ops.schema.health import Verdict

NASTY = "\x1b[31m<!channel> & ```boom```\r\nBcc: all@example.com"


def message(
    event: str = "opened", reason: str = "SIGKILL ended rank 3", *, left_out: int = 0, state: str = "recovered"
) -> Message:
    """Return a message about a killed rank."""
    verdict = Verdict("killed", reason, 0.99, culprits=(3,), nodes=("node-a",), round=2, action="restart")
    incident = Incident("gpt-4", "gpt", 2, state, Marks(began=1e9, detected=1e9, named=1e9 + 1), verdict)
    return compose(event, "error", incident, link="https://ops.example.com/", wall_s=1e9, left_out=left_out)


def test_a_title_says_job_rank_node_and_what_happened() -> None:
    """One line for a phone; the end is called what it is."""
    assert message(state="open").title == "error: job gpt: rank 3 on node-a was killed"
    assert message("solved").title == "solved: job gpt: rank 3 on node-a was killed"
    assert message().title == "error, solved: job gpt: rank 3 on node-a was killed"


def test_a_message_has_the_card_and_a_link_to_the_incident() -> None:
    """The card that `why` prints, the page at this incident, and how many were left out before."""
    sent = message(left_out=2)

    assert "SIGKILL ended rank 3" in sent.text
    assert sent.text.startswith("incident gpt-4 · recovered")
    assert "2 messages were left out" in sent.text
    assert sent.link == "https://ops.example.com/#incident=gpt-4"


def test_json_says_all_of_it_by_name() -> None:
    """What a program needs, as data and not as sentences alone."""
    body = as_json(message())

    assert {key: body[key] for key in ("version", "event", "severity", "job", "incident", "fault", "action")} == {
        "version": 1,
        "event": "opened",
        "severity": "error",
        "job": "gpt",
        "incident": "gpt-4",
        "fault": "killed",
        "action": "restart",
    }
    assert (body["ranks"], body["nodes"]) == ([3], ["node-a"])
    assert {"label": "reason", "lines": ["SIGKILL ended rank 3"]} in body["card"]  # type: ignore[operator]  # a list
    assert msgspec.json.decode(msgspec.json.encode(body)) == body


def test_slack_obeys_nothing_that_a_rank_says() -> None:
    """No mention of a channel, no end of the block that the card stands in, no more than Slack takes."""
    body = msgspec.json.encode(as_slack(message(reason=NASTY))).decode()
    long = as_slack(message(reason="x" * 20_000))

    assert "<!channel>" not in body
    assert "&lt;!channel&gt; &amp;" in body
    text = as_slack(message(reason=NASTY))["attachments"][0]["text"]  # type: ignore[index]  # a list of tables
    assert text.count("```") == 2
    assert len(long["attachments"][0]["text"]) < 8_000  # type: ignore[index]  # same


def test_a_mail_takes_no_header_from_a_rank() -> None:
    """Its subject is one line, and mails about one incident are one thread."""
    mail = as_mail(message(reason=NASTY), "ops@example.com", ("a@example.com", "b@example.com"))

    assert mail["Subject"] == "[megascale-ops] error, solved: job gpt: rank 3 on node-a was killed"
    assert mail["To"] == "a@example.com, b@example.com"
    assert mail["Bcc"] is None
    assert mail["References"] == as_mail(message("solved"), "ops@example.com", ("a@b",))["References"]
    assert "https://ops.example.com/#incident=gpt-4" in mail.get_content()
    assert "\x1b" not in mail.get_content()


def test_a_command_has_everything_in_its_environment() -> None:
    """No variable holds what could not be one: a zero byte ends a program before it begins."""
    variables = as_variables(message(reason="zero\0byte"))

    assert variables["MEGASCALE_NOTIFY_FAULT"] == "killed"
    assert variables["MEGASCALE_NOTIFY_SEVERITY"] == "error"
    assert not any("\0" in value for value in variables.values())
