# SPDX-License-Identifier: Apache-2.0
"""Where one node keeps what it gathered: files that are whole or not there.

    <run folder>/incidents/<incident>/<node>/    the evidence of an incident; ``evidence.json``, the index, comes last
    <run folder>/profiles/<profile>/             the kernel timings of a profile, by rank

For their owner only: mode 0700 and 0600. Each file is written beside and renamed. Nodes that share a run folder do not
meet: each has a folder of its own for an incident, and ranks of its own in a profile.
"""

import contextlib
import os
import tempfile
from pathlib import Path

from megascale_ops.schema.identity import check_name


class KeptFolder:
    """A folder below the run folder; made when the first file is written.

    Raises:
        UsageError: a name can't be a folder.
        OSError: (every method) the disk is full, no rights, and so on.
    """

    def __init__(self, run_dir: str, *names: str) -> None:
        if not run_dir:
            raise FileNotFoundError("the round file names no run folder")
        self._run_dir = Path(run_dir)
        self._names = names
        self.path = self._run_dir.joinpath(*(check_name("folder", name) for name in names))

    def write(self, name: str, data: bytes) -> Path:
        """Write a file so that it is either whole or not there; return its path."""
        target = self.path / name
        self._make()
        handle, partial = tempfile.mkstemp(prefix=f".{name}.", suffix=".partial", dir=self.path)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            self._give_to_owner(Path(partial))
            Path(partial).replace(target)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise
        return target

    def _make(self) -> None:
        if self.path.is_dir():
            return
        self._run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for depth in range(len(self._names)):
            folder = self._run_dir.joinpath(*self._names[: depth + 1])
            folder.mkdir(mode=0o700, exist_ok=True)
            self._give_to_owner(folder)

    def _give_to_owner(self, path: Path) -> None:
        """An agent that runs as root leaves files that belong to whoever owns the run folder."""
        if os.geteuid() != 0:
            return
        with contextlib.suppress(OSError):
            owner = self._run_dir.stat()
            os.chown(path, owner.st_uid, owner.st_gid)


class IncidentFolder(KeptFolder):
    """One node's folder of one incident."""

    def __init__(self, run_dir: str, incident: str, node: str) -> None:
        super().__init__(run_dir, "incidents", check_name("incident", incident), check_name("node", node))


class ProfileFolder(KeptFolder):
    """The folder of one profile, for all nodes."""

    def __init__(self, run_dir: str, profile: str) -> None:
        super().__init__(run_dir, "profiles", check_name("profile", profile))
