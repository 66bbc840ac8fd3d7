# SPDX-License-Identifier: Apache-2.0
"""What one rank's end speaks for: a class of fault, a lost peer, its runner's order, or nothing at all.

An exception that ended it says most; then the last words of its output, then the exit status. What the rank survived
(``error_records``) says nothing of its end. Peers of a dead rank die of it within milliseconds and say so: Gloo
"Connection closed by peer", NCCL "remote process exited". Words that any library may use ("Connection refused") speak
of a peer only in torch's own exceptions: a script has connections of its own.

Pure: told how one rank ended, answers with a class and its reason.
"""

import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from megascale_ops.controller.error_records import ended_it, error_of, words
from megascale_ops.diagnosis.exits.tile_timeouts import is_mismatch, is_timeout
from megascale_ops.schema.health import FAULTS, HostReading
from megascale_ops.schema.messages import RankExit
from megascale_ops.schema.progress import RankError, RankReport

# What peers of a dead rank report, in the text of an exception (Gloo, TCPStore, NCCL; measured with torch 2.13).
_PEER = re.compile(
    r"gloo/.*(?:Connection closed|Connection reset|Broken pipe|Read error|Connection refused|timeout|Timed out)"
    r"|Timed out waiting \d+ ?ms for (?:recv|send) operation|connectFullMesh|ncclRemoteError|remote process exited"
    r"|NCCL communicator was aborted|collective operation timeout|recvValue failed|Dist(?:Network|Store)Error"
    r"|ProcessGroup.*(?:aborted|shut ?down)|failed to pass monitoredBarrier|successfully reached monitoredBarrier"
    r"|Timed out initializing process group|wait timeout after \d+ ?ms, keys",
    re.IGNORECASE,
)
# The same where torch itself raises it; anywhere else it may be the script's own connection, file or lock.
_TORCH_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Read error|Broken pipe|Timed out waiting|Connection refused"
    r"|Socket Timeout|Failed to recv|failed to connect|wait timeout",
    re.IGNORECASE,
)
_TORCHS = re.compile(r"^(?:RuntimeError$|torch\.)")
_MEMORY = re.compile(r"MemoryError|out of memory|OutOfMemoryError|Cannot allocate memory|bad_alloc", re.IGNORECASE)
_DISK = re.compile(r"No space left on device|Errno 28\b|Disk quota exceeded", re.IGNORECASE)
_MISMATCH = re.compile(r"op\.preamble\.length <= op\.nbytes|Received data size doesn't match expected size")
# Collectives of Python objects send sizes first. Where another rank's numbers came instead, they are read as a size, or
# as a pickle: torch asks for more memory than there is in the world, or finds no pickle.
_GARBAGE = re.compile(
    r"more than 1EB|Storage size calculation overflowed|numel: integer multiplication overflow|negative dimension"
    r"|UnpicklingError|pickle data was truncated"
)
_OBJECTS = re.compile(
    r"\bin (?:all_gather_object|gather_object|broadcast_object_list|scatter_object_list|recv_object_list"
    r"|_tensor_to_object)\b"
)
_CUDA = re.compile(r"CUDA error|cuda(?:Error|_ERROR)|CUBLAS_STATUS|CUDNN_STATUS|device-side assert", re.IGNORECASE)
_NCCL = re.compile(r"NCCL error|nccl\w*Error|DistBackendError", re.IGNORECASE)

# Names of the agent's patterns of last words, and the class each speaks for. "peer" is a consequence.
PATTERN_FAULTS: dict[str, str] = {
    "gloo_peer_closed": "peer",
    "gloo_mismatch": "collective_mismatch",
    "gloo_timeout": "peer",
    "gloo_connect": "peer",
    "nccl_remote": "peer",
    "nccl_timeout": "peer",
    "nccl_aborted": "peer",
    "store_lost": "peer",
    "monitored_barrier": "peer",
    "cuda_out_of_memory": "out_of_memory",
    "host_out_of_memory": "out_of_memory",
    "oom_killer": "out_of_memory",
    "shm_full": "out_of_memory",
    "xid": "cuda_error",
    "cuda_error": "cuda_error",
    "nccl_error": "nccl_error",
    "disk_full": "disk_full",
    "segfault": "segfault",
    "aborted": "aborted",
    "killed": "killed",
    "assertion": "exception",
    "exception": "exception",
}
_GENERAL = frozenset({"exception", "aborted", "nccl_error"})  # what a victim may say too while it goes down

# Any other signal came from outside.
_SIGNAL_FAULTS = {
    int(signal.SIGSEGV): "segfault",
    int(signal.SIGBUS): "segfault",
    int(signal.SIGILL): "segfault",
    int(signal.SIGABRT): "aborted",
}
# How a rank goes down when its runner asks it to: no exception of the script's own.
_STOPPED_BY = ("KeyboardInterrupt", "SystemExit", "SignalException")
# 0.97 of the host's memory in use: a SIGKILL then is nearly always the kernel's out-of-memory killer.
_MEMORY_FULL = 0.97


class Ended(NamedTuple):
    """How one rank ended: as its runner reported it, ``age_s`` before now."""

    node: str
    exit: RankExit
    age_s: float


class Judged(NamedTuple):
    """What one rank's end speaks for, and the words that say so."""

    ended: Ended
    fault: str  # a class of FAULTS, or "peer", "by_us", "normal"
    why: str


def classify(one: Ended, report: RankReport | None, host: HostReading | None) -> Judged:
    """Say what a rank's end speaks for."""
    exit_ = one.exit
    error = error_of(exit_, report)
    ended_by = error if error is not None and ended_it(exit_, error) else None
    if ended_by is not None and not (exit_.by_us and ended_by.type in _STOPPED_BY):
        if ended_by.type == "KeyboardInterrupt":
            return Judged(one, "killed", f"interrupted (SIGINT): {words(ended_by)}")
        return Judged(one, class_of_error(ended_by, exit_.stderr_tail), words(ended_by))
    if plain := _plainly(one):
        return plain
    told = list(exit_.last_words) + [word.pattern for word in (report.last_words if report is not None else ())]
    classes = [PATTERN_FAULTS[word] for word in told if word in PATTERN_FAULTS]
    if error is not None:
        survived = class_of_error(error)
        classes = [fault for fault in classes if fault != survived]  # its own traceback, which the rank survived
    own = [fault for fault in classes if fault != "peer"]
    if _MISMATCH.search(exit_.stderr_tail):
        own.append("collective_mismatch")
    if "peer" in classes and all(fault in _GENERAL for fault in own) and exit_.code != -signal.SIGKILL:
        return Judged(one, "peer", f"its last words are of a lost peer ({', '.join(told)})")
    return _by_status(one, own, host)


def _plainly(one: Ended) -> Judged | None:
    """Return an end that needs no words: by order, in order, or without anybody having seen how."""
    if one.exit.by_us:
        return Judged(one, "by_us", "stopped by its runner or launcher")
    if one.exit.vanished:
        return Judged(one, "killed", "its process was gone in the midst of its work, and its launcher did not say how")
    return Judged(one, "normal", "ended normally") if one.exit.code == 0 else None


def _by_status(one: Ended, own: Sequence[str], host: HostReading | None) -> Judged:
    """Say what a rank's exit status speaks for, when it left no exception; ``own`` is what its last words speak for."""
    code = one.exit.code
    if code == -signal.SIGKILL:
        return _killed(one, own, host)
    said = next((fault for fault in own if fault not in _GENERAL), "")
    if said:
        return Judged(one, said, f"its last words speak for: {FAULTS[said]}")
    if code < 0:
        fault = _SIGNAL_FAULTS.get(-code, "killed")
        return Judged(one, fault, f"died of {signal_name(-code)}: {FAULTS[fault]}")
    if own and not (own[0] == "exception" and one.exit.phase):
        return Judged(one, own[0], f"exit code {code}, its last words speak for: {FAULTS[own[0]]}")
    # A black box was there to note what nobody caught: what its output shows was caught, and the code is the script's.
    last = _last_line(one.exit.stderr_tail)
    return Judged(
        one, "exit_code", f"exit code {code}, no exception seen" + (f"; it last wrote: {last}" if last else "")
    )


def _last_line(text: str) -> str:
    """Return the last line of a rank's stderr, as ``sys.exit("no data left")`` leaves it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "".join(character for character in lines[-1][:200] if character.isprintable()) if lines else ""


def _killed(one: Ended, own: Sequence[str], host: HostReading | None) -> Judged:
    """Tell the kernel's out-of-memory killer from any other sender of SIGKILL."""
    if "out_of_memory" in own:
        return Judged(one, "out_of_memory", "SIGKILL, and its last words are of memory")
    if host is not None and host.memory_used > _MEMORY_FULL:
        return Judged(one, "out_of_memory", f"SIGKILL while {host.memory_used:.0%} of the host's memory was used")
    return Judged(one, "killed", "killed by SIGKILL from outside")


def class_of_error(error: RankError, traceback: str = "") -> str:
    """Return the class that an exception speaks for, raised where the end of stderr says."""
    if is_timeout(error) or is_mismatch(error):
        return "peer"
    text = f"{error.type}: {error.message}"
    if _GARBAGE.search(text) and _OBJECTS.search(traceback):
        return "collective_mismatch"
    first = (("out_of_memory", _MEMORY), ("disk_full", _DISK), ("collective_mismatch", _MISMATCH))
    for fault, pattern in first:
        if pattern.search(text):
            return fault
    if _PEER.search(text) or (_TORCHS.search(error.type) and _TORCH_PEER.search(text)):
        return "peer"
    for fault, pattern in (("cuda_error", _CUDA), ("nccl_error", _NCCL)):
        if pattern.search(text):
            return fault
    return "exception"


def signal_name(number: int) -> str:
    """Return a signal's name, or its number where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
