# SPDX-License-Identifier: Apache-2.0
"""What the journal weighs and costs: a job that fails N times in a row, through the real loop into a real journal.

    python benchmarks/journal.py 1000 4000
    python benchmarks/journal.py --sync          # what a commit costs that survives a power cut

Each incident is a rank that dies: its runner tells so, the round ends, a decision is made, the next round comes up and
catches up. No clock is waited for (the nodes are made up), so the seconds are those of loop and journal alone.
"""

import argparse
import asyncio
import contextlib
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.journal.store import Store, open_store
from megascale_ops.schema.events import Event
from megascale_ops.schema.policy import JobPolicy

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fakes.controlled_job import World

TURNS, BATCHES = 10, 50
RECORD = b'{"job":"demo","reason":"%s"}' % (b"x" * 1300)
# No budget may end the job before it has failed often enough.
ENDLESS = JobPolicy(restarts_per_hour=10**9, restarts_per_cause_per_hour=10**9, fruitless_restarts=10**9)


async def fail(world: World, times: int) -> None:
    """Let a job of two ranks come up, and lose a rank as often as asked for."""
    # Where the time went is reckoned by the clock, which runs a thousand times faster here.
    world.loop.goodput = lambda _name: None  # type: ignore[method-assign]  # not what is measured
    await world.up("a")
    step = 20
    for _ in range(times):
        dead = world.exit(1, -9)
        join = world.new_join(cause="failure", exits=(dead,), previous_round=world.round)
        world.ranks.clear()
        reply = world.ask(join)
        for _ in range(50):
            if reply.done():
                break
            await world.wait(0.1)
        if reply.result().status != "go":
            raise RuntimeError(f"the job was not started again: {reply.result().reason}")
        step += 5
        await world.run_round(step)
        world.tasks = [task for task in world.tasks if not task.done()]


def grow(times: int) -> None:
    """Print how large a journal becomes by so many incidents, how long that takes, and how long it is opened."""
    with tempfile.TemporaryDirectory(prefix="megascale-bench-") as folder:
        path = Path(folder, "ops.db")
        store = open_store(f"sqlite:///{path}")

        async def run() -> None:
            world = World(_Now(store), policy=ENDLESS)
            await fail(world, times)

        began_s = time.monotonic()
        asyncio.run(run())
        store.close()
        took_s = time.monotonic() - began_s
        with contextlib.closing(sqlite3.connect(path)) as connection:
            record = connection.execute("SELECT MAX(LENGTH(body)) FROM jobs").fetchone()[0]
        began_s = time.monotonic()
        again = open_store(f"sqlite:///{path}")
        again.jobs()
        again.newest_incidents(500)
        opened_s = time.monotonic() - began_s
        again.close()
        size_mb = sum(each.stat().st_size for each in Path(folder).iterdir()) / 1e6
    print(
        f"{times:>8} incidents  {size_mb:>8.1f} MB  {size_mb * 1e3 / times:>7.1f} KB each  {took_s:>7.1f} s  "
        f"{took_s / times * 1e3:>6.1f} ms each  record {record / 1e3:>7.1f} KB  opened in {opened_s:.2f} s",
        flush=True,
    )


def commits(where: str | None) -> None:
    """Print what a batch takes that is bound to last, and one that is not, in turns of one journal each."""
    took_ms: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(prefix="megascale-bench-", dir=where) as folder:
        store = open_store(f"sqlite:///{folder}/ops.db")
        now = _Now(store)
        for turn in range(2 * TURNS):
            for _ in range(BATCHES):
                binding = turn % 2 == 0
                event = Event(time.time(), "demo", "lost", "x" * 200)
                began_s = time.perf_counter()
                now.submit(Batch(events=(event,), job="demo", record=RECORD, binding=binding), lambda: None)
                took_ms[binding].append((time.perf_counter() - began_s) * 1e3)
        store.close()
    print(f"{TURNS} turns of {BATCHES} batches each (a record of {len(RECORD) / 1e3:.1f} KB and an event), ms")
    print(f"{'synchronous':<14}{'median':>8}{'p90':>8}{'p99':>8}{'longest':>9}")
    for binding, name in ((True, "FULL"), (False, "NORMAL")):
        ms = sorted(took_ms[binding])
        p90, p99 = ms[int(0.9 * len(ms))], ms[int(0.99 * len(ms))]
        print(f"{name:<14}{statistics.median(ms):>8.2f}{p90:>8.2f}{p99:>8.2f}{ms[-1]:>9.2f}")


class _Now:
    """A journal whose batches are safe when ``submit`` returns: the made-up world has one thread."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def submit(self, batch: Batch, done: object) -> None:
        """Write, wait, and go on."""
        safe = threading.Event()
        self._store.submit(batch, safe.set)
        if not safe.wait(60):
            raise TimeoutError("the journal did not write a batch within 60 s")
        done()  # type: ignore[operator]  # a callback


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("times", nargs="*", type=int, default=[1000, 4000])
    parser.add_argument("--sync", action="store_true", help="measure commits instead")
    parser.add_argument("--folder", default=None, help="where journals are written; a real disk for --sync")
    given = parser.parse_args()
    if given.sync:
        commits(given.folder)
        return
    for times in given.times:
        grow(times)


if __name__ == "__main__":
    main()
