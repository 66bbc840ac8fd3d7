# SPDX-License-Identifier: Apache-2.0
"""All rounds on this node: what runs now, and what has just ended and may still be asked for.

A restart takes less than a second, an order to preserve evidence of the round before comes with the reply to a
heartbeat. So the watches of an ended round stay for a minute, with the black boxes they hold open.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from megascale_agents.collectors import process
from megascale_agents.ownership import processes, rights
from megascale_agents.ownership.rights import Owner
from megascale_agents.ranks import blackboxes
from megascale_agents.ranks.log_folders import LogFolder, LogFolders, folder_of
from megascale_agents.ranks.rank_watch import RankWatch
from megascale_agents.ranks.tile_looks import TileLooks
from megascale_ops.errors import MegascaleError
from megascale_ops.schema.identity import RankProcess, RoundFile

log = logging.getLogger(__name__)

KEPT_S = 60.0
# A job that crashes as fast as it starts must not use up the agent's file handles: 5 rounds of 8 ranks hold 80.
_KEPT_ROUNDS = 5
# 1,024: two jobs of 64 ranks that crash, with six rounds each; more would take the handles of other users' jobs.
MOST_RANKS_OF_ONE = 1024
# 20 of a job: the errors are in a user's files, which may change ten times a second.
_MOST_COMPLAINTS = 20
# 30 s: a controller counts a node as lost after 15 s; by then it has a report that runner and ranks are gone.
_ABANDONED_S = 30.0


class RoundWatch:
    """One round of one job on this node, and ``bounds``: whose files and processes may be touched for it."""

    def __init__(self, folder: str, node: str, file: RoundFile, owner: Owner) -> None:
        self.folder = folder
        self.bounds = processes.bounds_of(owner, file.runner_pid, file.runner_start_ticks)
        self.file = file
        self.job = file.job
        self.round = file.round
        self.shelf = blackboxes.BoxShelf(folder, node, file.round, owner)
        self.tiles = TileLooks(folder)
        self.ranks = {one.rank: self._watch_of(one.rank, one) for one in file.ranks}
        self.ended_s = 0.0
        self.abandoned_since_s = 0.0

    def _watch_of(self, rank: int, started: RankProcess | None) -> RankWatch:
        return RankWatch(rank, self.round, started, self.bounds, self.tiles)

    def refresh_boxes(self) -> None:
        """Open boxes that appeared since the last time."""
        if not self.shelf.refresh():
            return
        for rank, reader in self.shelf.readers.items():
            watch = self.ranks.setdefault(rank, self._watch_of(rank, None))
            if watch.box is not reader:
                watch.set_box(reader, self.shelf.pulses[rank])

    def is_abandoned(self) -> bool:
        """Return whether neither the runner nor any of its ranks lives: nothing is left to remove the round file."""
        if any(not watch.is_gone for watch in self.ranks.values()):
            return False
        runner = process.read_once(self.file.runner_pid)
        return not runner.state or runner.start_ticks != self.file.runner_start_ticks

    def close(self) -> None:
        """Let go of everything."""
        for watch in self.ranks.values():
            watch.close()
        self.shelf.close()


class Rounds:
    """Follows the box roots. ``current`` holds one round for each job, ``ended`` the ones before.

    ``logs`` holds where jobs have printed that run no more.

    Args:
        root: Our own box root.
        node: Our name.
        on_box_error: Called with the number of boxes that could not be read.
        find: Returns the other box roots; None: none counts.
    """

    def __init__(
        self,
        root: str,
        node: str,
        on_box_error: Callable[[int], None],
        find: Callable[[], Iterable[str]] | None = None,
    ) -> None:
        self.root = root
        self.node = node
        self.current: dict[str, RoundWatch] = {}
        self.ended: list[RoundWatch] = []
        self.logs = LogFolders()
        self._on_box_error = on_box_error
        self._find = find
        self._is_contested = False
        self._roots = {root: blackboxes.Folder(root)}
        self._folders: dict[str, blackboxes.Folder] = {}
        self._abandoned: set[tuple[str, int, int]] = set()
        self._complained: dict[str, set[str]] = {}

    def refresh(self, now_s: float) -> bool:
        """Follow what changed; return whether a round began or ended."""
        # Each is called, since each keeps its last result.
        if sum(folder.changed() for folder in self._roots.values()):
            self._list_jobs()
        changed = False
        for job in [job for job in self.current if job not in self._folders]:
            changed |= self._end(job, now_s)
        for job, folder in self._folders.items():
            if not folder.changed():
                continue
            try:
                changed |= self._follow(job, folder.path, now_s)
            except OSError as error:  # one job's folder that can't be read must not hide the others
                self._complain(job, f"{folder.path} can't be read: {error}; the job is not watched")
        self._forget(now_s)
        return changed

    def end_abandoned(self, now_s: float) -> bool:
        """Give up rounds whose runner and ranks have been gone for a while; cheap enough for once a second."""
        changed = False
        for job, watch in list(self.current.items()):
            if not watch.is_abandoned():
                watch.abandoned_since_s = 0.0
            elif not watch.abandoned_since_s:
                watch.abandoned_since_s = now_s
            elif now_s - watch.abandoned_since_s > _ABANDONED_S:
                self._complain(job, f"job {job}: runner and ranks of round {watch.round} are gone; no longer watched")
                self._abandoned.add(_name_of(watch.file))
                changed |= self._end(job, now_s)
        return changed

    def find(self, job: str, round_: int) -> RoundWatch | None:
        """Return the watch of a round that runs or has just ended."""
        here = self.current.get(job)
        if here is not None and here.round == round_:
            return here
        return next((watch for watch in reversed(self.ended) if (watch.job, watch.round) == (job, round_)), None)

    def ranks(self) -> Iterator[tuple[RoundWatch, RankWatch]]:
        """All ranks of the rounds that run."""
        for round_watch in self.current.values():
            for rank_watch in list(round_watch.ranks.values()):
                yield round_watch, rank_watch

    def close(self) -> None:
        """Let go of everything."""
        for watch in (*self.current.values(), *self.ended):
            watch.close()
        self.current.clear()
        self.ended.clear()

    def find_roots(self) -> None:
        """Look for other box roots; once a second is enough, for runners make theirs before they start ranks."""
        if self._find is None:
            return
        found = dict.fromkeys([self.root, *self._find()])
        if found.keys() != self._roots.keys() or self._is_contested:
            self._roots = {path: self._roots.get(path) or blackboxes.Folder(path) for path in found}
            self._list_jobs()

    def _list_jobs(self) -> None:
        """List the jobs of all box roots.

        To a controller a name is one job. So of two users' jobs of one name that which runs is watched, else the first
        in which a runner wrote something; the other one is logged and looked at again.
        """
        listed: dict[str, list[str]] = {}
        for root in self._roots:
            for job in blackboxes.list_jobs(root):
                listed.setdefault(job, []).append(str(Path(root, job)))
        before, self._folders = self._folders, {}
        self._is_contested = any(len(paths) > 1 for paths in listed.values())
        for job, paths in listed.items():
            known = before.get(job)
            if known is None or known.path not in paths or (len(paths) > 1 and job not in self.current):
                path = next((path for path in paths if self._is_begun(path)), paths[0])
                known = known if known is not None and known.path == path else blackboxes.Folder(path)
            self._folders[job] = known
            for path in paths:
                if path != known.path and self._is_begun(path):
                    self._complain(job, f"{path}: a job of this name is in {known.path}; this one is not watched")

    def _is_begun(self, folder: str) -> bool:
        """Return whether a runner of this node has written into a job's folder."""
        return Path(folder, self.node + blackboxes.ROUND_SUFFIX).exists()

    def _follow(self, job: str, folder: str, now_s: float) -> bool:
        uid, file = self._read(job, folder)
        if file is not None and (file.job != job or _name_of(file) in self._abandoned):
            file = None
        before = self.current.get(job)
        changed = False
        if before is not None and (file is None or _name_of(file) != _name_of(before.file) or uid != before.bounds.uid):
            changed = self._end(job, now_s)
        if file is None:
            return changed
        if job not in self.current:
            if self._ranks_of(uid) + len(file.ranks) > MOST_RANKS_OF_ONE:
                limit = f"{MOST_RANKS_OF_ONE} ranks and boxes of one user"
                self._complain(
                    job, f"{folder}: {limit} are watched on a node, and there are that many; this job is not"
                )
                return changed
            pids = (file.runner_pid, *(one.pid for one in file.ranks))
            self.current[job] = RoundWatch(folder, self.node, file, rights.owner_with(uid, pids))
            changed = True
        watch = self.current[job]
        changed |= self._update(watch, file)
        errors = watch.shelf.errors
        watch.refresh_boxes()
        self._on_box_error(watch.shelf.errors - errors)
        return changed

    def _read(self, job: str, folder: str) -> tuple[int, RoundFile | None]:
        """Return whose the job is, and its round file."""
        try:
            uid = rights.uid_of(folder)
            return uid, blackboxes.read_round(folder, self.node, Owner(uid))
        except FileNotFoundError:  # cleaned up just now
            pass
        except OSError as error:
            self._complain(job, f"{folder} {error.strerror or error}; the job is not watched")
        except MegascaleError as error:
            self._complain(job, f"{error}; the job is not watched")
        return -1, None

    def _ranks_of(self, uid: int) -> int:
        """Count what is watched for a user."""
        return sum(len(watch.ranks) for watch in (*self.current.values(), *self.ended) if watch.bounds.uid == uid)

    def _complain(self, job: str, text: str) -> None:
        """Log once what is wrong with a job's folder."""
        said = self._complained.setdefault(job, set())
        if text not in said and len(said) < _MOST_COMPLAINTS:
            said.add(text)
            log.warning("%s", text, extra={"job": job, "node": self.node})

    @staticmethod
    def _update(watch: RoundWatch, file: RoundFile) -> bool:
        """Take over ranks that the runner added to the file of a round that already runs."""
        if file == watch.file:
            return False
        watch.file = file
        for started in file.ranks:
            known = watch.ranks.get(started.rank)
            if known is None or known.started != started:
                if known is not None:
                    known.close()
                watch.ranks[started.rank] = RankWatch(started.rank, file.round, started, watch.bounds, watch.tiles)
                if (box := watch.shelf.readers.get(started.rank)) is not None:
                    watch.ranks[started.rank].set_box(box, watch.shelf.pulses[started.rank])
        return True

    def _end(self, job: str, now_s: float) -> bool:
        watch = self.current.pop(job)
        watch.ended_s = now_s
        self.ended.append(watch)
        self.logs.note(job, LogFolder(folder_of(watch.file), watch.bounds.owner))
        of_job = [ended for ended in self.ended if ended.job == job]
        self._drop(of_job[:-_KEPT_ROUNDS])
        return True

    def _forget(self, now_s: float) -> None:
        self._drop([watch for watch in self.ended if now_s - watch.ended_s > KEPT_S])

    def _drop(self, watches: list[RoundWatch]) -> None:
        for watch in watches:
            self.ended.remove(watch)
            watch.close()


def _name_of(file: RoundFile) -> tuple[str, int, int]:
    """The key of a round, which also differs when a new runner begins to count anew."""
    return file.job, file.round, file.runner_start_ticks
