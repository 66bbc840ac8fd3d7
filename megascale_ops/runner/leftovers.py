# SPDX-License-Identifier: Apache-2.0
"""Clean up after a runner that was killed, before the same job starts again; refuse when it still lives.

A SIGKILLed runner can't tidy: ranks that were not Python may live on, black boxes lie in shared memory. Its round
file names it and the mark that all its processes carry, so the next start finds every one of them.
"""

import shutil
from pathlib import Path

import msgspec

from megascale_ops.errors import UsageError
from megascale_ops.runner.processes import kill_for_certain, marked_processes, start_ticks
from megascale_ops.schema.identity import RoundFile


def read_round_file(path: Path) -> RoundFile | None:
    """Return the round file at ``path``; None when there is none or it can't be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RoundFile)
    except (OSError, msgspec.DecodeError):
        return None


def clean_up(box_dir: Path, node: str, job: str) -> str:
    """Remove what an earlier runner of this job on this node left behind.

    Returns:
        A sentence saying what was found, or "" when there was nothing.

    Raises:
        UsageError: the earlier runner still runs.
    """
    path = box_dir / f"{node}.round.json"
    earlier = read_round_file(path)
    if earlier is None:
        return ""
    if earlier.runner_pid and start_ticks(earlier.runner_pid) == earlier.runner_start_ticks:
        raise UsageError(
            f"job {job} already runs on {node} (runner process {earlier.runner_pid}): "
            "stop that one first, or give this run another name with --job"
        )
    killed = kill_for_certain(lambda: marked_processes(earlier.run_id)) if earlier.run_id else 0
    removed = remove_boxes(box_dir, earlier)
    return (
        f"an earlier runner of job {job} (process {earlier.runner_pid}, round {earlier.round}) had died without "
        f"tidying: {killed} of its processes still ran and were killed, {removed} of its files were removed"
    )


def remove_boxes(box_dir: Path, round_file: RoundFile | None, node: str = "") -> int:
    """Remove the black boxes of one node's ranks, its round file, and the folder when it is empty.

    Returns:
        How many files were removed.
    """
    removed = 0
    names = [str(rank.rank) for rank in round_file.ranks] if round_file is not None else []
    for name in names:
        for path in box_dir.glob(f"{name}.*"):
            path.unlink(missing_ok=True)
            removed += 1
    file = box_dir / f"{round_file.node if round_file is not None else node}.round.json"
    if file.exists():
        file.unlink(missing_ok=True)
        removed += 1
    others = list(box_dir.glob("*.round.json")) if box_dir.exists() else []
    if not others and box_dir.exists():
        removed += sum(1 for path in box_dir.iterdir() if path.is_file())
        shutil.rmtree(box_dir, ignore_errors=True)
    return removed
