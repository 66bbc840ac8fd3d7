# SPDX-License-Identifier: Apache-2.0
"""Frames of a page as they are gathered of a small world, and what they say of its ranks."""

from megascale_ops.account import Account
from megascale_ops.controller.live.feed import Feed, Sources
from megascale_ops.schema.live import JUDGED, Frame, numbers
from tests.fakes.controlled_job import World


def gather(feed: Feed, world: World, account: Account | None = None) -> Frame:
    """Return the next frame, whole."""
    loop = world.loop
    sources = Sources(loop.jobs, loop.registry, loop.incidents, loop.histories.by_job)
    for _pause in feed.gather(sources, now_s=loop.clock(), wall_s=loop.wall(), lag_s=0.0, goodput=account):
        pass
    assert feed.frame is not None
    return feed.frame


def judged(frame: Frame) -> list[str]:
    """Return what each rank is, by its number."""
    assert frame.columns is not None
    return [JUDGED[number] for number in numbers("judged", frame.columns.judged)]
