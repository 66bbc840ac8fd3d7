# SPDX-License-Identifier: Apache-2.0
"""How far a rank is: step, phase, collective, and what its process is doing.

Points in time are seconds of the sender's monotonic clock (``*_mono_s``); the message that carries them also carries
the sender's clock at sending, so a receiver computes ages and never compares the clocks of two machines.

What every heartbeat carries is made with ``gc=False``: such frozen trees can't be part of a cycle, and a controller
that keeps 100,000 of them would otherwise stop for 0.8 s whenever Python looks through them all.
"""

import msgspec

from megascale_ops.schema.identity import Mesh

# 32: more than any second of real training has; of toys that make more, the newest are told.
MOST_WORK = 32
# The phases that the recorder tells apart by itself; a script may declare others by any name up to 31 bytes.
PHASES = ("startup", "data", "forward", "backward", "optimizer", "checkpoint", "eval", "other")


class Progress(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What the black box says of one rank."""

    state: str = "starting"  # starting, running, exited
    step: int = -1  # last finished step, -1 before the first
    step_is_absolute: bool = False  # the script told us its own step number
    steps_seen: int = 0  # steps finished by this process
    phase: str = "startup"
    phase_since_mono_s: float = 0.0
    moved_mono_s: float = 0.0  # last event of any kind (step, phase, collective)
    beat_mono_s: float = 0.0  # last beat of the recorder's thread; stale while the process runs = GIL held
    step_p50_s: float = 0.0  # over the steps still in the ring
    step_p99_s: float = 0.0
    wandered_mono_s: float = 0.0  # the training thread's stack was last seen in another place than 0.1 s before
    wandered: int = 0  # how often since anything moved; only while nothing has moved for a second


class CollectivePosition(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """How far a rank is in its process groups: a rank with ``enqueued > completed`` waits inside a collective."""

    enqueued: int = -1
    completed: int = -1
    name: str = ""


class StepWork(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One finished step of one rank: where its time went, seconds of the host's clock.

    ``waiting_s`` was spent inside collectives, waiting for others or moving data; it is no part of ``data_s`` to
    ``checkpoint_s``. What is left of ``wall_s`` is the rank's own work. ``gc_s`` (garbage collection) and ``cpu_s``
    (CPU time of the process) lie inside ``wall_s``. ``loss`` is the last one known when the step ended, None when
    there is none or when it is no finite number (``loss_is_finite`` tells which).
    """

    step: int
    wall_s: float
    waiting_s: float = 0.0
    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    checkpoint_s: float = 0.0
    gc_s: float = 0.0
    cpu_s: float = 0.0
    loss: float | None = None
    loss_is_finite: bool = True


class ProcessReading(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One look at /proc: ``state`` is the kernel's letter (R, S, D, T, Z, ...), "" when the process is gone."""

    state: str = ""
    stopped_since_mono_s: float = 0.0  # first seen in state T; 0 when not stopped
    cpu_s: float = 0.0
    cpu_busy: float = 0.0  # share of one core since the last heartbeat; a rank may exceed 1
    rss_bytes: int = 0
    threads: int = 0
    starved: float = 0.0  # share of the time since the last heartbeat in which its main thread wanted a core in vain


class LastWords(msgspec.Struct, frozen=True, gc=False):
    """A line of a rank's stderr that names a known fault."""

    pattern: str  # name of the pattern in the table
    fault: str  # the class it speaks for
    line: str  # at most 300 characters


class RankError(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """An exception that nobody in a rank caught, as its own recorder wrote it down.

    One in the main thread ends the process; one in another thread ends that thread.
    """

    type: str = ""
    message: str = ""
    where: str = ""  # file:line function of the innermost frame of the script
    step: int = -1
    thread: str = ""  # name of the thread that it ended; "" for the main thread, and where that is not known
    raised_mono_s: float = 0.0  # when; 0 where that is not known


class RankReport(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """All that an agent knows of one rank."""

    rank: int
    local_rank: int
    pid: int
    round: int
    world_size: int = 0
    mesh: Mesh = Mesh()
    progress: Progress | None = None  # None: no black box (the script is not a torch script, or has not imported it)
    collective: CollectivePosition | None = None
    process: ProcessReading = ProcessReading()
    error: RankError | None = None
    last_words: tuple[LastWords, ...] = ()
    # Share of the last looks (10 to 20, a second apart) in which data waited in its TCP send queues; -1.0: not known.
    sending: float = -1.0
    rivals: tuple[int, ...] = ()  # other living processes that opened a black box for this rank in this round
    work: tuple[StepWork, ...] = ()  # steps finished since the report before, oldest first, at most MOST_WORK
    sending_to: str = ""  # the address for which it waited most often, "" where none did
    gpu: str = ""  # UUID of the GPU that its process computes on, by NVML; "" where that is not known
