# SPDX-License-Identifier: Apache-2.0
"""The words of a drawn timeline, before any file format: tracks, slices on them, marks and samples.

Times are nanoseconds on the clock of the reference node. A trace of 8 ranks and 1,000 steps has 600,000 slices, so they
are structs that Python's collector of garbage does not look at.
"""

from typing import NamedTuple, TypeAlias

import msgspec

# Arguments that repeat from slice to slice are kept apart from those that never do: a writer encodes them once.
Args: TypeAlias = tuple[tuple[str, str | int | float], ...]


class Group(NamedTuple):
    """A group of tracks that belong together: one rank, or the job itself. ``number`` is above 0 and unique."""

    number: int
    name: str
    about: str = ""


class Track(NamedTuple):
    """One line of the picture. ``number`` is above all groups' numbers; ``unit`` is "" unless it holds samples."""

    number: int
    group: int
    name: str
    unit: str = ""
    about: str = ""


class Mark(msgspec.Struct, frozen=True, gc=False):
    """A moment. ``leads_to`` are the arrows that begin here."""

    track: int
    name: str
    at_ns: int
    args: Args = ()
    leads_to: tuple[int, ...] = ()


class Slice(msgspec.Struct, frozen=True, gc=False):
    """A span of time with what lies inside of it, in order and without overlap.

    ``kin`` is the same number for the same collective on all ranks (0: none); ``follows`` the arrow that ends at its
    beginning (0: none).
    """

    track: int
    name: str
    begin_ns: int
    end_ns: int
    args: Args = ()
    seq: int = -1
    inner: tuple["Slice | Mark", ...] = ()
    kin: int = 0
    follows: int = 0


class Sample(msgspec.Struct, frozen=True, gc=False):
    """A value from ``at_ns`` on."""

    track: int
    at_ns: int
    value: float


Event: TypeAlias = Slice | Mark | Sample
