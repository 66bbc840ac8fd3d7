# SPDX-License-Identifier: Apache-2.0
"""A save into a folder that all nodes see, whole and on disk when it returns."""

import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from megascale_ops.checkpoint import deletion, persist, storage, writer_lock
from megascale_ops.checkpoint.allowed import Allowed
from megascale_ops.checkpoint.manifest import FileEntry
from megascale_ops.checkpoint.ranks import require_one_step
from megascale_ops.checkpoint.retention import Rule
from megascale_ops.checkpoint.state.variants import Told
from megascale_ops.checkpoint.trust.alarms import Findings
from megascale_ops.checkpoint.trust.check import Summary
from megascale_ops.checkpoint.trust.trust import leave
from megascale_ops.checkpoint.trust.watch import Watch
from megascale_ops.errors import CheckpointError

if TYPE_CHECKING:
    import torch


def save(
    root: Path,
    watch: Watch,
    allowed: Allowed,
    *,
    metric: float | msgspec.UnsetType,
    rule: Rule,
    damaged: Collection[str] = (),
) -> None:
    """Save a state into a folder and delete what has no reason to stay, by ``rule``; collective.

    Raises:
        CheckpointError: on every rank, when any could not do its part, or when another job writes there.
    """
    step, state, ranks = watch.step, watch.state, watch.ranks
    doing = f"saving step {step} to {root}"
    lock = writer_lock.lock_of(root)
    flat: dict[str, torch.Tensor] = {}
    writer = 0

    def prepare() -> tuple[int, int, Told]:
        told = watch.variants.take_apart(state, allowed, flat)
        number = lock.hold(ranks.rank, ranks.world_size) if ranks.leads else 0
        if ranks.leads:
            storage.begin(root, step, number)
        return step, number, told

    def write() -> tuple[list[FileEntry], Summary | None]:
        folder = storage.partial_folder(root, step, writer)
        seen = watch.look(flat)
        persist.write(folder, flat, ranks)
        return persist.digest_own(folder, ranks, watch.algorithm), seen

    def seal(entries: Iterable[FileEntry], found: Findings | None) -> None:
        lock.confirm()
        entries = (*entries, *leave(storage.partial_folder(root, step, writer), found, watch.algorithm))
        files = tuple(sorted(entries, key=lambda entry: entry.name))
        storage.seal(root, watch.manifest(files, time.time(), metric), writer)

    try:
        prepared = ranks.agree(doing, prepare)
        writer = prepared[0][1]
        require_one_step(doing, [each for each, _, _ in prepared])
        watch.variants.settle(doing, [told for _, _, told in prepared], flat, ranks)
        shares = ranks.agree(doing, write)
        found = watch.conclude([seen for _, seen in shares])
        entries = [entry for own, _ in shares for entry in own]
        ranks.agree(doing, lambda: seal(entries, found) if ranks.leads else None)
    except CheckpointError:
        if ranks.leads and lock.number:
            storage.abandon(root, step, lock.number)
        raise
    if ranks.leads:
        deletion.after_save(root, rule, step, damaged, lock.confirm)
