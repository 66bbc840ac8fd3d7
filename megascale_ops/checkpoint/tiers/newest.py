# SPDX-License-Identifier: Apache-2.0
"""Find the newest checkpoint over all tiers that verifies, and load it; collective.

Nothing is imported before something is found: DCP costs half a second.

A folder, an object store and the nodes themselves answer alike: what is there, newest first, and each is tried by
loading it. What turns out damaged is passed over by all ranks, said once, and overwritten by the next.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megascale_ops import foreign
from megascale_ops.checkpoint import latest, manifest, storage
from megascale_ops.checkpoint.allowed import Allowed
from megascale_ops.checkpoint.loading.traffic import Traffic
from megascale_ops.checkpoint.manifest import CheckpointReport, Manifest
from megascale_ops.checkpoint.ranks import Ranks
from megascale_ops.checkpoint.readers import Mark
from megascale_ops.checkpoint.tiers import sets
from megascale_ops.checkpoint.tiers.sets import Candidate
from megascale_ops.checkpoint.trust import alarms
from megascale_ops.errors import CheckpointError

if TYPE_CHECKING:
    from megascale_ops.checkpoint.loading.restore_log import Tier
    from megascale_ops.checkpoint.tiers.local_store import LocalStore
    from megascale_ops.checkpoint.tiers.remote import RemoteStore
    from megascale_ops.checkpoint.tiers.store_saves import Sealed

# 3: a folder would have to lose what was listed three times within a look at a few manifests.
_MOST_LOOKS = 3

_log = logging.getLogger("megascale_ops.checkpoint")


class _Shared(NamedTuple):
    """One checkpoint in the shared folder or store."""

    step: int
    load: Callable[[dict[str, Any], Ranks], CheckpointReport]
    is_there: Callable[[], bool]


class Search:
    """One restore.

    Args:
        path: the shared folder, where it is one.
        said: how sentences name the shared folder or store.
        allowed: what may be unpickled and made.
        remote: the store, where it is no folder.
        local: the tier on the nodes, where there is one.
        skipped: gets what was passed over.
        before: a step; checkpoints of earlier ones are preferred, for what later ones hold was bad itself. -1: none.
    """

    def __init__(
        self,
        path: Path,
        said: str,
        allowed: Allowed,
        remote: "RemoteStore | None",
        local: "LocalStore | None",
        skipped: list[CheckpointReport],
        *,
        before: int = -1,
    ) -> None:
        self._path, self._said, self._allowed, self._remote, self._local = path, said, allowed, remote, local
        self.skipped, self._before = skipped, before
        self.traffic = Traffic()
        self.tier: Tier = "shared" if remote is None else "store"
        """Where the checkpoint that was loaded lay, as this rank saw it."""
        self.newest_shared = -1
        """The newest step in the shared folder or store, whole or not."""

    def load(self, state: dict[str, Any], ranks: Ranks, reader: Mark | None) -> CheckpointReport | None:
        """Load the newest checkpoint that every rank finds whole; in a folder the leading rank has marked it."""
        doing = f"looking for checkpoints in {self._said}"
        for _ in range(_MOST_LOOKS):
            self.skipped.clear()
            shared = self._shared(doing, ranks, reader)
            order = self._in_order(shared, ranks)
            loaded = self._load_first_whole(order, shared, state, ranks)
            if loaded is not None:
                self.newest_shared = shared[0].step if shared else -1
                return loaded
            if not order:
                return None
            if not ranks.lead(doing, partial(_is_any_gone, shared)):
                break
        raise CheckpointError(
            f"none of the {len(order)} checkpoints in {self._said} verifies, the newest: "
            f"{self.skipped[0].sentence()}. To start from step 0, move that folder away."
        )

    def _shared(self, doing: str, ranks: Ranks, reader: Mark | None) -> list[_Shared]:
        """What the shared folder or store has, the newest first."""
        remote = self._remote
        if remote is not None:
            return [
                _Shared(one.step, partial(self._load_remote, one, reader), partial(remote.is_there, one))
                for one in ranks.lead(doing, remote.sealed)
            ]
        return [
            _Shared(storage.step_of(folder), partial(self._load_folder, folder, reader), folder.exists)
            for folder in ranks.lead(doing, lambda: storage.candidates(self._path))
        ]

    def _in_order(self, shared: list[_Shared], ranks: Ranks) -> list[Candidate]:
        """All that may be loaded, the newest first; on the nodes too, where there is such a tier."""
        inventories = [] if self._local is None else self._local.inventories(ranks)
        found = sets.candidates(inventories, [each.step for each in shared])
        if self._before < 0:
            return found
        earlier = [one for one in found if one.step < self._before]
        later = [one for one in found if one.step >= self._before]
        if ranks.leads and later:
            what = f"passed over, since training failed from there ({', '.join(str(one.step) for one in later[:3])})"
            _log.warning("checkpoints of step %d and later are %s", self._before, what if earlier else "all there are")
        return earlier + later

    def _load_first_whole(
        self, order: list[Candidate], shared: list[_Shared], state: dict[str, Any], ranks: Ranks
    ) -> CheckpointReport | None:
        """Load the first of these that verifies; what is passed over goes to ``skipped``."""
        for candidate in order:
            if candidate.set_id:
                assert self._local is not None, "it listed this one"
                report, self.traffic = self._local.load(candidate, state, self._allowed, ranks)
                tier: Tier = "buddy" if self.traffic.is_from_buddy else "node"
            else:
                tier = "shared" if self._remote is None else "store"
                report = shared[candidate.place].load(state, ranks)
            if report.ok:
                self.tier = tier
                return report
            if any(fault.kind == "other version" for fault in report.faults):
                raise CheckpointError(
                    f"looking for checkpoints in {self._said} failed: the newest, of step {report.step}, is of a later "
                    f"version ({report.faults[0].detail}): update this program, or move {report.path} away"
                )
            self.skipped.append(report)
            if ranks.leads and not candidate.set_id:  # of a set on the nodes it was said which files are nowhere
                _log.warning("skipped: %s", report.sentence())
        return None

    def _load_remote(self, one: "Sealed", reader: Mark | None, state: dict[str, Any], ranks: Ranks) -> CheckpointReport:
        """Load one checkpoint of a remote store; the leading rank marks it first, and looks whether it is deleted."""
        remote = self._remote
        assert remote is not None, "it listed this one"

        def mark() -> bool:
            if reader is not None:
                reader.mark(one.step)
            return remote.is_there(one)

        if not ranks.lead(f"looking for checkpoints in {self._said}", mark):
            gone = manifest.Fault(manifest.FILE_NAME, "missing", "it was deleted just now")
            return CheckpointReport(f"{self._said}/{one.folder}", one.step, (gone,))
        report, self.traffic = remote.load(one, state, self._allowed, ranks)
        if report.ok and ranks.leads:
            alarms.remind(report.manifest, partial(remote.findings, one))
        return report

    def _load_folder(self, folder: Path, reader: Mark | None, state: dict[str, Any], ranks: Ranks) -> CheckpointReport:
        """Load one checkpoint of a folder, verifying what is read of it; the leading rank marks it first."""
        from megascale_ops.checkpoint.loading.restore import Restore
        from megascale_ops.checkpoint.loading.sources import FolderSource

        step = storage.step_of(folder)
        if ranks.leads and reader is not None:
            reader.mark(step)
        restore = Restore(FolderSource(folder), step, ranks)
        sealed = restore.manifest()
        if isinstance(sealed, manifest.Fault):
            return CheckpointReport(str(folder), step, (sealed,))
        if sealed.version <= manifest.LAST_PICKLED:
            report = self._load_pickled(folder, sealed, state, ranks)
        else:
            faults = restore.sizes(sealed)
            if faults:
                return CheckpointReport(str(folder), step, tuple(faults), sealed)
            report = restore.load(sealed, state, self._allowed)
        self.traffic = restore.traffic
        if report.ok:
            doing = f"restoring step {step} from {folder}"
            ranks.lead(doing, lambda: latest.require_unchanged(folder, report))
            if ranks.leads:
                alarms.remind(sealed, partial(foreign.read, folder / alarms.FILE_NAME, alarms.MOST_BYTES))
        return report

    def _load_pickled(self, folder: Path, sealed: Manifest, state: dict[str, Any], ranks: Ranks) -> CheckpointReport:
        """Load a checkpoint of an older format: all of it is verified first, then each rank reads what it needs."""
        from megascale_ops.checkpoint import persist

        doing = f"restoring step {sealed.step} from {folder}"
        share = partial(latest.inspect, folder, part=ranks.rank, parts=ranks.world_size)
        report = manifest.merge(ranks.agree(doing, share))
        if not report.ok:
            return report
        if ranks.leads and self._allowed.old_pickles:
            _log.warning("unpickling %s, which an older version wrote: that runs what its writer wanted", folder)
        ranks.agree(doing, lambda: persist.read_into(folder, sealed, state, self._allowed))
        return report


def _is_any_gone(shared: list[_Shared]) -> bool:
    """Whether a checkpoint was deleted after it was listed: then others have come, and one looks again."""
    return not all(each.is_there() for each in shared)
