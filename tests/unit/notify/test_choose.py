# SPDX-License-Identifier: Apache-2.0
"""Who is told of what, and when: once, from a severity on, of some classes, never more than an hour may have."""

import msgspec

from megascale_ops.notify.choose import SETTLE_S, Choice, severity_of
from megascale_ops.notify.config import Target
from megascale_ops.schema.events import Incident, Marks
from megascale_ops.schema.health import Verdict

KILLED = Incident("gpt-1", "gpt", 1, marks=Marks(detected=10.0), verdict=Verdict("killed", "kill -9", 1.0, (3,)))
SLOW = Incident("gpt-2", "gpt", 1, state="watching", verdict=Verdict("straggler", "slow", 0.9, (3,), action="warn"))
replace = msgspec.structs.replace


def target(**settings: object) -> Target:
    """Return a target that could be anything."""
    return msgspec.convert({"kind": "command", "command": ["true"], **settings}, Target)


def acted(incident: Incident, action: str = "restart", state: str = "open") -> Incident:
    """Return an incident about which something was decided."""
    assert incident.verdict is not None
    return replace(incident, state=state, verdict=replace(incident.verdict, action=action))


def told(choice: Choice, *incidents: Incident, now_s: float = 0.0) -> list[tuple[str, str, str]]:
    """Return target, event and incident of what is told now."""
    book = {incident.id: incident for incident in incidents}
    return [(notice.target, notice.event, notice.incident.id) for notice in choice.poll(book, now_s)]


def test_an_incident_is_told_once() -> None:
    """When something was decided; not again with its next evidence, nor when it is over, unless that is asked for."""
    choice = Choice({"a": target(), "b": target(solved=True)})
    acting, over = acted(KILLED), acted(KILLED, state="recovered")

    first = told(choice, acting)
    again = told(choice, acting) + told(choice, replace(acting, done="restarted"))
    end = told(choice, over)
    after = told(choice, over) + told(choice, replace(over, done="more"))

    assert first == [("a", "opened", "gpt-1"), ("b", "opened", "gpt-1")]
    assert again == []
    assert end == [("b", "solved", "gpt-1")]
    assert after == []


def test_a_warning_below_the_severity_is_not_told() -> None:
    """The negative control: to who wants errors a straggler is silence, while who wants warnings hears of it."""
    choice = Choice({"pager": target(severity="error"), "chat": target(severity="warning")})

    first = told(choice, SLOW)
    end = told(choice, replace(SLOW, state="over"))

    assert first == [("chat", "opened", "gpt-2")]
    assert end == []


def test_what_grows_worse_is_told_then() -> None:
    """A restart is an error; when the job is stopped at last, who wants what is critical hears of it, once."""
    choice = Choice({"boss": target(severity="critical")})

    first = told(choice, acted(KILLED))
    worse = told(choice, acted(KILLED, "stop"), now_s=5.0)

    assert first == []
    assert worse == [("boss", "opened", "gpt-1")]


def test_only_the_classes_that_are_named_are_told() -> None:
    """The others are silence."""
    choice = Choice({"a": target(faults=["killed"]), "b": target(faults=["straggler"])})

    assert told(choice, acted(KILLED), SLOW) == [("a", "opened", "gpt-1"), ("b", "opened", "gpt-2")]


def test_a_suspicion_that_passes_by_itself_is_not_told() -> None:
    """Open and undecided it waits for some seconds; harmless by then it is silence, still open a person should look."""
    choice = Choice({"a": target(solved=True)})
    other = replace(KILLED, id="gpt-9")

    assert told(choice, KILLED, other) == []
    assert told(choice, replace(KILLED, state="harmless"), other, now_s=3.0) == []
    assert told(choice, other, now_s=SETTLE_S + 0.1) == [("a", "opened", "gpt-9")]
    assert told(choice, replace(other, state="harmless"), now_s=60.0) == [("a", "solved", "gpt-9")]


def test_the_last_look_tells_what_has_not_settled() -> None:
    """A controller that ends with its run leaves nothing unsaid."""
    choice = Choice({"a": target()})
    assert told(choice, KILLED) == []

    left = choice.poll({KILLED.id: KILLED}, 1.0, is_last=True)

    assert [notice.incident for notice in left] == [KILLED]


def test_more_than_an_hour_may_have_is_counted_and_not_told() -> None:
    """The next message that goes says how many were left out; other targets have hours of their own."""
    choice = Choice({"few": target(per_hour=2), "many": target()})
    many = [replace(acted(KILLED), id=f"gpt-{number}") for number in range(6)]

    first = told(choice, *many[:5])
    left = choice.take_left_out()
    later = choice.poll({one.id: one for one in many}, 3601.0)

    assert [name for name, _, _ in first].count("few") == 2
    assert [name for name, _, _ in first].count("many") == 5
    assert left == {"few": 3}
    assert [(notice.target, notice.left_out) for notice in later] == [("few", 3), ("many", 0)]
    assert choice.take_left_out() == {}


def test_what_does_not_fit_into_a_queue_is_counted_too() -> None:
    """It and what it would have told of are in the number of the next message."""
    choice = Choice({"a": target()})
    one, other = acted(KILLED), replace(acted(KILLED), id="gpt-7")
    refused = choice.poll({one.id: one}, 0.0)[0]

    choice.refuse(refused)
    following = choice.poll({one.id: one, other.id: other}, 1.0)

    assert [notice.left_out for notice in following] == [1]
    assert choice.take_left_out() == {"a": 1}


def test_a_controller_that_was_started_again_tells_only_what_is_new() -> None:
    """What it finds in its journal was told before; the end of what is still open is news."""
    choice = Choice({"a": target(solved=True)})
    opened, closed = acted(KILLED), replace(acted(KILLED, state="recovered"), id="gpt-0")

    choice.know([closed, opened], 0.0)

    assert told(choice, closed, opened) == []
    assert told(choice, closed, acted(KILLED, state="recovered")) == [("a", "solved", "gpt-1")]


def test_severity_is_what_an_incident_does_to_training() -> None:
    """It goes on, it is brought back, it is over."""
    assert severity_of(SLOW) == "warning"
    assert severity_of(replace(KILLED, state="harmless")) == "warning"
    assert severity_of(acted(KILLED)) == "error"
    assert severity_of(acted(KILLED, state="recovered")) == "error"
    assert severity_of(acted(KILLED, "stop", "ended")) == "critical"
