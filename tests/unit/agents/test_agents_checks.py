# SPDX-License-Identifier: Apache-2.0
"""No caller waits for a collector that hangs, and the hang is reported."""

import threading
from collections.abc import Callable, Iterator

import pytest
from megascale_agents.collectors.collector import NotHereError, Pace
from megascale_agents.hardware.checks import Check

PACE = Pace(every_s=5.0, deadline_s=10.0, share=0.01)


def answered(check: Check[str]) -> None:
    """Wait until the check's thread has answered; the answer stays where it is."""
    check._answers.put(check._answers.get(timeout=60.0))


class Door:
    """A collector that stands still until it is let through."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self.looks = 0
        self.threads: set[int] = set()

    def look(self) -> str:
        """Return once the door is open."""
        self.looks += 1
        self.threads.add(threading.get_ident())
        self.entered.set()
        assert self.open.wait(30.0)
        return f"look {self.looks}"


@pytest.fixture
def door() -> Iterator[Door]:
    """Open at the end, so that no thread outlives its test."""
    made = Door()
    yield made
    made.open.set()


def make(look: Callable[[], str]) -> Check[str]:
    """Return a check of a fake collector on a clock that stands still."""
    return Check("gpu", look, PACE, clock=lambda: 0.0)


def test_an_answer_comes_with_a_later_poll_and_the_next_question_in_its_time(door: Door) -> None:
    """A poll never waits; the collector is asked every five seconds."""
    check = make(door.look)

    first = check.poll(0.0)
    answered(check)
    second = check.poll(0.1)
    early = check.poll(4.9)

    assert (first, second, early, door.looks) == (None, "look 1", None, 1)
    check.poll(5.0)
    answered(check)
    assert check.poll(5.1) == "look 2"
    assert len(door.threads) == 1
    check.close()


def test_a_check_rests_until_it_is_asked_again_and_never_while_it_is_asked(door: Door) -> None:
    """Who looks ten times a second passes by a check that rests; an answer, a hang and a failure must be noticed."""
    check = make(door.look)

    unasked = check.rests_until_s
    check.poll(0.0)
    asked = check.rests_until_s
    answered(check)
    check.poll(0.1)
    rests = check.rests_until_s
    check.poll(5.0)

    assert (unasked, asked, rests, check.rests_until_s) == (0.0, 0.0, 5.0, 0.0)
    answered(check)
    check.close()


def test_a_collector_that_hangs_is_told_once_and_never_asked_a_second_time(door: Door) -> None:
    """One time-out for one hang, one thread, and the status says that nothing is known."""
    check = make(door.look)
    door.open.clear()

    for now_s in (0.0, 5.0, 9.9):
        check.poll(now_s)
    assert door.entered.wait(5.0)
    before = (check.timeouts, check.hung_since_s, check.is_known)
    for now_s in (10.1, 20.0, 600.0):
        assert check.poll(now_s) is None

    assert before == (0, None, False)
    assert (check.timeouts, check.is_known, door.looks, len(door.threads)) == (1, True, 1, 1)
    check.close()


def test_a_late_answer_is_thrown_away_and_asked_for_anew(door: Door) -> None:
    """It says how things were before the hang; the next one says how they are."""
    check = make(door.look)
    door.open.clear()
    check.poll(0.5)
    check.poll(30.0)
    hung_s = check.hung_since_s
    door.open.set()
    answered(check)

    late = check.poll(31.0)
    answered(check)
    fresh = check.poll(31.1)

    assert (hung_s, late, fresh) == (0.5, None, "look 2")
    assert (check.hung_since_s, check.timeouts) == (None, 1)
    check.close()


def test_an_error_is_handed_over_once_and_the_next_look_is_in_its_time() -> None:
    """The daemon counts and logs it; the check says unknown until a look succeeds."""
    answers: list[Exception | str] = [OSError("firmware"), "well"]

    def look() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    check = make(look)
    check.poll(0.0)
    answered(check)

    assert check.poll(0.1) is None
    assert isinstance(check.take_error(), OSError)
    assert check.take_error() is None
    assert check.is_failing
    check.poll(5.0)
    answered(check)
    assert check.poll(5.1) == "well"
    assert not check.is_failing
    check.close()


def test_what_is_not_there_is_no_error_and_is_looked_for_each_minute() -> None:
    """A node without GPUs has no GPU check; a driver that is loaded later is found."""
    found: list[str] = []

    def look() -> str:
        if not found:
            raise NotHereError("no NVIDIA driver on this node")
        return found[0]

    check = make(look)
    check.poll(0.0)
    answered(check)
    check.poll(0.1)
    absent = (check.absent, check.is_known, check.take_error())
    found.append("a GPU")
    check.poll(59.0)
    check.poll(60.2)
    answered(check)

    assert absent == ("no NVIDIA driver on this node", False, None)
    assert check.poll(60.3) == "a GPU"
    assert check.is_known
    check.close()


def test_looks_that_cost_much_come_seldom() -> None:
    """One second of CPU at one percent of a core is paid for by a hundred seconds of rest; the first look is free."""
    times = iter((8.0, 10.0, 10.0, 11.0, 11.0, 11.0))
    check = Check("gpu", lambda: "look", PACE, clock=lambda: 0.0, cpu_clock=lambda: next(times))
    check.poll(0.0)
    answered(check)
    check.poll(5.0)
    answered(check)
    check.poll(6.0)

    check.poll(105.0)
    rested = check._asked_s is None
    check.poll(106.0)

    assert rested
    assert check._asked_s == 106.0
    check.close()
