# SPDX-License-Identifier: Apache-2.0
"""What is found and what is judged: findings are facts with a number, a verdict is what they add up to."""

import msgspec

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
    "node_lost": "neither the agent nor the runner of the node answers",
    "membership": "the set of nodes changed; nothing is broken",
    "script_bug": "the same exception at the same step twice in a row",
    "unknown": "the evidence names no class",
}


class HostReading(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One look at a node's host (fractions of one; bytes)."""

    cpu_busy: float = 0.0
    load_1m: float = 0.0
    memory_used: float = 0.0
    memory_available_bytes: int = 0
    swap_used: float = 0.0
    shm_free_bytes: int = 0
    disk_free_bytes: int = 0
    cores: int = 0


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One fact that speaks for or against a verdict; ``text`` is a sentence with the number in it."""

    name: str
    text: str
    source: str  # black box, process, stderr, exit status, heartbeat, stacks, flight recorder
    rank: int = -1
    node: str = ""
    value: float = 0.0
    unit: str = ""


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who is to blame, for what, how sure we are and why.

    ``confidence`` is in 0..1. ``otherwise`` says what would have changed the verdict.
    """

    fault: str
    reason: str
    confidence: float
    culprits: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    since_wall_s: float = 0.0
    since_step: int = -1
    round: int = 0
    action: str = "none"  # none, wait, restart, stop
    evidence: tuple[Finding, ...] = ()
    otherwise: str = ""
