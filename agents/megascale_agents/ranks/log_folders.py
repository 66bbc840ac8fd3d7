# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of a job print, as its runner has listed it; also of jobs that have ended since the agent began."""

from collections import OrderedDict
from pathlib import PurePath
from typing import NamedTuple

from megascale_agents.ownership.rights import Owner
from megascale_ops.schema.identity import RoundFile

# 64 jobs of one user: those of a day whose logs are still read. 1,024 of all, 300 bytes each.
_MOST_OF_ONE = 64
_MOST = 1024


class LogFolder(NamedTuple):
    """The folder that has a job's rounds, and with whose rights it is read."""

    path: str
    owner: Owner


def folder_of(file: RoundFile) -> str:
    """Return the folder that has the rounds: ``<folder>/round-N/rank-R/stderr.log`` is what a runner lists."""
    for one in file.ranks:
        for listed in (one.stderr_path, one.stdout_path):
            above = PurePath(listed).parents
            if len(above) > 2 and above[1].name == f"round-{file.round}" and above[0].name == f"rank-{one.rank}":
                return str(above[2])
    return str(PurePath(file.run_dir, "logs"))


class LogFolders:
    """The folders of jobs that do not run any more, the newest last."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, LogFolder] = OrderedDict()

    def note(self, job: str, folder: LogFolder) -> None:
        """Remember a job's folder."""
        self._known[job] = folder
        self._known.move_to_end(job)
        of_owner = [name for name, one in self._known.items() if one.owner.uid == folder.owner.uid]
        if len(of_owner) > _MOST_OF_ONE:
            del self._known[of_owner[0]]
        elif len(self._known) > _MOST:
            self._known.popitem(last=False)

    def find(self, job: str) -> LogFolder | None:
        """Return a job's folder; None when nothing is known of it."""
        return self._known.get(job)
