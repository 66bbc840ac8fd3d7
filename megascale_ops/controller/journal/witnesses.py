# SPDX-License-Identifier: Apache-2.0
"""Which numbers of incidents were given out, by folders and rows: a journal that lost its end gives none again.

Evidence lies in ``<run folder>/incidents/<job>-<number>``. A folder that is there while the journal knows of no such
incident shows that the journal has lost it: a power cut, a backup that was restored, a damaged row.
"""

import logging
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from megascale_ops.controller.journal.rows import number_of
from megascale_ops.foreign import UNREADABLE

log = logging.getLogger(__name__)

# 2 s: folders are listed in milliseconds; those of a file system that hangs are not waited for.
LOOK_S = 2.0


class _Where(msgspec.Struct):
    """The part of a job's record that names its run folder."""

    run_dir: str = ""


def highest_numbers(records: Mapping[str, bytes], rows: Mapping[str, int], run_dir: Path | None) -> dict[str, int]:
    """Return the highest number that an incident of each job is known to have had.

    Args:
        records: every job's, whole.
        rows: the highest in the journal's rows, by job.
        run_dir: where incidents are kept when a job's runner names no folder.
    """
    folders = {Path(where.run_dir) for raw in records.values() if (where := _where(raw)).run_dir}
    folders |= {run_dir} if run_dir is not None else set()
    found = dict(rows)
    for name in _listed(folders):
        job = name.rpartition("-")[0]
        if job in records or job in rows:
            found[job] = max(found.get(job, 0), number_of(name))
    return found


def _where(raw: bytes) -> _Where:
    try:
        return msgspec.json.decode(raw, type=_Where)
    except UNREADABLE:
        return _Where()


def _listed(folders: Iterable[Path]) -> list[str]:
    """Return the names of all incidents' folders, as far as their file systems answer."""
    names: list[str] = []

    def look() -> None:
        for folder in folders:
            try:
                names.extend(one.name for one in (folder / "incidents").iterdir())
            except OSError as error:
                log.debug("the incidents in %s can't be listed: %s", folder, error)

    looking = threading.Thread(target=look, name="incident-folders", daemon=True)
    looking.start()
    looking.join(LOOK_S)
    if looking.is_alive():
        log.warning("the folders of incidents do not answer: numbers of incidents go by the journal and the runners")
    return list(names)
