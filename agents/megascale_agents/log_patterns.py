# SPDX-License-Identifier: Apache-2.0
"""Last words: what a dying rank writes to stderr, and which fault each line speaks for. One table.

The order matters: the first pattern that matches a line names it. So the specific stand before the general, and a
Python exception, whatever its text, comes last.

``consequence`` marks lines that only say that *another* rank is gone or late. A survivor of a crash writes them, the
culprit does not; taking them for a cause would blame the victims.

Each row says where the text comes from, so that the next release of that software can be compared with it. A test
holds a real line for each pattern, and a near miss that it must leave alone.
"""

import re
from typing import NamedTuple

# The class of a consequence; it is none of the faults a verdict may carry (schema.health.FAULTS), on purpose.
PEER_LOST = "peer_lost"

# What torch puts before each line of a traceback when several ranks write to one terminal.
_PREFIX = re.compile(r"^(?:\[(?:rank|default)\d+\]:\s?)+")


class Pattern(NamedTuple):
    """One kind of last words.

    ``in_traceback``: only the line that ends a Python traceback is meant.
    """

    name: str
    regex: re.Pattern[str]
    fault: str
    why: str
    consequence: bool = False
    in_traceback: bool = False


def _row(name: str, regex: str, fault: str, why: str, *, in_traceback: bool = False) -> Pattern:
    return Pattern(name, re.compile(regex), fault, why, fault == PEER_LOST, in_traceback)


PATTERNS: tuple[Pattern, ...] = (
    # Somebody else is gone. Before everything else: these lines carry words like "error" and "NCCL" too.
    _row(
        "gloo_peer_closed",
        r"gloo/transport.*(?:Connection closed by peer|Connection reset by peer|Broken pipe|Socket closed)",
        PEER_LOST,
        "Gloo's pair.cc, 13 to 27 ms after a peer's process has died; seen on every survivor (torch 2.13)",
    ),
    _row(
        "gloo_mismatch",
        r"op\.preamble\.length <= op\.nbytes|Received data size doesn't match expected size",
        "collective_mismatch",
        "Gloo's pair.cc, on a rank that was sent more than it expects: it aborts, though a peer called it otherwise",
    ),
    _row(
        "gloo_timeout",
        r"Timed out waiting \d+ ?ms for (?:recv|send) operation|gloo.*(?:Wait timeout|timed out)",
        PEER_LOST,
        "Gloo's unbound_buffer.cc when a peer did not answer within the process group's timeout: it is frozen or slow",
    ),
    _row(
        "gloo_connect",
        r"Gloo connectFullMesh failed|gloo/transport.*(?:Connection refused|connect)",
        PEER_LOST,
        "Gloo while it builds its mesh: a peer that should listen does not (torch 2.13)",
    ),
    _row(
        "nccl_remote",
        r"ncclRemoteError|remote process (?:exiting|exited)|NCCL.*Connection closed by remote peer",
        PEER_LOST,
        "nccl.h: ncclRemoteError, a peer exited or the network to it failed",
    ),
    _row(
        "nccl_timeout",
        r"Watchdog caught collective operation timeout|collective operation timeout: WorkNCCL",
        PEER_LOST,
        "torch's ProcessGroupNCCL watchdog: this rank waited; the one it waited for is to blame",
    ),
    _row(
        "nccl_aborted",
        r"NCCL communicator was aborted|NCCL communicator encountered error set by ProcessGroupNCCL",
        PEER_LOST,
        "torch's ProcessGroupNCCL, on ranks whose communicator was torn down after another one's error",
    ),
    _row(
        "store_lost",
        r"Dist(?:Store|Network)Error|TCPStore.*(?:failed|timed out|[Bb]roken pipe)|recvValue failed on Socket"
        r"|wait timeout after \d+ms, keys:",
        PEER_LOST,
        "torch's TCPStore: the rank or node that serves it has gone, or a rank it should hear of never came",
    ),
    _row(
        "monitored_barrier",
        r"failed to pass monitoredBarrier|successfully reached monitoredBarrier, but",
        PEER_LOST,
        "torch's ProcessGroupGloo: rank 0 names who did not come in time, the others tell that they did (torch 2.13)",
    ),
    # Out of memory. Before CUDA errors: a full GPU is one too.
    _row(
        "cuda_out_of_memory",
        r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|cudaErrorMemoryAllocation"
        r"|CUBLAS_STATUS_ALLOC_FAILED",
        "out_of_memory",
        "torch's CUDACachingAllocator, the CUDA runtime and cuBLAS when GPU memory is full",
    ),
    _row(
        "host_out_of_memory",
        r"^MemoryError\b|std::bad_alloc|Cannot allocate memory|DefaultCPUAllocator: .*memory"
        r"|numpy\._core\._exceptions\._ArrayMemoryError|ArrayMemoryError: Unable to allocate",
        "out_of_memory",
        "CPython, libstdc++, errno ENOMEM, torch's CPU allocator and numpy when host memory or an rlimit is reached",
    ),
    _row(
        "oom_killer",
        r"Out of memory: Killed process \d+|oom-kill:|[Mm]emory cgroup out of memory|[Dd]etected \d+ oom[-_ ]kill",
        "out_of_memory",
        "the kernel's OOM killer (mm/oom_kill.c) and slurmstepd's report of it",
    ),
    _row(
        "shm_full",
        r"insufficient shared memory \(shm\)|out of shared memory"
        r"|unable to (?:write to|allocate|resize) (?:file|shared memory)[^:]*/torch_",
        "out_of_memory",
        "torch's DataLoader and its shared-memory manager when /dev/shm is full",
    ),
    # GPU and its driver.
    _row(
        "xid",
        r"\bS?Xid \((?:PCI:)?[0-9a-fA-F:.]+\): \d+|GPU has fallen off the bus",
        "cuda_error",
        "the NVIDIA driver's kernel messages, where a console or a log shipper mixes them into stderr",
    ),
    _row(
        "cuda_error",
        r"CUDA error: |CUDA (?:driver|runtime) error|cudaError[A-Z]\w+|CUDA_ERROR_[A-Z]\w+|device-side assert triggered"
        r"|(?:CUBLAS|CUDNN|CUSPARSE|CUSOLVER|CUFFT)_STATUS_(?!SUCCESS)[A-Z]\w+|AcceleratorError",
        "cuda_error",
        "torch's C10_CUDA_CHECK, the CUDA driver's and runtime's error names, the CUDA libraries' status names",
    ),
    _row(
        "nccl_error",
        r"nccl(?:System|Internal|UnhandledCuda)Error|ncclInvalid(?:Argument|Usage)|DistBackendError|NCCL [Ee]rror"
        r"|NCCL failure",
        "nccl_error",
        "nccl.h's result names and torch's DistBackendError",
    ),
    # Disk.
    _row(
        "disk_full",
        r"No space left on device|\[Errno 28\]|Disk quota exceeded|\[Errno 122\]",
        "disk_full",
        "errno ENOSPC and EDQUOT, in C and in Python",
    ),
    # How a process was ended by the kernel or by itself.
    _row(
        "segfault",
        r"Fatal Python error: (?:Segmentation fault|Bus error|Illegal instruction)|Segmentation fault"
        r"|signal(?:: | )(?:SIGSEGV|SIGBUS|11 )|Bus error",
        "segfault",
        "CPython's faulthandler, the shell, torch's DataLoader and glibc's catchsegv",
    ),
    _row(
        "aborted",
        r"Fatal Python error: |terminate called (?:after throwing|without an active)|Aborted \("
        r"|^Aborted$|double free or corruption|free\(\): invalid|malloc\(\): |corrupted size vs\. prev_size"
        r"|Assertion [`'].*' failed",
        "aborted",
        "CPython's fatal errors, libstdc++'s terminate, the shell, glibc's heap checks and assert.h",
    ),
    _row(
        "killed",
        r"^Killed$|:(?: line \d+:)? +\d+ Killed\b|is killed by signal: Killed",
        "killed",
        "a shell or torch's DataLoader whose child got SIGKILL; the OOM killer is the usual sender, not the only one",
    ),
    # Python, last: any exception at all.
    _row(
        "assertion",
        r"^AssertionError\b",
        "exception",
        "CPython: a failed assert statement",
        in_traceback=True,
    ),
    _row(
        "exception",
        r"^(?!KeyboardInterrupt|SystemExit)[A-Za-z_][\w.]*(?:: .*)?$",
        "exception",
        "the line that ends a Python traceback: the exception's name and text",
        in_traceback=True,
    ),
)

CONSEQUENCES = frozenset(pattern.name for pattern in PATTERNS if pattern.consequence)

# A cheap look that lets nearly every line of an ordinary log pass: any line that a pattern outside of tracebacks could
# match has one of these pieces. 0.1 us for a line instead of 15 us for the whole table.
HINT = re.compile(
    r"[Ee]rror|ERROR|gloo|Timed out|[Tt]ime[d ]?out|remote p|[Mm]emory|oom|bad_alloc|Xid|fallen off|aborted|NCCL"
    r"|_STATUS_|assert|Assert|space left|Errno|quota|fault|signal|Abort|terminate called|double free|free\(\)|malloc"
    r"|corrupted|Killed|TCPStore|recvValue|torch_|monitoredBarrier"
)
TRACEBACK_BEGINS = "Traceback (most recent call last):"


def strip_prefix(line: str) -> str:
    """Take torch's ``[rank3]: `` away, so that a line reads the same from one rank and from many."""
    return _PREFIX.sub("", line) if line.startswith("[") else line


def match(line: str, *, ends_traceback: bool = False) -> Pattern | None:
    """Return the first pattern that ``line`` (without prefix) matches.

    Args:
        line: One line, without its end.
        ends_traceback: Whether it is the line that ends a Python traceback.
    """
    if not ends_traceback and HINT.search(line) is None:
        return None
    for pattern in PATTERNS:
        if pattern.in_traceback and not ends_traceback:
            continue
        if pattern.regex.search(line) is not None:
            return pattern
    return None
