# SPDX-License-Identifier: Apache-2.0
"""The history of steps as bytes: all of it comes back, and damage is told with whatever can still be read."""

import json
import struct
import zlib
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.errors import VersionError
from megascale_ops.schema.history import (
    FIELDS,
    Bucket,
    DamagedHistoryError,
    Facts,
    History,
    Losses,
    Place,
    Turn,
    decode,
    encode,
)
from megascale_ops.schema.identity import Mesh

PREFIX = struct.Struct("<8sHIII")  # as the module's docstring draws it


def history() -> History:
    """Return two buckets of different numbers of ranks."""
    facts = Facts(
        job="gpt", life=2, world_size=3, turns=(Turn(5.0, "running", 1),), places=(Place(2, "a", Mesh(tp=1)),)
    )
    small = Bucket(10.0, 1.0, 4, tuple(array("f", [1.5, field]) for field in range(len(FIELDS))))
    large = Bucket(12.0, 2.0, 9, tuple(array("f", [0.5, field, 3.0]) for field in range(len(FIELDS))))
    return History(facts, (small, large._replace(losses=Losses(7.5, 3.0, 1))))


def test_all_of_it_comes_back() -> None:
    """Facts, buckets, cells."""
    assert decode(encode(history())) == history()


def test_a_file_of_a_version_without_losses_is_read() -> None:
    """The place of the losses is the last one of a bucket, and may be missing."""
    raw = encode(history())
    magic, version, length, _, body_sum = PREFIX.unpack_from(raw)
    head = json.loads(raw[PREFIX.size : PREFIX.size + length])
    head["shapes"] = [shape[:4] for shape in head["shapes"]]
    older = json.dumps(head).encode()
    prefix = PREFIX.pack(magic, version, len(older), zlib.crc32(older), body_sum)

    found = decode(prefix + older + raw[PREFIX.size + length :])

    assert found.buckets == tuple(one._replace(losses=Losses()) for one in history().buckets)


@given(cut=st.integers(min_value=0, max_value=len(encode(history())) - 1))
def test_what_is_cut_off_is_told(cut: int) -> None:
    """Cut anywhere: either nothing can be read, in one sentence, or the facts are there and the damage is told."""
    raw = encode(history())[:cut]

    try:
        found = decode(raw, "that file")
        told = found.damage
    except DamagedHistoryError as error:
        found, told = None, str(error)

    assert told.startswith("that file is damaged")
    assert found is None or (found.facts, found.buckets) == (history().facts, ())


@given(
    place=st.integers(min_value=0, max_value=len(encode(history())) - 1), flip=st.integers(min_value=1, max_value=255)
)
def test_a_byte_that_was_changed_is_never_taken_for_truth(place: int, flip: int) -> None:
    """Whatever byte it is."""
    raw = bytearray(encode(history()))
    raw[place] ^= flip

    try:
        found = decode(bytes(raw))
    except (DamagedHistoryError, VersionError):
        return
    assert found == history() if not found.damage else found.buckets == ()


def test_a_version_far_away_is_refused() -> None:
    """With both versions named."""
    raw = bytearray(encode(history()))
    raw[8] = 9

    with pytest.raises(VersionError, match="version 9; this program speaks version 1"):
        decode(bytes(raw))
