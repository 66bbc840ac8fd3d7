# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders without torch: real files, really sealed, whose bytes mean nothing."""

from collections.abc import Mapping
from pathlib import Path

from megascale_ops.checkpoint import storage
from megascale_ops.checkpoint.manifest import Manifest

WRITER = 1
SHARDS = {".metadata": b"plan of nothing", "__0_0.distcp": b"first shard " * 20, "__1_0.distcp": b"second shard " * 20}


def sealed(root: Path, step: int, shards: Mapping[str, bytes] = SHARDS) -> Path:
    """Write and seal one checkpoint; its folder."""
    storage.prepare_root(root)
    folder = storage.begin(root, step, WRITER)
    for name, data in shards.items():
        (folder / name).write_bytes(data)
    files = tuple(storage.digest(folder / name) for name in sorted(shards))
    return storage.seal(root, Manifest(step=step, world_size=2, written_wall_s=1.0, files=files), WRITER)
