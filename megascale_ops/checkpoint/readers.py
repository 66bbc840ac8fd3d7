# SPDX-License-Identifier: Apache-2.0
"""Marks in a checkpoint folder that say what is being restored, so that nothing is deleted under a reader.

    <root>/.reader-00000120.<token>.json    a process restores step 120; renewed every 10 s, gone when it is done

The reader puts its mark down before it looks at the checkpoint; who deletes moves the folder away before it looks at
the marks, and back where it finds one (``deletion``). Whichever comes second sees the other.

A mark ends by itself. Of a process on this machine the kernel knows whether it lives; that of another one ends when it
was not renewed for ten minutes. Its age is the difference of two time stamps of the same file system, that of the mark
and that of a file written now, so that no clock of this machine decides.
"""

import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import msgspec

from megascale_ops import foreign
from megascale_ops.checkpoint import processes, storage, writers
from megascale_ops.checkpoint.retention import MARK_LASTS_S, still_reads
from megascale_ops.checkpoint.writers import Writer

_NAME = re.compile(r"\.reader-(\d{8,})\.[0-9a-f]{32}\.json")
# 64 kB, as for a writer's name: a record has some 600 bytes.
_MOST_BYTES = 1 << 16
_RENEW_S = MARK_LASTS_S / 60
# 1 s: the end of a restore does not wait for a slow disk.
_FAREWELL_S = 1.0

_log = logging.getLogger("megascale_ops.checkpoint")


class Mark(Protocol):
    """What a process is restoring: one step at a time, or nothing."""

    def mark(self, step: int) -> None:
        """Mark a step, and no other any more."""

    def renew(self) -> None:
        """Show that we still read."""

    def end(self) -> None:
        """Take the mark away."""


class Reading(Mark):
    """What this process is restoring from one folder: one step at a time, or nothing."""

    def __init__(self, root: Path, me: Writer) -> None:
        self.root = root
        self._me = me
        self._path: Path | None = None
        self._busy = threading.Lock()  # a renewal does not come between two steps

    def mark(self, step: int) -> None:
        """Mark a step, and no other any more. A mark that can't be written is logged: a full disk stops no restore."""
        path = self.root / f".reader-{step:08d}.{self._me.token}.json"
        with self._busy:
            former, self._path = self._path, None
            try:
                with path.open("xb") as stream:
                    stream.write(msgspec.json.encode(self._me))
                self._path = path
            except FileExistsError:
                self._path = path
            except OSError as exc:
                tell_unmarked(step, str(self.root), storage.describe(exc))
            if former is not None and former != self._path:
                _remove(former)

    def renew(self) -> None:
        """Show that we still read."""
        with self._busy, suppress(OSError):
            if self._path is not None:
                os.utime(self._path)  # by the file system's own clock

    def end(self) -> None:
        """Take the mark away."""
        with self._busy:
            former, self._path = self._path, None
            if former is not None:
                _remove(former)


def tell_unmarked(step: int, said: str, why: str) -> None:
    """Warn that a checkpoint is read though no mark could be written."""
    _log.warning("step %d of %s is read without a mark, and may be deleted meanwhile: %s", step, said, why)


@contextmanager
def reading(root: Path, rank: int, world_size: int) -> Iterator[Mark]:
    """A mark of this process on a folder, renewed until the end; ``mark`` says on which step."""
    with renewed(Reading(root, processes.describe_writer(rank, world_size))) as ours:
        yield ours


@contextmanager
def renewed(ours: Mark) -> Iterator[Mark]:
    """A mark that is renewed until the end, and taken away then."""
    stopped = threading.Event()

    def keep() -> None:
        while not stopped.wait(_RENEW_S):
            ours.renew()

    keeper = threading.Thread(target=keep, name="checkpoint-reader", daemon=True)
    keeper.start()
    try:
        yield ours
    finally:
        stopped.set()
        keeper.join(_FAREWELL_S)
        ours.end()


def readers_of(root: Path, *, clear: bool = False) -> dict[int, tuple[str, ...]]:
    """Who restores from a folder now, by step.

    Args:
        root: the folder.
        clear: remove the marks of those that read no more.

    Raises:
        OSError: the folder can't be listed.
    """
    marks = sorted(path for path in root.iterdir() if _NAME.fullmatch(path.name))
    now_s = _file_system_s(root) if marks else 0.0
    found: dict[int, list[str]] = {}
    for path in marks:
        who = _who_reads(path, now_s)
        if who:
            found.setdefault(int(path.name.split(".")[1].removeprefix("reader-")), []).append(who)
        elif clear:
            _remove(path)
    return {step: tuple(named) for step, named in found.items()}


def _who_reads(path: Path, now_s: float) -> str:
    """Who reads by this mark; empty: it reads no more."""
    try:
        age_s = now_s - path.lstat().st_mtime
    except OSError:
        return ""  # taken away just now
    try:
        writer = writers.decode(foreign.read(path, _MOST_BYTES))
    except FileNotFoundError:
        return ""
    except OSError:  # a link, a device, no rights
        writer = None
    life = processes.life_of(writer.process, processes.this_process()) if writer is not None else "unknown"
    if not still_reads(life, age_s):
        return ""
    return writer.who() if writer is not None else "a process whose mark can't be read"


def _file_system_s(root: Path) -> float:
    """Now, by the time stamps of the file system that the folder is on; by this machine where it can't be written."""
    try:
        handle, probe = tempfile.mkstemp(prefix=".probe-", dir=root)
    except OSError:
        return time.time()
    try:
        return os.fstat(handle).st_mtime
    finally:
        os.close(handle)
        _remove(Path(probe))


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
