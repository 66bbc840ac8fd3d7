# SPDX-License-Identifier: Apache-2.0
"""From the entries of a flight recorder dump to calls that can be compared between ranks.

Torch records what NCCL is given, which is not always what was called. A ``dist.all_gather`` whose outputs differ in
size is a batch: a broadcast from each member, all under one number, ended by an entry without tensors. A
``reduce_scatter`` of uneven inputs is a batch of reductions. A coalescing manager makes a batch of what it is given.
Each batch becomes the one call that it was, with the sizes of all its pieces: where ranks meant different sizes, these
differ, and so they do from a rank that meant equal ones and called the plain collective.

The pieces stay "scheduled" for ever; a batch ends with the entry that ends it (torch's ``test_batched_send_recv``), or,
where a backend writes none, with whatever came later in its group. Before torch 2.7 the pieces were not recorded.

Sends and receives of a batch stay calls of their own: each has a peer. They share the batch's number.

Pure: entries in, calls out.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megascale_agents.evidence import collective_facts
from megascale_agents.evidence.dump_format import Dump, Entry
from megascale_ops.blackbox.calls import function_of, group_of
from megascale_ops.schema.messages import MOST_PEERS, CollectiveFact

# What a batch of these pieces was called as.
_CALLED_AS = {"_broadcast_oop": "all_gather_v", "_reduce_oop": "reduce_scatter_v"}
# 16: a tensor of more dims is from a broken record, whose product may take long.
MOST_DIMS = 16
# 60 characters: three functions of a batch that mixes them; a fact's function is a word.
_MOST_NAME = 60

Sizes = list[list[int]]


class Call(NamedTuple):
    """One call; ``inputs`` or ``outputs`` None: each rank brings, or gets, as much as it has."""

    entry: Entry  # that ends it
    name: str  # without its backend
    inputs: Sizes | None
    outputs: Sizes | None
    input_dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...]
    is_over: bool

    @property
    def shown(self) -> str:
        """The call as text for people."""
        return f"{self.entry.profiling_name} {self.entry.collective_seq_id} of group {self.entry.group}"


def calls_of(entries: Sequence[Entry]) -> list[Call]:
    """Fold each batch into one call, or end its sends and receives with it; oldest first."""
    batches: dict[tuple[str, bool, int], list[Entry]] = {}
    for entry in entries:
        batches.setdefault(entry.number, []).append(entry)
    over = _over(entries)
    # Once a batch, not once an entry: an exchange with 512 peers is a batch of a thousand.
    ended = {number: any(one.ends_batch and one.is_over for one in batch) for number, batch in batches.items()}
    calls = []
    for entry in entries:
        batch = batches[entry.number]
        if len(batch) == 1 or entry.is_p2p or entry.collective_seq_id < 0:
            calls.append(_call(entry, is_over=entry.is_over or ended[entry.number]))
        elif entry is batch[-1]:
            calls.append(_folded(batch, has_followers=over.get(entry.group, -1) > entry.collective_seq_id))
    return calls


def _over(entries: Sequence[Entry]) -> dict[str, int]:
    """Return the last collective of each group that is known to be over: those before it are, too."""
    found: dict[str, int] = {}
    for entry in entries:
        if entry.is_over and not entry.is_p2p:
            found[entry.group] = max(entry.collective_seq_id, found.get(entry.group, -1))
    return found


def _call(entry: Entry, *, is_over: bool) -> Call:
    name = entry.name
    inputs = None if name in ("all_gather_v", "ALLGATHER_coalesced") else entry.input_sizes
    outputs = None if name in ("reduce_scatter_v", "REDUCE_SCATTER_coalesced") else entry.output_sizes
    if entry.ends_batch:  # its pieces were not recorded: its tensors are unknown
        inputs = outputs = None
    return Call(entry, name, inputs, outputs, _kinds([entry], "input"), _kinds([entry], "output"), is_over)


def _folded(batch: Sequence[Entry], *, has_followers: bool) -> Call:
    """Return a batch of collectives as one call."""
    pieces = [entry for entry in batch if not entry.ends_batch] or list(batch)
    ends = [entry for entry in batch if entry.ends_batch]
    names = list(dict.fromkeys(entry.name for entry in pieces))
    name = _CALLED_AS.get(names[0], names[0]) if len(names) == 1 else "+".join(names)[:_MOST_NAME]
    inputs: Sizes | None = [sizes for entry in pieces for sizes in entry.input_sizes]
    outputs: Sizes | None = [sizes for entry in pieces for sizes in entry.output_sizes]
    if name == "all_gather_v":
        inputs = None
    if name == "reduce_scatter_v":
        outputs = None
    is_over = has_followers or all(entry.is_over for entry in ends or pieces)
    last = (ends or pieces)[-1]
    return Call(last, name, inputs, outputs, _kinds(pieces, "input"), _kinds(pieces, "output"), is_over)


def _kinds(entries: Sequence[Entry], side: str) -> tuple[str, ...]:
    """Return the types of all tensors, each once."""
    return tuple(dict.fromkeys(kind for entry in entries for kind in getattr(entry, f"{side}_dtypes")))


def fact_of(call: Call, dump: Dump) -> CollectiveFact:
    """Return a call as a judge reads it."""
    entry = call.entry
    sizes = "" if call.inputs is None else collective_facts.sizes_of(call.inputs)
    outputs = "" if call.outputs is None else collective_facts.sizes_of(call.outputs)
    kind, made = ",".join(call.input_dtypes)[:60], ",".join(call.output_dtypes)[:60]
    sends, receives = _splits(call)
    return CollectiveFact(
        group=group_of(entry.group),
        seq=-1 if entry.is_p2p else entry.collective_seq_id,
        function=function_of(call.name),
        sizes=sizes,
        dtype=kind,
        done=call.is_over,
        outputs="" if outputs == sizes else outputs,
        output_dtype="" if made == kind else made,
        sends=sends,
        receives=receives,
        peer=_peer(entry, dump.ranks),
        batch=min(entry.p2p_seq_id, 2**53) if entry.is_p2p else -1,
        begun=_begun(call) if dump.is_timed else None,
    )


def _begun(call: Call) -> bool:
    return call.is_over or call.entry.state == "started" or bool(call.entry.time_discovered_started_ns)


def _splits(call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the elements that an unfinished all_to_all sends to and gets from each member, () where not known."""
    if call.is_over or function_of(call.name) != "all_to_all":
        return (), ()
    entry = call.entry
    sends, receives = entry.input_split_sizes, entry.output_split_sizes
    tensors = [*(call.inputs or ()), *(call.outputs or ())]
    is_list = len(call.inputs or ()) > 1 and len(call.outputs or ()) > 1 and max(map(len, tensors)) <= MOST_DIMS
    if not (sends or receives) and is_list:
        sends = [math.prod(sizes) for sizes in call.inputs or ()]
        receives = [math.prod(sizes) for sizes in call.outputs or ()]
    if (
        len(sends) != len(receives)
        or len(sends) > MOST_PEERS
        or not all(0 <= one < 2**53 for one in (*sends, *receives))
    ):
        return (), ()
    return tuple(sends), tuple(receives)


def _peer(entry: Entry, ranks: Mapping[str, Sequence[int]]) -> int:
    """Return the rank at the other end of a send or a receive, -1 where it is not known."""
    arrow = "->" if entry.name == "send" else "<-"
    place = entry.profiling_name.rpartition(arrow)[2] if entry.is_p2p and arrow in entry.profiling_name else ""
    if not (place.isascii() and place.isdigit()) or len(place) > 6:
        return -1
    members = ranks.get(entry.group)
    if members is None:  # the default group has all ranks, so its numbers are the ranks
        is_default = entry.group == "0" or entry.process_group[1:] == ["default_pg"]
        return int(place) if is_default and int(place) < 2**17 else -1
    return members[int(place)] if int(place) < len(members) else -1
