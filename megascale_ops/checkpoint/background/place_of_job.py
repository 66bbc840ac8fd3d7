# SPDX-License-Identifier: Apache-2.0
"""Which place a save is made in, as its job names it."""

from megascale_ops.checkpoint.background.messages import Job
from megascale_ops.checkpoint.background.places import Place


def place_of(job: Job) -> Place:
    """The place of a save, as its job names it."""
    if "://" in job.root:
        from megascale_ops.checkpoint.background.store_place import StorePlace  # costs fsspec

        return StorePlace(job)
    from megascale_ops.checkpoint.background.folder_place import FolderPlace

    return FolderPlace(job)


def give_up(job: Job, reason: str) -> None:
    """Give back what a save takes in its place; by a training process whose writer process has died."""
    place_of(job).give_up(reason)
