# SPDX-License-Identifier: Apache-2.0
"""A simulated cluster whose controller records what it takes in, and the blocks that it leaves."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from megascale_ops.controller.embedded import Embedded, Ring
from megascale_ops.replay.cutting import Block, Found, blocks_of
from megascale_ops.replay.files import read_blocks
from megascale_ops.schema.recording.entries import BLOCK_SUFFIX
from megascale_ops.sim.clock import Clock, VirtualTime
from megascale_ops.sim.faults import read_faults
from megascale_ops.sim.settings import Settings, checked
from megascale_ops.sim.world import World


def record(
    folder: Path, faults: Sequence[str], *, ranks: int = 16, minutes: float = 2.5, every_heartbeat: bool = False
) -> tuple[list[Block], dict[str, Found]]:
    """Simulate a job with these faults (``KIND@HOURS``), and return what was recorded of it."""
    settings = checked(
        Settings(
            ranks=ranks, hours=minutes / 60, faults=(), step_s=2.0, start_s=15.0, load_s=5.0, spares=1,
            columns=False, pp=1, checkpoint_every_s=60.0, every_heartbeat=every_heartbeat,
        )
    )  # fmt: skip
    clock = Clock()
    ring = Ring(folder / "recording", most_bytes=1 << 24, keep_s=1e9, clock=clock.mono_s, wall=clock.wall_s)
    controller = Embedded(f"sqlite:///{folder / 'ops.db'}", clock=clock.mono_s, wall=clock.wall_s, ring=ring)
    try:
        world = World(settings, sorted(read_faults(list(faults))), controller, clock)
        with asyncio.Runner(loop_factory=lambda: VirtualTime(clock)) as runner:
            runner.run(world.run())
    finally:
        controller.close()
    return blocks_of(read_blocks(folder / "recording", BLOCK_SUFFIX))
