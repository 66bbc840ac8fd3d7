# SPDX-License-Identifier: Apache-2.0
"""What is found and what is judged: findings are facts with a number, a verdict is what they add up to."""

import msgspec

from megascale_ops.schema.ranges import Bytes, Count, Pids, Share, Text, WallSeconds, Word

# The classes a verdict may carry. One word per idea; the sentence is for people, the word for programs.
FAULTS = {
    "exception": "an unhandled exception ended the rank",
    "exception_everywhere": "the same unhandled exception ended every rank",
    "killed": "the rank was killed by a signal from outside",
    "segfault": "the rank crashed with a memory fault",
    "aborted": "the rank called abort",
    "out_of_memory": "the rank ran out of memory",
    "disk_full": "a write failed because the disk is full",
    "cuda_error": "the rank died of a CUDA error",
    "nccl_error": "the rank died of an NCCL error",
    "exit_code": "the rank ended by itself with a non-zero exit code",
    "exited_early": "the rank ended without error while the others still trained",
    "frozen": "the process is stopped (state T)",
    "silent": "the rank makes no progress although its process lives",
    "not_joined": "the rank never came to the collective that the others wait in",
    "collective_order": "ranks wait in different collectives of the same group: they were called in another order",
    "collective_mismatch": "ranks call the same collective with other shapes, types or sizes",
    "tile_timeout": "a tile of the rank never came to the overlapped kernels of others, which wait for it",
    "group_never_formed": "a process group that not every rank creates, or a rendezvous that never completes",
    "link_cut": "what ranks send each other does not arrive: the network between them is cut",
    "stuck": "the rank computes or loops outside collectives and makes no step",
    "gpu_stuck": "the rank's GPU does not come to a collective: what was launched before does not end",
    "sleeping": "the rank sleeps outside collectives",
    "busy": "the rank works on something of its own that it has not declared, and the others wait",
    "gil_held": "native code holds the interpreter's lock, and no Python thread of the rank can run",
    "data_stall": "the rank waits for its data loader",
    "storage_stall": "the rank waits for storage",
    "idle": "no rank does anything and none waits for another",
    "slow": "the rank is slow, not stuck",
    "straggler": "the rank needs longer for its own work than its equals and makes all of them wait",
    "slow_link": "the rank's collectives move data more slowly than those of its equals",
    "loss_nan": "the loss is not a number",
    "loss_spike": "the loss jumped far out of its recent range",
    "duplicate_rank": "two processes say that they are the same rank",
    "node_lost": "neither the agent nor the runner of the node answers",
    "runner_lost": "the runner of the node is gone, and its ranks with it; the node itself lives",
    "membership": "the set of nodes changed; nothing is broken",
    "script_bug": "the same exception at the same step twice in a row",
    "unknown": "the evidence names no class",
}


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


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One fact that speaks for or against a verdict; ``text`` is a sentence with the number in it."""

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
    the kernel told of a device, with that behind it: nvme_lost_nvme4),
    ``text`` a sentence with its number. Ends with its reason; what happened once stays for ten minutes.
    """

    name: Word
    text: Text
    check: Word  # who found it: gpu, kernel_log, fabric, pressure, blocked, disks; or the check that hangs
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
    """Who is to blame, for what, how sure we are and why.

    ``confidence`` is in 0..1; where ``sure_of`` is "place" it is of who stands still and where, and not that it hangs:
    a silence that contradicts nothing may end by itself. ``otherwise`` says what would have changed the verdict.
    ``cause`` narrows a straggler down (compute, input, host, starved, gc, launch, gpu, throttled) or a slow link (link,
    network); ``cost`` is the share of every step that it costs all ranks, in 0..1.
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
    sure_of: str = ""  # "place" or, of all that it says, ""
