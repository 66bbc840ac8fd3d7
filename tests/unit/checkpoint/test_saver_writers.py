# SPDX-License-Identifier: Apache-2.0
"""The end of a writer process is the end of the save that it carries, and of no other."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale_ops.checkpoint.background import saver as background_saver
from megascale_ops.checkpoint.background.flight import Flight
from megascale_ops.checkpoint.background.messages import Job
from megascale_ops.checkpoint.background.save_log import SaveLog
from megascale_ops.checkpoint.background.saver import BackgroundSaver
from megascale_ops.checkpoint.manifest import Manifest
from megascale_ops.checkpoint.retention import Rule


class DeadWriter:
    """A writer process that was killed."""

    pid, has_ended = 7, True

    def __init__(self, token: str) -> None:
        self.token = token

    def send(self, job: Job) -> None:
        """Nobody takes it."""
        raise BrokenPipeError(errno.EPIPE, f"nobody takes {job.token}")

    def receive(self) -> None:
        """Nothing comes any more."""

    def end_in_words(self) -> str:
        """As `WriterProcess` has it."""
        return "the writer process 7 was killed by signal 9"

    def dismiss(self) -> None:
        """It is gone."""


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[BackgroundSaver]:
    """One whose save of step 4 has been launched and not handed over."""
    made = BackgroundSaver(str(tmp_path), Rule(), overlapped=False, deadline_s=60.0, log=SaveLog())
    sealed = Manifest(step=4, world_size=1, written_wall_s=0.0, files=())
    job = Job("new", str(tmp_path), 1, 0, 0, (), b"", sealed, Rule())
    made._launched = background_saver._Launched(Flight("new", 4, 0.0), job)
    yield made
    made._launched, made._outcome = None, background_saver._Outcome()
    made.close(0.0)


@pytest.mark.parametrize(("token", "reason"), [("older", ""), ("new", "the writer process 7 was killed by signal 9")])
def test_a_writer_that_died_before_a_save_began_costs_it_nothing(
    saver: BackgroundSaver, token: str, reason: str
) -> None:
    """Its death may be noticed when the next save is launched already, and not handed over yet."""
    saver._writer = DeadWriter(token)  # type: ignore[assignment]  # what is asked of one that is dead

    saver._listen(saver._writer)  # type: ignore[arg-type]  # as above

    assert saver._writer is None
    assert saver._flight is not None
    assert (saver._flight.has_ended, saver._flight.reason) == (bool(reason), reason)


def test_a_writer_that_dies_while_it_is_told_is_told_by_how_it_died(
    saver: BackgroundSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it took the order is nothing to the reader: its listener knows the signal; other errors stay told."""
    launched = saver._launched
    assert launched is not None
    dying = DeadWriter("new")
    dying.has_ended = False  # a moment before
    saver._writer = dying  # type: ignore[assignment]  # what is asked of one that dies

    saver._hand_over(launched.flight, launched.job)
    before = launched.flight.has_ended
    saver._listen(dying)  # type: ignore[arg-type]  # as above

    assert not before
    assert launched.flight.reason == "the writer process 7 was killed by signal 9"

    other = saver._launched = background_saver._Launched(Flight("new", 5, 0.0), launched.job)
    monkeypatch.setattr(dying, "send", lambda _: (_ for _ in ()).throw(OSError(errno.ENOMEM, "no memory")))
    saver._writer = dying  # type: ignore[assignment]  # as above
    saver._hand_over(other.flight, other.job)
    assert other.flight.reason == "the writer process could not be told: [Errno 12] no memory"
