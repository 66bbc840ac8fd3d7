# SPDX-License-Identifier: Apache-2.0
"""Whatever is given for a recording: it is read in bounded memory, or refused in one sentence."""

import gzip
import lzma
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_ops.errors import MegascaleError, UsageError, VersionError
from megascale_ops.replay import files
from megascale_ops.replay.drive import replay
from megascale_ops.replay.files import Recording, pack, parse, read_recording, write_recording
from megascale_ops.schema.messages import Heartbeat, JobReport, Join
from megascale_ops.schema.recording.entries import PLAIN_VERSION, Beat, Header, Joined

REAL = Path(__file__).parents[2] / "real" / "recordings" / "killed.recording"
HEADER = Header(PLAIN_VERSION, 1.0, 1_700_000_000.0)


def packed(*lines: str) -> bytes:
    """Return a file with these lines."""
    return gzip.compress("".join(f"{line}\n" for line in lines).encode())


GOOD = '{"recording":1,"began_mono_s":1,"began_wall_s":1}'
BAD = {
    "empty file": (b"", "no recording: it is empty"),
    "nothing in it": (gzip.compress(b""), "no recording: it is empty"),
    "text": (b"Traceback (most recent call last)", "neither compressed with xz nor with gzip"),
    "other lines": (packed("hello"), "is no recording: its first line is not the header"),
    "other JSON": (packed('{"version":1}'), "is no recording: its first line is not the header"),
    "newer": (packed('{"recording":7,"new":[1]}'), "has version 7 of the format of recordings; this program reads"),
    "version 0": (packed('{"recording":0}'), "there is no version 0"),
    "header": (packed('{"recording":1}'), "the header of the recording can't be read"),
    "entry": (packed(GOOD, '{"kind":"heartbeat","t":-1}'), "line 2 is no entry of a recording"),
    "kind": (packed(GOOD, '{"kind":"song","t":1}'), "line 2 is no entry of a recording"),
    "range": (packed(GOOD, '{"kind":"broken","t":1e300,"n":1}'), "line 2 is no entry of a recording"),
    "half a line": (gzip.compress(f"{GOOD}\n{{".encode()), "cut off in the middle of a line"),
    "half a gzip": (packed(GOOD, *['{"kind":"broken","t":1,"n":1}'] * 50)[:-20], "is cut off"),
    "damaged gzip": (packed(GOOD)[:12] + b"\xff\xff\xff" + packed(GOOD)[15:], "is damaged: it can't be unpacked"),
    "half a real one": (REAL.read_bytes()[:2000], "is cut off"),
    "damaged xz": (REAL.read_bytes()[:500] + b"\x00" * 50 + REAL.read_bytes()[550:], "is damaged"),
}


@pytest.mark.parametrize(("raw", "said"), BAD.values(), ids=BAD)
def test_what_is_no_recording_gets_one_sentence(tmp_path: Path, raw: bytes, said: str) -> None:
    """It names the file, what is wrong, and where."""
    path = tmp_path / "sent.recording"
    path.write_bytes(raw)

    with pytest.raises((UsageError, VersionError)) as caught:
        read_recording(path)

    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_unpacks_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before memory is full: by all of it, and by one line."""
    monkeypatch.setattr(files, "MOST_BYTES", 3 << 20)
    entries = b'{"kind":"broken","t":1,"n":1}\n' * 400_000

    for raw in (gzip.compress(GOOD.encode() + b"\n" + entries), lzma.compress(GOOD.encode() + b"\n" + entries)):
        with pytest.raises(UsageError, match="has more than 3 MiB when unpacked"):
            parse(raw, "bomb")
    monkeypatch.setattr(files, "MOST_LINE_BYTES", 1 << 20)
    with pytest.raises(UsageError, match="has a line of more than 1 MiB"):
        parse(gzip.compress(b" " * (3 << 20)), "line")


def test_a_folder_a_device_and_nothing_are_told(tmp_path: Path) -> None:
    """What is no file is not waited for."""
    for path, said in (
        (tmp_path, "it is a folder"),
        (Path("/dev/zero"), "it is a device"),
        (tmp_path / "x", "No such"),
    ):
        with pytest.raises(UsageError, match=said):
            read_recording(path)


def test_what_is_written_is_read_as_it_was(tmp_path: Path) -> None:
    """Nothing is lost on the way."""
    recording = Recording(HEADER, (Beat(1.0, Heartbeat("n", "a", 1, 1.0, 2.0)),))
    path = tmp_path / "a.recording"

    write_recording(path, recording)

    assert read_recording(path) == recording
    with pytest.raises(UsageError, match="can't be written to"):
        write_recording(tmp_path / "none" / "a.recording", recording)


def test_two_jobs_and_none_are_refused() -> None:
    """A block of a controller may tell of several: one is to be taken out first."""
    two = (
        Beat(1.0, Heartbeat("n", "a", 1, 1.0, 2.0, jobs=(JobReport("one"), JobReport("two")))),
        Beat(2.0, Heartbeat("n", "a", 2, 2.0, 3.0)),
    )

    with pytest.raises(UsageError, match=r"tells of 2 jobs \(one, two\): `megascale-ops recording export JOB`"):
        replay(Recording(HEADER, two))
    with pytest.raises(UsageError, match="tells of no job"):
        replay(Recording(HEADER, two[1:]))


def test_what_a_controller_refuses_is_noted_and_the_replay_goes_on() -> None:
    """A name that can't be: a real sender would have got the sentence."""
    join = Join("job", "../etc", "r", "j", 1, 1, 1, "h", 1, 1.0)
    recording = Recording(HEADER, (Joined(1.0, 1, join), Beat(2.0, Heartbeat("n", "a", 1, 1.0, 2.0))))

    done = replay(recording)

    assert not done.incidents
    assert len(done.refused) == 1
    assert "the join of ../etc" in done.refused[0]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(data: st.DataObject) -> None:
    """Whatever is changed in a real one: an error of ours, or a recording that a controller lives with."""
    lines = lzma.decompress(REAL.read_bytes()).splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    line = bytearray(lines[at])
    for _ in range(data.draw(st.integers(1, 4))):
        line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.integers(32, 126))
    lines[at] = bytes(line)

    try:
        replay(parse(gzip.compress(b"\n".join([*lines, b""])), "damaged"))
    except MegascaleError as error:
        assert "\n" not in str(error)  # noqa: PT017  it may also be read


def test_a_packed_recording_is_reproducible() -> None:
    """The same recording, the same bytes."""
    recording = read_recording(REAL)

    assert pack(recording) == pack(recording)
    assert msgspec.json.encode(parse(pack(recording), "again").entries) == msgspec.json.encode(recording.entries)
