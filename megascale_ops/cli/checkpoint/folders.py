# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints a PATH means, and whether they are whole: one, a folder of them, or a run folder with one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from megascale_ops.checkpoint import deletion, latest, lock_files, processes, readers, storage
from megascale_ops.checkpoint.deletion import Glance
from megascale_ops.checkpoint.manifest import CheckpointReport
from megascale_ops.errors import CheckpointError, UsageError

# As a run folder names it; also in cli/sources/runs.
_OF_A_RUN = "checkpoints"


class Meant(NamedTuple):
    """What a PATH stands for: the folder of checkpoints, and those of it that are meant, newest first."""

    root: Path
    folders: list[Path]
    is_one: bool = False


def meant_by(path: str) -> Meant:
    """Return the checkpoints that a PATH stands for.

    Raises:
        UsageError: there are none; one sentence.
    """
    given = Path(path).absolute()
    try:
        if not given.exists():
            raise UsageError(f"there is no {path}: give a folder of checkpoints, one of them, or a run folder")
        if not given.is_dir():
            raise UsageError(f"{path} is no folder: give a folder of checkpoints, one of them, or a run folder")
        if storage.step_of(given) >= 0:
            return Meant(given.parent, [given], is_one=True)
        for root in (given, given / _OF_A_RUN):
            folders = storage.candidates(root)
            if folders:
                return Meant(root, folders)
    except OSError as error:
        raise UsageError(f"{path} can't be read: {storage.describe(error)}") from error
    raise UsageError(f"no checkpoint is in {path}: one is a folder step-00000120 that CheckpointManager has saved")


def holder_of(root: Path) -> str:
    """Return who writes to a folder, as far as one look tells; "" where no process is known to."""
    try:
        writer = lock_files.read_lock(root).writer
    except OSError:
        return ""
    if writer is None or writer.released or processes.life_of(writer.process, processes.this_process()) == "dead":
        return ""
    return writer.who()


def verified(folders: list[Path]) -> Iterator[CheckpointReport]:
    """Yield a report of each, with a bar while its files are read; one that was deleted meanwhile is left out."""
    from megascale_ops.cli.terminal.progress import bytes_bar

    for folder in folders:
        seen = deletion.glance(folder)
        with bytes_bar(f"step {seen.step}", promised_bytes(seen)) as told:
            report = latest.inspect(folder, told=told)
        if report.ok or folder.exists():
            yield report


def promised_bytes(seen: Glance) -> int:
    """Return the size of a checkpoint by its manifest; by what is there where it has none."""
    return sum(entry.size_bytes for entry in seen.manifest.files) if seen.manifest is not None else seen.size_bytes


def pair_of(first: str, second: str | None) -> tuple[Path, Path]:
    """Return two checkpoints to compare: the newest whole one of each PATH, of a single one the two newest.

    Raises:
        UsageError: there is nothing to compare.
        CheckpointError: one of them is damaged, or too few are whole.
    """
    if second is not None:
        return _newest_whole(first, 1)[0], _newest_whole(second, 1)[0]
    if meant_by(first).is_one:
        raise UsageError(f"{first} is one checkpoint: give a second one, or the folder that holds both")
    after, before = _newest_whole(first, 2)
    return before, after


def _newest_whole(path: str, count: int) -> list[Path]:
    meant, found, why = meant_by(path), [], ""
    for report in verified(meant.folders):
        if report.ok:
            found.append(Path(report.path))
        else:
            why = why or f"; {report.sentence()}"
        if len(found) == count:
            return found
    lacking = "no whole checkpoint is" if count == 1 else "fewer than two whole checkpoints are"
    raise CheckpointError(f"{lacking} in {path}{why}")


@contextmanager
def marked(folder: Path) -> Iterator[None]:
    """Keep a checkpoint from being deleted while it is read; where no mark can be written it is read without.

    Raises:
        CheckpointError: it is gone already.
    """
    with readers.reading(folder.parent, 0, 1) as reader:
        reader.mark(storage.step_of(folder))
        if not folder.exists():
            raise CheckpointError(f"{folder} was deleted meanwhile: ask once more")
        yield
