# SPDX-License-Identifier: Apache-2.0
"""The controller looks for garbage when its memory has grown; whoever is there after it gets Python's ways back."""

import asyncio
import contextlib
import gc
import weakref

import pytest

from megascale_ops.controller import garbage

MB = 1 << 20


class Ring:
    """Refers to itself: only the collector can free it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize(
    ("now_mb", "last_mb", "due"),
    [
        (60, 60, False),
        (123, 60, False),  # 63 MB more
        (124, 60, True),
        (799, 400, False),
        (800, 400, True),
        (100, 400, False),  # shrunk
    ],
)
def test_a_look_is_due_when_memory_has_doubled(now_mb: int, last_mb: int, due: bool) -> None:
    """Doubled, and by 64 MB at least: a small one that grows a little is no reason."""
    assert garbage.is_due(now_mb * MB, last_mb * MB) is due


@pytest.mark.parametrize("grown", [True, False])
async def test_rings_are_freed_when_memory_has_grown_and_the_collector_is_given_back(
    monkeypatch: pytest.MonkeyPatch, grown: bool
) -> None:
    """Nothing is looked for while memory stays what it is."""
    monkeypatch.setattr(garbage, "MEASURED_EACH_S", 0.0)
    monkeypatch.setattr(garbage, "is_due", lambda _now, _last: grown)
    ring = Ring()
    gc.collect()  # now it is old
    freed = weakref.ref(ring)
    looking = asyncio.create_task(garbage.collect())
    await asyncio.sleep(0)
    del ring

    for _ in range(10):
        await asyncio.sleep(0)
    held, was_enabled = freed(), gc.isenabled()
    looking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await looking

    assert (held is None, was_enabled) == (grown, False)
    assert gc.isenabled()
