# SPDX-License-Identifier: Apache-2.0
"""Damages of ``checkpoint_kills.py``: drawn, done to copies of whole checkpoints, and what must come is known."""

import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
from checkpoint_trials import (
    DEADLINE_S,
    ELEMENTS,
    PATIENCE_S,
    STEPS,
    TENSORS,
    Trial,
    asked,
    forked,
    join_group,
    restored,
    saved,
    sealed_steps,
    state_of,
)
from torch import distributed

from megascale_ops.checkpoint import CheckpointManager, manifest, storage
from megascale_ops.checkpoint.trust import alarms

NOBODY = 65_534
BASE = "base"  # the folder of whole checkpoints of which copies are damaged


def save_base(folder: Path) -> None:
    """Three checkpoints of two ranks, which damages are done to copies of."""
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))

    def save(rank: int) -> None:
        join_group(scratch, rank, 2)
        manager = CheckpointManager(folder, keep=100)
        for step in STEPS:
            manager.save(step, state_of(step))
        manager.close()

    pids = [forked(partial(save, rank)) for rank in range(2)]
    assert {os.waitpid(pid, 0)[1] for pid in pids} == {0}
    shutil.rmtree(scratch)


def flip(path: Path, dice: random.Random) -> None:
    """Flip bits of one to sixteen bytes."""
    data = bytearray(path.read_bytes())
    for _ in range(dice.randint(1, 16)):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    if bytes(data) == path.read_bytes():  # two flips of one bit
        data[0] ^= 1
    path.write_bytes(data)


def truncate(path: Path, dice: random.Random) -> None:
    """Cut off the end, or all."""
    os.truncate(path, dice.randrange(path.stat().st_size))


def remove(path: Path, dice: random.Random) -> None:
    """Take the file away."""
    del dice
    path.unlink()


def exchange(path: Path, dice: random.Random) -> None:
    """Put the file of another step there, whole as it is: an older copy, a lost write."""
    whole = path.parent.parent.with_name(BASE)  # of the damaged copy another one may have been exchanged already
    others = [each for each in sorted(whole.glob(f"step-*/{path.name}")) if each.parent.name != path.parent.name]
    shutil.copy(dice.choice(others), path)


def zero(path: Path, dice: random.Random) -> None:
    """Fill a page with zeros, as a lost block is; a page that has none anyway is not chosen."""
    data = bytearray(path.read_bytes())
    start = dice.randrange(len(data))
    stop = min(len(data), start + 4096)
    data[start:stop] = bytes(stop - start) if any(data[start:stop]) else b"\x01" * (stop - start)
    path.write_bytes(data)


def fifo(path: Path, dice: random.Random) -> None:
    """A file that gives nothing for ever: opened plainly, it would hang the reader."""
    del dice
    path.unlink()
    os.mkfifo(path)


DAMAGES = {
    "flipped bytes": flip, "truncated": truncate, "missing": remove, "of another step": exchange, "zeros": zero,
    "hangs (FIFO)": fifo,
}  # fmt: skip


def damage(folder: Path, dice: random.Random, kind: str) -> Trial:
    """Damage a drawn file of one, two or all checkpoints; the newest that was left alone has to come."""
    began_s = time.monotonic()
    steps = sealed_steps(folder)
    doomed = set(steps[-dice.choice([1, 1, 1, 2, len(steps)]) :])
    for step in doomed:
        files = sorted(path for path in storage.final_folder(folder, step).iterdir() if path.stat().st_size)
        if kind == "of another step":  # an equal file is no damage
            files = [path for path in files if path.suffix == ".tensors" or path.name == manifest.FILE_NAME]
        if kind in {"flipped bytes", "zeros"}:  # no restore needs it, so one that has its size costs none
            files = [path for path in files if path.name != alarms.FILE_NAME]
        DAMAGES[kind](dice.choice(files), dice)
    wanted = max(set(steps) - doomed, default=-2)
    step, problem = asked(lambda: restored(folder))
    if step == -2 and wanted == -2 and "To start from step 0, move that folder away" in problem:
        return Trial("", "refused, told", "", time.monotonic() - began_s)
    if step != wanted:
        problem = problem or f"restored {step} instead of {wanted}"
    return Trial("", "fell back", problem, time.monotonic() - began_s)


def newer(folder: Path, dice: random.Random) -> Trial:
    """The newest is of a later format, whole: told, and no step is lost in silence."""
    began_s = time.monotonic()
    path = storage.final_folder(folder, STEPS[-1]) / manifest.FILE_NAME
    sealed = manifest.decode(path.read_bytes())
    path.write_bytes(manifest.encode(msgspec.structs.replace(sealed, version=manifest.VERSION + dice.randint(1, 9))))
    step, said = asked(lambda: restored(folder))
    fine = step == -2 and "is of a later version" in said
    return Trial("", "refused, told", "" if fine else f"{step}: {said}", time.monotonic() - began_s)


def read_only(folder: Path, dice: random.Random) -> Trial:
    """A folder without the right to write: saving is refused in a sentence, and all that was there is restored."""
    del dice
    began_s = time.monotonic()
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)

    def try_both() -> tuple[str, int]:
        if os.getuid() == 0:  # root may write anywhere
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        said = saved(folder, 9)
        return said, len(list(folder.iterdir()))

    before = len(list(folder.iterdir()))
    said, after = asked(try_both)
    step, problem = asked(lambda: restored(folder))
    if "Permission denied" not in said or after != before or step != STEPS[-1]:
        problem = problem or f"said {said!r}, {before} entries became {after}, restored {step}"
    return Trial("", "refused, told", problem, time.monotonic() - began_s)


def limited(folder: Path, dice: random.Random) -> Trial:
    """No file may grow beyond a drawn size while saving: told, nothing is left of it, what was before is restored."""
    began_s, most = time.monotonic(), dice.randrange(1, 3 * ELEMENTS * TENSORS)

    def save() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        return saved(folder, 9)

    said = asked(save)
    return _after_no_room(folder, said, began_s)


def full(folder: Path, dice: random.Random) -> Trial:
    """A file system that is full at a drawn byte of the save: the same."""
    began_s, used = time.monotonic(), sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    room = dice.randrange(64_000, 5 * ELEMENTS * TENSORS)
    disk = folder.with_name(f"{folder.name}-disk")
    with small_disk(disk, used + room + 4096 * 20) as is_mounted:
        if not is_mounted:
            return Trial("", "not possible here", "", 0.0)
        shutil.copytree(folder, disk, dirs_exist_ok=True)
        said = asked(lambda: saved(disk, 9))
        return _after_no_room(disk, said, began_s)


def _after_no_room(folder: Path, said: str, began_s: float) -> Trial:
    step, problem = asked(lambda: restored(folder))
    partial = [path.name for path in folder.iterdir() if path.name.endswith(".partial")]
    if not said:  # it had room after all
        if step != 9:
            problem = problem or f"restored {step} after a save that was told as done"
        return Trial("", "had room", problem, time.monotonic() - began_s)
    told = any(words in said for words in ("No space left", "File too large"))
    if step != STEPS[-1] or partial or not told:
        problem = problem or f"restored {step}, left {partial}, said {said!r}"
    return Trial("", "refused, told", problem, time.monotonic() - began_s)


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[bool]:
    """Let a folder be a file system of so many bytes; false where we may not mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    is_mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", str(folder)], check=True, timeout=30)
        folder.rmdir()


def hanging(folder: Path, dice: random.Random) -> Trial:
    """The storage of one rank of two does not answer: the other is told within its process group's time-out."""
    began_s = time.monotonic()
    scratch, victim = Path(tempfile.mkdtemp(dir=folder.parent)), dice.randrange(2)

    def save(rank: int, told: int) -> None:
        logging.disable()
        join_group(scratch, rank, 2, PATIENCE_S)
        manager = CheckpointManager(folder, keep=100)
        if rank == victim:
            os.fsync = lambda _: time.sleep(DEADLINE_S + 10)  # as a lost NFS server
        try:
            manager.save(9, state_of(9))
            os.write(told, b"saved")
        except Exception as error:  # noqa: BLE001  whatever the group raises: that it does is asked
            os.write(told, f"{type(error).__name__}: {error}".encode())

    listening, told = os.pipe()
    pids = [forked(partial(save, rank, told)) for rank in range(2)]
    os.close(told)
    with os.fdopen(listening, "rb") as heard:
        said = os.read(heard.fileno(), 4096).decode()
        took_s = time.monotonic() - began_s
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    shutil.rmtree(scratch)
    step, problem = asked(lambda: restored(folder))
    if step != STEPS[-1] or not said or said == "saved":
        problem = problem or f"restored {step}, said {said!r}"
    return Trial("", "told in time", problem, took_s)


def other_size(folder: Path, dice: random.Random) -> Trial:
    """Restored by another number of ranks than saved it: every rank has every bit."""
    began_s, size = time.monotonic(), dice.choice([1, 3])
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))

    def load(rank: int, told: int) -> None:
        join_group(scratch, rank, size)
        os.write(told, json.dumps(restored(folder)).encode() + b"\n")
        distributed.barrier()

    listening, told = os.pipe()
    pids = [forked(partial(load, rank, told)) for rank in range(size)]
    os.close(told)
    with os.fdopen(listening, "rb") as heard:
        answers = [json.loads(line) for line in heard]
    for pid in pids:
        os.waitpid(pid, 0)
    shutil.rmtree(scratch)
    problem = "" if answers == [[STEPS[-1], ""]] * size else f"on {size} ranks: {answers}"
    return Trial("", "restored", problem, time.monotonic() - began_s)


OTHERS: dict[str, tuple[Callable[[Path, random.Random], Trial], int]] = {
    "a later format": (newer, 1),
    "read-only folder": (read_only, 1),
    "file size limit": (limited, 1),
    "full disk (tmpfs)": (full, 1),
    "storage of one rank hangs": (hanging, 20),  # one in twenty: each waits for a time-out
    "another number of ranks": (other_size, 1),
}
