# SPDX-License-Identifier: Apache-2.0
"""Find the newest checkpoint that verifies, and log of every newer one why it was passed over.

Needs no torch: a command line, an agent or a runner can ask what a restart would find.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from megascale_ops import foreign
from megascale_ops.checkpoint import manifest as manifests
from megascale_ops.checkpoint import storage
from megascale_ops.checkpoint.manifest import CheckpointReport, Fault, Manifest, ManifestError
from megascale_ops.errors import CheckpointError


class Choice(msgspec.Struct, frozen=True):
    """What a restart would load, and what it would pass over."""

    newest: CheckpointReport | None
    skipped: tuple[CheckpointReport, ...] = ()


def inspect(
    folder: Path, *, part: int = 0, parts: int = 1, told: Callable[[int], object] | None = None
) -> CheckpointReport:
    """Verify one checkpoint folder, or a share of it.

    Args:
        folder: a sealed checkpoint.
        part: which share of the files to read, so that many ranks verify one checkpoint together.
        parts: into how many shares the files are dealt.
        told: hears of bytes as they are read.

    Returns:
        The report; an unreadable or missing manifest is a fault like any other, never an exception.
    """
    step, manifest = storage.step_of(folder), read_manifest(folder)
    if isinstance(manifest, Fault):
        return CheckpointReport(str(folder), step, (manifest,))
    found = [manifests.judge_step(manifest, step)]
    share = manifest.files[part::parts]
    found += [manifests.judge_file(entry, storage.observe(folder, entry, told)) for entry in share]
    return CheckpointReport(str(folder), step, tuple(fault for fault in found if fault), manifest)


def read_manifest(folder: Path) -> Manifest | Fault:
    """The manifest of a checkpoint, or why it can't be believed; never raises."""
    try:
        return manifests.decode(foreign.read(folder / manifests.FILE_NAME, manifests.MOST_BYTES))
    except ManifestError as exc:
        return exc.fault
    except FileNotFoundError:
        return Fault(manifests.FILE_NAME, "missing")
    except OSError as exc:
        return Fault(manifests.FILE_NAME, "unreadable", storage.describe(exc))


def require_unchanged(folder: Path, report: CheckpointReport) -> None:
    """Prove, after a checkpoint was read, that it is the one that was verified.

    Raises:
        CheckpointError: it was saved again, or deleted, meanwhile.
    """
    try:
        raw = foreign.read(folder / manifests.FILE_NAME, manifests.MOST_BYTES)
    except OSError as exc:
        raise CheckpointError(f"it was taken away while it was read ({storage.describe(exc)})") from exc
    if report.manifest is None or raw != manifests.encode(report.manifest):
        raise CheckpointError("it was saved again while it was read: restore once more")


def verify(root: Path | str) -> list[CheckpointReport]:
    """Verify every checkpoint under ``root``, newest first.

    Raises:
        OSError: the folder exists and cannot be listed.
    """
    return [inspect(folder) for folder in storage.candidates(Path(root))]


def newest(root: Path | str) -> Choice:
    """The newest checkpoint that verifies; stops reading as soon as it has one.

    A restart refuses two kinds of it instead of loading them: format 1 where no pickle is allowed, and formats later
    than this program's, which stand among the skipped here.

    Raises:
        OSError: the folder exists and cannot be listed.
    """
    skipped: list[CheckpointReport] = []
    for folder in storage.candidates(Path(root)):
        report = inspect(folder)
        if report.ok:
            return Choice(report, tuple(skipped))
        skipped.append(report)
    return Choice(None, tuple(skipped))
