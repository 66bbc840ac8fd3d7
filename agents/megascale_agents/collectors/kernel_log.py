# SPDX-License-Identifier: Apache-2.0
"""The kernel's log, ``/dev/kmsg``: Xids, NVSwitch's SXids, GPUs off the bus, processes killed for memory.

Each ``read`` of the device gives one record, ``priority,sequence,microseconds,flags;text``, and never waits when
opened non-blocking; so it is looked at with every look of the agent (1 us when there is nothing) and needs no thread.
A line is known by its sequence number and the kernel's boot id: the number of the last event that counted is kept in a
file, so that an agent that is started again counts nothing twice and misses nothing of what came in between. Without
such a file what is in the log already is passed over, for it is not news.

The priority is not looked at: what the driver writes and what a test injects differ only there. A plain file works as
well as the device, for tests and for a log that is piped in from elsewhere.
Sources: Documentation/ABI/testing/dev-kmsg; the forms of lines in docs.nvidia.com/deploy/xid-errors and in NVIDIA's
Fabric Manager guide.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from megascale_agents.ownership import files
from megascale_agents.ownership.rights import myself
from megascale_ops import foreign

# 8 KiB: the kernel refuses a smaller buffer than its longest record (1 KiB of text and its dictionary).
_RECORD_BYTES = 8192
_MEMORY_BYTES = 8192  # a path, a number and the name of a boot
# 2,000 records a look: a whole ring buffer within a second, and 10 ms at most of one look.
_MOST_RECORDS = 2000
# A GPU that falls off the bus writes an Xid 79 and a line of its own, in either order.
_SAME_FALL_S = 10.0
FELL_OFF = 79

# Numbers of at most 19 digits (63 bits): Python refuses to read those of thousands, and a log may hold anything.
_HEAD = re.compile(rb"^\d+,(\d{1,19}),(\d{1,19}),[^;]*;(.*)$")
# Nearly all lines are of something else; one search for these tells.
_WORTH = re.compile(rb"Xid|fallen off the bus|Killed process")
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d{1,19})(?:, (.*))?$")
# What the driver puts before its words: whose work it was. A process that is not known is "<unknown>".
_WHOSE = re.compile(r"^pid='?(\d{1,19}|<unknown>)'?,? ?(?:name=[^,]*,? ?)?")
_FELL = re.compile(r"NVRM: .*?(?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}).*fallen off the bus")
_SXID = re.compile(r"nvidia-nvswitch\w*: SXid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d{1,19})(?:, (.*))?$")
_KILLED = re.compile(r"(?:Out of memory|[Mm]emory cgroup out of memory): Killed process (\d{1,19}) \(([^)]*)\)")


class _Counted(msgspec.Struct, frozen=True):
    """Up to where the events of a log were counted, as the file keeps it."""

    path: str
    boot: str
    seq: int


class Record(NamedTuple):
    """One line; ``mono_s`` is on the clock that Python's ``monotonic`` shows."""

    seq: int
    mono_s: float
    text: str


class KernelEvent(NamedTuple):
    """Something that the kernel told. ``kind``: xid, sxid, oom. ``pci`` as in ``pci_key``; ``number`` of the Xid."""

    kind: str
    mono_s: float
    text: str
    seq: int = -1
    pci: str = ""
    number: int = 0
    pid: int = 0  # whose work it was, 0 where that is not told


def pci_key(text: str) -> str:
    """Return a PCI address as domain:bus:device: NVML, the driver and the kernel write it in three ways."""
    parts = text.lower().removeprefix("pci:").split(".")[0].split(":")
    if len(parts) == 2:
        parts.insert(0, "0")
    try:
        domain, bus, device = (int(part, 16) for part in parts)
    except ValueError:
        return text
    return f"{domain:04x}:{bus:02x}:{device:02x}"


def parse(raw: bytes, after_seq: int = -1) -> list[Record]:
    """Return the records beyond ``after_seq`` that may say something; continuation lines are left out."""
    found = []
    for line in raw.split(b"\n"):
        if _WORTH.search(line) is None:
            continue
        head = _HEAD.match(line)
        if head is not None and int(head[1]) > after_seq:
            found.append(Record(int(head[1]), int(head[2]) / 1e6, head[3].decode("utf-8", "replace")))
    return found


def events_of(records: Iterable[Record]) -> list[KernelEvent]:
    """Return what the records tell; one fall off the bus is one event, however often it is told."""
    found: list[KernelEvent] = []
    for record in records:
        event = _event(record)
        if event is not None and not any(_same_fall(event, known) for known in found):
            found.append(event)
    return found


def _event(record: Record) -> KernelEvent | None:
    seq, mono_s, text = record
    if match := _XID.search(text):
        said = match[3] or ""
        whose = _WHOSE.match(said)
        pid = int(whose[1]) if whose is not None and whose[1].isdigit() else 0
        text = said[whose.end() :] if whose is not None else said
        return KernelEvent("xid", mono_s, text.strip(), seq, pci_key(match[1]), int(match[2]), pid)
    if match := _SXID.search(text):
        return KernelEvent("sxid", mono_s, match[3] or "", seq, pci_key(match[1]), int(match[2]))
    if match := _FELL.search(text):
        return KernelEvent("xid", mono_s, "GPU has fallen off the bus", seq, pci_key(match[1]), FELL_OFF)
    if match := _KILLED.search(text):
        return KernelEvent("oom", mono_s, match[2], seq, pid=int(match[1]))
    return None


def _same_fall(one: KernelEvent, other: KernelEvent) -> bool:
    return (
        (one.kind, one.number, one.pci) == (other.kind, other.number, other.pci)
        and one.number == FELL_OFF
        and abs(one.mono_s - other.mono_s) <= _SAME_FALL_S
    )


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
        self._rest = b""
        self._seq = -1
        self._falls: list[KernelEvent] = []

    def look(self) -> list[KernelEvent]:
        """Return what was told since the look before.

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
        news = events_of(records)
        news = [event for event in news if not any(_same_fall(event, known) for known in self._falls)]
        self._falls = [*self._falls, *(event for event in news if event.number == FELL_OFF)][-64:]
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
        if not parts:  # as nearly always
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
        # The folder may be a user's: what lies there in our way is neither followed nor written to.
        self._memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        counted = msgspec.json.encode(_Counted(self._path, self._boot_id, self._seq))
        files.write_whole(self._memory.parent, (), self._memory.name, counted, myself())
