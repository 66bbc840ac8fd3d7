# SPDX-License-Identifier: Apache-2.0
"""What ``checkpoint prune`` does: decide by what really verifies, and delete while no job writes there."""

from pathlib import Path
from typing import NamedTuple

from megascale_ops.checkpoint import deletion, lock_files, storage, writer_lock
from megascale_ops.checkpoint.retention import Decision, Rule
from megascale_ops.cli.checkpoint.folders import Meant, holder_of, verified
from megascale_ops.errors import CheckpointError


class Row(NamedTuple):
    """One checkpoint and what becomes of it."""

    step: int
    path: str
    size_bytes: int
    is_damaged: bool
    reasons: tuple[str, ...]  # of its staying
    deleted: bool = False


def require_no_writer(root: Path) -> None:
    """Refuse a folder that a job writes to: it deletes by its own rule, and may be saving a step that would go.

    Raises:
        CheckpointError: one does; it is named.
    """
    who = writer_lock.living_writer(root)
    if who:
        raise CheckpointError(
            f"nothing was deleted: {who} writes to {root} and keeps what its own `keep` says; end it first"
        )


def decide(meant: Meant, rule: Rule) -> tuple[list[Decision], set[str]]:
    """Return what becomes of each, and which are damaged; as many are verified as have to be whole.

    Raises:
        CheckpointError: none is whole.
    """
    damaged: set[str] = set()
    whole = 0
    for report in verified(meant.folders):
        whole += report.ok
        if not report.ok:
            damaged.add(report.path)
        if whole == rule.keep:
            break
    if not whole:
        raise CheckpointError(
            f"nothing was deleted: none of the {len(meant.folders)} checkpoints in {meant.root} is whole"
        )
    damaged |= {str(one) for one in meant.folders if not deletion.glance(one).ok}
    return deletion.plan(meant.root, rule, damaged=damaged, clear=False), damaged


def rows_of(decisions: list[Decision], damaged: set[str]) -> list[Row]:
    """Return the decisions with sizes, newest first."""
    return [
        Row(one.step, one.path, storage.bytes_in(Path(one.path)), one.path in damaged, one.reasons) for one in decisions
    ]


def delete(root: Path, decisions: list[Decision]) -> set[str]:
    """Delete what goes, and return the paths of it; stops when a job begins to write there.

    Raises:
        CheckpointError: a job came.
        OSError: the file system refuses.
    """
    first = lock_files.read_lock(root)

    def before(one: Decision) -> None:
        if lock_files.read_lock(root).number != first.number:
            raise CheckpointError(
                f"stopped before step {one.step}: {holder_of(root) or 'a job'} began to write to {root}"
            )

    return {one.path for one in deletion.carry_out(root, decisions, before)}
