# SPDX-License-Identifier: Apache-2.0
"""Ranks that a victim's words name: which did not come, and whose failure was carried to all others.

Most words of victims name no rank. A few do, for their library has looked:

- Gloo's monitored barrier names the ranks that did not come, within its group;
- torch's report of a desync names the ranks that did not join the collective that the others are in;
- a kernel of torch's symmetric memory names the rank whose signal did not come;
- Horovod's look for stalls names the ranks that have not submitted a tensor;
- JAX's coordination service names the processes whose heartbeats have stopped, or that did not come to a barrier;
- a store that waits for NCCL's id names the rank that should have put it there;
- torch's barrier in a store counts who has come, and a log of all ranks has the line of each that came;
- distributed checkpoints gather the exceptions of all ranks and raise them in all of them.

Pure: a text in, ranks and a class out.
"""

import re
from typing import NamedTuple

from megascale_ops.diagnosis.exits.last_words import fault_of, row_of_error
from megascale_ops.schema.folding import named

_BARRIER = re.compile(r"Ranks? (\d{1,9}(?:, *\d{1,9})*) failed to pass monitoredBarrier")
_DESYNC = re.compile(r"\[(\d{1,9})\] finished collective #(\d{1,12}), but didn't join collective #(\d{1,12})")
_NO_ID = re.compile(r"retr(?:ie|ei)ving ncclUniqueId from \[(\d{1,9})\][^\n]{0,200}(?:[Tt]imeout|[Tt]imed out)")
# torch's CUDASymmetricMemory.cu; numbers count within the group that shares the memory.
_NO_SIGNAL = re.compile(r"CUDASymmetricMemory::\w{1,40}: rank (\d{1,9}) failed to receive signal from rank (\d{1,9})")
# XLA's coordination_service.cc: a list behind the words, or one name before them.
_A_TASK = r"/job:\w{1,80}/replica:\d{1,9}/task:\d{1,9}"
_UNHEALTHY = re.compile(
    rf"(?:stopped sending heartbeats\)|heartbeat timeout)[^\n]{{0,80}}\n?((?:\s*{_A_TASK},?)+)"
    rf"|Task ({_A_TASK}) heartbeat timeout"
)
_LATE = re.compile(rf"[Tt]imed out task names:((?:\s{{0,8}}{_A_TASK},?)+)")
_TASK = re.compile(r"/task:(\d{1,9})")
# torch/distributed/checkpoint/api.py, CheckpointException: each rank's traceback, its exception last.
_GATHERED = re.compile(r"CheckpointException ranks:dict_keys\(\[(\d{1,9}(?:, \d{1,9})*)\]\)")
# Horovod's stall_inspector.cc: a rank a line with the tensors that it has not submitted.
_STALLED = re.compile(r"Missing ranks:((?:\s{0,4}\n?\d{1,9}: \[[^\]\n]{0,2000}\]){1,64})")
_A_RANK = re.compile(r"(?:^|\n)\s{0,4}(\d{1,9}): \[([^\]\n]{0,2000})")
# Horovod before 0.19: a tensor a line with the ranks that have not submitted it.
_STALLED_BEFORE = re.compile(r"\[missing ranks: (\d{1,9}(?:, \d{1,9})*)\]")
# Ascend's HCCL, on a rank whose wait for a notification ended.
_NO_NOTIFY = re.compile(r"not received the Notify record from remote rank:? ?\[(\d{1,9})\]")
_WAITER = re.compile(r"\bRankID:(\d{1,9})\b")
# torch's distributed_c10d.py before 2.3: a line of each rank that comes, and the count of one that waits.
_CAME = re.compile(r"Added key: (\S{1,120}) to store for rank: (\d{1,9})\b")
_COUNTED = re.compile(
    r"Timed out initializing process group in store based barrier on rank:? \d{1,9}, for key: (\S{1,120}) "
    r"\(world_size=(\d{1,6}), (?:worker_count|num_workers_joined)=(\d{1,6}),"
)
# MindSpore's scheduler (meta_server_node.cc), of the heartbeats of processes.
_SILENT_NODE = re.compile(r"The node: (\d{1,9}) is timed out")
_OF_RANK = re.compile(r"Traceback \(most recent call last\): \(RANK (\d{1,9})\)")
_CHAINED = re.compile(r"The above exception was the direct cause|During handling of the above exception")
_RAISED = re.compile(r"^(?:\[rank\d+\]: ?)?([A-Za-z_][\w.]{0,120}): ([^\n]{0,440})", re.MULTILINE)


class Named(NamedTuple):
    """The ranks that a text names, with the class of fault and the confidence of those words."""

    ranks: tuple[int, ...]
    fault: str
    why: str
    sure: float


def named_in(text: str) -> Named | None:
    """Return the ranks that a victim's words name; None where they name no rank."""
    found = (read(text) for read in _READERS)
    return next((one for one in found if one is not None), None)


def _of_barrier(text: str) -> Named | None:
    if (found := _BARRIER.search(text)) is None:
        return None
    ranks = _numbers(found[1])
    # 0.8: the numbers count within the barrier's group, and nothing shows that it is the whole job's.
    return Named(ranks, "not_joined", f"{named(ranks)} did not come to a monitored barrier of the others", 0.8)


def _of_desync(text: str) -> Named | None:
    if not (late := _DESYNC.findall(text)):
        return None
    ranks = tuple(sorted({int(rank) for rank, _, _ in late}))
    why = f"torch's desync report says that {named(ranks)} did not join collective #{late[0][2]} of the others"
    return Named(ranks, "not_joined", why, 0.8)


def _of_signals(text: str) -> Named | None:
    signals = _NO_SIGNAL.findall(text)
    waiters = {int(rank) for rank, _ in signals}
    ranks = tuple(sorted({int(peer) for _, peer in signals} - waiters))
    # 0.6: the peer may itself have waited for a third rank; a victim's text has only what that victim missed.
    why = f"{named(ranks)} sent no signal to a kernel of the others, which gave up"
    return Named(ranks, "not_joined", why, 0.6) if ranks else None


def _of_heartbeats(text: str) -> Named | None:
    if "heartbeat" not in text or not (found := _UNHEALTHY.findall(text)):
        return None
    ranks = tuple(sorted({int(task) for one in found for task in _TASK.findall("".join(one))}))
    # 0.6: a process that stopped sending may have been cut off or be dead as well as frozen.
    return Named(ranks, "silent", f"{named(ranks)} stopped sending heartbeats to JAX's coordination service", 0.6)


def _of_late_tasks(text: str) -> Named | None:
    if "imed out task" not in text or (found := _LATE.search(text)) is None:
        return None
    ranks = tuple(sorted({int(task) for task in _TASK.findall(found[1])}))
    # 0.8: a task is a process, and the service lists some of those that are late where they are many.
    return Named(ranks, "not_joined", f"{named(ranks)} did not come to a barrier of JAX's coordination service", 0.8)


def _of_nccl_id(text: str) -> Named | None:
    if (found := _NO_ID.search(text)) is None:
        return None
    ranks = (int(found[1]),)
    # 0.6: it may itself have waited for a rank that came late to the same group.
    return Named(ranks, "not_joined", f"{named(ranks)} did not give NCCL's id, for which the others waited", 0.6)


def _of_store_barrier(text: str) -> Named | None:
    if not (found := _COUNTED.findall(text)):
        return None
    key, size, count = found[-1][0], int(found[-1][1]), int(found[-1][2])
    ranks = tuple(sorted({*range(size)} - {int(rank) for name, rank in _CAME.findall(text) if name == key}))
    # Of which only some lines are there, the missing ones are more than the barrier has missed.
    if not ranks or len(ranks) != size - count:
        return None
    why = f"{count} of {size} ranks came to the barrier that makes the process group, and {named(ranks)} did not"
    # 0.7: a line may be lost as well as its rank.
    return Named(ranks, "not_joined", why, 0.7)


def _of_stall(text: str) -> Named | None:
    if not (found := _STALLED.findall(text)):
        return None
    missing = {int(rank): set(tensors.split(", ")) for rank, tensors in _A_RANK.findall(found[-1])}
    sets = list(missing.values())
    # Two ranks that each miss what the other has submitted wait for each other: neither is late.
    if any(not (one <= other or other <= one) for one in sets for other in sets):
        return None
    ranks = tuple(sorted(missing))
    return Named(ranks, "not_joined", f"{named(ranks)} did not submit what Horovod waited for on the others", 0.8)


def _of_stall_before(text: str) -> Named | None:
    listed = [_numbers(ranks) for ranks in _STALLED_BEFORE.findall(text)]
    if not listed or any(ranks != listed[-1] for ranks in listed):
        return None
    why = f"{named(listed[-1])} did not submit what Horovod waited for on the others"
    return Named(listed[-1], "not_joined", why, 0.8)


def _of_notifications(text: str) -> Named | None:
    if "Notify" not in text:
        return None
    ranks = {int(rank) for rank in _NO_NOTIFY.findall(text)} - {int(rank) for rank in _WAITER.findall(text)}
    # 0.5: the peer may itself have waited for a third rank, and numbers count within a group.
    why = f"{named(sorted(ranks))} sent no notification, for which HCCL waited on the others"
    return Named(tuple(sorted(ranks)), "not_joined", why, 0.5) if ranks else None


def _of_silent_nodes(text: str) -> Named | None:
    ranks = tuple(sorted({int(node) for node in _SILENT_NODE.findall(text)}))
    why = f"{named(ranks)} stopped sending heartbeats to MindSpore's scheduler"
    return Named(ranks, "silent", why, 0.6) if ranks else None


def gathered_in(text: str) -> Named | None:
    """Return whose exceptions a distributed checkpoint has carried to all ranks, and of which class they are."""
    pieces = _OF_RANK.split(text)  # before the first, then a rank's number and its traceback in turn
    listed = _GATHERED.search(text)
    ranks = tuple(sorted({*(_numbers(listed[1]) if listed else ()), *(int(piece) for piece in pieces[1::2])}))
    if not ranks:
        return None
    blocks = [_CHAINED.split(piece)[0] for piece in pieces[2::2]]
    # An exception that was cut away, at either end, is looked for in the whole text.
    raised = [found for block in blocks if (found := _RAISED.search(block))] or [*_RAISED.finditer(text)]
    rows = [row_of_error(found[1], found[2]) for found in raised]
    first = next((at for at, row in enumerate(rows) if fault_of(row) not in ("exception", "peer")), 0)
    fault = fault_of(rows[first]) if rows else "exception"
    hint = f" ({rows[first].hint})" if rows and rows[first].hint else ""
    words = f": {raised[first][1]}: {raised[first][2][:200]}{hint}" if raised else ""
    why = f"{named(ranks)} failed in a distributed checkpoint, which raises it in all ranks{words}"
    return Named(ranks, "exception" if fault in ("peer", "unknown") else fault, why, 0.9)


_READERS = (
    gathered_in,
    _of_barrier,
    _of_desync,
    _of_signals,
    _of_heartbeats,
    _of_late_tasks,
    _of_nccl_id,
    _of_store_barrier,
    _of_stall,
    _of_stall_before,
    _of_notifications,
    _of_silent_nodes,
)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(number) for number in text.split(",")}))
