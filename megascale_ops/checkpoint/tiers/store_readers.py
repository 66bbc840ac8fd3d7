# SPDX-License-Identifier: Apache-2.0
"""Marks of restores in a store: as ``readers`` has them in a folder, and judged alike. Loads no torch.

<url>/.reader-00000120.<token>.json    a process restores step 120; written again every 10 s, gone when it is done
"""

import re
import threading
import uuid
from contextlib import suppress

import msgspec

from megascale_ops.checkpoint import processes, readers, writers
from megascale_ops.checkpoint.readers import Mark
from megascale_ops.checkpoint.retention import still_reads
from megascale_ops.checkpoint.storage import describe
from megascale_ops.checkpoint.tiers.filesystems import Store
from megascale_ops.checkpoint.writers import Writer

_NAME = re.compile(r"\.reader-(\d{8,})\.[0-9a-f]{32}\.json")
_MOST_BYTES = 1 << 16


class StoreReading(Mark):
    """What this process is restoring from one store: one step at a time, or nothing."""

    def __init__(self, store: Store, me: Writer) -> None:
        self._store, self._me = store, me
        self._name = ""
        self._busy = threading.Lock()  # a renewal does not come between two steps

    def mark(self, step: int) -> None:
        """Mark a step, and no other any more. A mark that can't be written is logged: that stops no restore."""
        with self._busy:
            former, self._name = self._name, f".reader-{step:08d}.{self._me.token}.json"
            try:
                self._store.put(self._name, msgspec.json.encode(self._me))
            except OSError as exc:
                readers.tell_unmarked(step, self._store.url, describe(exc))
            if former != self._name:
                self._remove(former)

    def renew(self) -> None:
        """Show that we still read: the store sets the time."""
        with self._busy, suppress(OSError):
            if self._name:
                self._store.put(self._name, msgspec.json.encode(self._me))

    def end(self) -> None:
        """Take the mark away."""
        with self._busy:
            former, self._name = self._name, ""
            self._remove(former)

    def _remove(self, name: str) -> None:
        with suppress(OSError):
            if name:
                self._store.delete(name)


def readers_of(store: Store, *, clear: bool = False) -> dict[int, tuple[str, ...]]:
    """Which processes restore from a store now, by step.

    Args:
        store: the files below a URL.
        clear: remove the marks of those that read no more.

    Raises:
        OSError: the store can't be listed.
    """
    marks = [name for name in store.names() if _NAME.fullmatch(name)]
    now_ns = _store_ns(store) if marks else 0
    found: dict[int, list[str]] = {}
    for name in marks:
        who = _who_reads(store, name, now_ns)
        if who:
            found.setdefault(int(name.split(".")[1].removeprefix("reader-")), []).append(who)
        elif clear:
            store.delete(name)
    return {step: tuple(named) for step, named in found.items()}


def _who_reads(store: Store, name: str, now_ns: int) -> str:
    """The process that reads by this mark; empty: it reads no more."""
    try:
        age_s = (now_ns - store.modified_ns(name)) / 1e9
        writer = writers.decode(store.read(name, _MOST_BYTES))
    except FileNotFoundError:
        return ""  # taken away just now
    life = processes.life_of(writer.process, processes.this_process()) if writer is not None else "unknown"
    if not still_reads(life, age_s):
        return ""
    return writer.who() if writer is not None else "a process whose mark can't be read"


def _store_ns(store: Store) -> int:
    """Now, by the store's own clock; 0, by which every mark counts, where nothing can be written to it."""
    probe = f".probe-{uuid.uuid4().hex}"
    try:
        store.put(probe, b"")
        try:
            return store.modified_ns(probe)
        finally:
            store.delete(probe)
    except OSError:
        return 0
