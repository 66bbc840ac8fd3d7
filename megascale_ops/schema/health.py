# SPDX-License-Identifier: Apache-2.0
"""What is found and what is judged: findings are facts with a number, a verdict is what they add up to."""

import msgspec

from megascale_ops.schema.ranges import Bytes, Count, Pids, Share, Text, WallSeconds, Word


class HostReading(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One look at a node's host (fractions of one; bytes)."""

    cpu_busy: Share = 0.0
    load_1m: Share = 0.0
    memory_used: Share = 0.0
    memory_available_bytes: Bytes = 0
    swap_used: Share = 0.0
    shm_free_bytes: Bytes = 0
    disk_free_bytes: Bytes = 0
    cores: Count = 0
    has_shm: bool = True  # the folder of the black boxes could be queried for its space
    has_disk: bool = True  # the same of a run folder; without a job there is none


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One fact for or against a verdict; ``text`` is a sentence with the number in it."""

    name: str
    text: str
    source: str  # black box, progress board, process, stderr, exit status, heartbeat, stacks, ...
    rank: int = -1
    node: str = ""
    value: float = 0.0
    unit: str = ""


class HardwareFinding(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is wrong with a node's hardware or host now, as its agent sees it.

    ``name`` is a word for programs (xid_79, gpu_lost, throttled_hw_thermal, port_down_mlx5_0_1, oom_kill, ...; where
    the kernel named a device, with that behind it: nvme_lost_nvme4),
    ``text`` a sentence with its number. Ends with its reason; what happened once stays for ten minutes.
    """

    name: Word
    text: Text
    check: Word  # of the check: gpu, kernel_log, fabric, a collector of the agent's table; or the check that hangs
    severity: Word = "warn"  # note (evidence, no worry), warn, fail
    gpu: Word = ""  # UUID
    since_wall_s: WallSeconds = 0.0
    last_wall_s: WallSeconds = 0.0  # of something that happens: when it last did
    count: Count = 1
    is_bad: bool = False  # the GPU is in doubt also after a restart: to be remembered
    pids: Pids = ()  # processes that it is about


class BadHardware(msgspec.Struct, frozen=True, omit_defaults=True):
    """A GPU that failed, remembered by its UUID until an operator marks it as mended or replaced."""

    uuid: str
    reason: str  # name of the finding
    node: str  # where it was when it last failed
    text: str
    since_wall_s: float
    last_wall_s: float
    count: int = 1  # how often, at least a minute apart


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """The ranks or nodes to blame, for what, how sure we are and why.

    ``confidence`` is in 0..1; where ``sure_of`` is "place" it is of which rank stands still and where, and not that it
    hangs: a silence that contradicts nothing may end by itself. ``otherwise`` is what would have changed the verdict.
    ``cause`` narrows a straggler down (compute, input, host, starved, gc, launch, gpu, throttled) or a slow link (link,
    network); ``excess`` is a slow rank's own work above its equals', as a share of theirs, and ``cost`` the share of
    every step that it costs all ranks, in 0..1.
    """

    fault: str
    reason: str
    confidence: float
    culprits: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    since_wall_s: float = 0.0
    since_step: int = -1
    round: int = 0
    action: str = "none"  # none, ignore, warn, wait, restart, evict (restart without the nodes), stop
    evidence: tuple[Finding, ...] = ()
    otherwise: str = ""
    cause: str = ""
    cost: float = 0.0
    place: str = ""  # of a silence: the script's line and the collective, the same words the next time it happens
    sure_of: str = ""  # "place", or "" for all its fields
    excess: float = 0.0
