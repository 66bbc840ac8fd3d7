# SPDX-License-Identifier: Apache-2.0
"""What a runner does when the engine takes its node away: save, tell the controller, then end its ranks."""

import signal
from typing import TYPE_CHECKING, cast

import pytest

from megascale_ops.errors import RefusedError
from megascale_ops.runner.services import eviction, saving
from megascale_ops.runner.services.eviction import Eviction
from megascale_ops.schema.messages import CheckpointView

if TYPE_CHECKING:
    from megascale_ops.link import BlockingLink


class World:
    """A controller, and what the runner has done, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, saves: bool = True, refuses: bool = False) -> None:
        self.done: list[object] = []
        self.saves = saves
        self.refuses = refuses
        monkeypatch.setattr(saving, "_LOOK_S", 0.0)
        monkeypatch.setattr(eviction.os, "kill", lambda _pid, number: self.done.append(number))

    def ask_checkpoint(self, job: str) -> CheckpointView:
        """Ask."""
        if self.refuses:
            raise RefusedError("job gpt does not train now: it is replacing")
        self.done.append("asked")
        return CheckpointView(job, 10.0, 0.0)

    def checkpoint(self, job: str) -> CheckpointView:
        """Look."""
        return CheckpointView(job, 10.0, 11.0 if self.saves else 0.0, (0, 1))

    def leave(self, outcome: str, reason: str) -> None:
        """Tell."""
        self.done.append((outcome, reason))

    def signalled(self, grace_s: float = 120.0) -> Eviction:
        """Return a runner that has got SIGTERM and done what follows."""
        runner = Eviction(grace_s)
        runner.watch("gpt", cast("BlockingLink", self), self.leave)
        assert runner.takes_sigterm()
        runner.hear(signal.SIGTERM)
        thread = runner._thread
        assert thread is not None
        thread.join(60.0)
        return runner


def test_the_controller_is_told_before_the_ranks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise what other nodes lose would be told first, as a failure of theirs."""
    world = World(monkeypatch)

    runner = world.signalled()

    why = "its engine has sent SIGTERM and takes it away within 120 s"
    assert world.done == ["asked", ("evicted", why), signal.SIGTERM]
    assert not runner.takes_sigterm()  # the one that it sends itself stops the ranks


def test_a_grace_without_room_for_a_checkpoint_is_used_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """15 s are the end's: no checkpoint is waited for that could not come in time."""
    world = World(monkeypatch, saves=False)

    world.signalled(grace_s=10.0)

    assert [one[0] for one in world.done if isinstance(one, tuple)] == ["evicted"]


def test_a_controller_that_takes_no_request_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round may be over already, by another node that was evicted first."""
    world = World(monkeypatch, refuses=True)

    world.signalled()

    assert [one[0] for one in world.done if isinstance(one, tuple)] == ["evicted"]


def test_ranks_that_end_by_themselves_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Well or not: then the runner tells how, and no eviction."""
    world = World(monkeypatch)
    runner = Eviction(120.0)
    runner.watch("gpt", cast("BlockingLink", world), world.leave)
    runner.close()

    runner.hear(signal.SIGTERM)

    assert runner._thread is None
    assert world.done == []
    assert runner.end(0) == 0


def test_before_there_are_ranks_and_a_second_time_it_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell may hand the same one on; a later one means it."""
    now_s = [100.0]
    monkeypatch.setattr(eviction.time, "monotonic", lambda: now_s[0])
    runner = Eviction(120.0)
    before = runner.takes_sigterm()
    world = World(monkeypatch)
    runner.watch("gpt", cast("BlockingLink", world), world.leave)

    taken = [runner.takes_sigterm()]
    for passed_s in (0.5, 2.5):
        now_s[0] = 100.0 + passed_s
        taken.append(runner.takes_sigterm())

    assert not before
    assert taken == [True, True, False]
    assert signal.SIGUSR1 not in runner.signals  # that one stays the script's
