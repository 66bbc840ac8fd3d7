# SPDX-License-Identifier: Apache-2.0
"""The controller looks for garbage by itself; what is in the process besides gets Python's own ways back."""

import asyncio
import contextlib
import gc
import weakref

import pytest

from megascale_ops.controller import main


class Ring:
    """Refers to itself: only the collector can free it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("full_look_s", [1e6, 0.0])
async def test_rings_are_freed_and_the_collector_is_given_back(
    monkeypatch: pytest.MonkeyPatch, full_look_s: float
) -> None:
    """By a look at the young objects or, where one has become old, by a look at all."""
    monkeypatch.setattr(main, "YOUNG_LOOK_S", 0.0)
    monkeypatch.setattr(main, "FULL_LOOK_S", full_look_s)
    ring = Ring()
    if not full_look_s:
        gc.collect()  # now it is old
    freed = weakref.ref(ring)
    looking = asyncio.create_task(main._collect_garbage())
    await asyncio.sleep(0)
    del ring

    for _ in range(10):
        await asyncio.sleep(0)
    held, was_enabled = freed(), gc.isenabled()
    looking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await looking

    assert (held, was_enabled) == (None, False)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
