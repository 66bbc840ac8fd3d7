# SPDX-License-Identifier: Apache-2.0
"""What stands in a black box, as structs: who the rank is, its finished steps, its collectives, its tiles.

Progress, position and error are words of the shared vocabulary (``schema.progress``); these are the box's own.
"""

import msgspec

from megascale_ops.schema.identity import Mesh


class BoxIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Whose box it is. Written once, before the file has its name; only the server's path comes later.

    ``start_ticks`` is field 22 of ``/proc/PID/stat``; with it a re-used pid is told apart. Paths are "" when unknown.
    """

    job: str
    node: str
    rank: int
    local_rank: int
    world_size: int
    pid: int
    start_ticks: int
    round: int
    mesh: Mesh = Mesh()
    stderr_path: str = ""
    worker_server_path: str = ""
    started_mono_s: float = 0.0
    started_wall_s: float = 0.0


class StepRecord(msgspec.Struct, frozen=True):
    """A finished step: where its time went, on the host's clock.

    ``wall_s`` runs from the end of the step before, without declared phases other than checkpoints. ``data_s`` to
    ``checkpoint_s`` do not overlap; ``waiting_s`` (in blocking collectives) lies inside them.
    """

    step: int
    ended_mono_s: float
    wall_s: float
    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    checkpoint_s: float = 0.0
    waiting_s: float = 0.0


class CollectiveRecord(msgspec.Struct, frozen=True):
    """A collective as the host saw it. ``ended_mono_ns`` is 0 while it runs, or when its end is not seen (async)."""

    communicator: str
    function: str
    seq: int
    bytes_moved: int
    enqueued_mono_ns: int
    started_mono_ns: int = 0
    ended_mono_ns: int = 0


class TileRecord(msgspec.Struct, frozen=True):
    """Where one CTA of a fused kernel is: its launch, the tile it works on, the peer it waits for (-1: none)."""

    launch: int
    operation: int
    cta: int
    tile: int
    peer: int
    state: int
    since_ns: int
