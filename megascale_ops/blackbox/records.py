# SPDX-License-Identifier: Apache-2.0
"""The structs of a black box: the rank's identity, its finished steps, its collectives, NCCL's work.

Progress, position and error are words of the shared vocabulary (``schema.progress``); these are the box's own.
"""

import msgspec

from megascale_ops.blackbox.nccl_codes import FLAG_DONE, FLAG_DOUBTFUL, FLAG_HOST_CLOCK
from megascale_ops.schema.identity import Mesh


class BoxIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of the rank that a box belongs to. Written once, before the file has its name, but for the server.

    ``start_ticks`` is field 22 of ``/proc/PID/stat``; it distinguishes a re-used pid. Paths are "" when unknown.
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

    ``wall_s`` runs from the end of the step before, without evaluations. ``data_s`` to ``waiting_s`` do not overlap:
    what a part waited for other ranks is taken out of it and stands in ``waiting_s``. ``gc_s`` (garbage collection) and
    ``cpu_s`` (of the whole process) lie inside them. ``loss`` is the last one known when the step ended, None when
    there is none; it may be NaN.
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
    gc_s: float = 0.0
    cpu_s: float = 0.0
    loss: float | None = None


class GpuStepRecord(msgspec.Struct, frozen=True):
    """What the GPU needed for a finished step, between events on the stream that the training thread launched into.

    A part lasts from the moment the stream reaches its begin to the moment it reaches the next part's: idle time while
    the host launches too slowly, or waits for a batch, lies in it. ``wall_s`` runs from the end of the step before;
    what is in none of the parts is "other". ``number`` is the step's among all steps of its process, from 0.
    """

    number: int
    step: int
    wall_s: float
    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    checkpoint_s: float = 0.0
    phases: tuple[tuple[str, float], ...] = ()  # declared ones, seconds each; at most MOST_GPU_PHASES


# 4: 28 slots then hold those of the last seven steps; a script declares one or two.
MOST_GPU_PHASES = 4


class CollectiveRecord(msgspec.Struct, frozen=True):
    """A collective as the host saw it. ``ended_mono_ns`` is 0 while it runs, or when its end is not seen (async).

    ``passage`` is the training thread's newest when it called this; 0: another thread did, or that is not known.
    """

    communicator: str
    function: str
    seq: int
    bytes_moved: int
    enqueued_mono_ns: int
    started_mono_ns: int = 0
    ended_mono_ns: int = 0
    passage: int = 0


class NcclRecord(msgspec.Struct, frozen=True):
    """A collective, a send or a receive as NCCL's profiler interface reported it (the C plugin writes these).

    ``communicator`` is NCCL's id, equal on all ranks. Collectives match across ranks by (communicator, function, seq);
    sends and receives by (communicator, seq, rank, ``peer``). GPU times are on the host's monotonic clock, 0 where not
    known: their difference is exact to the GPU's clock, their place to some microseconds. ``step`` is the last step
    that was finished when it was enqueued, -1 before the first. ``started_channels`` and ``ended_channels`` are bit
    masks: in a hang they show the kernel's progress.
    """

    number: int
    communicator: int
    function: str
    seq: int
    bytes_moved: int  # count x size of the datatype
    enqueued_mono_ns: int
    gpu_started_mono_ns: int
    gpu_ended_mono_ns: int  # of the last channel that ended so far
    gpu_clock_ns: int  # the start on the GPU's own clock
    step: int
    channels: int
    started_channels: int
    ended_channels: int
    datatype: str
    algorithm: str
    protocol: str
    peer: int  # -1: a collective
    root: int
    flags: int  # nccl_codes.FLAG_*

    @property
    def is_done(self) -> bool:
        """Whether nothing more is expected of it."""
        return bool(self.flags & FLAG_DONE)

    @property
    def is_timed(self) -> bool:
        """Whether start and end come from the GPU's own clock, and make sense."""
        return bool(self.gpu_clock_ns and self.gpu_ended_mono_ns and not self.flags & (FLAG_HOST_CLOCK | FLAG_DOUBTFUL))


class CommunicatorRecord(msgspec.Struct, frozen=True):
    """A communicator of NCCL's. ``nranks`` and ``nnodes`` are 0 where NCCL (up to 2.26) does not report them."""

    id: int
    name: str
    nranks: int
    rank: int  # within it
    nnodes: int
    opened_mono_ns: int
    closed_mono_ns: int  # 0: in use


class ProfilerState(msgspec.Struct, frozen=True):
    """The NCCL profiler plugin about itself. Counts only grow; shares are parts of a million of the wall time."""

    abi: int  # interface version that NCCL chose; 0: NCCL has not called it
    mask: int  # kinds of events requested of NCCL now
    level: int  # steps down for the sake of the budget; 0: none
    budget_ppm: int
    share_ppm: int  # what it cost in the last second or more that was looked at
    judged_mono_ns: int
    opened_mono_ns: int
    inits: int
    records: int  # numbers given to records so far
    events: int  # calls
    own_ns: int  # time in all its calls, measured one in sixteen
    dropped_late: int  # changes of a record that newer ones had replaced
    dropped_busy: int  # two threads at one slot
    dropped_no_box: int
    dropped_no_context: int  # with a communicator that is gone, or one of more than 1,024
    unsampled: int  # left out for the sake of the budget
    is_chained: bool
    chain_lost: int  # events that the second plugin did not get
    open_communicators: int
    complaint: str  # one sentence, "" for none
    untimed: int = 0  # collectives whose channels were left out to reduce NCCL's part of the cost
    timed_one_in: int = 0  # of how many collectives one has channels now; 0 and 1: all, where there are any


class SavesRecord(msgspec.Struct, frozen=True):
    """What the rank knows of its checkpoints; the newest save is not over as long as one is in flight."""

    step: int  # of the newest save that began
    stall_s: float  # how long the training stood still for it
    write_s: float  # from there to its seal, of the newest sealed one; 0: not saved in the background
    sealed_step: int  # -1: none
    sealed_wall_s: float  # 0: none
    in_flight: int
    failed: int


class RestoresRecord(msgspec.Struct, frozen=True):
    """What the rank knows of its restores: of the newest one, and how many there were of each kind."""

    step: int  # of the newest one
    restore_s: float  # how long it took, the search for it included
    read_bytes: int  # what this rank read of it from storage
    passed_over: int  # checkpoints that were found damaged, in all restores
    failed: int  # restores that gave the training nothing though there were checkpoints
    node: int  # from the tier on the nodes, each file where it was written
    buddy: int  # from there, with a buddy's copy of what a node had lost
    shared: int  # from the shared folder
    store: int  # from an object store


class CollectiveRun(msgspec.Struct, frozen=True):
    """Collectives that follow each other; ``next_number`` is where to go on, ``lost`` were driven out unread."""

    records: list[CollectiveRecord]
    next_number: int
    lost: int
