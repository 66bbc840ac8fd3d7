# SPDX-License-Identifier: Apache-2.0
"""Where a job's time went, and on which GPU a rank computes, as a page is told of it."""

import re
from pathlib import Path

from megascale_ops import ledger
from megascale_ops.controller import live
from megascale_ops.controller.live.feed import Feed
from megascale_ops.schema.live import JUDGED, MOST_GPUS, Ledger, merge
from tests.fakes.controlled_job import World
from tests.fakes.gathered_frames import gather

WEB = Path(live.__file__).parent / "web"


async def test_the_ledger_is_the_account_of_the_job() -> None:
    """Rows that have any time are told, to a tenth of a second, and add up to the job's wall clock."""
    world = World(nproc=2)
    await world.up("a", step=50)
    await world.wait(30.0)
    account = world.loop.goodput("job")
    assert account is not None

    told = gather(Feed("job"), world, account).ledger

    assert told is not None
    assert told.wall_s == round(account.wall_s, 1) > 0
    assert told.rows == {name: round(one, 1) for name, one in account.rows.items() if round(one, 1) > 0}
    assert abs(sum(told.rows.values()) - told.wall_s) <= 0.05 * len(ledger.ROWS)
    assert set(told.hour) <= set(ledger.ROWS)


async def test_a_ledger_that_changed_is_told_alone() -> None:
    """A later frame has the ledger when it has changed, and a reader puts it in place of the one before."""
    world = World(nproc=2)
    await world.up("a", step=50)
    feed = Feed("job")
    first = gather(feed, world, world.loop.goodput("job"))
    await world.wait(5.0)

    second = gather(feed, world, world.loop.goodput("job"))

    assert feed.change is not None
    assert feed.change.ledger == second.ledger != first.ledger
    assert merge(first, feed.change).ledger == second.ledger


async def test_without_an_account_no_ledger_is_made_up() -> None:
    """Of a job whose time is not known there is no ledger, rather than an empty one."""
    world = World(nproc=2)
    await world.up("a", step=50)

    assert gather(Feed("job"), world).ledger is None


async def test_a_gpu_that_is_known_late_is_told() -> None:
    """Which GPU a rank computes on comes with its place, also where an agent found that out after the first frame."""
    world = World(nproc=2)
    await world.up("a", step=50)
    feed = Feed("job")
    before = gather(feed, world)
    world.rank(1).gpu = "GPU-1f"
    world.beat_all()

    after = gather(feed, world)

    assert before.layout is not None
    assert after.layout is not None
    assert (before.layout.gpus, after.layout.gpus) == ((), ("", "GPU-1f"))


async def test_gpus_of_a_large_job_are_left_out() -> None:
    """UUIDs of thousands of ranks would be most of a frame: only culprits have theirs, in the headline."""
    world = World(nproc=MOST_GPUS + 1)
    await world.up("a", step=50)
    world.rank(1).gpu = "GPU-1f"
    world.beat_all()

    frame = gather(Feed("job"), world)

    assert frame.layout is not None
    assert frame.layout.gpus == ()


def test_the_page_knows_every_row_of_the_ledger_and_every_state_of_a_rank() -> None:
    """What the page has words for are the rows of the ledger, in their order, and the states of ranks."""
    rows = (WEB / "ledger.js").read_text().partition("const ROWS = {")[2].partition("};")[0]
    states = re.search(r"JUDGED = (\[.*?\]);", (WEB / "frames.js").read_text())
    style = (WEB / "style.css").read_text()

    assert re.findall(r"^  (\w+): \[", rows, re.MULTILINE) == list(ledger.ROWS)
    assert states is not None
    assert re.findall(r"\"(\w+)\"", states[1]) == list(JUDGED)
    assert [row for row in ledger.ROWS if f".row-{row}" not in style] == []


def test_an_empty_ledger_has_no_rows_to_share() -> None:
    """Two ledgers that were made without rows share none: what is put in one is not in the other."""
    assert Ledger().rows is not Ledger().rows
