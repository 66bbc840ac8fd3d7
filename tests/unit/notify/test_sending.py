# SPDX-License-Identifier: Apache-2.0
"""Messages on their way to real servers: taken, refused, tried again, given up, and never in each other's way."""

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from megascale_ops.notify.config import Secret, Target
from megascale_ops.notify.message import Message, compose
from megascale_ops.notify.outbox import MOST_WAITING, Outbox, attempt
from megascale_ops.notify.ways import Way
from megascale_ops.schema.events import Incident
from megascale_ops.schema.health import Verdict
from tests.fakes.certificates import make_certificate, serving_with
from tests.fakes.notified import MailTarget, WebTarget
from tests.fakes.servers import until

QUICK_S = 0.01


def message(number: int = 1) -> Message:
    """Return a message about an incident of that number."""
    incident = Incident(f"gpt-{number}", "gpt", 1, verdict=Verdict("killed", "kill -9", 1.0, (3,), action="restart"))
    return compose("opened", "error", incident, link="", wall_s=1e9)


@pytest.fixture
def web() -> Iterator[WebTarget]:
    """A web server."""
    with WebTarget() as target:
        yield target


def hook(web: WebTarget, **settings: object) -> Target:
    """Return a target that leads there."""
    return msgspec.structs.replace(Target(kind="webhook", url=Secret(web.url)), **settings)


def mail(server: str, **settings: object) -> Target:
    """Return a mail target without encryption."""
    plain = Target(kind="email", server=server, security="none", sender="ops@h.example", to=("a@h.example",))
    return msgspec.structs.replace(plain, **settings)


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def failure(target: Target) -> str:
    """Return the sentence of one attempt that fails."""
    error = await attempt(Way(target), message(), target.timeout_s)
    assert error is not None
    return str(error)


async def test_a_webhook_and_a_chat_get_what_each_understands(web: WebTarget) -> None:
    """JSON of ours for the one, Slack's form for the other."""
    assert await attempt(Way(hook(web)), message(), 30.0) is None
    assert await attempt(Way(hook(web, kind="slack")), message(), 30.0) is None

    ours, slack = web.got
    assert ours["incident"] == "gpt-1"
    assert slack["text"] == "error: job gpt: rank 3 was killed"
    assert "killed" in slack["attachments"][0]["text"]


async def test_a_mail_server_takes_a_card(tmp_path: Path) -> None:
    """With a login whose password is in a file; a wrong one is told by the server's own words."""
    password = tmp_path / "password"
    password.write_text("right\n")
    password.chmod(0o600)
    wrong = tmp_path / "wrong"
    wrong.write_text("W0SECRET\n")
    wrong.chmod(0o600)

    with MailTarget(password="right") as server:  # noqa: S106  a made-up one
        known = mail(server.server, user="ops", password_file=password)
        assert await attempt(Way(known), message(), 30.0) is None
        refused = await failure(mail(server.server, user="ops", password_file=wrong))

    assert server.got[0]["Subject"] == "[megascale-ops] error: job gpt: rank 3 was killed"
    assert "kill -9" in server.got[0].get_content()
    assert server.envelopes[0].rcpt_tos == ["a@h.example"]
    assert refused.startswith("127.0.0.1 answered 535")
    assert "W0SECRET" not in refused


async def test_a_mail_goes_encrypted_and_only_to_whom_the_certificate_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """STARTTLS with a certificate that is trusted here; one that is not is said so, and nothing is sent."""
    certificate = make_certificate(tmp_path)
    with MailTarget(tls=serving_with(certificate)) as server:
        target = mail(server.server, security="starttls")
        unknown = await failure(target)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert await attempt(Way(target), message(), 30.0) is None

    assert "its certificate can't be trusted" in unknown
    assert len(server.got) == 1


async def test_a_refusal_is_one_sentence_with_the_server_s_words(silent: str) -> None:
    """A mail that is refused, a server that offers no STARTTLS, one that is not there, one that says nothing."""
    with MailTarget(refuses="554 no such thing here") as server:
        assert await failure(mail(server.server)) == "127.0.0.1 answered 554: no such thing here"
        asked = await failure(mail(server.server, security="starttls"))
    gone = await failure(mail("127.0.0.1:1"))
    mute = await failure(mail(silent, timeout_s=0.3))

    assert asked == "127.0.0.1 does not offer what is asked of it: STARTTLS"
    assert gone == "127.0.0.1 port 1 can't be reached: connection refused"
    assert mute == "127.0.0.1 did not answer within 0.3 s"


async def test_an_answer_of_a_web_server_is_told_without_the_address(web: WebTarget) -> None:
    """The status, and Slack's word for what is wrong; a page that repeats the address stays unsaid."""
    web.answers[:] = [404]
    web.says = b"no_service"
    word = await failure(hook(web))
    web.says = b"Cannot POST /services/T0SECRET/B0SECRET"
    page = await failure(hook(web))
    web.says = b"B0SECRET"
    echo = await failure(hook(web))
    web.answers[:] = [302]
    moved = await failure(hook(web))

    assert word == "127.0.0.1 answered 404 (no_service)"
    assert page == "127.0.0.1 answered 404"
    assert "SECRET" not in echo
    assert "leads elsewhere" in moved


async def test_a_command_gets_the_card_and_is_ended_in_time(tmp_path: Path) -> None:
    """Its stdin is the card, its environment has the rest; status and last line are told, and what hangs is killed."""
    out = tmp_path / "out"
    script = f'cat > {out}; echo "$MEGASCALE_NOTIFY_INCIDENT" >> {out}'
    fine = Target(kind="command", command=("sh", "-c", script))
    bad = Target(kind="command", command=("sh", "-c", "echo first >&2; echo last words >&2; exit 3"))
    hangs = Target(kind="command", command=("sh", "-c", f"sleep 600 & echo $! > {out}.pid; wait"), timeout_s=1.0)

    assert await attempt(Way(fine), message(), 30.0) is None
    assert await failure(bad) == "sh ended with status 3: last words"
    assert await failure(Target(kind="command", command=("/nowhere/page",))) == (
        "/nowhere/page can't be started: No such file or directory"
    )
    assert await failure(hangs) == "sh did not answer within 1 s"

    assert "kill -9" in out.read_text()
    assert out.read_text().endswith("gpt-1\n")
    child = Path("/proc", tmp_path.joinpath("out.pid").read_text().strip(), "cmdline")
    until(lambda: not child.exists() or not child.read_bytes(), "the command's child to be killed, too")


def test_what_passes_is_tried_again_and_what_does_not_is_not(web: WebTarget) -> None:
    """503 and then 200: sent once. 404: one attempt, counted as failed, and the log names target and host alone."""
    web.answers[:] = [503, 200]
    outbox = Outbox({"hook": hook(web)}, pause_s=QUICK_S)
    outbox.start()

    assert outbox.put("hook", message(1))
    web.wait_for(1)
    until(lambda: outbox.sent["webhook"] == 1, "the message to be counted")
    web.answers[:] = [404]
    assert outbox.put("hook", message(2))
    until(lambda: outbox.failed["webhook"] == 1, "the failure to be counted")
    outbox.stop(5.0)

    assert len(web.paths) == 3
    assert [one["incident"] for one in web.got] == ["gpt-1"]


def test_a_target_that_hangs_holds_no_other_up(web: WebTarget, silent: str, caplog: pytest.LogCaptureFixture) -> None:
    """Three never answer, by HTTP, by SMTP and as a command: the fourth has its message, and the end comes soon."""
    slow = Target(kind="webhook", url=Secret(f"http://{silent}/T0SECRET"), timeout_s=60.0)
    targets = {
        "mute": slow,
        "mail": mail(silent, timeout_s=60.0),
        "command": Target(kind="command", command=("sleep", "600"), timeout_s=60.0),
        "fine": hook(web),
    }
    outbox = Outbox(targets, pause_s=QUICK_S)
    outbox.start()

    with caplog.at_level(logging.DEBUG):
        for name in targets:
            assert outbox.put(name, message())
        web.wait_for(1)
        outbox.stop(0.2)

    assert not outbox._thread.is_alive()
    assert outbox.sent == {"webhook": 1}
    assert "SECRET" not in caplog.text


def test_a_queue_has_an_end(silent: str) -> None:
    """A hundred wait for a target that never answers; the next one is refused at once."""
    target = Target(kind="webhook", url=Secret(f"http://{silent}/"), timeout_s=60.0)
    outbox = Outbox({"mute": target}, pause_s=QUICK_S)
    outbox.start()

    taken = [outbox.put("mute", message(number)) for number in range(MOST_WAITING + 1)]
    outbox.stop(0.0)

    assert taken == [True] * MOST_WAITING + [False]


def test_an_outbox_that_has_ended_refuses() -> None:
    """Only messages that will be sent are accepted."""
    outbox = Outbox({"a": Target(kind="command", command=("true",))})
    before = outbox.put("a", message())
    outbox.start()
    outbox.stop(1.0)

    assert before is False
    assert outbox.put("a", message()) is False


def test_what_waits_is_sent_before_the_end(web: WebTarget) -> None:
    """A run that fails ends its controller at once: the last message still goes."""
    outbox = Outbox({"hook": hook(web)}, pause_s=QUICK_S)
    outbox.start()
    assert outbox.put("hook", message())

    outbox.stop(30.0)

    assert len(web.got) == 1
