# SPDX-License-Identifier: Apache-2.0
"""The form of torch's flight recorder dumps, as it is and as it was: JSON or pickled, since torch 2.3.

What differs between versions and backends, and what is made of it:

- ``process_group`` is a name with a description; ``pg_config`` has the ranks of a group by that name, but on Gloo,
  where it has one entry without a name. ``pg_status`` goes by a number of the group's, as text in JSON.
- ``time_discovered_started_ns`` of what has not started is 0 in JSON and None in a pickle. It is known only where
  NCCL's timing is on; a backend whose recording hangs on hooks writes start and end in one go.
- ``input_split_sizes`` and ``output_split_sizes`` of an all_to_all, as elements, came with 2.11. Before, one that was
  given one tensor and its splits has the sum of them only.
- Before 2.4 there was one number, ``seq_id``, that sends and receives counted in, too; theirs is left alone.
- ``retired`` without "completed" is an end on Gloo, which never has "completed"; on NCCL, which asks the GPU first, it
  is one that timed out (pytorch#114804): the first rank whose watchdog gave up has not finished before the others. The
  last one only: nothing of its group ends behind a call that timed out.
- An empty dump has no ``entries`` at all. Keys that a version adds (``comm_lib_version``) are passed over.

Pure: bytes in, entries out.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec

from megascale_agents.evidence import dump_pickle
from megascale_ops.blackbox.calls import begun_anew
from megascale_ops.foreign import UNREADABLE
from megascale_ops.schema.ranges import MOST_RANKS

# -1: none. What is no number that fits into 63 bits is from a broken record.
_Number = Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]


class Entry(msgspec.Struct):
    """One entry, as far as anything is made of it."""

    profiling_name: str = "?"
    process_group: list[str] = []
    collective_seq_id: _Number = -1
    seq_id: _Number = -1
    p2p_seq_id: _Number = -1
    input_sizes: list[list[int]] = []
    output_sizes: list[list[int]] = []
    input_dtypes: list[str] = []
    output_dtypes: list[str] = []
    input_split_sizes: list[int] = []
    output_split_sizes: list[int] = []
    is_p2p: bool = False
    state: str = ""
    retired: bool = False
    time_discovered_started_ns: int | None = None
    time_discovered_completed_ns: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether the call is over: NCCL marks it "completed" up to 1 s before it retires it, Gloo only retires it."""
        has_timed_out = self.retired and self.state != "completed" and self.profiling_name.startswith("nccl:")
        return (self.retired or self.state == "completed") and not has_timed_out

    @property
    def group(self) -> str:
        """The name of its process group."""
        return self.process_group[0] if self.process_group else "?"

    @property
    def name(self) -> str:
        """What was called, without the backend and the peers: "nccl:send 0->1" is a send."""
        words = self.profiling_name.rpartition(":")[2].split()
        return words[0] if words else "?"

    @property
    def number(self) -> tuple[str, bool, int]:
        """What the pieces of a batch share with the entry that ends it."""
        return self.group, self.is_p2p, self.p2p_seq_id if self.is_p2p else self.collective_seq_id

    @property
    def ends_batch(self) -> bool:
        """Whether it stands for a batch ("coalesced", "ALLGATHER_coalesced") and has no tensors of its own."""
        return self.name == "coalesced" or (self.name.endswith("_coalesced") and self.name[:1].isupper())


class Dump(NamedTuple):
    """One rank's dump."""

    entries: list[Entry]  # of groups that still exist, oldest first
    recorded: int  # how many there were
    unread: int  # how many of them could not be read
    broken: str  # why the first of these could not
    reached: Mapping[str, Mapping[str, object]]  # how far each group is, by its number
    ranks: Mapping[str, Sequence[int]]  # the members of each group, where recorded
    is_timed: bool  # whether an entry without a start has not begun on the GPU


class _Trace(msgspec.Struct):
    """The part of a dump that is read; entries one by one, since a broken one costs itself only."""

    pg_status: msgspec.Raw = msgspec.Raw(b"{}")
    pg_config: msgspec.Raw = msgspec.Raw(b"{}")
    entries: list[msgspec.Raw] | None = None


_ENTRY = msgspec.json.Decoder(Entry)
# What may be null where it is an empty list.
_LISTS = frozenset(
    {"input_sizes", "output_sizes", "input_dtypes", "output_dtypes", "input_split_sizes", "output_split_sizes"}
)


def read(dump: bytes) -> Dump:
    """Read a dump of either form.

    Raises:
        ValueError: it is not a flight recorder's.
    """
    if dump_pickle.is_pickle(dump):
        dump = dump_pickle.as_json(dump)
    try:
        trace = msgspec.json.decode(dump, type=_Trace)
        recorded = trace.entries or []
        reached = _tables(trace.pg_status, or_nothing=bool(recorded))
    except UNREADABLE as error:
        raise ValueError(f"not a flight recorder dump: {error}") from error
    entries, broken = [], ""
    for raw in recorded:
        try:
            entries.append(_numbered(_entry(raw)))
        except UNREADABLE as error:
            broken = broken or str(error)
    unread = len(recorded) - len(entries)
    entries = _settled(_living(entries))
    ranks = _ranks(_tables(trace.pg_config, or_nothing=True))
    return Dump(entries, len(recorded), unread, broken, reached, ranks, _is_timed(entries))


def _entry(raw: msgspec.Raw) -> Entry:
    """Read one entry; programs that write a dump anew make texts of numbers, nulls of empty lists and lists of one."""
    try:
        return _ENTRY.decode(raw)
    except UNREADABLE:
        told = msgspec.json.decode(raw, type=dict[str, object])
        if "profiling_name" not in told:
            raise
        kept = {key: value for key, value in told.items() if value is not None or key not in _LISTS}
        if isinstance(group := kept.get("process_group"), str):
            kept["process_group"] = [group]
        return msgspec.convert(kept, Entry, strict=False)


def _numbered(entry: Entry) -> Entry:
    """Give a collective of torch 2.3 its number, and a send or a receive the mark that it is one."""
    if entry.collective_seq_id < 0 <= entry.seq_id:
        entry.is_p2p = entry.is_p2p or entry.name in ("send", "recv")
        entry.collective_seq_id = -1 if entry.is_p2p else entry.seq_id
    return entry


def _settled(entries: list[Entry]) -> list[Entry]:
    """Take what NCCL retired for an end where a later call of its group has ended, too: a time-out is the last."""
    ended: set[tuple[str, bool]] = set()
    for entry in reversed(entries):
        order = entry.group, entry.is_p2p
        if entry.retired and order in ended:
            entry.state = "completed"
        if entry.retired or entry.state == "completed":
            ended.add(order)
    return entries


def _tables(raw: msgspec.Raw, *, or_nothing: bool) -> dict[str, dict[str, object]]:
    """Return a table by group; nothing where that can't be read and the entries suffice."""
    try:
        return msgspec.json.decode(raw, type=dict[str, dict[str, object]])
    except UNREADABLE:
        if or_nothing:
            return {}
        raise


def _living(entries: Sequence[Entry]) -> list[Entry]:
    """Leave out groups that have ended: the recorder keeps them, and a later group may have the name of one."""
    begins = begun_anew((entry.group, -1 if entry.is_p2p else entry.collective_seq_id) for entry in entries)
    return [entry for at, entry in enumerate(entries) if at >= begins.get(entry.group, 0)]


def _ranks(config: Mapping[str, Mapping[str, object]]) -> dict[str, list[int]]:
    """Return the ranks of each group by its name, in the group's order, which is by rank."""
    found = {}
    for name, told in config.items():
        try:
            ranks = msgspec.json.decode(str(told.get("ranks", "")).encode(), type=list[int])
        except UNREADABLE:
            continue
        if name and ranks and min(ranks) >= 0 and max(ranks) < MOST_RANKS:
            found[name] = ranks
    return found


def _is_timed(entries: Sequence[Entry]) -> bool:
    """Return whether starts are known: an entry has one, and not as late as its end, as hooks write it."""
    return any(
        entry.time_discovered_started_ns and entry.time_discovered_started_ns != entry.time_discovered_completed_ns
        for entry in entries
    )
