# SPDX-License-Identifier: Apache-2.0
"""What is exported of a large job: its last seconds, with what was known by then, as long as that says the same."""

from pathlib import Path

import pytest

from megascale_ops.errors import UsageError
from megascale_ops.replay import export as module
from megascale_ops.replay import files
from megascale_ops.replay.drive import begun_later, replay
from megascale_ops.replay.export import export
from megascale_ops.replay.files import pack, parse, read_recording
from megascale_ops.replay.verdicts import judged
from megascale_ops.schema.recording.entries import Beat, Polled, Start

REAL = Path(__file__).parents[2] / "real" / "recordings"


def test_a_recording_that_begins_later_says_the_same() -> None:
    """With jobs, agents and requests that wait, as they were by then; its wall clock goes on."""
    whole = read_recording(REAL / "killed.recording")
    said = judged(replay(whole).incidents)
    from_s = whole.span_s / 3

    later = begun_later(whole, from_s)
    start = later.entries[0]

    assert judged(replay(later).incidents) == said != ()
    assert later.span_s == pytest.approx(whole.span_s - from_s)
    assert later.header.began_wall_s == pytest.approx(whole.header.began_wall_s + from_s, abs=0.2)
    assert isinstance(start, Start)
    assert len(start.agents) == len({entry.m.node for entry in whole.entries if isinstance(entry, Beat)})
    assert start.polls
    assert all(isinstance(one, Polled) and one.t == 0.0 for one in start.polls)
    assert sum(isinstance(entry, Start) for entry in later.entries) == 1


def test_one_that_begins_after_the_fault_is_another_story() -> None:
    """The control: what came before is no part of it, so a replay must be asked."""
    whole = read_recording(REAL / "straggler.recording")
    said = judged(replay(whole).incidents)

    later = begun_later(whole, whole.span_s - 1.0)

    assert said
    assert judged(replay(later).incidents) != said


@pytest.mark.parametrize(
    ("name", "before_s", "is_later"),
    [
        pytest.param("killed", 5.0, True, id="it needs no more than the last seconds"),
        pytest.param("straggler", -20.0, False, id="what had begun by then is not told again"),
    ],
)
def test_of_a_large_job_the_last_seconds_are_kept_where_they_say_the_same(
    monkeypatch: pytest.MonkeyPatch, name: str, before_s: float, *, is_later: bool
) -> None:
    """Told in a note; where they say something else, all is kept."""
    whole = read_recording(REAL / f"{name}.recording")
    monkeypatch.setattr(module, "_MANY", 10)
    monkeypatch.setattr(module, "_BEFORE_S", before_s)

    made = export(whole)

    assert made.replayed == judged(replay(made.recording).incidents)
    assert [str(one) for one in made.recorded] == [str(one) for one in made.replayed]
    assert any(note.startswith("of ") and "are kept" in note for note in made.notes) is is_later
    assert (made.recording.span_s < whole.span_s - 1.0) is is_later


def test_a_small_one_keeps_all_its_time() -> None:
    """The control: a person who reads it wants to see what led to it."""
    whole = read_recording(REAL / "killed.recording")

    made = export(whole)

    assert made.notes == ()
    assert made.recording.span_s == pytest.approx(whole.span_s, abs=0.1)


def test_what_could_not_be_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence that says what to do, and before minutes of packing."""
    whole = read_recording(REAL / "killed.recording")
    monkeypatch.setattr(files, "MOST_BYTES", 1 << 20)
    raw = pack(whole)
    monkeypatch.setattr(files, "MOST_BYTES", 1 << 10)

    with pytest.raises(UsageError, match=r"has 0 MiB before it is packed, .* take less time .*--before SECONDS"):
        pack(whole)
    assert raw
    monkeypatch.undo()
    assert len(parse(raw, "x").entries) == len(whole.entries)
