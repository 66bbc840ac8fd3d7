# SPDX-License-Identifier: Apache-2.0
"""Write a timeline as a Perfetto trace, for https://ui.perfetto.dev.

Each group is a process of its own with a number that we give (rank 3 is process 4: 0 is the kernel's), its tracks are
children in an order that we state. Descriptors and all that comes once goes through the generated classes; the events
are spliced from pieces (``wire``). Strings are written once and named by number from then on.

Field numbers: protos/perfetto/trace/{trace_packet,track_event/track_event,track_event/debug_annotation}.proto.
"""

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from struct import pack
from typing import Any

from megascale_ops.trace.scene import Args, Mark, Sample, Slice
from megascale_ops.trace.timeline import Timeline
from megascale_ops.trace.wire import SHORT, nested, stamp, tag, varint

SUFFIX = ".pftrace"
_SEQUENCE = 1  # all packets are of one writer: strings are numbered within it
_CLEARED, _NEEDS_STATE = 1, 2  # SequenceFlags
_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4  # TrackEvent.Type
_BOOTTIME, _REALTIME = 6, 1  # BuiltinClock; timestamps are read as BOOTTIME when no other clock is set

_PACKET = tag(1, 2)
_TIMESTAMP = tag(8, 0)
# Every event: its sequence, and that it uses strings which came before it.
_HEAD = tag(10, 0) + varint(_SEQUENCE) + tag(13, 0) + varint(_NEEDS_STATE) + tag(11, 2)
_FLOW, _FLOW_END = tag(47, 1), tag(48, 1)
_CORRELATION = tag(52, 0)
_ANNOTATION = 4
_ARGUMENT, _NAME, _INTEGER = tag(_ANNOTATION, 2), tag(1, 0), tag(4, 0)
_LONGEST = 16_000
_CHUNK = 4096  # events that are joined before they go to the file: a system call costs as much as ten of them


class PerfettoWriter:
    """Turns a timeline into bytes. ``slices`` and ``arrows`` count what has been written.

    Raises:
        ModuleNotFoundError: the package ``perfetto`` is not installed.
    """

    def __init__(self, timeline: Timeline) -> None:
        # By name: the package brings no types, and is not installed everywhere.
        messages: Any = import_module("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
        builders: Any = import_module("perfetto.trace_builder.proto_builder")
        self._timeline = timeline
        self._new_builder = builders.TraceProtoBuilder
        self._interned = messages.InternedData
        self._packet = messages.TracePacket
        self._names: dict[str, int] = {}
        self._keys: dict[str, int] = {}
        self._values: dict[str, int] = {}
        self._fresh: list[bytes] = []  # packets with strings that the next event needs
        self._heads: dict[tuple[int, int, str, Args], bytes] = {}
        self._seq = _NAME + varint(self._number(self._keys, "debug_annotation_names", "seq")) + _INTEGER
        self.slices = 0
        self.arrows = 0

    def opening(self) -> bytes:
        """Return the beginning of the file: clocks, attributes, and the descriptors of all tracks."""
        builder = self._new_builder()
        first = builder.add_packet()
        first.trusted_packet_sequence_id = _SEQUENCE
        first.sequence_flags = _CLEARED
        first.timestamp = self._timeline.begin_ns
        clocks = ((_BOOTTIME, 0), (_REALTIME, self._timeline.clocks.wall_minus_mono_ns))
        for clock_id, offset_ns in clocks:
            clock = first.clock_snapshot.clocks.add()
            clock.clock_id, clock.timestamp = clock_id, max(0, self._timeline.begin_ns + offset_ns)
        self._add_attributes(builder)
        self._add_groups(builder)
        self._add_tracks(builder)
        return bytes(builder.serialize())

    def window(self, window: int) -> Iterator[bytes]:
        """Yield the events of one window of the timeline."""
        out: list[bytes] = []
        for event in self._timeline.events(window):
            if isinstance(event, Slice):
                self._slice(event, out)
            else:
                out.append(self._mark(event) if isinstance(event, Mark) else _packet(event.at_ns, _sample(event)))
            if len(out) >= _CHUNK:
                yield b"".join(out)
                out.clear()
        yield b"".join(out)

    def closing(self) -> bytes:
        """Return what ends the file: nothing, for Perfetto."""
        return b""

    def _slice(self, event: Slice, out: list[bytes]) -> None:
        """Append a slice and what lies inside of it: this runs half a million times, so it calls little."""
        track, name, args = event.track, event.name, event.args
        self.slices += 1
        head = self._heads.get((_BEGIN, track, name, args)) or self._head(_BEGIN, track, name, args)
        if event.seq >= 0:
            number = varint(event.seq)
            head += b"".join((_ARGUMENT, SHORT[len(self._seq) + len(number)], self._seq, number))
        if event.kin:
            head += _CORRELATION + varint(event.kin)
        if event.follows:
            self.arrows += 1
            head += _FLOW_END + pack("<Q", event.follows)
        if self._fresh:
            out += self._flush()
        out.append(_packet(event.begin_ns, head))
        for one in event.inner:
            if isinstance(one, Slice):
                self._slice(one, out)
            else:
                out.append(self._mark(one))
        out.append(_packet(event.end_ns, _end(track)))

    def _mark(self, event: Mark) -> bytes:
        head = self._head(_INSTANT, event.track, event.name, event.args)
        head += b"".join(_FLOW + pack("<Q", arrow) for arrow in event.leads_to)
        return b"".join((*self._flush(), _packet(event.at_ns, head)))

    def _head(self, kind: int, track: int, name: str, args: Args) -> bytes:
        """Return the part of an event that repeats."""
        known = (kind, track, name, args)
        head = self._heads.get(known)
        if head is None:
            head = tag(9, 0) + varint(kind) + tag(11, 0) + varint(track)
            head += tag(10, 0) + varint(self._number(self._names, "event_names", name))
            head += b"".join(self._argument(key, value) for key, value in args)
            if len(self._heads) >= 1 << 16:  # 65,536: arguments that never repeat may not fill the memory
                self._heads.clear()
            self._heads[known] = head
        return head

    def _argument(self, key: str, value: str | float) -> bytes:
        """Return one argument as it stands inside an event."""
        number = self._keys.get(key) or self._number(self._keys, "debug_annotation_names", key)
        name = _NAME + varint(number)
        if isinstance(value, str):
            number = self._number(self._values, "debug_annotation_string_values", value)
            return nested(_ANNOTATION, name + tag(17, 0) + varint(number))
        if isinstance(value, int):  # a negative number is ten bytes long
            body = name + _INTEGER + varint(value & (1 << 64) - 1)
            return _ARGUMENT + varint(len(body)) + body
        return nested(_ANNOTATION, name + tag(5, 1) + pack("<d", value))

    def _number(self, known: dict[str, int], field: str, text: str) -> int:
        """Return a string's number; a new string is to be written before the event that uses it."""
        number = known.get(text)
        if number is None:
            number = known[text] = len(known) + 1
            interned = self._interned()
            entry = getattr(interned, field).add()
            entry.iid = number
            if field == "debug_annotation_string_values":
                entry.str = text.encode(errors="replace")
            else:
                entry.name = text.encode(errors="replace").decode()
            packet = self._packet(
                trusted_packet_sequence_id=_SEQUENCE, sequence_flags=_NEEDS_STATE, interned_data=interned
            )
            self._fresh.append(nested(1, packet.SerializeToString()))
        return number

    def _flush(self) -> list[bytes]:
        fresh, self._fresh = self._fresh, []
        return fresh

    def _add_attributes(self, builder: Any) -> None:  # noqa: ANN401  the package has no types
        """Write the trace's attributes; older Perfetto has none, and shows the job's mark instead."""
        packet = builder.add_packet()
        if hasattr(packet, "trace_attributes"):
            for key, value in self._timeline.scope.about:
                attribute = packet.trace_attributes.attribute.add()
                attribute.key = f"megascale: {key}"
                if isinstance(value, int):
                    attribute.long_value = value
                else:
                    attribute.string_value = str(value)

    def _add_groups(self, builder: Any) -> None:  # noqa: ANN401  as above
        root = builder.add_packet().track_descriptor
        root.uuid = 0
        if hasattr(root, "process_ordering"):  # without it processes stand in whatever order the viewer likes
            root.process_ordering = root.PROCESS_ORDERING_EXPLICIT
        for place, group in enumerate(self._timeline.groups):
            track = builder.add_packet().track_descriptor
            track.uuid = group.number
            track.name = group.name
            track.process.pid = group.number
            track.process.process_name = group.name
            track.process.legacy_sort_index = place
            track.child_ordering = track.EXPLICIT
            track.sibling_order_rank = place
            if group.about:
                track.description = group.about

    def _add_tracks(self, builder: Any) -> None:  # noqa: ANN401  as above
        for place, one in enumerate(self._timeline.tracks):
            track = builder.add_packet().track_descriptor
            track.uuid, track.parent_uuid, track.name = one.number, one.group, one.name
            track.sibling_order_rank = place
            if one.unit:
                track.counter.unit_name = one.unit


def _packet(at_ns: int, event: bytes) -> bytes:
    if len(event) > _LONGEST:  # the mark of the ranks that came last, when more than 1,600 ranks are drawn
        return nested(1, b"".join((_TIMESTAMP, stamp(at_ns), _HEAD, varint(len(event)), event)))
    body = b"".join((_TIMESTAMP, stamp(at_ns), _HEAD, SHORT[len(event)], event))
    return b"".join((_PACKET, SHORT[len(body)], body))


@cache
def _end(track: int) -> bytes:
    return tag(9, 0) + varint(_END) + tag(11, 0) + varint(track)


@cache
def _counter(track: int) -> bytes:
    return tag(9, 0) + varint(_COUNTER) + tag(11, 0) + varint(track) + tag(44, 1)


def _sample(event: Sample) -> bytes:
    return _counter(event.track) + pack("<d", event.value)
