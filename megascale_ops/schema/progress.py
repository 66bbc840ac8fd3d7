# SPDX-License-Identifier: Apache-2.0
"""How far a rank is: step, phase, collective, and what its process is doing.

Points in time are seconds of the sender's monotonic clock (``*_mono_s``); the message that carries them also carries
the sender's clock at sending, so a receiver computes ages and never compares the clocks of two machines.

What every heartbeat carries is made with ``gc=False``: such frozen trees can't be part of a cycle, and a controller
that keeps 100,000 of them would otherwise stop for 0.8 s whenever Python looks through them all.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.ranges import (
    Bytes,
    Count,
    Line,
    Lines,
    Loss,
    Pid,
    Pids,
    Rank,
    RankOrNone,
    Ranks,
    Round,
    Seconds,
    Share,
    Step,
    Text,
    Word,
    Words,
)

# 32: more than any second of real training has; of toys that make more, the newest are reported.
MOST_WORK = 32
# 64: one for each pattern of the table, with room.
MOST_LAST_WORDS = 64
# 8: a black box keeps seven.
MOST_RANK_FINDINGS = 8
# The phases that the recorder finds by itself; a script may declare others by any name up to 31 bytes.
PHASES = ("startup", "data", "forward", "backward", "optimizer", "checkpoint", "eval", "other")


class Progress(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The black box's progress of one rank."""

    state: Word = "starting"  # starting, running, exited
    step: Step = -1  # last finished step, -1 before the first
    step_is_absolute: bool = False  # the step number is the script's own
    steps_seen: Count = 0  # steps finished by this process
    phase: Word = "startup"
    phase_since_mono_s: Seconds = 0.0
    moved_mono_s: Seconds = 0.0  # last event of any kind (step, phase, collective)
    beat_mono_s: Seconds = 0.0  # last heartbeat of the monitor thread; stale while the process runs = GIL held
    step_p50_s: Seconds = 0.0  # over the steps still in the ring
    step_p99_s: Seconds = 0.0
    wandered_mono_s: Seconds = 0.0  # the training thread's stack was last seen in another place than 0.1 s before
    wandered: Count = 0  # how often since anything moved; only while nothing has moved for a second


class CollectivePosition(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """How far a rank is in its process groups: a rank with ``enqueued > completed`` waits inside a collective."""

    enqueued: Step = -1
    completed: Step = -1
    name: Line = ""


class Trail(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Through which phases and steps a rank's training thread went last, and in which groups it called collectives.

    ``path`` is in order, oldest first. A letter is a phase that began, "a" the first of ``phases``; a capital one when
    a step ended there: each raised the number of the last finished step by ``stride``, the last of them to ``step``. A
    digit is a collective that the thread called by a function of torch's, "0" one in the first of ``groups``; ``seqs``
    are the numbers of the last in each group. Sends and receives are left out.
    """

    path: Text = ""
    phases: Words = ()
    groups: Lines = ()
    seqs: Annotated[tuple[Step, ...], Meta(max_length=10)] = ()
    step: Step = -1  # the last 24 bits of its number
    stride: Count = 0  # 0: no step ended


class StepWork(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One finished step of one rank: where its time went, seconds of the host's clock.

    ``waiting_s`` was spent inside collectives, waiting for others or moving data; it is no part of ``data_s`` to
    ``checkpoint_s``. What is left of ``wall_s`` is the rank's own work. ``gc_s`` (garbage collection) and ``cpu_s``
    (CPU time of the process) lie inside ``wall_s``. ``loss`` is the last one known when the step ended, None when
    there is none or when it is no finite number (``loss_is_finite`` is which).
    """

    step: Step
    wall_s: Seconds
    waiting_s: Seconds = 0.0
    data_s: Seconds = 0.0
    forward_s: Seconds = 0.0
    backward_s: Seconds = 0.0
    optimizer_s: Seconds = 0.0
    checkpoint_s: Seconds = 0.0
    gc_s: Seconds = 0.0
    cpu_s: Seconds = 0.0
    loss: Loss | None = None
    loss_is_finite: bool = True


# The state of a process that no agent has looked at: of a rank of which only files are left.
UNSEEN = "?"


class ProcessReading(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One look at /proc: ``state`` is the kernel's letter (R, S, D, T, Z, ...), "" when the process is gone."""

    state: Word = ""
    stopped_since_mono_s: Seconds = 0.0  # first seen in state T; 0 when not stopped
    cpu_s: Seconds = 0.0
    cpu_busy: Share = 0.0  # share of one core since the last heartbeat; a rank may exceed 1
    rss_bytes: Bytes = 0
    threads: Count = 0
    starved: Share = 0.0  # share of the time since the last heartbeat its main thread was runnable without a core


class LastWords(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A line of a rank's stderr that names a known fault."""

    pattern: Word  # name of the pattern in the table
    fault: Word  # the class it is evidence of
    line: Line  # at most 300 characters
    steps_seen: Step = -1  # steps that the rank had finished when it was read; -1: not known
    stale: bool = False  # a hundred ordinary lines were read after it


class RankError(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """An exception that no code of a rank caught, as its recorder wrote it down.

    One in the main thread ends the process; one in another thread ends that thread.
    """

    type: Line = ""
    message: Text = ""
    where: Text = ""  # file:line function of the innermost frame of the script
    step: Step = -1
    thread: Line = ""  # name of the thread that it ended; "" for the main thread, and where that is not known
    raised_mono_s: Seconds = 0.0  # when; 0 where that is not known


class RankFinding(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a check of a rank's own has found: a class of fault, and a sentence; without text it is over."""

    fault: Word
    step: Step = -1
    text: Text = ""
    told_mono_s: Seconds = 0.0


class RankReport(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """All that an agent knows of one rank."""

    rank: Rank
    local_rank: Rank
    pid: Pid
    round: Round
    world_size: Ranks = 0
    mesh: Mesh = Mesh()
    progress: Progress | None = None  # None: no black box (the script is not a torch script, or has not imported it)
    collective: CollectivePosition | None = None
    process: ProcessReading = ProcessReading()
    error: RankError | None = None
    last_words: Annotated[tuple[LastWords, ...], Meta(max_length=MOST_LAST_WORDS)] = ()
    # Share of the last looks (10 to 20, a second apart) in which data waited in its TCP send queues; -1.0: not known.
    sending: Share = -1.0
    rivals: Pids = ()  # other living processes that opened a black box for this rank in this round
    # Steps finished since the report before, oldest first, at most MOST_WORK.
    work: Annotated[tuple[StepWork, ...], Meta(max_length=MOST_WORK)] = ()
    sending_to: Line = ""  # the address for which it waited most often, "" where none did
    gpu: Word = ""  # UUID of the GPU that its process computes on, by NVML; "" where that is not known
    # The rank for whose tile its overlapped kernels wait, looked for once it is quiet; -1: none.
    tile_peer: RankOrNone = -1
    # What its own checks have found and is not over.
    findings: Annotated[tuple[RankFinding, ...], Meta(max_length=MOST_RANK_FINDINGS)] = ()
