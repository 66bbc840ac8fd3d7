# SPDX-License-Identifier: Apache-2.0
"""Frames of the live feed: there and back through JSON, and changes laid over what is known."""

import msgspec
import pytest

from megascale_ops.schema.live import (
    LIVE_VERSION,
    Columns,
    Frame,
    Headline,
    Pace,
    Slot,
    Times,
    merge,
    numbers,
    packed,
)


def _slots(*spans: tuple[float, float]) -> Times:
    return Times(rows=1, slots=tuple(Slot(start, length, cells=b"\x64") for start, length in spans))


def _whole(**parts: object) -> Frame:
    return Frame(LIVE_VERSION, 1, 100.0, "job", whole=True, **parts)  # type: ignore[arg-type]  # parts by name


def _change(**parts: object) -> Frame:
    return Frame(LIVE_VERSION, 2, 101.0, "job", **parts)  # type: ignore[arg-type]  # parts by name


def test_a_frame_survives_its_way_through_json() -> None:
    """What is encoded is what is decoded, columns of bytes included."""
    frame = _whole(
        headline=Headline("calm", "All 2 ranks make progress."), columns=Columns(behind=packed("behind", [0, 7]))
    )

    read = msgspec.json.decode(msgspec.json.encode(frame), type=Frame)

    assert read == frame
    assert read.columns is not None
    assert list(numbers("behind", read.columns.behind)) == [0, 7]


def test_a_column_that_does_not_fit_is_refused() -> None:
    """No number is cut to the column's width in silence."""
    with pytest.raises(OverflowError):
        packed("behind", [70_000])


def test_what_did_not_change_stays() -> None:
    """A change brings its parts and columns; all others are as they were."""
    known = _whole(
        pace=Pace("running", step=7), columns=Columns(phases=("a",), phase=b"\0", quiet=packed("quiet", [1]))
    )

    now = merge(known, _change(columns=Columns(quiet=packed("quiet", [2]))))

    assert now.whole
    assert now.seq == 2
    assert now.pace == Pace("running", step=7)
    assert now.columns == Columns(phases=("a",), phase=b"\0", quiet=packed("quiet", [2]))


def test_a_whole_frame_replaces_everything() -> None:
    """Nothing of the frames before is left."""
    known = _whole(pace=Pace("running"))

    now = merge(known, _whole(headline=Headline("over", "The job finished.")))

    assert now.pace is None


def test_a_wider_slot_takes_the_place_of_those_that_it_covers() -> None:
    """Where two stretches of time became one, the two are gone and what lies beside them stays."""
    known = _whole(times=_slots((0.0, 1.0), (1.0, 1.0), (2.0, 1.0)))

    now = merge(known, _change(times=_slots((0.0, 2.0), (3.0, 1.0))))

    assert now.times is not None
    assert [(slot.start_s, slot.length_s) for slot in now.times.slots] == [(0.0, 2.0), (2.0, 1.0), (3.0, 1.0)]
