# SPDX-License-Identifier: Apache-2.0
"""The tier on the nodes: every node saves its ranks' shards into a folder of its own, and keeps a copy of a buddy's.

Saving is collective and quick: no node waits for a disk that all share. The copy travels in the background (``copies``)
and the next save here is left out while it does, so the set before is always whole on all nodes and their buddies. A
save that fails here costs a warning: the shared storage is what a job relies on.

Restoring takes a set that is whole over all nodes that are there. A file that turns out damaged on one node is read on
its buddy instead.
"""

import atexit
import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch

from megascale_ops import foreign
from megascale_ops.checkpoint import persist, plan, processes, storage, writer_lock
from megascale_ops.checkpoint.allowed import Allowed
from megascale_ops.checkpoint.loading.restore import Restore
from megascale_ops.checkpoint.loading.sources import FolderSource
from megascale_ops.checkpoint.loading.traffic import Traffic
from megascale_ops.checkpoint.manifest import CheckpointReport, Fault, FileEntry, Manifest
from megascale_ops.checkpoint.ranks import Ranks
from megascale_ops.checkpoint.tiers import node_folder
from megascale_ops.checkpoint.tiers.copies import Receiver, Sender, own_host
from megascale_ops.checkpoint.tiers.desk import Desk
from megascale_ops.checkpoint.tiers.nodes import Nodes
from megascale_ops.checkpoint.tiers.sets import Candidate, Held, incomplete_sentence
from megascale_ops.checkpoint.tiers.settings import LocalTier
from megascale_ops.checkpoint.trust.check import Summary
from megascale_ops.checkpoint.trust.file_digests import FileDigest
from megascale_ops.checkpoint.trust.watch import Watch
from megascale_ops.errors import CheckpointError, UsageError

# 10 s: at the end of a job a copy that is nearly there may arrive; none waits for a node that is gone.
_FAREWELL_S = 10.0

_log = logging.getLogger("megascale_ops.checkpoint")


class _Met(NamedTuple):
    """What the ranks have told each other."""

    nodes: Nodes
    root: Path
    ranks: tuple[int, int]  # this rank, and how many
    sender: Sender | None
    receiver: Receiver | None
    desk: Desk | None


class LocalStore:
    """This process's part of the tier on the nodes.

    Args:
        tier: what the user wants.
        shared: how the shared storage is named.
        identify: gives the identity that is kept in the shared storage; called on the leading rank.
        deadline_s: how long the ranks of a save in the background wait for each other; 0: none is in the background.

    Raises:
        UsageError: the path can't be written to.
    """

    def __init__(self, tier: LocalTier, shared: str, identify: Callable[[], str], deadline_s: float = 0.0) -> None:
        self._tier, self._shared, self._identify = tier.checked(), shared, identify
        self._path = Path(tier.path).absolute()
        storage.prepare_root(self._path)
        self._deadline_s = deadline_s
        self._met: _Met | None = None
        self._own_bytes = 0  # of the last save, by this rank
        self._left_out = ""

    # -- meeting ----------------------------------------------------------------------------------------------------

    def _meet(self, ranks: Ranks, *, anew: bool = False) -> _Met:
        """Find out who shares a node, once; collective. ``anew``: a rank may have been replaced, so all ask again.

        Raises:
            CheckpointError: on every rank, when a node's folder can't be used.
            UsageError: on every rank, when a buddy was asked for and there is one node.
        """
        met = self._met
        if met is not None and met.ranks == (ranks.rank, ranks.world_size) and not anew:
            return met
        self._part(0.0)
        doing = f"preparing the local tier {self._path}"
        here, found = processes.this_process(), self._path.stat()
        nodes = Nodes.of(ranks.gather((here.host, here.boot_id, found.st_dev, found.st_ino)))
        if self._tier.buddy and len(nodes.members) < 2:
            raise UsageError(
                f"LocalTier(buddy=True) needs two nodes, and all {ranks.world_size} ranks share {self._path} of one: "
                "leave buddy out, or give each node a folder of its own"
            )
        self._require_apart(doing, nodes, ranks)
        identity = ranks.lead(doing, self._identify)
        root = node_folder.folder_of(self._path, self._shared, identity)
        leads = nodes.lead_of(ranks.rank) == ranks.rank
        ranks.agree(doing, lambda: node_folder.prepare(root, self._shared, identity) if leads else None)
        copies = self._connect(doing, nodes, root, ranks)
        desk = Desk.of(doing, ranks, self._deadline_s) if self._deadline_s else None
        self._met = _Met(nodes, root, (ranks.rank, ranks.world_size), *copies, desk)
        atexit.register(self._end, os.getpid())
        return self._met

    def _require_apart(self, doing: str, nodes: Nodes, ranks: Ranks) -> None:
        """Refuse a folder that several nodes share: their files would stand for each other."""
        probe = self._path / f".node-{uuid.uuid4().hex}"
        leads = nodes.lead_of(ranks.rank) == ranks.rank

        def mark() -> str:
            if leads:
                probe.touch()
            return probe.name

        try:
            names = ranks.agree(doing, mark)
            others = [names[members[0]] for members in nodes.members if ranks.rank not in members]

            def look() -> None:
                if leads and any((self._path / name).exists() for name in others):
                    raise CheckpointError("several nodes see this folder: the local tier needs one of each node's own")

            ranks.agree(doing, look)
        finally:
            probe.unlink(missing_ok=True)

    def _connect(self, doing: str, nodes: Nodes, root: Path, ranks: Ranks) -> tuple[Sender | None, Receiver | None]:
        if self._tier.buddy is False or len(nodes.members) < 2:
            return None, None
        token = ranks.lead(doing, lambda: os.urandom(32))
        receivers: list[Receiver] = []

        def listen() -> tuple[str, int]:
            receivers.append(Receiver(root, own_host(), token))
            return receivers[0].address

        addresses = ranks.agree(doing, listen)
        partner = nodes.partner_of(ranks.rank)
        assert partner is not None, "there are two nodes"
        host, port = addresses[partner]
        return Sender((host, port), token, f"the buddy node of rank {partner} ({host}:{port})"), receivers[0]

    # -- saving -----------------------------------------------------------------------------------------------------

    def save(self, step: int, state: dict[str, Any], allowed: Allowed, ranks: Ranks, watch: Watch) -> bool:
        """Save a state on the nodes; whether it was. Collective.

        Raises:
            CheckpointError: the state can't be stored as data, or is refused because replicas differ.
        """
        doing = f"saving step {step} to the local tier {self._path}"
        flat: dict[str, torch.Tensor] = {}

        apart = ranks.agree(doing, lambda: watch.variants.take_apart(state, allowed, flat))
        watch.variants.settle(doing, apart, flat, ranks)
        try:
            met = self._meet(ranks)
            told = ranks.gather((self._estimate(flat, ranks), met.sender is not None and met.sender.is_sending))
            sending = sum(is_sending for _, is_sending in told)
            if sending:
                self._leave_out("busy", step, f"{sending} ranks still send the one before to a buddy", ranks)
                return False
            self._save(doing, step, flat, [need for need, _ in told], met, ranks, watch)
        except CheckpointError as exc:
            if watch.refusal:
                raise
            self._leave_out("failed", step, str(exc), ranks)
            return False
        self._left_out = ""
        return True

    def _leave_out(self, kind: Literal["busy", "failed"], step: int, why: str, ranks: Ranks) -> None:
        """Say so, once until a save succeeds again."""
        if ranks.leads:
            level = logging.DEBUG if kind == self._left_out else logging.WARNING
            _log.log(level, "step %d is not saved on the nodes: %s", step, why)
        self._left_out = kind

    def _estimate(self, flat: dict[str, torch.Tensor], ranks: Ranks) -> int:
        """How much this rank will write: what it wrote last, else the least that it can be."""
        if self._own_bytes:
            return self._own_bytes
        total = 0
        for each in flat.values():
            local = each.to_local() if hasattr(each, "to_local") else each
            # What all ranks hold alike is written by one of them.
            total += local.numel() * local.element_size() // (1 if local is not each else ranks.world_size)
        return total

    def _begin(self, step: int, needs: Sequence[int], met: _Met, ranks: Ranks) -> int:
        """Make the folder of a set on this node; the number of the lock by which the node's leading rank holds it.

        Raises:
            CheckpointError: another job holds it.
            OSError: there is no room, or the file system refuses.
        """
        me, nodes = ranks.rank, met.nodes
        if nodes.lead_of(me) != me:
            return 0
        number = writer_lock.lock_of(met.root).hold(me, ranks.world_size)
        here = nodes.members[nodes.node_of(me)]
        need = sum(needs[rank] for rank in here) * (1 if met.sender is None else 2)
        node_folder.require_room(met.root, need, self._tier.room, keep=1)
        storage.begin(met.root, step, number)
        return number

    def _abandon(self, step: int, met: _Met, ranks: Ranks) -> None:
        """Drop what this node has of a set that will not be."""
        number = writer_lock.lock_of(met.root).number
        if met.nodes.lead_of(ranks.rank) == ranks.rank and number:
            storage.abandon(met.root, step, number)

    def _save(
        self,
        doing: str,
        step: int,
        flat: dict[str, torch.Tensor],
        needs: Sequence[int],
        met: _Met,
        ranks: Ranks,
        watch: Watch,
    ) -> None:
        me, nodes, root = ranks.rank, met.nodes, met.root
        leads, lock = nodes.lead_of(me) == me, writer_lock.lock_of(root)
        writer = 0

        def write() -> tuple[list[FileEntry], Summary | None]:
            folder = storage.partial_folder(root, step, writer)
            seen = watch.look(flat)
            persist.write(folder, flat, ranks)
            return persist.digest_own(folder, ranks, watch.algorithm), seen

        def describe(shares: Sequence[Sequence[FileEntry]]) -> tuple[Manifest, bytes]:
            files = tuple(sorted((entry for share in shares for entry in share), key=lambda entry: entry.name))
            folder = storage.partial_folder(root, step, writer)
            raw = foreign.read(folder / plan.FILE_NAME, max(entry.size_bytes for entry in files))
            return persist.sealed_of(step, ranks.world_size, watch.variants.world, files), raw

        def seal(sealed: Manifest, raw_plan: bytes) -> None:
            if leads:
                lock.confirm()
                node_folder.seal(root, sealed, raw_plan, writer)

        try:
            writer = ranks.agree(doing, lambda: self._begin(step, needs, met, ranks))[nodes.lead_of(me)]
            written = ranks.agree(doing, write)
            watch.conclude([seen for _, seen in written])
            shares = [entries for entries, _ in written]
            sealed, raw_plan = ranks.lead(doing, lambda: describe(shares))
            ranks.agree(doing, lambda: seal(sealed, raw_plan))
        except CheckpointError:
            self._abandon(step, met, ranks)
            raise
        own = [entry for entry in shares[me] if entry.name != plan.FILE_NAME]
        self._own_bytes = sum(entry.size_bytes for entry in own)
        ranks.agree(doing, lambda: node_folder.keep_newest(root, step, self._tier.keep) if leads else None)
        if met.sender is not None:
            folder = storage.final_folder(root, step)
            met.sender.send(folder, step, node_folder.set_id_of(sealed), own)

    # -- saving behind the training ---------------------------------------------------------------------------------

    def open_set(self, step: int, save: str, flat: dict[str, torch.Tensor], watch: Watch) -> "LocalSet | None":
        """Begin a set that is written in the background; collective. None: it is left out, which was told.

        Args:
            step: that is saved.
            save: the token of the save.
            flat: the state, taken apart by ``contents``.
            watch: of this call of ``save``.
        """
        ranks, doing = watch.ranks, f"saving step {step} to the local tier {self._path}"
        try:
            met = self._meet(ranks)
            told = ranks.gather((self._estimate(flat, ranks), met.sender is not None and met.sender.is_sending))
            sending = sum(is_sending for _, is_sending in told)
            if sending:
                self._leave_out("busy", step, f"{sending} ranks still send the one before to a buddy", ranks)
                return None
            try:
                begun = ranks.agree(doing, lambda: self._begin(step, [need for need, _ in told], met, ranks))
            except CheckpointError:
                self._abandon(step, met, ranks)
                raise
        except CheckpointError as exc:
            self.leave_out(step, str(exc), ranks)
            return None
        assert met.desk is not None, "asked for only where saves are in the background"
        writer = begun[met.nodes.lead_of(ranks.rank)]
        if ranks.leads:
            met.desk.expect(save, partial(persist.sealed_of, step, ranks.world_size, watch.variants.world))
        return LocalSet(self, met, save, writer, watch)

    def leave_waiting(self, step: int, ranks: Ranks) -> None:
        """Say that a set is left out because a save before it is still written."""
        self._leave_out("busy", step, "the save before is still written", ranks)

    def leave_out(self, step: int, why: str, ranks: Ranks) -> None:
        """Say that a set failed, once until one is saved again."""
        self._leave_out("failed", step, why, ranks)

    def seal_set(self, one: "LocalSet", files: tuple[FileEntry, ...], failure: str) -> None:
        """Agree with the other ranks, seal this node's part, and begin to send this rank's files to the buddy.

        Raises:
            CheckpointError: there will be no set.
        """
        met, step, me = one.met, one.step, one.ranks.rank
        leads, lock = met.nodes.lead_of(me) == me, writer_lock.lock_of(met.root)
        assert met.desk is not None, "it opened the set"

        def seal(sealed: Manifest, raw_plan: bytes) -> None:
            if leads:
                lock.confirm()
                node_folder.seal(met.root, sealed, raw_plan, one.writer)

        promised = files if failure else one.with_plan(files)
        sealed = met.desk.take_part(one.save, me, promised, failure, one.plan, seal)
        self._own_bytes = sum(entry.size_bytes for entry in files)
        self._left_out = ""
        if leads:
            node_folder.keep_newest(met.root, step, self._tier.keep)
        if met.sender is not None:
            met.sender.send(storage.final_folder(met.root, step), step, node_folder.set_id_of(sealed), files)

    # -- restoring --------------------------------------------------------------------------------------------------

    def inventories(self, ranks: Ranks) -> list[list[Held]]:
        """What each node has, by its number; collective."""
        doing = f"looking for checkpoints in the local tier {self._path}"
        met = self._meet(ranks, anew=True)
        leads = met.nodes.lead_of(ranks.rank) == ranks.rank
        gathered = ranks.agree(doing, lambda: msgspec.msgpack.encode(node_folder.inventory(met.root) if leads else []))
        return [msgspec.msgpack.decode(gathered[members[0]], type=list[Held]) for members in met.nodes.members]

    def load(
        self, candidate: Candidate, state: dict[str, Any], allowed: Allowed, ranks: Ranks
    ) -> tuple[CheckpointReport, Traffic]:
        """Load a set, from whichever nodes have its files undamaged; collective."""
        met = self._meet(ranks)
        folder, mine = storage.final_folder(met.root, candidate.step), met.nodes.node_of(ranks.rank)
        lost: set[tuple[int, str]] = set()
        found: dict[str, Fault] = {}
        traffic = Traffic()
        while True:
            left = candidate.without(lost)
            if left.missing:
                faults = tuple(found.get(name) or Fault(name, "missing", "on no node") for name in left.missing)
                if ranks.leads:
                    _log.warning("skipped: %s", incomplete_sentence(left))
                return CheckpointReport(str(folder), candidate.step, faults), traffic
            held = frozenset(name for name, nodes in left.holders.items() if mine in nodes)
            giving = left.holders[plan.FILE_NAME][0]
            giver = met.nodes.members[giving][0]
            restore = Restore(FolderSource(folder), candidate.step, ranks, held=held, giver=giver)
            sealed = restore.manifest()
            if isinstance(sealed, Fault) or node_folder.set_id_of(sealed) != candidate.set_id:
                lost.add((giving, plan.FILE_NAME))
                continue
            report, traffic = restore.load(sealed, state, allowed), restore.traffic
            if report.ok:
                traffic.is_from_buddy = left.is_from_buddy(met.nodes)
                return report, traffic
            for each in restore.found:
                lost.add((met.nodes.node_of(each.rank), each.fault.file))
                found[each.fault.file] = each.fault
                if ranks.leads:
                    said = each.fault.sentence()
                    _log.warning("%s on the node of rank %d (%s): its copy is read", said, each.rank, folder)

    # -- ending -----------------------------------------------------------------------------------------------------

    def close(self, *, clear: bool) -> None:
        """Stop sending and listening; with ``clear`` what this node keeps goes."""
        root = self._part(0.0 if clear else _FAREWELL_S)
        if root is None:
            return
        writer_lock.lock_of(root).release()
        if clear:
            node_folder.clear(root)

    def _end(self, pid: int) -> None:
        """At the end of the process that met the others, and of no child of it: what is on its way may arrive."""
        if os.getpid() == pid:
            self._part(_FAREWELL_S)

    def _part(self, most_s: float) -> Path | None:
        """Let what is on its way arrive for so long, then end it; the folder of this node, where there is one."""
        met, self._met = self._met, None
        if met is None:
            return None
        atexit.unregister(self._end)
        until_s = time.monotonic() + most_s
        if met.sender is not None:
            if not met.sender.wait(most_s) and most_s:
                _log.warning("the copy to the buddy node is left unfinished: %s", met.root)
            met.sender.close()
        if met.receiver is not None:
            met.receiver.close(max(until_s - time.monotonic(), 0.0))
        if met.desk is not None:
            met.desk.close()
        return met.root


class LocalSet:
    """A set on the nodes that is written in the background; see ``background.local_part``.

    Args:
        store: the tier.
        met: how the ranks stand.
        save: the token of the save.
        writer: number of the lock by which this node's leading rank holds the folder.
        watch: of this call of ``save``.
    """

    def __init__(self, store: LocalStore, met: _Met, save: str, writer: int, watch: Watch) -> None:
        self.met, self.save, self.writer = met, save, writer
        self.step, self.ranks, self._algorithm = watch.step, watch.ranks, watch.algorithm
        self.plan = b""
        """The bytes of the plan; of the leading rank, once it is made."""
        self._store = store

    @property
    def folder(self) -> Path:
        """Where this rank's files go."""
        return storage.partial_folder(self.met.root, self.step, self.writer)

    def with_plan(self, files: tuple[FileEntry, ...]) -> tuple[FileEntry, ...]:
        """What this rank adds to the manifest: its files, and the plan, which each node writes for itself."""
        if not self.plan:
            return files
        digest = FileDigest(self._algorithm)
        digest.update(self.plan)
        return (*files, FileEntry(plan.FILE_NAME, len(self.plan), digest.text()))

    def finish(self, files: tuple[FileEntry, ...], failure: str) -> bool:
        """Seal it with the other ranks; whether it is. What fails is told and leaves nothing."""
        try:
            self._store.seal_set(self, files, failure)
        except (OSError, CheckpointError) as exc:
            self.drop()
            self._store.leave_out(
                self.step, storage.describe(exc) if isinstance(exc, OSError) else str(exc), self.ranks
            )
            return False
        return True

    def drop(self) -> None:
        """Give its space back."""
        if self.met.nodes.lead_of(self.ranks.rank) == self.ranks.rank:
            storage.abandon(self.met.root, self.step, self.writer)
