# SPDX-License-Identifier: Apache-2.0
"""What happened when, in virtual time: the records that a trace is made of."""

from typing import NamedTuple

START = "start"
END = "end"
WAIT = "wait"
ARRIVED = "arrived"
GAVE_UP = "gave up"
NOTIFY = "notify"
DROPPED = "dropped"


class Who(NamedTuple):
    """A program of a kernel, or a host operation (program 0), on one rank.

    Attributes:
        rank: the rank it runs on.
        kernel: the kernel's name.
        program: linear index in the grid.
        stream: name of the stream.
        launch: number of the operation in the world's life.
    """

    rank: int
    kernel: str
    program: int
    stream: str
    launch: int

    def __str__(self) -> str:
        return f"rank {self.rank} {self.kernel}[{self.program}]"


class Event(NamedTuple):
    """One thing that a program did.

    Attributes:
        at_ns: virtual time.
        who: the program.
        what: `START`, `END`, `WAIT`, `ARRIVED`, `GAVE_UP`, `NOTIFY` or `DROPPED`.
        peer: the rank waited for or notified; -1 for start and end.
        channel: the flag's index; -1 for start and end.
        tile: the tile in hand of a wait, else -1.
        value: the stamp waited for or written; of `GAVE_UP` the code that the wait returned.
    """

    at_ns: int
    who: Who
    what: str
    peer: int = -1
    channel: int = -1
    tile: int = -1
    value: int = 0


class Notify(NamedTuple):
    """A release that is about to be written into a flag; a world's `drop` decides whether it gets lost.

    Attributes:
        who: the program that notifies.
        target: the rank in whose memory the flag lies.
        slot: the flag's slot.
        source: the rank whose flag it is.
        channel: index of the flag.
        stamp: what is written.
    """

    who: Who
    target: int
    slot: int
    source: int
    channel: int
    stamp: int
