# SPDX-License-Identifier: Apache-2.0
"""A busy event loop gathers what comes within two milliseconds; a calm one, and one with other work, does not wait."""

import asyncio
import selectors
import socket
from collections.abc import Iterator

import pytest

from megascale_ops.controller.server.coalescing_selector import (
    BUSY_PER_S,
    ENOUGH,
    GATHER_S,
    GatheringSelector,
    event_loop,
)


class Gatherer:
    """A selector over real sockets, with a clock that the test winds; a pause is noted, and winds it."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.pauses: list[float] = []
        self.comes_meanwhile: list[socket.socket] = []  # that say something while it gathers
        self.selector = GatheringSelector(lambda: self.now_s, self._pause)
        self.mine, self.theirs = zip(*(socket.socketpair() for _ in range(ENOUGH)), strict=True)
        for sock in self.mine:
            self.selector.register(sock, selectors.EVENT_READ)

    def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds
        for sock in self.comes_meanwhile:
            sock.send(b".")

    def select(self, timeout: float | None, *, spoken: int = 1) -> int:
        """Let so many speak; return how many are found ready, and take what they said."""
        for sock in self.theirs[:spoken]:
            sock.send(b".")
        ready = self.selector.select(timeout)
        for key, _events in ready:
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.recv(100)
        return len(ready)

    def be_loaded(self, per_s: float, seconds: float = 1.0) -> None:
        """Let so many come a second, one at a time."""
        for _ in range(round(per_s * seconds)):
            self.now_s += 1 / per_s
            self.select(0)


@pytest.fixture
def gatherer() -> Iterator[Gatherer]:
    """Yield one, and close its sockets."""
    made = Gatherer()
    yield made
    made.selector.close()
    for sock in (*made.mine, *made.theirs):
        sock.close()


def test_a_calm_loop_answers_at_once(gatherer: Gatherer) -> None:
    """Below 500 a second nothing waits."""
    gatherer.be_loaded(BUSY_PER_S * 0.9)

    assert gatherer.select(1.0) == 1
    assert gatherer.pauses == []


def test_a_busy_loop_gathers_what_comes_meanwhile(gatherer: Gatherer) -> None:
    """Who speaks within two milliseconds is found in the same look; when it is calm again nothing waits."""
    gatherer.be_loaded(BUSY_PER_S * 1.1)
    gatherer.comes_meanwhile = list(gatherer.theirs[1:4])

    assert gatherer.select(1.0) == 4
    assert gatherer.select(None) == 4
    assert gatherer.pauses == [GATHER_S, GATHER_S]

    gatherer.be_loaded(BUSY_PER_S * 0.5)
    assert gatherer.select(1.0) == 1
    assert len(gatherer.pauses) == 2


@pytest.mark.parametrize(("timeout", "spoken"), [(0, 1), (GATHER_S, 1), (1.0, ENOUGH), (0.01, 0)])
def test_a_busy_loop_does_not_wait_where_it_must_not(gatherer: Gatherer, timeout: float, spoken: int) -> None:
    """With callbacks or a timer due, with enough at hand, with nothing at hand."""
    gatherer.be_loaded(BUSY_PER_S * 2)

    assert gatherer.select(timeout, spoken=spoken) == spoken
    assert gatherer.pauses == []


def test_the_loop_is_one_that_gathers() -> None:
    """And works as any other."""
    with asyncio.Runner(loop_factory=event_loop) as runner:
        assert isinstance(runner.get_loop()._selector, GatheringSelector)  # type: ignore[attr-defined]
        assert runner.run(asyncio.sleep(0, "done")) == "done"
