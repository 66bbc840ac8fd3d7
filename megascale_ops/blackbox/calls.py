# SPDX-License-Identifier: Apache-2.0
"""The collectives that a black box knows of, as facts that can be compared between ranks.

The ring holds those that went through torch.distributed's Python functions. What it can't see is the end of an
asynchronous collective: it is over when a later one of its group is, or when the group's own count, which the
recorder's heartbeat notes at 10 Hz, has passed it. The same count shows collectives that C++ has started, as DDP does
in each backward pass: facts without a function's name.

Torch's flight recorder and the ring call the same collective by different names (``all_gather_into_tensor`` is
``_all_gather_base`` to NCCL and ``all_gather`` to Gloo), so names are made equal here. An object collective is the
first one inside it. Names of groups are cut to 23 bytes, as in the box.
"""

from collections.abc import Iterable, Sequence

from megascale_ops.blackbox.records import CollectiveRecord
from megascale_ops.blackbox.writer import collective_name
from megascale_ops.schema.messages import CollectiveFact
from megascale_ops.schema.progress import CollectivePosition

# Other names of one collective -> the name that Gloo's flight recorder gives it.
_SAME = {
    "_all_gather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_coalesced": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_object": "all_gather",
    "all_gather_v": "all_gather",
    "ALLGATHER_coalesced": "all_gather",
    "gather_object": "all_gather",  # it gathers the objects' sizes from all first
    "all_reduce_coalesced": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_v": "reduce_scatter",
    "REDUCE_SCATTER_coalesced": "reduce_scatter",
    "all_to_all_v_single": "all_to_all",
    "all_to_all_single": "all_to_all",
    "alltoall": "all_to_all",
    "all_to_all_base": "all_to_all",
    "broadcast_object_list": "broadcast",
    "scatter_object_list": "broadcast",  # it sends the objects' size to all first
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "all_reduce_barrier": "barrier",
    "isend": "send",
    "irecv": "recv",
    "send_object_list": "send",
    "recv_object_list": "recv",
}
_POINT_TO_POINT = ("send", "recv")


def function_of(name: str) -> str:
    """Return a collective's name without its backend and its peers: "nccl:send 0->1" is a send."""
    words = name.rpartition(":")[2].split()
    plain = words[0] if words else "?"
    return _SAME.get(plain, plain)


def group_of(name: str) -> str:
    """Return a process group's name as the black box holds it."""
    return collective_name(name).decode("utf-8", "ignore")


def begun_anew(numbers: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return where groups begin that stand in a record twice, as a script makes them that starts its groups again.

    Args:
        numbers: Group and number of each call, oldest first; -1 for one without a number.
    """
    begins: dict[str, int] = {}
    last: dict[str, int] = {}
    for at, (group, seq) in enumerate(numbers):
        if 0 <= seq <= 1 < last.get(group, -1):  # the first of a group has number 1
            begins[group] = at
        if seq >= 0:
            last[group] = seq
    return begins


def living(records: Iterable[CollectiveRecord]) -> list[CollectiveRecord]:
    """Return the records of groups that there still are: a later group may have the name of one that has ended."""
    records = list(records)
    begins = begun_anew((record.communicator, number_of(record)) for record in records)
    return [record for at, record in enumerate(records) if at >= begins.get(record.communicator, 0)]


def number_of(record: CollectiveRecord) -> int:
    """Return a call's number in its group, -1 of one that takes none."""
    return -1 if function_of(record.function) in _POINT_TO_POINT else record.seq


def of_ring(records: Iterable[CollectiveRecord], position: CollectivePosition | None) -> list[CollectiveFact]:
    """Turn what the black box's ring holds into facts, oldest first.

    Args:
        records: The ring, oldest first.
        position: The group's position in the recorder's last heartbeat.
    """
    records = living(records)
    finished: dict[str, int] = {}  # group -> the last known to be over
    if position is not None:
        finished[group_of(position.name.removeprefix("pg "))] = position.completed
    for record in records:
        if record.ended_mono_ns and number_of(record) >= 0:
            finished[record.communicator] = max(record.seq, finished.get(record.communicator, -1))
    facts = []
    for record in records:
        seq = number_of(record)
        over = 0 <= seq <= finished.get(record.communicator, -1)
        facts.append(
            CollectiveFact(
                group=record.communicator,
                seq=seq,
                function=function_of(record.function),
                bytes_moved=record.bytes_moved,
                done=bool(record.ended_mono_ns) or over,
            )
        )
    return facts + _counted(facts, position)


def _counted(facts: Sequence[CollectiveFact], position: CollectivePosition | None) -> list[CollectiveFact]:
    """Return what the group's count adds to the ring: its last collective, and the one that it waits in."""
    if position is None or position.enqueued < 0:
        return []
    group = group_of(position.name.removeprefix("pg "))
    known = {fact.seq for fact in facts if fact.group == group}
    seqs = sorted({min(position.completed + 1, position.enqueued), position.enqueued} - known)
    newest = max(known, default=-1)
    return [
        CollectiveFact(group=group, seq=seq, function="", done=seq <= position.completed)
        for seq in seqs
        if seq > newest or seq > position.completed
    ]
