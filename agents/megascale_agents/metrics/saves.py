# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of this node's ranks, for Prometheus: one series a job and value, not one a rank.

All ranks save together, so the rank with the most tells: the longest stall is what the training waited for, and a
failure is one of the job, however many ranks counted it. So it is with restores, but for their bytes: each rank reads
its own share, and what the node reads is their sum.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from megascale_agents.ranks.rank_watch import RankWatch
from megascale_agents.ranks.rounds import RoundWatch

if TYPE_CHECKING:
    from megascale_ops.blackbox.records import RestoresRecord, SavesRecord

FIELDS = {
    "megascale_checkpoint_stall_seconds": "stall_s",
    "megascale_checkpoint_write_seconds": "write_s",
    "megascale_checkpoint_saves_in_flight": "in_flight",
    "megascale_checkpoint_failed_saves_total": "failed",
    "megascale_checkpoint_sealed_timestamp_seconds": "sealed_wall_s",
}

RESTORE_FIELDS = {
    "megascale_checkpoint_restore_seconds": "restore_s",
    "megascale_checkpoint_passed_over_total": "passed_over",
    "megascale_checkpoint_failed_restores_total": "failed",
}
READ, RESTORES = "megascale_checkpoint_restore_read_bytes", "megascale_checkpoint_restores_total"
TIERS = ("node", "buddy", "shared", "store")


def restores_of(
    ranks: Iterable[tuple[RoundWatch, RankWatch]], node: str
) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Yield what is known of a job's restores here, once one of its ranks has made one with us."""
    known: dict[str, list[RestoresRecord]] = {}
    for round_watch, watch in ranks:
        restores = watch.box.restores() if watch.box is not None and not watch.is_gone else None
        if restores is not None:
            known.setdefault(round_watch.job, []).append(restores)
    for job, all_restores in known.items():
        for name, field in RESTORE_FIELDS.items():
            yield name, (job, node), float(max(getattr(one, field) for one in all_restores))
        yield READ, (job, node), float(sum(one.read_bytes for one in all_restores))
        for tier in TIERS:
            most = max(getattr(one, tier) for one in all_restores)
            if most:
                yield RESTORES, (job, node, tier), float(most)


def samples_of(
    ranks: Iterable[tuple[RoundWatch, RankWatch]], node: str
) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Yield the most of each value over a job's ranks here, once one of them has saved with us."""
    known: dict[str, list[SavesRecord]] = {}
    for round_watch, watch in ranks:
        saves = watch.box.saves() if watch.box is not None and not watch.is_gone else None
        if saves is not None:
            known.setdefault(round_watch.job, []).append(saves)
    for job, all_saves in known.items():
        for name, field in FIELDS.items():
            most = float(max(getattr(saves, field) for saves in all_saves))
            if most or field != "sealed_wall_s":
                yield name, (job, node), most
