# SPDX-License-Identifier: Apache-2.0
"""From blocks of a controller to one small file that can be sent: cut out, made anonymous, thinned, and held to it.

Each step is followed by a replay, and the file that comes out says what the blocks said: the ways to thin a recording
are tried from the one that takes most, and the first that changes no verdict is taken. One without any incident is to
show that nothing is wrong with what it has, so it keeps the times of steps and collectives.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from megascale_ops.replay.anonymous import Anonymiser, anonymise, anonymiser_of
from megascale_ops.replay.drive import begun_later, replay
from megascale_ops.replay.files import Recording
from megascale_ops.replay.thinning import FEW, WAYS, thin
from megascale_ops.replay.verdicts import Judged, compare, judged, recorded_incidents
from megascale_ops.schema.recording.entries import Beat, Start

# 4,000 entries: two minutes of 32 nodes, some 60 kB. Of more the time before an incident is most of the file.
_MANY = 4000
# 15 s: three times as long as a node is silent until it is looked at.
_BEFORE_S = 15.0


class Exported(NamedTuple):
    """A recording to be written, and what is known of it."""

    recording: Recording
    recorded: tuple[Judged, ...]  # what was said when it happened
    replayed: tuple[Judged, ...]  # what a replay of the whole says, with the names of the file
    notes: tuple[str, ...]  # what a person should know before sending it


def export(
    recording: Recording,
    *,
    is_anonymous: bool = True,
    is_thinned: bool = True,
    tell: Callable[[str], None] = lambda _text: None,
) -> Exported:
    """Return a recording as it can be sent.

    Args:
        recording: of one job, cut out.
        is_anonymous: replace all names and texts of the user's.
        is_thinned: leave out what changes no verdict.
        tell: is given what is being done.
    """
    notes = []
    tell("replaying it as it was recorded")
    said = judged(replay(recording).incidents)
    recorded = judged(recorded_incidents(recording))
    if not compare(recorded, said).is_none:
        notes.append("replayed as it was recorded it says something else than was said then; replay it to see what")
    made = _later(recording, said, tell) if is_thinned and len(recording.entries) > _MANY else recording
    if made is not recording:
        notes.append(
            f"of {recording.span_s:.0f} s the last {made.span_s:.0f} are kept, with what was known when they began"
        )
    if is_anonymous:
        one = anonymiser_of(made)
        made = anonymise(made, one)
        said, recorded = _renamed(one, said), _renamed(one, recorded)
        tell("replaying it without names and texts")
        without = judged(replay(made).incidents)
        if not compare(said, without).is_none:
            notes.append("without names and texts it says something else: one of them has decided; --as-it-is keeps it")
            said = without
    if is_thinned:
        thinned = _thinned(made, said, tell)
        if thinned is None:
            notes.append("all of it is kept: each way to make it smaller changes a verdict")
        made = thinned or made
    return Exported(made, recorded, said, tuple(notes))


def _later(recording: Recording, said: tuple[Judged, ...], tell: Callable[[str], None]) -> Recording:
    """Return what came shortly before the first incident and since then, where that says the same; else all."""
    began_s = [one.marks.began - recording.header.began_wall_s for one in recorded_incidents(recording)]
    from_s = min(began_s, default=0.0) - _BEFORE_S
    if not said or from_s <= 0.0:
        return recording
    tell(f"replaying its last {recording.span_s - from_s:.0f} s")
    later = begun_later(recording, from_s)
    return later if compare(said, judged(replay(later).incidents)).is_none else recording


def _thinned(recording: Recording, said: tuple[Judged, ...], tell: Callable[[str], None]) -> Recording | None:
    """Return the smallest that says the same; None where none does."""
    has_ended = any(not one.is_warning for one in said)
    ways = WAYS if has_ended else WAYS[1:] if said else WAYS[2:]
    for way in (FEW, *ways) if has_ended and len(recording.entries) > _MANY else ways:
        thinned = thin(recording, way)
        tell(f"replaying it thinned ({way.name})")
        if compare(said, judged(replay(thinned).incidents)).is_none:
            return thinned
    return None


def _renamed(one: Anonymiser, verdicts: tuple[Judged, ...]) -> tuple[Judged, ...]:
    return tuple(
        verdict._replace(nodes=tuple(one.name("node-", node) for node in verdict.nodes), fault=one.word(verdict.fault))
        for verdict in verdicts
    )


class Contents(NamedTuple):
    """What is in a recording, for a person who is about to send it."""

    job: str
    span_s: float
    nodes: tuple[str, ...]
    ranks: int
    entries: dict[str, int]  # by kind
    texts: dict[str, tuple[str, ...]]  # every string that is no word of our tables, by the field that it is in
    is_anonymous: bool
    thinned: str


def contents(recording: Recording) -> Contents:
    """Return what is in a recording."""
    counted = Counter(entry.__struct_config__.tag for entry in recording.entries)
    nodes: dict[str, None] = {}
    ranks: set[int] = set()
    texts: dict[str, dict[str, None]] = {}
    for entry in recording.entries:
        for heartbeat in _heartbeats_of(entry):
            nodes.setdefault(heartbeat.node)
            ranks |= {rank.rank for report in heartbeat.jobs for rank in report.ranks}
        for field, text in _strings(entry, ""):
            texts.setdefault(field, {}).setdefault(text)
    return Contents(
        job=recording.header.job,
        span_s=recording.span_s,
        nodes=tuple(nodes),
        ranks=len(ranks),
        entries={str(kind): number for kind, number in counted.items()},
        texts={field: tuple(found) for field, found in sorted(texts.items())},
        is_anonymous=recording.header.is_anonymous,
        thinned=recording.header.thinned,
    )


def _heartbeats_of(entry: object) -> Iterator[Any]:
    if isinstance(entry, Beat):
        yield entry.m
    elif isinstance(entry, Start):
        yield from (agent.m for agent in entry.agents)


def _strings(value: object, field: str) -> Iterator[tuple[str, str]]:
    """Yield every string in a value with its field."""
    if isinstance(value, str):
        if value:
            yield field, value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _strings(getattr(value, name), name)
    elif isinstance(value, tuple):
        for one in value:
            yield from _strings(one, field)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield field, key
            yield from _strings(one, field)
    elif isinstance(value, msgspec.Raw):
        yield from _strings(_plain(msgspec.json.decode(bytes(value))), field)


def _plain(value: object) -> object:
    """Return JSON with tuples for lists, as messages have them."""
    if isinstance(value, list):
        return tuple(_plain(one) for one in value)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value
