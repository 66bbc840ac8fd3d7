# SPDX-License-Identifier: Apache-2.0
"""Read folders of format 1, which are DCP's own: the plan and all that is not a tensor is a pickle.

Only for users who asked for it (``CheckpointManager(allow_pickle=True)``): unpickling runs what the writer wanted.
"""

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megascale_ops.checkpoint import contents
from megascale_ops.checkpoint.dcp_storage import load_alone


class OldFolder:
    """A verified checkpoint of format 1.

    Args:
        folder: the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._described = FileSystemReader(folder).read_metadata().state_dict_metadata

    @property
    def keys(self) -> frozenset[str]:
        """Everything that is stored."""
        return frozenset(self._described)

    def stored(self, key: str) -> contents.Stored:
        """Shape and type of a tensor."""
        described = self._described[key]
        assert isinstance(described, TensorStorageMetadata), f"{key}: a slot stands for a tensor"
        return contents.Stored(tuple(described.size), described.properties.dtype)

    def structures(self, names: list[str]) -> dict[str, contents.Structure]:
        """The structures of these entries."""
        found: dict[str, Any] = {contents.structure_key(name): None for name in names}
        self.load(found)
        return {name: found[contents.structure_key(name)] for name in names}

    def load(self, flat: dict[str, Any]) -> None:
        """Load exactly these keys, by this rank alone."""
        load_alone(flat, FileSystemReader(self._folder), DefaultLoadPlanner())
