# SPDX-License-Identifier: Apache-2.0
"""The classes of fault that a verdict may carry: one table, one row a class, for all judges, policies and pages.

A row has the meaning of the class, what it blames, the words for pages and cards, what is done about it by default,
and whether it is a hang. From it follow the policy and its reader, the pages, the cards
of the command line and the metrics: nothing else lists classes. What finds a class is the file of a judge, in
``diagnosis``; how long it waits before it acts depends on its evidence, so each answer of a judge carries that itself.
"""

from enum import Enum
from typing import NamedTuple


class Blames(Enum):
    """What a class blames: the subject of the sentence on a page."""

    RANK = "rank"
    NODE = "node"
    JOB = "job"  # no rank or node: the sentence is whole


class Hang(Enum):
    """Whether ranks stand still though nothing is broken that could be seen."""

    NO = "no"
    PROVEN = "proven"  # waiting mends nothing: calls contradict each other, a process is stopped, a network is cut
    # An absent rank may come back by itself: where a restart has not cured it, no second one is tried.
    UNPROVEN = "unproven"


class Fault(NamedTuple):
    """One class of fault. One word per idea: ``name`` is for programs, all else for people."""

    name: str
    blames: Blames
    says: str  # what happens to the rank or node, its verb first, or of the whole job a sentence; no full stop
    meaning: str  # what the class is, for cards and logs: one clause, no full stop
    # What is done, before budgets: ignore, warn, restart, evict, stop. All that can be transient is tried again; the
    # budgets end what is not. What only slows a job down is acted upon once it has cost as much as a restart.
    action: str
    why: str  # the reason for that action
    hang: Hang = Hang.NO
    telling: tuple[str, ...] = ("stderr", "stacks")  # kinds of evidence, the most specific first
    # The machine is a likely culprit: twice on one node within an hour and never on another is no chance.
    is_machines: bool = False
    # No proof against the GPU of the rank, and yet how some bad ones show: it is measured before its node goes on.
    checks_gpu: bool = False
    # So many in a row, with the same words at the same step, are the script's own doing or its data's; 0: none are.
    script_bug_after: int = 0


# What a rank does is in its stacks, what ranks disagree about is in their collectives.
_STACKS = ("stacks", "flight_recorder", "stderr")
_CALLS = ("flight_recorder", "collectives", "stacks", "stderr")
_GPU = ("collectives", "stacks", "stderr")
_PROCESS = ("stacks", "stderr")
# A killed process writes nothing more: the kernel's log and the control group may.
_KILL = ("kernel", "stderr", "stacks")
_NETWORK = ("process", "flight_recorder", "stderr")

# An exception has its own words and place: twice is no chance. A status, or words that any script may have, thrice.
_WORDS, _STATUS = 2, 3

# One class, one row: unfolded by the formatter this table would be 350 lines.
# fmt: off
_ROWS = (
    Fault("exception", Blames.RANK, "died of an exception",
          "an unhandled exception ended the rank",
          "restart", "an exception may be transient; the same one at the same step again is a bug",
          script_bug_after=_WORDS),
    Fault("exception_everywhere", Blames.RANK, "died of the same exception",
          "the same unhandled exception ended every rank",
          "restart", "all ranks fell over the same thing once; once more and it is a bug",
          script_bug_after=_WORDS),
    Fault("killed", Blames.RANK, "was killed",
          "the rank was killed by a signal from outside",
          "restart", "whoever killed the rank may not do it again", telling=_KILL, is_machines=True),
    Fault("segfault", Blames.RANK, "crashed with a memory fault",
          "the rank crashed with a memory fault",
          "restart", "memory faults are often the machine's", is_machines=True, script_bug_after=_STATUS),
    Fault("aborted", Blames.RANK, "aborted",
          "the rank called abort",
          "restart", "an abort is often the machine's or a library's",
          script_bug_after=_STATUS),
    Fault("out_of_memory", Blames.RANK, "ran out of memory",
          "the rank ran out of memory",
          "restart", "memory may have been taken by somebody else", telling=("stderr", "kernel", "stacks"),
          script_bug_after=_STATUS),
    Fault("disk_full", Blames.RANK, "could not write: the disk is full",
          "a write failed because the disk is full",
          "restart", "the newest checkpoint that verifies is still there; space may be freed",
          script_bug_after=_STATUS),
    Fault("cuda_error", Blames.RANK, "died of a CUDA error",
          "the rank died of a CUDA error",
          "restart", "a fresh process gets a fresh CUDA context", is_machines=True, script_bug_after=_STATUS),
    Fault("nccl_error", Blames.RANK, "died of an NCCL error",
          "the rank died of an NCCL error",
          "restart", "fresh processes get fresh communicators"),
    Fault("exit_code", Blames.RANK, "ended with an error",
          "the rank ended by itself with a non-zero exit code",
          "restart", "the script may have given up on something transient",
          script_bug_after=_STATUS),
    Fault("service_down", Blames.RANK, "could not reach a service",
          "the script could not reach a service that it needs: data, an object store, a name server, a licence",
          "restart", "a service that is away may come back, and is waited for, ever longer"),
    Fault("exited_early", Blames.RANK, "ended while the others still trained",
          "the rank ended without error while the others still trained",
          "restart", "the others cannot go on without the rank",
          script_bug_after=_STATUS),
    Fault("frozen", Blames.RANK, "froze",
          "the process is stopped (state T)",
          "restart", "the process does not run and holds all others up", Hang.PROVEN, _PROCESS),
    Fault("silent", Blames.RANK, "makes no progress",
          "the rank makes no progress although its process lives",
          "restart", "the rank does not move and holds all others up", Hang.UNPROVEN, _STACKS),
    Fault("not_joined", Blames.RANK, "did not come to the collective that the others wait in",
          "the rank never came to the collective that the others wait in",
          "restart", "the others would wait for it for ever", Hang.UNPROVEN, _CALLS),
    Fault("collective_order", Blames.RANK, "called collectives in another order than the others",
          "ranks wait in different collectives of the same group: they were called in another order",
          "restart", "a race may have turned the order round; the same again is a bug", Hang.PROVEN, _CALLS,
          script_bug_after=_STATUS),
    Fault("collective_mismatch", Blames.RANK, "called a collective with other sizes than the others",
          "ranks call the same collective with other shapes, types or sizes",
          "restart", "the data may have had an odd shape; the same again is a bug", Hang.PROVEN, _CALLS,
          script_bug_after=_STATUS),
    Fault("tile_timeout", Blames.RANK, "never sent the tile that the kernels of others wait for",
          "a tile of the rank never came to the overlapped kernels of others, which wait for it",
          "restart", "the others would wait for its tile for ever, or have given up", Hang.UNPROVEN, _CALLS),
    Fault("group_never_formed", Blames.RANK, "waits for a process group that never forms",
          "a process group that not every rank creates, or a rendezvous that never completes",
          "restart", "fresh processes meet anew", Hang.PROVEN, _STACKS),
    Fault("link_cut", Blames.RANK, "is cut off on the network",
          "what ranks send each other does not arrive: the network between them is cut",
          "restart", "fresh processes connect anew, and the network may be whole again; twice, a node goes",
          Hang.PROVEN, _NETWORK),
    Fault("stuck", Blames.RANK, "is stuck outside of collectives",
          "the rank computes or loops outside collectives and makes no step",
          "restart", "the rank does not come out of it and holds all others up", Hang.UNPROVEN, _STACKS),
    Fault("gpu_stuck", Blames.RANK, "has a GPU that does not come to its collective",
          "the rank's GPU does not come to a collective: what was launched before does not end",
          "restart", "fresh processes launch anew; what is wrong with the GPU itself its own errors tell",
          Hang.UNPROVEN, _GPU, checks_gpu=True),
    Fault("sleeping", Blames.RANK, "sleeps while the others wait",
          "the rank sleeps outside collectives",
          "restart", "the rank does not come out of it and holds all others up", Hang.UNPROVEN, _STACKS),
    Fault("busy", Blames.RANK, "works on something of its own",
          "the rank works on something of its own that it has not declared, and the others wait",
          "restart", "it has worked for longer than a declared phase may take, and holds all others up",
          Hang.UNPROVEN, _STACKS),
    Fault("gil_held", Blames.RANK, "is stuck in native code",
          "native code holds the interpreter's lock, and no Python thread of the rank can run",
          "restart", "no Python code of the rank can run until the native call ends", Hang.UNPROVEN, _STACKS),
    Fault("data_stall", Blames.RANK, "waits for its data loader",
          "the rank waits for its data loader",
          "restart", "fresh data loaders may not hang", Hang.UNPROVEN, _STACKS),
    Fault("storage_stall", Blames.RANK, "waits for storage",
          "the rank waits for storage",
          "restart", "the storage may answer a fresh process", Hang.UNPROVEN, _STACKS),
    Fault("idle", Blames.JOB, "No rank does anything",
          "no rank does anything and none waits for another",
          "restart", "nobody would wake it up", Hang.UNPROVEN, _STACKS),
    Fault("slow", Blames.RANK, "is slow",
          "the rank is slow, not stuck",
          "warn", "it goes on, if slowly; a restart would cost more"),
    Fault("straggler", Blames.RANK, "is slow and makes all others wait",
          "the rank needs longer for its own work than its equals and makes all of them wait",
          "evict", "the job is better off without the node once it has cost as much as a restart"),
    Fault("slow_link", Blames.RANK, "moves data more slowly than its equals",
          "the rank's collectives move data more slowly than those of its equals",
          "evict", "the job is better off without the node once it has cost as much as a restart"),
    Fault("loss_nan", Blames.JOB, "The loss is not a number",
          "the loss is not a number",
          "warn", "what to do about a loss is the researcher's decision"),
    Fault("loss_spike", Blames.JOB, "The loss jumped",
          "the loss jumped far out of its recent range",
          "warn", "what to do about a loss is the researcher's decision"),
    Fault("silent_corruption", Blames.RANK, "holds other weights than its replicas",
          "what the rank holds and others hold alike is no longer the same: silent data corruption",
          "warn", "the wrong weights spread by gradients; which save is still sound a person decides"),
    Fault("replicas_differ", Blames.JOB, "Replicas of the same weights differ",
          "ranks that hold the same weights hold different values, and no majority tells which are right",
          "warn", "one of them is corrupted, or they were never replicas; a person decides"),
    Fault("stale_weights", Blames.JOB, "The weights that are saved do not change",
          "the optimizer makes steps and the weights that are saved stay as they were",
          "warn", "training goes on, maybe on another copy; what is saved is worth nothing"),
    Fault("duplicate_rank", Blames.RANK, "runs twice",
          "two processes say that they are the same rank",
          "stop", "two processes that write the same checkpoint would ruin it"),
    Fault("node_lost", Blames.NODE, "does not answer",
          "neither the agent nor the runner of the node answers",
          "restart", "the others can go on, with a replacement or without", is_machines=True),
    Fault("runner_lost", Blames.NODE, "lost its runner and its ranks",
          "the runner of the node is gone, and its ranks with it; the node itself lives",
          "restart", "whoever killed it may start it again; the others can go on with it or without", is_machines=True),
    Fault("engine_eviction", Blames.NODE, "is taken away by its engine",
          "the engine that owns the node takes it away, or evicts the pod on it; nothing is broken",
          "restart", "the others go on without it, or with what the engine puts in its place"),
    Fault("membership", Blames.JOB, "The set of nodes changed",
          "the set of nodes changed; nothing is broken",
          "restart", "a changed set of nodes needs a new round"),
    Fault("script_bug", Blames.JOB, "The script fails at the same step again",
          "the same exception twice in a row at the same step, or the same exit code thrice",
          "stop", "it would happen again"),
    Fault("unknown", Blames.RANK, "has a fault: unknown",
          "the evidence names no class",
          "restart", "nothing speaks against trying once more"),
)
# fmt: on

FAULTS: dict[str, Fault] = {row.name: row for row in _ROWS}


def class_of(name: str) -> Fault:
    """Return the row of a class; for one that only a newer version knows, what can be said of it all the same."""
    known = FAULTS.get(name)
    if known is not None:
        return known
    return FAULTS["unknown"]._replace(name=name, says=unnamed(name), meaning="a class that this program does not know")


def unnamed(name: str) -> str:
    """Return what is said where there are no better words."""
    return f"has a fault: {name.replace('_', ' ')}"
