# SPDX-License-Identifier: Apache-2.0
"""The part of a background save that the training waits for: agree, look, copy, hand over. For all tiers alike.

The state is copied once, whichever tiers it goes to: the writer process writes the same memory to this node first and
to the shared folder or store then.
"""

import uuid
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import msgspec

from megascale_ops.checkpoint import contents
from megascale_ops.checkpoint.allowed import Allowed
from megascale_ops.checkpoint.background.save_log import SaveLog
from megascale_ops.checkpoint.background.saver import BackgroundSaver, Save
from megascale_ops.checkpoint.background.staging import Outline, Staged
from megascale_ops.checkpoint.ranks import Ranks, require_one_step
from megascale_ops.checkpoint.retention import Rule
from megascale_ops.checkpoint.state.variants import Told
from megascale_ops.checkpoint.tiers.local_store import LocalStore
from megascale_ops.checkpoint.trust import alarms
from megascale_ops.checkpoint.trust.alarms import Findings
from megascale_ops.checkpoint.trust.watch import Watch
from megascale_ops.checkpoint.writer_lock import WriterLock
from megascale_ops.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from megascale_ops.checkpoint.trust.check import Summary


class Foreground:
    """The saves of one manager that the training does not wait for.

    Args:
        root: the checkpoint folder, or its URL.
        rule: what stays there.
        lock: gives the lock of the folder or store in this process.
        overlapped: return from a save before everything is copied.
        deadline_s: a save is given up when nothing was written for so long.
        log: what is told of the saves.
    """

    def __init__(
        self,
        root: str,
        rule: Rule,
        lock: Callable[[], WriterLock],
        *,
        overlapped: bool,
        deadline_s: float,
        log: SaveLog,
    ) -> None:
        self.saver = BackgroundSaver(root, rule, overlapped=overlapped, deadline_s=deadline_s, log=log)
        self._root, self._lock = root, lock
        self._unsettled: Watch | None = None  # of the save in flight, until it is known whether it counts

    def settle(self, ranks: Ranks) -> None:
        """End the save in flight, on all ranks; what it has looked at is what the next one is held against."""
        self.saver.settle(ranks)
        watch, self._unsettled = self._unsettled, None
        if watch is not None and not self.saver.failure and not self.saver.was_left:
            watch.sealed()

    def forget(self) -> None:
        """Another state was loaded: what the last save has looked at is of no use."""
        self._unsettled = None

    def save(
        self,
        watch: Watch,
        allowed: Allowed,
        *,
        metric: float | msgspec.UnsetType,
        damaged: Collection[str],
        to_shared: bool,
        local: LocalStore | None,
    ) -> None:
        """Copy the state and have it written, to the nodes too where ``local`` is given; collective.

        Raises:
            CheckpointError: on every rank, when any could not copy, or when another job writes there.
        """
        step, state, ranks, saver = watch.step, watch.state, watch.ranks, self.saver
        doing = f"saving step {step} to {self._root}" if to_shared else f"saving step {step} on the nodes"
        if not to_shared and local is not None and any(ranks.gather(saver.is_in_flight)):
            local.leave_waiting(step, ranks)  # a set on the nodes is not worth a wait for the shared storage
            return
        self.settle(ranks)
        lock = self._lock()
        flat: dict[str, torch.Tensor] = {}

        def prepare() -> tuple[int, int, str, Outline | None, Told]:
            tensors, structures = contents.separate(state, allowed)
            saver.start(state, tensors)
            told = watch.variants.encode(state, allowed, tensors, structures, flat)
            # Once held it is asked for again only after a failure: no look at the folder stops the training.
            number = lock.number if lock.number and not saver.failure else 0
            if to_shared and ranks.leads and not number:
                number = lock.hold(ranks.rank, ranks.world_size)
            return step, number, uuid.uuid4().hex, saver.outline(flat, ranks), told

        prepared = ranks.agree(doing, prepare)
        require_one_step(doing, [each[0] for each in prepared])
        # By another name a structure has another place in the plan.
        is_as_before = watch.variants.settle(doing, [each[4] for each in prepared], flat, ranks)
        outlines = [each[3] if is_as_before else None for each in prepared]
        token = prepared[0][2]
        opened = local.open_set(step, token, flat, watch) if local is not None else None
        if not to_shared and opened is None:
            saver.drop()
            return
        try:
            staged, found = self._stage(doing, flat, watch, outlines)
        except CheckpointError as exc:
            if opened is not None:
                opened.drop()
            if to_shared or watch.refusal or local is None:
                raise
            local.leave_out(step, str(exc), ranks)
            return
        if opened is not None and ranks.leads:
            opened.plan = staged.plan
        sealed = watch.manifest((), 0.0, metric)
        said = b"" if found is None or not ranks.leads else alarms.encode(found)
        made = Save(token, prepared[0][1], sealed, said, watch.algorithm)
        saver.launch(made, staged, ranks, frozenset(damaged), to_shared=to_shared, opened=opened)
        self._unsettled = watch.without_tensors()

    def _stage(
        self, doing: str, flat: "dict[str, torch.Tensor]", watch: Watch, outlines: list[Outline | None]
    ) -> tuple[Staged, Findings | None]:
        """Look at the state, and copy it.

        Raises:
            CheckpointError: on every rank, when any could not copy, or where replicas differ and that is refused.
        """
        ranks, staged = watch.ranks, list[Staged]()

        def stage() -> "Summary | None":
            watch.begin(flat)  # while the GPU copies what was started
            staged.append(self.saver.stage(flat, ranks, outlines))
            return watch.look(flat)

        found = watch.conclude(ranks.agree(doing, stage))
        return staged[0], found
