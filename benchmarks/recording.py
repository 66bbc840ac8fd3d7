# SPDX-License-Identifier: Apache-2.0
"""What recording costs a controller, and how fast a recording is replayed.

    python benchmarks/recording.py [--ranks 12288] [--minutes 5] [--step-s 6.34]

A simulated cluster speaks to the real controller, every heartbeat by itself, once with a recording and once without.
CPU seconds are the process's, of all its threads; memory is what the ring holds between two blocks.
"""

import argparse
import asyncio
import gc
import tempfile
import time
from pathlib import Path

import numpy as np

from megascale_ops.controller.embedded import Embedded, Ring
from megascale_ops.controller.recording.ring import Block as Written
from megascale_ops.replay.cutting import Block, Found, Window, blocks_of, cut
from megascale_ops.replay.drive import replay
from megascale_ops.replay.export import export
from megascale_ops.replay.files import pack, read_blocks
from megascale_ops.replay.verdicts import compare, judged, recorded_incidents
from megascale_ops.schema.recording.entries import BLOCK_SUFFIX, Entry
from megascale_ops.sim.clock import Clock, VirtualTime
from megascale_ops.sim.faults import Fault, draw, read_faults
from megascale_ops.sim.machine import JOB
from megascale_ops.sim.settings import Settings, checked
from megascale_ops.sim.world import World


class MeasuredRing(Ring):
    """A ring that is asked how much it held, and what its parts took."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        super().__init__(folder, most_bytes=1 << 30, keep_s=1e9, clock=clock.mono_s, wall=clock.wall_s)
        self.most_held = self.blocks = 0
        self.note_s = self.write_s = self.start_s = 0.0

    def note(self, entry: Entry) -> None:
        """Measure."""
        began_s = time.thread_time()
        super().note(entry)
        self.note_s += time.thread_time() - began_s
        self.most_held = max(self.most_held, self._now.bytes)

    def _begin_anew(self) -> None:
        began_s = time.thread_time()
        super()._begin_anew()
        self.start_s = max(self.start_s, time.thread_time() - began_s)

    def write(self, block: Written) -> None:
        """Measure."""
        began_s = time.thread_time()
        super().write(block)
        self.write_s += time.thread_time() - began_s
        self.blocks += 1


def run(settings: Settings, faults: list[Fault], folder: Path, *, records: bool) -> tuple[float, World, MeasuredRing]:
    """Simulate; return the CPU seconds, the world and the ring."""
    clock = Clock()
    ring = MeasuredRing(folder / "recording", clock)
    controller = Embedded(
        f"sqlite:///{folder / f'{records}.db'}", clock=clock.mono_s, wall=clock.wall_s, ring=ring if records else None
    )
    world = World(settings, faults, controller, clock)
    began_s = time.process_time()
    with asyncio.Runner(loop_factory=lambda: VirtualTime(clock)) as runner:
        runner.run(world.run())
    took_s = time.process_time() - began_s
    controller.close()
    return took_s, world, ring


def tell_export(blocks: list[Block], found: Found) -> None:
    """Export an incident as the command does by default, and print what that takes."""
    began_s = time.process_time()
    made = export(cut(blocks, JOB, Window(found.began_wall_s - 120.0, found.ended_wall_s + 15.0)))
    exported_s = time.process_time() - began_s
    kilobytes = len(pack(made.recording)) / 1e3
    packing_s = time.process_time() - began_s - exported_s
    print(
        f"export of {found.incident.id}: {kilobytes:.0f} kB, {len(made.recording.entries)} entries, thinned: "
        f"{made.recording.header.thinned}; {exported_s:.1f} s of CPU, packing {packing_s:.1f} s"
    )
    for note in made.notes:
        print(f"  {note}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=12_288)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--step-s", type=float, default=6.34)
    asked = parser.parse_args()
    settings = checked(
        Settings(
            ranks=asked.ranks, hours=asked.minutes / 60, faults=(), step_s=asked.step_s, columns=False, spares=0,
            start_s=20.0, load_s=20.0, every_heartbeat=True, tp=8 if asked.ranks >= 64 else 1, pp=1,
        )
    )  # fmt: skip
    faults = sorted(
        [*draw(settings, np.random.default_rng(0)), *read_faults([f"killed@{asked.minutes * 0.8 / 60:.5f}"])]
    )
    gc.set_threshold(200_000, 50, 1000)  # as in the controller's own process
    with tempfile.TemporaryDirectory(prefix="megascale-recording-") as made:
        folder = Path(made)
        without_s, world, _ = run(settings, faults, folder, records=False)
        with_s, world, ring = run(settings, faults, folder, records=True)
        heard = world.heartbeats
        print(f"{asked.ranks} ranks, {settings.nodes} nodes, {asked.minutes:g} minutes, {heard} heartbeats")
        print(f"simulation with the controller: {without_s:.1f} s of CPU without, {with_s:.1f} s with a recording")
        print(f"note: {ring.note_s / ring.entries * 1e6:.1f} us an entry, {ring.bytes / ring.entries:.0f} bytes")
        print(
            f"      {ring.note_s / asked.minutes / 60:.2%} of a core for the loop; a start {ring.start_s * 1e3:.1f} ms"
        )
        print(f"write: {ring.write_s / asked.minutes / 60:.2%} of a core for a thread, {ring.blocks} blocks")
        stored = sum(path.stat().st_size for path in (folder / "recording").iterdir())
        print(f"memory: at most {ring.most_held / 1e6:.1f} MB held, {ring.most_held / asked.ranks:.0f} bytes a rank")
        per_s = stored / asked.minutes / 60
        print(f"disk: {stored / 1e6:.1f} MB, {per_s / 1e3:.1f} kB/s, 64 MB hold {64e6 / per_s / 60:.0f} minutes")
        blocks, incidents = blocks_of(read_blocks(folder / "recording", BLOCK_SUFFIX))
        whole = cut(blocks, JOB)
        began_s = time.process_time()
        done = replay(whole)
        cpu_s = time.process_time() - began_s
        same = compare(judged(recorded_incidents(whole)), judged(done.incidents)).is_none
        print(f"replay: {cpu_s:.1f} s of CPU, {done.span_s / cpu_s:.1f} times as fast; the same verdicts: {same}")
        print(f"  {[str(one) for one in judged(done.incidents)]}")
        tell_export(blocks, next(reversed(incidents.values())))


if __name__ == "__main__":
    main()
