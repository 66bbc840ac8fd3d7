# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints a PATH of the command line means."""

from megascale_ops.checkpoint.storage import describe
from megascale_ops.cli.checkpoint.places import Place
from megascale_ops.errors import CheckpointError, UsageError


def meant_by(path: str) -> Place:
    """Return the checkpoints that a PATH stands for.

    Raises:
        UsageError: there are none, or it can't be looked at; one sentence.
    """
    try:
        if "://" in path:
            from megascale_ops.cli.checkpoint.stores import store_of  # costs fsspec

            return store_of(path)
        from megascale_ops.cli.checkpoint.folders import folder_of

        return folder_of(path)
    except OSError as error:
        raise UsageError(f"{path} can't be read: {describe(error)}") from error


def newest_whole(path: str, count: int) -> tuple[Place, list[str]]:
    """Return the newest checkpoints that verify, and where they are.

    Raises:
        CheckpointError: there are fewer.
        UsageError: nothing is there.
    """
    place, why = meant_by(path), ""
    found: list[str] = []
    for report in place.verified():
        if report.ok:
            found.append(report.path)
        else:
            why = why or f"; {report.sentence()}"
        if len(found) == count:
            return place, found
    lacking = "no whole checkpoint is" if count == 1 else "fewer than two whole checkpoints are"
    raise CheckpointError(f"{lacking} in {path}{why}")


def pair_of(first: str, second: str | None) -> tuple[tuple[Place, str], tuple[Place, str]]:
    """Return two checkpoints to compare: the newest whole one of each PATH, of a single one the two newest.

    Raises:
        UsageError: there is nothing to compare.
        CheckpointError: one of them is damaged, or too few are whole.
    """
    if second is not None:
        (one, (before,)), (other, (after,)) = newest_whole(first, 1), newest_whole(second, 1)
        return (one, before), (other, after)
    if meant_by(first).is_one:
        raise UsageError(f"{first} is one checkpoint: give a second one, or the folder that holds both")
    place, (after, before) = newest_whole(first, 2)
    return (place, before), (place, after)
