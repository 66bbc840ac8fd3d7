# SPDX-License-Identifier: Apache-2.0
"""Read and write recordings: compressed lines of JSON, from whatever sender.

A file is read in bounded memory whatever it claims to be, each line is decoded with the types of the schema, and the
first thing that is wrong is told with its line. Nothing in a recording is run or unpickled.
"""

import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from megascale_ops.errors import MegascaleError, UsageError, VersionError
from megascale_ops.foreign import UNREADABLE, NotRegularError, read
from megascale_ops.replay.folding import Folding
from megascale_ops.schema.recording.entries import (
    MOST_BYTES,
    MOST_LINE_BYTES,
    PLAIN_VERSION,
    RECORDING_VERSION,
    Beat,
    Entry,
    Header,
    Joined,
    Left,
    Start,
)
from megascale_ops.whole_file import write_whole

# 64 MB compressed: what one is sent has kilobytes; a block of 12,288 ranks a megabyte.
_MOST_FILE_BYTES = 64 * 1024 * 1024
_PIECE_BYTES = 1 << 20
# 8 MB: what is smaller is read by programs that know no folding.
_SMALL_BYTES = 8 * 1024 * 1024
# 1 MB, some twenty kilobytes when packed: the best that xz can takes a fifth of a second. Beyond it a tenth more of a
# file takes a third of the time.
_PACKED_BEST_BYTES = 1 << 20
_LEAST_DICTIONARY_BYTES, _MOST_DICTIONARY_BYTES = 1 << 16, 1 << 23
_XZ_MEMORY = 128 * 1024 * 1024
_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"

_encode = msgspec.json.Encoder().encode
_entries = msgspec.json.Decoder(Entry)
_headers = msgspec.json.Decoder(Header)


class _Mark(msgspec.Struct):
    """What separates a recording from any other file, of whatever version."""

    recording: int


_marks = msgspec.json.Decoder(_Mark)


class Recording(NamedTuple):
    """What is in a file."""

    header: Header
    entries: tuple[Entry, ...]

    @property
    def span_s(self) -> float:
        """How much time it covers, seconds."""
        return self.entries[-1].t if self.entries else 0.0


def read_recording(path: Path) -> Recording:
    """Return what is in a recording.

    Raises:
        UsageError: there is none of ours, or it is damaged; the message names where.
        VersionError: it is of a format that this program does not read.
    """
    return parse(_read(path), str(path))


def _read(path: Path) -> bytes:
    try:
        return read(path, _MOST_FILE_BYTES, follow=True)
    except NotRegularError as error:
        raise UsageError(f"{path} can't be read as a recording: {error}") from error
    except OSError as error:
        raise UsageError(f"the recording {path} can't be read: {error.strerror}") from error


def read_header(path: Path) -> Header:
    """Return the header alone; see ``read_recording``."""
    for line in _lines(_read(path), str(path)):
        return _header(line, str(path))
    raise UsageError(f"{path} is no recording: it is empty")


def parse(raw: bytes, name: str) -> Recording:
    """Return a recording from the bytes of a file; see ``read_recording``."""
    header: Header | None = None
    entries: list[Entry] = []
    last_s = 0.0
    folding, unfolded_bytes = Folding(), 0
    for number, line in enumerate(_lines(raw, name), start=1):
        if header is None:
            header = _header(line, name)
            continue
        if header.recording > PLAIN_VERSION:
            line = folding.unfold(line, f"{name}: line {number}")  # noqa: PLW2901  as it was
            unfolded_bytes += len(line)
            if unfolded_bytes > MOST_BYTES:
                raise UsageError(f"{name} has more than {MOST_BYTES >> 20} MiB when unfolded: no recording is so large")
        try:
            entry = _entries.decode(line)
        except UNREADABLE as error:
            raise UsageError(f"{name}: line {number} is no entry of a recording: {error}") from error
        if entry.t < last_s:  # a clock that went backwards: the order in which things came is the truth
            entry = msgspec.structs.replace(entry, t=last_s)
        last_s = entry.t
        entries.append(entry)
    if header is None:
        raise UsageError(f"{name} is no recording: it is empty")
    return Recording(header, tuple(entries))


def _header(line: bytes, name: str) -> Header:
    try:
        version = _marks.decode(line).recording
    except UNREADABLE as error:
        raise UsageError(
            f"{name} is no recording: its first line is not the header that `megascale-ops recording export` writes"
        ) from error
    if version > RECORDING_VERSION:
        raise VersionError(
            f"{name} has version {version} of the format of recordings; this program reads version "
            f"{RECORDING_VERSION}: update it"
        )
    if version < 1:
        raise UsageError(f"{name} is no recording: there is no version {version} of the format")
    try:
        return _headers.decode(line)
    except UNREADABLE as error:
        raise UsageError(f"{name}: the header of the recording can't be read: {error}") from error


def _lines(raw: bytes, name: str) -> Iterator[bytes]:
    """Yield the lines of a compressed file, without their ends, in bounded memory."""
    left = b""
    for piece in _pieces(raw, name):
        pieces = (left + piece).split(b"\n")
        left = pieces.pop()
        if len(left) > MOST_LINE_BYTES:
            raise UsageError(f"{name} is no recording: it has a line of more than {MOST_LINE_BYTES >> 20} MiB")
        yield from (one for one in pieces if one)
    if left:
        raise UsageError(f"{name} is cut off in the middle of a line: send or copy the whole file again")


def _pieces(raw: bytes, name: str) -> Iterator[bytes]:
    unpacked = 0
    try:
        for piece in _gzip(raw) if raw.startswith(_GZIP) else _xz(raw, name):
            unpacked += len(piece)
            if unpacked > MOST_BYTES:
                raise UsageError(f"{name} has more than {MOST_BYTES >> 20} MiB when unpacked: no recording is so large")
            yield piece
    except EOFError as error:
        raise UsageError(f"{name} is cut off: send or copy the whole file again") from error
    except (zlib.error, lzma.LZMAError) as error:
        raise UsageError(f"{name} is damaged: it can't be unpacked ({error})") from error


def _gzip(raw: bytes) -> Iterator[bytes]:
    packer = zlib.decompressobj(wbits=31)
    data = raw
    while not packer.eof:
        piece = packer.decompress(data, _PIECE_BYTES)
        if not piece and not packer.unconsumed_tail and not packer.eof:
            raise EOFError
        data = packer.unconsumed_tail
        yield piece


def _xz(raw: bytes, name: str) -> Iterator[bytes]:
    if not raw.startswith(_XZ):
        what = "it is empty" if not raw else "it is neither compressed with xz nor with gzip"
        raise UsageError(f"{name} is no recording: {what}")
    packer = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)
    data = raw
    while not packer.eof:
        piece = packer.decompress(data, _PIECE_BYTES)
        data = b""
        if not piece and packer.needs_input and not packer.eof:
            raise EOFError
        yield piece


def pack(recording: Recording) -> bytes:
    """Return a recording as the bytes of a file: xz, which takes a third less than gzip.

    Raises:
        UsageError: it is so large that it could not be read.
    """
    lines = [_encode(entry) for entry in recording.entries]
    size_bytes = sum(map(len, lines))
    if size_bytes > MOST_BYTES:
        raise UsageError(
            f"the recording has {size_bytes >> 20} MiB before it is packed, and no more than {MOST_BYTES >> 20} can be "
            "read: take less time before or after the incident (--before SECONDS, --after SECONDS)"
        )
    version = PLAIN_VERSION if size_bytes < _SMALL_BYTES else RECORDING_VERSION
    if version > PLAIN_VERSION:
        folding = Folding()
        lines = [folding.fold(line) for line in lines]
    header = msgspec.structs.replace(recording.header, recording=version)
    raw = b"\n".join([_encode(header), *lines, b""])
    preset = 9 | lzma.PRESET_EXTREME if len(raw) < _PACKED_BEST_BYTES else 6
    # A dictionary as large as the file, where that is small: the preset's own takes 670 MB of memory, to no end.
    dictionary_bytes = min(max(1 << len(raw).bit_length(), _LEAST_DICTIONARY_BYTES), _MOST_DICTIONARY_BYTES)
    how = {"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": dictionary_bytes}
    return lzma.compress(raw, lzma.FORMAT_XZ, filters=[how])


def write_recording(path: Path, recording: Recording) -> int:
    """Write a recording beside its place and rename it; return its size in bytes.

    Raises:
        UsageError: it can't be written there.
    """
    raw = pack(recording)
    try:
        write_whole(path, raw, follow=True)
    except OSError as error:
        raise UsageError(f"the recording can't be written to {path}: {error.strerror}") from error
    return len(raw)


def incident_lines(raw: bytes, name: str) -> Iterator[bytes]:
    """Yield the lines of a file that tell of incidents, so that one need not decode all to find them."""
    return (line for line in _lines(raw, name) if line.startswith((b'{"kind":"incident"', b'{"recording"')))


def read_blocks(folder: Path, suffix: str) -> list[tuple[Path, bytes]]:
    """Return the blocks of a folder, the earliest first; one that goes meanwhile is left out.

    Raises:
        MegascaleError: there are none.
    """
    found = []
    for path in sorted(folder.glob(f"*{suffix}")):
        try:
            found.append((path, read(path, _MOST_FILE_BYTES)))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UsageError(f"{path} can't be read: {error.strerror or error}") from error
    if not found:
        raise MegascaleError(
            f"nothing is recorded in {folder}: the controller records there unless record_mb is 0, and keeps an hour"
        )
    return found


def job_of(recording: Recording) -> str:
    """Return the job that a recording tells of.

    Raises:
        UsageError: it tells of more than one job, or of none.
    """
    if recording.header.job:
        return recording.header.job
    names = sorted(jobs_of(recording))
    if len(names) == 1:
        return names[0]
    if not names:
        raise UsageError("the recording tells of no job")
    raise UsageError(
        f"the recording tells of {len(names)} jobs ({', '.join(names[:5])}): `megascale-ops recording export JOB` "
        "takes one out"
    )


def jobs_of(recording: Recording) -> set[str]:
    """Return all jobs that a recording tells of."""
    found: set[str] = set()
    for entry in recording.entries:
        if isinstance(entry, Start):
            found |= entry.records.keys()
        elif isinstance(entry, (Joined, Left)):
            found.add(entry.m.job)
        elif isinstance(entry, Beat):
            found |= {report.job for report in entry.m.jobs}
    return found
