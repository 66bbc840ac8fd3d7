# SPDX-License-Identifier: Apache-2.0
"""Read a Perfetto trace with the classes of the ``perfetto`` package alone, and forgive nothing.

As the viewer does: strings by number, slices by begin and end, tracks by their parents.
"""

from typing import Any, NamedTuple

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace


class DecodedTrack(NamedTuple):
    """A descriptor; ``pid`` is 0 for what is no process, ``unit`` "" for what holds no samples."""

    uuid: int
    parent: int
    name: str
    pid: int
    place: int
    unit: str


class DecodedSlice(NamedTuple):
    """A slice, or an instant with ``end_ns`` equal to its beginning; ``depth`` 0 is the outermost."""

    track: int
    name: str
    begin_ns: int
    end_ns: int
    depth: int
    args: dict[str, Any]
    arrows_out: tuple[int, ...]
    arrows_in: tuple[int, ...]
    kin: int
    is_instant: bool


class Decoded(NamedTuple):
    """A whole trace; slices in the order of their beginnings in the file."""

    tracks: dict[int, DecodedTrack]
    slices: list[DecodedSlice]
    samples: list[tuple[int, int, float]]  # track, time, value
    attributes: dict[str, str | int]
    clocks: dict[int, int]

    def track_of(self, group: str, name: str) -> int:
        """Return the number of the one track of this name in the group whose name begins so."""
        (found,) = (
            track.uuid
            for track in self.tracks.values()
            if track.name == name and self.tracks[track.parent].name.startswith(group)
        )
        return found

    def on(self, group: str, name: str) -> list[DecodedSlice]:
        """Return the slices of one track."""
        track = self.track_of(group, name)
        return [one for one in self.slices if one.track == track]


def decode(data: bytes) -> Decoded:
    """Decode and check: events refer to tracks and strings that came before, slices nest, times on a track rise."""
    trace = Trace.FromString(data)
    strings: dict[tuple[str, int], str] = {}
    found = Decoded({}, [], [], {}, {})
    open_slices: dict[int, list[int]] = {}
    last_ns: dict[int, int] = {}
    for packet in trace.packet:
        for field in ("event_names", "debug_annotation_names"):
            strings.update({(field, one.iid): one.name for one in getattr(packet.interned_data, field)})
        for one in packet.interned_data.debug_annotation_string_values:
            strings["values", one.iid] = one.str.decode()
        found.clocks.update({one.clock_id: one.timestamp for one in packet.clock_snapshot.clocks})
        for one in packet.trace_attributes.attribute:
            found.attributes[one.key] = one.string_value if one.HasField("string_value") else one.long_value
        if packet.HasField("track_descriptor"):
            _add_track(found, packet.track_descriptor)
        if packet.HasField("track_event"):
            event = packet.track_event
            assert event.track_uuid in found.tracks
            assert packet.timestamp >= last_ns.get(event.track_uuid, 0), "time runs backwards on a track"
            last_ns[event.track_uuid] = packet.timestamp
            _add_event(found, packet.timestamp, event, strings, open_slices.setdefault(event.track_uuid, []))
    assert not any(open_slices.values()), "a slice has no end"
    return found


def assert_arrows_whole(trace: Decoded) -> int:
    """Check that every arrow has one beginning and one end, forward in time, on two ranks; return their number."""
    begins = {arrow: one for one in trace.slices for arrow in one.arrows_out}
    ends = {arrow: one for one in trace.slices for arrow in one.arrows_in}
    assert len(begins) == sum(len(one.arrows_out) for one in trace.slices), "an arrow begins twice"
    assert len(ends) == sum(len(one.arrows_in) for one in trace.slices), "an arrow ends twice"
    assert begins.keys() == ends.keys()
    for arrow, begin in begins.items():
        end = ends[arrow]
        assert end.begin_ns >= begin.end_ns
        assert trace.tracks[begin.track].parent != trace.tracks[end.track].parent
    return len(begins)


def _add_track(found: Decoded, descriptor: Any) -> None:  # noqa: ANN401  generated classes
    if descriptor.uuid == 0:
        assert descriptor.process_ordering == descriptor.PROCESS_ORDERING_EXPLICIT
        return
    assert descriptor.uuid not in found.tracks
    assert bool(descriptor.parent_uuid) != descriptor.HasField("process")
    assert not descriptor.parent_uuid or descriptor.parent_uuid in found.tracks
    found.tracks[descriptor.uuid] = DecodedTrack(
        descriptor.uuid, descriptor.parent_uuid, descriptor.name, descriptor.process.pid,
        descriptor.sibling_order_rank, descriptor.counter.unit_name,
    )  # fmt: skip


def _add_event(
    found: Decoded,
    at_ns: int,
    event: Any,  # noqa: ANN401  generated classes
    strings: dict[tuple[str, int], str],
    stack: list[int],
) -> None:
    if event.type == event.TYPE_SLICE_END:
        place = stack.pop()
        begun = found.slices[place]
        assert all(
            begun.begin_ns <= inner.begin_ns and inner.end_ns <= at_ns
            for inner in found.slices[place + 1 :]
            if inner.track == begun.track and inner.depth > begun.depth
        )
        found.slices[place] = begun._replace(end_ns=at_ns)
    elif event.type == event.TYPE_COUNTER:
        assert found.tracks[event.track_uuid].unit
        found.samples.append((event.track_uuid, at_ns, event.double_counter_value))
    else:
        instant = event.type == event.TYPE_INSTANT
        assert instant or event.type == event.TYPE_SLICE_BEGIN
        found.slices.append(
            DecodedSlice(
                event.track_uuid,
                strings["event_names", event.name_iid],
                at_ns,
                at_ns if instant else -1,
                len(stack),
                {
                    strings["debug_annotation_names", one.name_iid]: _value(one, strings)
                    for one in event.debug_annotations
                },
                tuple(event.flow_ids),
                tuple(event.terminating_flow_ids),
                event.correlation_id,
                instant,
            )
        )
        if not instant:
            stack.append(len(found.slices) - 1)


def _value(annotation: Any, strings: dict[tuple[str, int], str]) -> str | int | float:  # noqa: ANN401  as above
    kind = annotation.WhichOneof("value")
    value: str | int | float = getattr(annotation, kind)
    return strings["values", int(value)] if kind == "string_value_iid" else value
