# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of one process: a group that is nothing but a store, and workspaces that know their place in it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


class FakeGroup:
    """One rank's view of a process group: the store is all that is shared."""

    def __init__(self, store: dist.HashStore) -> None:
        self.store = store

    def get_group_store(self) -> dist.HashStore:
        """The store."""
        return self.store


class FakeWorkspace:
    """What choosing and tuning ask of a workspace."""

    def __init__(self, group: FakeGroup, rank: int, world_size: int) -> None:
        self.group = group
        self.rank = rank
        self.world_size = world_size
        self.dtype = torch.bfloat16
        self.device = torch.device("cuda")
        self.deadline_s = 30.0
        self.layout = SimpleNamespace(channels=1 << 16)
        self.resets = 0

    def check(self) -> None:
        """Nothing is broken."""

    def forget_plans(self) -> None:
        """It has none."""

    def reset(self) -> None:
        """Counted."""
        self.resets += 1


def workspaces(world_size: int) -> list[Any]:
    """One workspace per rank, around one store."""
    store = dist.HashStore()
    return [FakeWorkspace(FakeGroup(store), rank, world_size) for rank in range(world_size)]


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run one call per rank at the same time; what each gave."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=60) for future in [pool.submit(call) for call in calls]]
