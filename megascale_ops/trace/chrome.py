# SPDX-License-Identifier: Apache-2.0
"""Write a timeline as Chrome's trace JSON, for chrome://tracing and whatever else reads it; Perfetto does, too.

The format is "Trace Event Format" (Google, 2016): complete events ("X"), instants ("i"), counters ("C"), metadata ("M")
and flows ("s", "f"). Times are microseconds with three decimals after the trace's first event. One event a line.
"""

import json
from collections.abc import Iterator
from functools import lru_cache

from megascale_ops.trace.scene import Args, Event, Mark, Slice
from megascale_ops.trace.timeline import Timeline

SUFFIX = ".json"
_ARROW = '"cat":"collective","name":"last arrival"'
_CHUNK = 4096  # events that are joined before they go to the file: a system call costs as much as ten of them


class ChromeWriter:
    """Turns a timeline into bytes. ``slices`` and ``arrows`` count what has been written."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._where = {one.number: f'"pid":{one.group},"tid":{one.number},"ts":' for one in timeline.tracks}
        self._track_name = {track.number: track.name for track in timeline.tracks}
        self.slices = 0
        self.arrows = 0

    def opening(self) -> bytes:
        """Return the beginning of the file: what it is about, and the names of all groups and tracks."""
        other: dict[str, str | int | float] = dict(self._timeline.scope.about)
        other["begins at ns of the reference clock"] = self._timeline.begin_ns
        head = f'{{"displayTimeUnit":"ns","otherData":{json.dumps(other)},"traceEvents":[\n'
        return (head + ",\n".join(self._names())).encode()

    def window(self, window: int) -> Iterator[bytes]:
        """Yield the events of one window of the timeline."""
        out: list[str] = []
        for event in self._timeline.events(window):
            self._add(event, out)
            if len(out) >= _CHUNK:
                yield "".join(out).encode()
                out.clear()
        yield "".join(out).encode()

    def closing(self) -> bytes:
        """Return what ends the file."""
        return b"\n]}\n"

    def _names(self) -> Iterator[str]:
        for place, group in enumerate(self._timeline.groups):
            name = {"ph": "M", "pid": group.number, "tid": 0, "name": "process_name", "args": {"name": group.name}}
            order = {**name, "name": "process_sort_index", "args": {"sort_index": place}}
            yield json.dumps(name)
            yield json.dumps(order)
        for place, track in enumerate(self._timeline.tracks):
            if not track.unit:
                name = {"ph": "M", "pid": track.group, "tid": track.number, "name": "thread_name"}
                yield json.dumps({**name, "args": {"name": track.name}})
                yield json.dumps({**name, "name": "thread_sort_index", "args": {"sort_index": place}})

    def _add(self, event: Event, out: list[str]) -> None:
        where = self._where[event.track]
        if isinstance(event, Slice):
            self._add_slice(event, where, out)
        elif isinstance(event, Mark):
            at = self._time(event.at_ns)
            out.append(
                f',\n{{"ph":"i","s":"t",{where}{at},"name":{_quoted(event.name)},"args":{_arguments(event.args)}}}'
            )
            out += [f',\n{{"ph":"s",{where}{at},"id":{arrow},{_ARROW}}}' for arrow in event.leads_to]
        else:
            name, at = _quoted(self._track_name[event.track]), self._time(event.at_ns)
            out.append(f',\n{{"ph":"C",{where}{at},"name":{name},"args":{{"value":{event.value!r}}}}}')

    def _add_slice(self, event: Slice, where: str, out: list[str]) -> None:
        self.slices += 1
        begin = self._time(event.begin_ns)
        took_ns = event.end_ns - event.begin_ns
        args = event.args if event.seq < 0 else (*event.args, ("seq", event.seq))
        inside = f',"args":{_arguments(args)}' if args else ""
        took = f"{took_ns // 1000}.{took_ns % 1000:03d}"
        out.append(f',\n{{"ph":"X",{where}{begin},"dur":{took},"name":{_quoted(event.name)}{inside}}}')
        if event.follows:
            self.arrows += 1
            out.append(f',\n{{"ph":"f","bp":"e",{where}{begin},"id":{event.follows},{_ARROW}}}')
        for one in event.inner:
            self._add(one, out)

    def _time(self, at_ns: int) -> str:
        since_ns = at_ns - self._timeline.begin_ns
        sign, since_ns = ("-", -since_ns) if since_ns < 0 else ("", since_ns)
        return f"{sign}{since_ns // 1000}.{since_ns % 1000:03d}"


def _arguments(args: Args) -> str:
    return "{" + ",".join([f"{_quoted(key)}:{_quoted(value)}" for key, value in args]) + "}"


def _quoted(value: str | float) -> str:
    """Return a value as JSON."""
    return _quoted_text(value) if isinstance(value, str) else json.dumps(value)


@lru_cache(1 << 14)
def _quoted_text(text: str) -> str:
    """Return a text as JSON; names repeat."""
    return json.dumps(text)
