# SPDX-License-Identifier: Apache-2.0
"""A controller whose frames are not finished until the test says so: as with a job of very many ranks."""

import asyncio
from collections.abc import Generator

import pytest

from megascale_ops.controller.cluster.registry import Registry
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.live.ranks import Ranks


def hold_frames(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Stop every gathering after its headline; return the event that lets all go on."""
    may_go_on = asyncio.Event()
    look_at_layout = Ranks.look_at_layout

    def held(ranks: Ranks, job: Job, registry: Registry, world_size: int, /) -> Generator[None]:
        while not may_go_on.is_set():
            yield
        yield from look_at_layout(ranks, job, registry, world_size)

    monkeypatch.setattr(Ranks, "look_at_layout", held)
    return may_go_on
