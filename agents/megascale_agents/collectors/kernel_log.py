# SPDX-License-Identifier: Apache-2.0
"""The kernel's log, ``/dev/kmsg``: followed from where it was last read; what lines mean is in ``kernel_events.py``.

Each ``read`` of the device gives one record, ``priority,sequence,microseconds,flags;text``, and never waits when
opened non-blocking; so it is looked at with every look of the agent (1 us when there is nothing) and needs no thread.
A line is known by its sequence number and the kernel's boot id: the number of the last event that counted is kept in a
file, so that an agent that is started again counts nothing twice and misses nothing of what came in between. Without
such a file what is in the log already is passed over, for it is not news.

The priority is not looked at: what the driver writes and what a test injects differ only there. A plain file works as
well as the device, for tests and for a log that is piped in from elsewhere.
Source: Documentation/ABI/testing/dev-kmsg.
"""

import logging
import os
import re
from pathlib import Path

import msgspec

from megascale_agents.collectors.kernel_events import KernelEvent, LineReader, Record, is_worth
from megascale_agents.ownership import files
from megascale_agents.ownership.rights import myself
from megascale_ops import foreign

log = logging.getLogger(__name__)

# 8 KiB: the kernel refuses a smaller buffer than its longest record (1 KiB of text and its dictionary).
_RECORD_BYTES = 8192
_MEMORY_BYTES = 8192  # a path, a number and the name of a boot
# 500 records a look: a whole ring buffer (some 4,000) within a second, and 10 ms at most of one look.
_MOST_RECORDS = 500
# Numbers of at most 19 digits (63 bits): Python refuses to read those of thousands, and a log may contain any text.
_HEAD = re.compile(rb"^\d{1,19},(\d{1,19}),(\d{1,19}),[^;]*;(.*)$")


class _Counted(msgspec.Struct, frozen=True):
    """Up to where the events of a log were counted, as the file keeps it."""

    path: str
    boot: str
    seq: int


def parse(raw: bytes, after_seq: int = -1) -> list[Record]:
    r"""Return the records beyond ``after_seq`` that may be events; continuation lines are left out.

    The device writes what is not printable as ``\x0a``: a record of several lines is as many records here.
    """
    found = []
    for line in raw.split(b"\n"):
        text = line[:_RECORD_BYTES].decode("utf-8", "replace")
        if not is_worth(text):
            continue
        head = _HEAD.match(line)
        if head is not None and int(head[1]) > after_seq:
            seq, mono_s = int(head[1]), int(head[2]) / 1e6
            parts = text[text.index(";") + 1 :].split("\\x0a")
            found += [Record(seq, mono_s, part.replace("\\x5c", "\\")) for part in parts if is_worth(part)]
    return found


def last_seq(raw: bytes) -> int:
    """Return the sequence number of the last whole record, -1 when there is none."""
    for line in reversed(raw.split(b"\n")):
        head = _HEAD.match(line)
        if head is not None:
            return int(head[1])
    return -1


class KernelLog:
    """Follows one kernel's log.

    Args:
        path: The device.
        memory: File that remembers up to where events were counted; "" remembers nothing.
        boot_id: Of the running kernel; a memory of another boot, or of another log, is void.
    """

    def __init__(self, path: str, memory: str, boot_id: str) -> None:
        self._path = path
        self._memory = Path(memory) if memory else None
        self._boot_id = boot_id
        self._handle = -1
        self._is_told = False
        self._rest = b""
        self._seq = -1
        self._reader = LineReader()

    def poll_log(self) -> list[KernelEvent]:
        """Return the events since the last call.

        Raises:
            OSError: the log can't be read.
        """
        if self._handle < 0:
            self._open()
        raw = self.read()
        records = parse(raw, self._seq) if raw else []
        if not records:
            return []
        self._seq = records[-1].seq
        news = self._reader.read(records)
        if news:
            self._remember()
        return news

    def read(self) -> bytes:
        """Return whole lines that are new; what the kernel has overwritten is passed over.

        Raises:
            OSError: the log can't be read.
        """
        parts = []
        for _ in range(_MOST_RECORDS):
            try:
                part = os.read(self._handle, _RECORD_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue
            if not part:
                break
            parts.append(part)
        if not parts:  # the usual case
            return b""
        parts.insert(0, self._rest)
        whole, newline, self._rest = b"".join(parts).rpartition(b"\n")
        return whole + newline

    def close(self) -> None:
        """Let go of the log."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _open(self) -> None:
        self._handle = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
        known = self._recall()
        if known is not None:
            self._seq = known
            return
        while raw := self.read():
            self._seq = max(self._seq, last_seq(raw))
        self._remember()

    def _recall(self) -> int | None:
        """Return up to where an agent of this boot has counted; None when there was none."""
        if self._memory is None:
            return None
        try:
            known = msgspec.json.decode(files.read_small(self._memory, myself(), _MEMORY_BYTES), type=_Counted)
        except (OSError, *foreign.UNREADABLE):
            return None
        return known.seq if (known.path, known.boot) == (self._path, self._boot_id) else None

    def _remember(self) -> None:
        if self._memory is None:
            return
        # The folder may be a user's: a link or file found there is neither followed nor written to.
        counted = msgspec.json.encode(_Counted(self._path, self._boot_id, self._seq))
        try:
            self._memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.write_whole(self._memory.parent, (), self._memory.name, counted, myself())
        except OSError as error:  # /dev/shm is full: what the kernel says counts all the same
            if not self._is_told:
                log.warning("%s: the agent's next start counts the kernel's log from then on: %s", self._memory, error)
            self._is_told = True
