# SPDX-License-Identifier: Apache-2.0
"""The controller looks for garbage when its memory has grown; its end restores Python's settings."""

import asyncio
import contextlib
import gc
import weakref

import pytest

from megascale_ops.controller.server import gc_pacing

MB = 1 << 20


class Ring:
    """Refers to itself: only the collector can free it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize(
    ("now", "last", "due"),
    [
        ((0.1, 60), (0.1, 60), False),
        ((0.19, 60), (0.1, 60), False),  # 90,000 objects more
        ((0.2, 60), (0.1, 60), True),
        ((1.9, 400), (1.0, 400), False),
        ((2.0, 400), (1.0, 400), True),
        ((0.5, 400), (1.0, 400), False),  # fewer
        ((1.0, 1000), (1.0, 400), False),  # a history that fills
        ((1.0, 1600), (1.0, 400), True),
        ((0.01, 80), (0.01, 20), False),  # 60 MB more
        ((0.01, 84), (0.01, 20), True),
    ],
)
def test_a_look_is_due_when_objects_have_doubled(now: tuple[float, int], last: tuple[float, int], due: bool) -> None:
    """Doubled, and by 100,000 at least (here millions); or four times the memory (MB), and by 64 MB at least."""
    sizes = [gc_pacing.Size(round(millions * 1e6), mb * MB) for millions, mb in (now, last)]

    assert gc_pacing.is_due(*sizes) is due


async def test_objects_that_came_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a look is due by is what has come and was not freed since the one before."""
    seen: list[int] = []
    monkeypatch.setattr(gc_pacing, "MEASURED_EACH_S", 0.0)
    monkeypatch.setattr(gc_pacing, "is_due", lambda now, last: seen.append(now.objects - last.objects))
    looking = asyncio.create_task(gc_pacing.collect())
    for _ in range(3):
        await asyncio.sleep(0)
    before = seen[-1]

    came = [[] for _ in range(50_000)]  # type: ignore[var-annotated]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with_them = seen[-1]
    came.clear()
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    looking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await looking
    assert 49_000 < with_them - before < 51_000
    assert abs(seen[-1] - before) < 1_000


@pytest.mark.parametrize("grown", [True, False])
async def test_rings_are_freed_when_memory_has_grown_and_the_collector_is_given_back(
    monkeypatch: pytest.MonkeyPatch, grown: bool
) -> None:
    """Nothing is looked for while memory stays what it is."""
    monkeypatch.setattr(gc_pacing, "MEASURED_EACH_S", 0.0)
    monkeypatch.setattr(gc_pacing, "is_due", lambda _now, _last: grown)
    gc.freeze()  # what tests before have imported is not looked at: ten looks were 11 s of a worker's
    ring = Ring()
    gc.collect()  # now it is old
    freed = weakref.ref(ring)
    looking = asyncio.create_task(gc_pacing.collect())
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
