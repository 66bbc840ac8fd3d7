# SPDX-License-Identifier: Apache-2.0
"""Find the newest checkpoint that verifies, and log of every newer one why it was passed over.

Needs no torch: a command line, an agent or a runner can ask what a restart would find.
"""

from pathlib import Path

import msgspec

from megascale_ops import foreign
from megascale_ops.checkpoint import manifest as manifests
from megascale_ops.checkpoint import storage
from megascale_ops.checkpoint.manifest import CheckpointReport, Fault


class Choice(msgspec.Struct, frozen=True):
    """What a restart would load, and what it would pass over."""

    newest: CheckpointReport | None
    skipped: tuple[CheckpointReport, ...] = ()


def inspect(folder: Path, *, part: int = 0, parts: int = 1) -> CheckpointReport:
    """Verify one checkpoint folder, or a share of it.

    Args:
        folder: a sealed checkpoint.
        part: which share of the files to read, so that many ranks verify one checkpoint together.
        parts: into how many shares the files are dealt.

    Returns:
        The report; an unreadable or missing manifest is a fault like any other, never an exception.
    """
    step = storage.step_of(folder)
    try:
        manifest = manifests.decode(foreign.read(folder / manifests.FILE_NAME, manifests.MOST_BYTES))
    except FileNotFoundError:
        return CheckpointReport(str(folder), step, (Fault(manifests.FILE_NAME, "missing"),))
    except OSError as exc:
        return CheckpointReport(str(folder), step, (Fault(manifests.FILE_NAME, "unreadable", storage.describe(exc)),))
    except manifests.ManifestError as exc:
        return CheckpointReport(str(folder), step, (exc.fault,))
    found = [manifests.judge_step(manifest, step)]
    found += [manifests.judge_file(entry, storage.observe(folder, entry)) for entry in manifest.files[part::parts]]
    return CheckpointReport(str(folder), step, tuple(fault for fault in found if fault), manifest)


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
