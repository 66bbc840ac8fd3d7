# SPDX-License-Identifier: Apache-2.0
"""Incidents, verdicts and steps as OpenTelemetry's spans and logs: what is told, how often, and to a real receiver."""

import logging
import socket
from collections.abc import Iterator

import msgspec
import pytest

from megascale_ops.cards import plain_incident
from megascale_ops.controller.config import ControllerConfig
from megascale_ops.controller.main import _telemetry
from megascale_ops.controller.telemetry import sender as sending
from megascale_ops.controller.telemetry.records import Identity, Log, Span
from megascale_ops.controller.telemetry.sender import Sender, base_of
from megascale_ops.controller.telemetry.watch import STEPS_S, Telemetry
from megascale_ops.errors import UsageError
from megascale_ops.schema.health import Verdict
from tests.fakes.controlled_job import World
from tests.fakes.otlp_receiver import Receiver, otlp_receiver

SPAN = Span("steps", Identity(7, 8), 100.0, 110.0, {"megascale.step.count": 5})
LOG = Log("a card", Identity(7, 8), 105.0, {"megascale.ranks": [1, 2]}, is_error=True)


class Kept(Sender):
    """A sender that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__("http://collector:4318")
        self.records: list[Span | Log] = []

    def start(self) -> None:
        """Begin to keep."""

    def put(self, record: Span | Log) -> bool:
        """Keep a record."""
        self.records.append(record)
        return True

    def stop(self, within_s: float) -> None:
        """Nothing waits."""

    @property
    def spans(self) -> list[Span]:
        """Incidents' spans."""
        return [one for one in self.records if isinstance(one, Span) and one.name != "steps"]

    @property
    def steps(self) -> list[Span]:
        """Spans of steps."""
        return [one for one in self.records if isinstance(one, Span) and one.name == "steps"]

    @property
    def logs(self) -> list[Log]:
        """Verdicts."""
        return [one for one in self.records if isinstance(one, Log)]


class Watched:
    """A job whose controller tells a collector."""

    def __init__(self) -> None:
        self.world = World()
        self.sender = Kept()
        self.telemetry = Telemetry(self.world.loop, self.sender)
        self.telemetry.begin()

    async def train(self, seconds: int, first: int) -> None:
        """Make a step a second, with a look after each."""
        for second in range(seconds):
            self.world.train(first + second)
            await self.world.wait(1.0)
            self.telemetry.poll()

    async def kill_and_recover(self) -> None:
        """Have rank 1 killed in round 1, and let round 2 catch up."""
        world = self.world
        await world.up("a", step=20)
        self.telemetry.poll()
        exits = (world.exit(1, -9, step=20), world.exit(0, -15, by_us=True))
        reply = world.ask(world.new_join("a", cause="failure", exits=exits, previous_round=1))
        await world.settle()
        assert reply.result().status == "go"
        self.telemetry.poll()
        await world.run_round(step=21)
        await self.train(3, 22)


class Shown(logging.Handler):
    """What the program's own log shows; pytest's also listens where nothing is handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep who said it."""
        self.names.append(record.name)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Serve a receiver that decodes what comes."""
    with otlp_receiver() as one:
        yield one


async def test_an_incident_is_one_span_from_its_detection_to_its_end() -> None:
    """With job, class, ranks, confidence, action and restart; its stages are events."""
    watched = Watched()

    await watched.kill_and_recover()

    incident = watched.world.incident(1)
    assert incident.state == "recovered"
    (span,) = watched.sender.spans
    told = span.attributes
    assert span.name == "incident killed"
    assert (span.began_s, span.ended_s) == (incident.marks.detected, incident.marks.caught_up)
    assert (told["megascale.job"], told["megascale.incident"], told["megascale.class"]) == ("job", "job-1", "killed")
    assert (told["megascale.ranks"], told["megascale.nodes"]) == ([1], ["a"])
    assert (told["megascale.action"], told["megascale.restart"]) == ("restart", True)
    assert incident.verdict is not None
    assert told["megascale.confidence"] == incident.verdict.confidence
    assert [name for name, _at_s in span.events] == ["named", "ordered", "stopped", "formed", "stepped", "caught_up"]
    assert not span.error


async def test_a_verdict_is_one_log_with_the_text_of_its_card_and_belongs_to_the_span() -> None:
    """Told once, when it is known, however often it is looked at."""
    watched = Watched()

    await watched.kill_and_recover()

    (log,), (span,) = watched.sender.logs, watched.sender.spans
    assert log.identity == span.identity
    assert log.is_error
    first = plain_incident(msgspec.structs.replace(watched.world.incident(1), state="open")).splitlines()
    assert log.text.splitlines()[:2] == first[:2]
    assert "killed: the rank was killed by a signal from outside" in log.text


async def test_a_job_that_failed_is_told_as_an_error() -> None:
    """With the reason of its verdict."""
    watched = Watched()
    await watched.world.up("a")
    job = watched.world.loop.jobs["job"]
    verdict = Verdict("bug", "the same exception twice", 0.9, culprits=(0,), action="stop", round=1)
    incident = watched.world.loop.transitions.warn(job, "x", verdict)

    watched.world.loop.transitions.put_incident(job, msgspec.structs.replace(incident, state="ended"))
    watched.telemetry.poll()

    (span,) = watched.sender.spans
    assert span.error == "the same exception twice"
    assert span.attributes["megascale.restart"] is False


async def test_figures_of_a_warning_are_not_told_again_and_again() -> None:
    """A log for another class, culprit or action; none for another cost."""
    watched = Watched()
    await watched.world.up("a")
    job = watched.world.loop.jobs["job"]
    for cost in (0.1, 0.2, 0.3):
        verdict = Verdict("straggler", "slow", 0.9, culprits=(1,), cause="host", cost=cost, round=1)
        watched.world.loop.transitions.warn(job, "straggler:1", verdict)
        watched.telemetry.poll()
    watched.world.loop.transitions.warn(job, "straggler:1", msgspec.structs.replace(verdict, culprits=(0,)))
    watched.telemetry.poll()

    ranks = [one.attributes["megascale.ranks"] for one in watched.sender.logs]

    assert ranks == [[1], [0]]
    assert not any(one.is_error for one in watched.sender.logs)
    assert watched.sender.spans == []


async def test_steps_are_at_most_one_span_in_ten_seconds_and_none_is_told_twice() -> None:
    """Each says from which step to which, and what one took; together they are all steps since the first look."""
    watched = Watched()
    await watched.world.up("a", step=20)
    watched.telemetry.poll()

    await watched.train(35, 21)
    await watched.telemetry.close()

    steps = watched.sender.steps
    assert len(steps) == 4
    assert all(one.ended_s - one.began_s >= STEPS_S for one in steps[:-1])
    spans = [(one.attributes["megascale.step.first"], one.attributes["megascale.step.last"]) for one in steps]
    assert (spans[0][0], spans[-1][1]) == (21, 55)
    assert [last + 1 for _first, last in spans[:-1]] == [first for first, _last in spans[1:]]
    assert steps[1].attributes["megascale.step.mean_s"] == pytest.approx(1.0, abs=0.2)


async def test_the_last_steps_of_a_round_are_told_when_the_next_one_begins() -> None:
    """And the first of the next count from its own first look."""
    watched = Watched()
    await watched.world.up("a", step=20)
    watched.telemetry.poll()
    await watched.train(3, 21)
    world = watched.world
    world.ask(world.new_join("a", cause="failure", exits=(world.exit(1, -9, step=23),), previous_round=1))
    await world.settle()

    await world.run_round(step=24)
    watched.telemetry.poll()

    (steps,) = watched.sender.steps
    assert (steps.attributes["megascale.round"], steps.attributes["megascale.step.last"]) == (1, 23)


async def test_a_controller_that_is_started_again_tells_nothing_twice_and_names_the_same() -> None:
    """What was over stays told; what goes on ends with the identity that its log had."""
    watched = Watched()
    world = watched.world
    await world.up("a", step=20)
    world.ask(world.new_join("a", cause="failure", exits=(world.exit(1, -9, step=20),), previous_round=1))
    await world.settle()
    watched.telemetry.poll()
    before = watched.sender.logs
    world.restart_controller()
    watched.telemetry = Telemetry(world.loop, watched.sender)
    watched.telemetry.begin()

    await world.run_round(step=21)
    await watched.train(3, 22)

    (span,) = watched.sender.spans
    assert watched.sender.logs == before
    assert [one.identity for one in before] == [span.identity]


def test_a_receiver_decodes_what_is_sent(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Span and log arrive as protobuf, with their times, attributes and resource, and are one trace."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=training")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    sender = Sender(receiver.url)
    sender.start()

    sender.put(LOG)
    sender.put(SPAN._replace(events=(("named", 101.0),), error="it failed"))
    receiver.until(lambda one: bool(one.spans and one.logs), "a span and a log")
    sender.stop(30.0)

    (span,), (log,) = receiver.spans, receiver.logs
    assert (span.message.start_time_unix_nano, span.message.end_time_unix_nano) == (100 * 10**9, 110 * 10**9)
    assert span.attributes == {"megascale.step.count": 5}
    assert [(one.name, one.time_unix_nano) for one in span.message.events] == [("named", 101 * 10**9)]
    assert (span.message.status.code, span.message.status.message) == (2, "it failed")
    assert log.message.body.string_value == "a card"
    assert (log.message.severity_text, log.attributes) == ("ERROR", {"megascale.ranks": [1, 2]})
    assert (log.message.trace_id, log.message.span_id) == (span.message.trace_id, span.message.span_id)
    assert int.from_bytes(span.message.trace_id, "big") == 7
    assert span.message.parent_span_id == b""
    assert span.resource["service.name"] == "megascale-ops-controller"
    assert span.resource["deployment.environment"] == "test"
    assert span.headers["x-tenant"] == log.headers["x-tenant"] == "training"
    assert dict(sender.counts) == {"sent": 2, "failed": 0, "left_out": 0}


def test_what_waits_is_sent_when_the_controller_ends(receiver: Receiver) -> None:
    """All of it, when there is time."""
    sender = Sender(receiver.url)
    sender.start()
    for number in range(20):
        sender.put(SPAN._replace(identity=Identity(1, number + 1)))

    sender.stop(60.0)

    assert [int.from_bytes(one.message.span_id, "big") for one in receiver.spans] == list(range(1, 21))


def test_an_endpoint_that_never_answers_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What does not fit is refused at once, the end comes while an attempt hangs, and what was lost is told."""
    monkeypatch.setattr(sending, "MOST_WAITING", 10)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sender = Sender(f"http://127.0.0.1:{silent.getsockname()[1]}")
        sender.start()

        taken = [sender.put(SPAN) for _ in range(50)]
        sender.stop(0.2)

    assert taken[:10] == [True] * 10
    assert sender.counts["left_out"] == taken.count(False) > 0
    assert "spans and logs did not reach the OpenTelemetry collector at 127.0.0.1:" in caplog.text


def test_a_collector_that_refuses_is_told_of_once_and_when_it_is_back(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    """Two lines, whatever the number of records; the library's own lines are not shown."""
    shown = Shown()
    receiver.status = 400
    logging.getLogger().addHandler(shown)
    sender = Sender(receiver.url)
    sender.start()
    for _ in range(5):
        sender.put(SPAN)
    receiver.until(lambda one: one.refused == 5, "five refusals")

    receiver.status = 200
    sender.put(LOG)
    receiver.until(lambda one: bool(one.logs), "a log")
    sender.stop(30.0)
    logging.getLogger().removeHandler(shown)

    ours = [one for one in caplog.records if "collector at" in one.getMessage() and one.levelno == logging.WARNING]
    assert ["takes nothing" in one.getMessage() for one in ours[:2]] == [True, False]
    assert "is back; 5 records were lost" in caplog.text
    assert shown.names
    assert not [name for name in shown.names if name.startswith("opentelemetry")]


def test_an_endpoint_that_cannot_be_is_told_and_harms_no_run(caplog: pytest.LogCaptureFixture) -> None:
    """The variable is the cluster's, and may be meant for gRPC."""
    world = World()

    for wrong in ("collector:4317", "ftp://me:secret@x", "http://"):
        assert _telemetry(ControllerConfig(otlp_endpoint=wrong), world.loop) is None
        with pytest.raises(UsageError, match="it looks like http://HOST:4318"):
            base_of(wrong)
    assert caplog.text.count("nothing is sent to OpenTelemetry") == 3
    assert "secret" not in caplog.text


@pytest.mark.parametrize("endpoint", ["", "none"])
def test_without_an_endpoint_there_is_nothing(endpoint: str) -> None:
    """No thread and no look; tests/processes/test_telemetry.py holds that nothing is imported."""
    assert _telemetry(ControllerConfig(otlp_endpoint=endpoint), World().loop) is None
