# SPDX-License-Identifier: Apache-2.0
"""Where one node keeps what it gathered: files that are whole or not there.

    <run folder>/incidents/<incident>/<node>/    the evidence of an incident; ``evidence.json``, the index, comes last
    <run folder>/profiles/<profile>/             the kernel timings of a profile, by rank

For the job's owner only (mode 0700 and 0600): each file is written beside and renamed with the owner's rights,
since the run folder is where the owner chose, and its files are the owner's (``ownership/files.py``). None of these
folders may be a link. Nodes that share a run folder do not meet: each has a folder of its own for an incident, and
ranks of its own in a profile.
"""

from pathlib import Path

from megascale_agents.ownership import files
from megascale_agents.ownership.rights import Owner
from megascale_ops.schema.identity import check_name


class KeptFolder:
    """A folder below the run folder; made when the first file is written.

    Raises:
        UsageError: a name can't be a folder.
        OSError: (every method) the disk is full, no rights, a link is in the way, and so on.
    """

    def __init__(self, run_dir: str, owner: Owner, *names: str) -> None:
        if not run_dir:
            raise FileNotFoundError("the round file names no run folder")
        self._run_dir = run_dir
        self._owner = owner
        self._names = tuple(check_name("folder", name) for name in names)

    def write(self, name: str, data: bytes) -> Path:
        """Write a file so that it is either whole or not there; return its path."""
        return files.write_whole(self._run_dir, self._names, name, data, self._owner)


class IncidentFolder(KeptFolder):
    """One node's folder of one incident."""

    def __init__(self, run_dir: str, owner: Owner, incident: str, node: str) -> None:
        super().__init__(run_dir, owner, "incidents", check_name("incident", incident), check_name("node", node))


class ProfileFolder(KeptFolder):
    """The folder of one profile, for all nodes."""

    def __init__(self, run_dir: str, owner: Owner, profile: str) -> None:
        super().__init__(run_dir, owner, "profiles", check_name("profile", profile))
