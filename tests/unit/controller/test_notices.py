# SPDX-License-Identifier: Apache-2.0
"""What the terminal of a run is told of incidents that stop nothing: once, on one node, and that they have passed."""

import logging

import msgspec
import pytest

from megascale_ops.cli.run import _named, _report_reply
from megascale_ops.controller.job.notices import Notices
from megascale_ops.schema.events import Incident, Marks
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import JoinReply, Notice
from tests.fakes.controlled_job import World

STUCK = Verdict("stuck", "rank 1 works in work (train.py:9)", 0.9, (1,), ("a",))
SLOW = Verdict("straggler", "rank 3 is slow", 0.9, (3,), ("b",), cause="compute", cost=0.1)
PLANNED = "nothing yet: it is acted upon if it lasts until 12:09:00 (540 s in all)"
OPEN = Incident("job-1", "job", 1, "open", Marks(), STUCK, PLANNED)


def changed(incident: Incident, **changes: object) -> Incident:
    """Return it with other fields."""
    return msgspec.structs.replace(incident, **changes)


def test_a_suspicion_is_told_when_it_is_known_what_follows_and_again_when_it_is_another() -> None:
    """Not before it was weighed, nor for each look; another class or other ranks are news; and so is its end."""
    notices = Notices()
    other = msgspec.structs.replace(STUCK, fault="sleeping", reason="rank 1 sleeps")

    told = [
        notices.note(changed(OPEN, done="")),
        notices.note(OPEN),
        notices.note(changed(OPEN, done="nothing yet: it is acted upon if it lasts until 12:09:05 (545 s in all)")),
        notices.note(changed(OPEN, verdict=other)),
        notices.note(changed(OPEN, verdict=other, state="harmless", done="it moved again")),
        notices.note(changed(OPEN, verdict=other, state="harmless", done="it moved again")),
    ]

    assert told == [False, True, False, True, True, False]
    assert [(one.state, one.fault) for one in notices.since(0)] == [
        ("open", "stuck"),
        ("open", "sleeping"),
        ("harmless", "sleeping"),
    ]
    assert notices.since(2) == notices.since(0)[2:]
    assert notices.since(3) == ()
    assert notices.since(70) == ()  # a number that another controller has given


@pytest.mark.parametrize(
    "incident",
    [
        changed(OPEN, marks=Marks(ordered=5.0)),
        changed(OPEN, verdict=None),
        changed(OPEN, done=""),
        changed(OPEN, state="recovered"),
        changed(OPEN, state="ended"),
        changed(OPEN, state="harmless"),
        changed(OPEN, state="over"),
    ],
    ids=["ordered", "no verdict", "not weighed", "recovered", "ended", "never told", "never warned of"],
)
def test_what_is_acted_upon_or_was_never_told_is_no_notice(incident: Incident) -> None:
    """The next round tells of the former; the latter would say that something has passed of which nobody heard."""
    notices = Notices()

    assert not notices.note(incident)
    assert notices.since(0) == ()


def test_a_suspicion_that_is_acted_upon_has_not_passed() -> None:
    """It was told, then stopped for: its end is the restart's."""
    notices = Notices()

    notices.note(OPEN)
    notices.note(changed(OPEN, marks=Marks(ordered=5.0)))

    assert not notices.note(changed(OPEN, state="harmless"))


async def test_the_first_nodes_runner_is_told_at_once_and_no_other() -> None:
    """Its long poll is answered; a poll that wants none waits on."""
    world = World(nproc=2, min_nodes=2, max_nodes=2)
    await world.up("a", "b")
    job = world.loop.jobs["job"]
    first, other, without = world.poll("a", noticed=0), world.poll("b"), world.poll("a")
    await world.wait(0.2)

    world.loop.transitions.warn(job, "test:3", SLOW)
    await world.wait(0.2)
    again = world.poll("a", noticed=first.result().noticed)
    await world.wait(0.2)
    world.loop.transitions.warn(job, "test:3", msgspec.structs.replace(SLOW, reason="rank 3 is slow still"))
    await world.wait(0.2)

    assert [one.reason for one in first.result().notices] == ["rank 3 is slow"]
    assert not other.done()
    assert not without.done()
    assert not again.done()


def test_lines_of_the_terminal(caplog: pytest.LogCaptureFixture) -> None:
    """Who, what, where, what will be done and when, and the verb that tells more."""
    caplog.set_level(logging.INFO)
    _report_reply("notice", Notice("toy-1", "open", "stuck", (1,), STUCK.reason, PLANNED), "--job toy")
    _report_reply("notice", Notice("toy-1", "harmless", "stuck", (1,), STUCK.reason, "it moved again"), "--job toy")
    _report_reply("notice", Notice("toy-2", "watching", "straggler", tuple(range(11)), "they are slow"), "--job toy")
    _report_reply("notice", Notice("toy-2", "over", "straggler", (), "they are slow"), "--job toy")

    assert [one.getMessage() for one in caplog.records] == [
        f"stuck: rank 1 works in work (train.py:9); {PLANNED}. `megascale-ops why toy-1 --job toy` tells more",
        "stuck (rank 1) has passed: it moved again",
        (
            "straggler (ranks 0, 1, 2, 3, 4, 5, 6, 7 and 3 more): they are slow; it is told only. "
            "`megascale-ops why toy-2 --job toy` tells more"
        ),
        "straggler (no rank named) has passed: it does not hold any more",
    ]


@pytest.mark.parametrize(
    ("kind", "exit_code", "lines"),
    [
        ("go", 0, [f"stuck: {STUCK.reason}; restarting as round 2. `megascale-ops why toy-1 --job toy` tells more"]),
        ("stop", 0, [f"stuck: {STUCK.reason}; stopping. `megascale-ops why toy-1 --job toy` tells more"]),
        ("stop", 1, []),
    ],
)
def test_why_a_job_has_failed_is_told_once(
    kind: str, exit_code: int, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """By the run's last line, an error with the same reason; a restart and an end without failure are told here."""
    reply = JoinReply(status=kind, round=2, verdict=STUCK, incident="toy-1", exit_code=exit_code)

    _report_reply(kind, reply, "--job toy")

    assert [one.getMessage() for one in caplog.records] == lines


@pytest.mark.parametrize(
    ("culprits", "reason", "line"),
    [
        ((1,), "rank 1 on vm: SIGKILL", "killed: rank 1 on vm: SIGKILL"),
        ((1, 2), "ranks 1, 2 have not come", "killed: ranks 1, 2 have not come"),
        ((1,), "rank 12 on vm: SIGKILL", "killed (rank 1): rank 12 on vm: SIGKILL"),
        ((1, 2), "ranks 1, 2, 3 wait", "killed (ranks 1, 2): ranks 1, 2, 3 wait"),
        ((1, 2), "ranks 1, 2 and 7 more wait", "killed (ranks 1, 2): ranks 1, 2 and 7 more wait"),
        ((1, 2), "ranks 1, 2-7 wait", "killed (ranks 1, 2): ranks 1, 2-7 wait"),
        ((1,), "vm lost rank 1", "killed (rank 1): vm lost rank 1"),
        ((), "nobody moves", "killed (no rank named): nobody moves"),
    ],
)
def test_ranks_are_named_once(culprits: tuple[int, ...], reason: str, line: str) -> None:
    """A reason that begins with just the ranks tells them; one that speaks of others there is told beside them."""
    assert _named("killed", culprits, reason) == line
