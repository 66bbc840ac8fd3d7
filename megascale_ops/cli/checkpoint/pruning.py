# SPDX-License-Identifier: Apache-2.0
"""What ``checkpoint prune`` does: decide by what really verifies, and delete while no job writes there."""

from collections.abc import Mapping
from typing import NamedTuple

from megascale_ops.checkpoint.retention import Decision, Rule
from megascale_ops.cli.checkpoint.places import Place
from megascale_ops.errors import CheckpointError


class Row(NamedTuple):
    """One checkpoint and what becomes of it."""

    step: int
    path: str
    size_bytes: int
    is_damaged: bool
    reasons: tuple[str, ...]  # of its staying
    deleted: bool = False


def require_no_writer(place: Place) -> None:
    """Refuse a place that a job writes to: it deletes by its own rule, and may be saving a step that would go.

    Raises:
        CheckpointError: one does; it is named.
    """
    who = place.living_writer()
    if who:
        raise CheckpointError(
            f"nothing was deleted: {who} writes to {place.said} and keeps what its own `keep` says; end it first"
        )


def decide(place: Place, rule: Rule) -> list[Row]:
    """Return what becomes of each; as many are verified as have to be whole.

    Raises:
        CheckpointError: none is whole.
    """
    seen = place.glances()
    damaged: set[str] = set()
    whole = 0
    for report in place.verified():
        whole += report.ok
        if not report.ok:
            damaged.add(report.path)
        if whole == rule.keep:
            break
    if not whole:
        raise CheckpointError(f"nothing was deleted: none of the {len(seen)} checkpoints in {place.said} is whole")
    damaged |= {one.path for one in seen if not one.ok}
    return _rows(place.decide(rule, damaged), damaged, {one.path: one.size_bytes for one in seen})


def _rows(decisions: list[Decision], damaged: set[str], sizes: Mapping[str, int]) -> list[Row]:
    return [Row(one.step, one.path, sizes.get(one.path, 0), one.path in damaged, one.reasons) for one in decisions]


def delete(place: Place, rows: list[Row]) -> list[Row]:
    """Delete what goes, and return the rows with that; stops when a job begins to write there.

    Raises:
        CheckpointError: a job came.
        OSError: the file system refuses.
    """
    gone = place.delete([Decision(row.step, row.path, row.reasons) for row in rows])
    return [row._replace(deleted=row.path in gone) for row in rows]
