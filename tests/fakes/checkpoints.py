# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders without torch: real files, really sealed, whose bytes mean nothing."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

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


class Crash(BaseException):
    """The process ends here; no handler of ours may run on."""


def count_down(monkeypatch: pytest.MonkeyPatch, operations_left: int) -> list[int]:
    """Let so many file operations happen and crash at the next; the list holds what is left."""
    left = [operations_left]

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  passes on whatever the system call takes
            if left[0] == 0:
                raise Crash
            left[0] -= 1
            return operation(*args, **kwargs)

        return call

    for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    return left
