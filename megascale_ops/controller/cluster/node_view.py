# SPDX-License-Identifier: Apache-2.0
"""One agent's view of its node, and its report of one job.

What changes with every heartbeat lies in columns (``columns``), and reads as fields here.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from megascale_ops.controller.cluster.columns import NOWHERE, Columns
from megascale_ops.controller.cluster.steady import Told
from megascale_ops.schema.progress import RankReport

if TYPE_CHECKING:
    from megascale_ops.schema.health import HardwareFinding, HostReading

# 5 s: an agent that missed five heartbeats was itself stalled (a paused machine): judge no rank by that gap; nor will
# it execute an order in time. Of agents that were told to speak less often it is two heartbeats and a half.
AGENT_FRESH_S, FRESH_HEARTBEATS = 5.0, 2.5
_replace = msgspec.structs.replace


class Key(NamedTuple):
    """Which agent of a node it is, over all its restarts."""

    node: str
    serves: str = ""  # the user and box root that it serves; "": an older program
    only_job: str = ""


class Share:
    """One node's report of one job. Owned by the registry."""

    __slots__ = (
        "_columns", "_place", "_ranks", "_stood_mono_s", "_told", "is_placed", "is_plain", "lives", "round", "run_dir",
    )  # fmt: skip

    def __init__(self, round_: int, run_dir: str) -> None:
        self._columns: Columns | None = None  # they may know more of what all told
        self._place = NOWHERE
        self.round = round_
        self.run_dir = run_dir
        self.lives = False  # the process of at least one rank does
        self.is_plain: bool | None = None  # nothing is odd about its ranks; None: not looked at since they were told
        self.is_placed: bool | None = None  # the job's history knows where they are; None: as before
        self._ranks: dict[int, RankReport] = {}
        self._told: tuple[Told, float] | None = None  # how all have gone on since, as of when by their node's clock
        self._stood_mono_s = 0.0  # all have stood since but for their recorders' beats, the newest of them; 0: none

    @property
    def ranks(self) -> dict[int, RankReport]:
        """What is known of each rank."""
        if self._columns is not None:
            self._fetch(self._columns)
        if self._told is not None:
            told, mono_s = self._told
            self._told = None
            progress = told.progress_at(mono_s)
            for rank, report in self._ranks.items():
                self._ranks[rank] = _replace(report, progress=progress, collective=told.collective)
        if self._stood_mono_s:
            beat_mono_s, self._stood_mono_s = self._stood_mono_s, 0.0
            for rank, report in self._ranks.items():
                if report.progress is not None:
                    progress = _replace(report.progress, beat_mono_s=beat_mono_s)
                    self._ranks[rank] = _replace(report, progress=progress)
        return self._ranks

    def __len__(self) -> int:
        """How many ranks there are."""
        return len(self._ranks)

    def named(self, places: Mapping[int, int]) -> list[int]:
        """Return which of some ranks are here, in their order; ``places``: of each in that.

        A verdict may name all 100,000 ranks of a job: each node looks for its own few among them, not for each of them.
        """
        return sorted((rank for rank in self._ranks if rank in places), key=places.__getitem__)

    def lend(self, columns: Columns, place: int) -> None:
        """Let what all ranks tell be noted in columns from now on."""
        self._columns, self._place = columns, place

    def take_back(self) -> None:
        """Note it here again."""
        if self._columns is not None:
            self._fetch(self._columns)
            self._columns = None

    def _fetch(self, columns: Columns) -> None:
        place = self._place
        holder = columns.told[place]
        if holder is not None:
            columns.told[place] = None
            self._told, self._stood_mono_s = (holder.told, columns.told_mono_s.item(place)), 0.0
        stood_mono_s = columns.stood_mono_s.item(place)
        if stood_mono_s:
            columns.stood_mono_s[place] = 0.0
            self._stood_mono_s = stood_mono_s

    def go_on(self, told: Told, mono_s: float) -> None:
        """Note that all ranks have gone on; their reports are written when they are read."""
        if self._columns is not None:
            self._fetch(self._columns)
        self._told = told, mono_s
        self._stood_mono_s = 0.0

    def stand(self, beat_mono_s: float) -> None:
        """Note that no rank has moved, and when their recorders' threads beat last."""
        if self._columns is not None:
            self._fetch(self._columns)
        self._stood_mono_s = beat_mono_s


class NodeView:
    """One agent's view of its node. Owned by the registry."""

    __slots__ = (
        "_columns", "agent_id", "complete", "every_s", "findings", "fresh_s", "host", "key", "lent", "metrics", "node",
        "only_job", "place", "sender", "shares", "since",
    )  # fmt: skip

    def __init__(self, key: Key, columns: Columns) -> None:
        self.key = key
        self.sender = key[:2]
        self.node = key.node
        self._columns, self.place = columns, columns.add()
        self.lent: Share | None = None  # the one of which columns know more
        self.metrics = ""  # HOST:PORT of its /metrics
        self.only_job = key.only_job  # the job that its agent's token is for; "": it may report all
        self.agent_id = ""
        self.every_s = 1.0  # between two of its heartbeats
        self.fresh_s = AGENT_FRESH_S  # for how long after a heartbeat its agent counts as there
        self.complete = False
        self.host: HostReading | None = None
        self.findings: tuple[HardwareFinding, ...] = ()  # what is wrong with its hardware now
        self.shares: dict[str, Share] = {}
        self.since: dict[str, int] = {}  # jobs that it reports or has reported, and when it began to, in order

    @property
    def seq(self) -> int:
        """Number of its last heartbeat."""
        return self._columns.seq.item(self.place)

    @property
    def heard_s(self) -> float:
        """When it was heard last; 0: never."""
        return self._columns.heard_s.item(self.place)

    @property
    def back_s(self) -> float:
        """When its heartbeats resumed after a silence."""
        return self._columns.back_s.item(self.place)

    @property
    def sent_mono_s(self) -> float:
        """When its last heartbeat was sent."""
        return self._columns.sent_mono_s.item(self.place)

    @property
    def floor_mono_s(self) -> float:
        """The sender's clock when its deadline began anew."""
        return self._columns.floor_mono_s.item(self.place)

    @floor_mono_s.setter
    def floor_mono_s(self, mono_s: float) -> None:
        self._columns.floor_mono_s[self.place] = mono_s

    @property
    def stirred(self) -> int:
        """The registry's number of the last heartbeat that told of more than time passing."""
        return self._columns.stirred.item(self.place)

    @stirred.setter
    def stirred(self, number: int) -> None:
        self._columns.stirred[self.place] = number

    def speaks_every(self, every_s: float) -> None:
        """Note how long its agent leaves between two heartbeats."""
        self.every_s = every_s
        self.fresh_s = max(AGENT_FRESH_S, every_s * FRESH_HEARTBEATS)

    def hear(self, now_s: float) -> None:
        """Note that its agent was heard."""
        columns, place = self._columns, self.place
        heard_s = columns.heard_s.item(place)
        if heard_s and now_s - heard_s > self.fresh_s:
            columns.back_s[place] = now_s
        columns.heard_s[place] = now_s

    def note(self, seq: int, mono_s: float, now_s: float) -> None:
        """Note a heartbeat of its agent."""
        self.hear(now_s)
        columns, place = self._columns, self.place
        columns.seq[place] = seq
        columns.sent_mono_s[place] = mono_s
        columns.hear(place)

    def lend(self, share: Share, awaited: int) -> None:
        """Let its heartbeats be taken in with those of many, until one of its own comes."""
        columns, place = self._columns, self.place
        if self.lent is not share:
            self.take_back()
            share.lend(columns, place)
            self.lent = share
        columns.awaited[place] = awaited
        columns.agents[place] = self.agent_id
        columns.fresh_s[place] = self.fresh_s
        columns.size[place] = len(share)
        columns.is_placed[place] = bool(share.is_placed)

    def take_back(self) -> None:
        """Take its heartbeats by themselves again."""
        if self.lent is not None:
            self.lent.take_back()
            self.lent = None
            self._columns.awaited[self.place] = 0
