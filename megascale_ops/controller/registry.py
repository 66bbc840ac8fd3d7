# SPDX-License-Identifier: Apache-2.0
"""The cluster as the agents last described it, folded from heartbeats.

Heartbeats come late, twice, out of order, with gaps, from an agent that was restarted, and after the controller itself
was restarted. The rules that make one view of them:

- Per agent the sequence number only rises; anything else is dropped.
- A gap, a new agent or a new controller means that something is unknown: ask for a full heartbeat until one came.
- A full heartbeat replaces what is known of the node, a partial one updates the ranks it names.
- A node's share of a job belongs to one round; whoever judges asks for the ranks of one round and sees no other.

Two clocks never mix: ``heard_s`` is the controller's, everything ``*_mono_s`` is the sender's. How long a rank has been
silent is said in its own node's clock as of the node's last heartbeat, so a late heartbeat accuses nobody.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from megascale_ops.schema.messages import Heartbeat, JobReport
from megascale_ops.schema.progress import RankReport

if TYPE_CHECKING:
    from megascale_ops.schema.health import HardwareFinding, HostReading

# 5 s: an agent that did not speak for five heartbeats was itself stalled (a paused machine): judge nobody by that gap.
STALL_S = 5.0
# 15 s: for so long a superseded agent is not believed any more; then it may be the only one that is left.
TAKEOVER_S = 15.0
GONE = ("", "Z", "X")
_replace = msgspec.structs.replace


class Share:
    """What one node says of one job. Owned by the registry."""

    __slots__ = ("lives", "ranks", "round", "run_dir")

    def __init__(self, round_: int, run_dir: str) -> None:
        self.round = round_
        self.run_dir = run_dir
        self.lives = False  # the process of at least one rank does
        self.ranks: dict[int, RankReport] = {}


class NodeView:
    """What one agent says. Owned by the registry."""

    __slots__ = (
        "agent_id", "complete", "findings", "floor_mono_s", "heard_s", "host", "metrics", "node", "only_job",
        "sent_mono_s", "seq", "shares",
    )  # fmt: skip

    def __init__(self, node: str) -> None:
        self.node = node
        self.metrics = ""  # HOST:PORT of its /metrics
        self.only_job = ""  # the job that its agent's token is for; "": it may speak of all
        self.agent_id = ""
        self.seq = 0
        self.complete = False
        self.heard_s = 0.0
        self.sent_mono_s = 0.0
        self.floor_mono_s = 0.0  # the sender's clock when patience began anew
        self.host: HostReading | None = None
        self.findings: tuple[HardwareFinding, ...] = ()  # what is wrong with its hardware now
        self.shares: dict[str, Share] = {}


class Folded(NamedTuple):
    """What became of one heartbeat."""

    accepted: bool
    send_full: bool
    node: NodeView


class Reached(NamedTuple):
    """How far a rank is, in numbers that only grow."""

    step: int
    completed: int  # collectives


class RankView(NamedTuple):
    """One rank for judgement; ages in seconds of its own node's clock."""

    node: str
    report: RankReport
    silent_s: float
    stopped_s: float  # in state T for so long, 0 when it runs
    phase_s: float
    heard_age_s: float
    left: bool = False  # it has ended, and its runner, which lives, tells of no failure

    @property
    def gone(self) -> bool:
        """The process is no more."""
        return self.report.process.state in GONE


class Registry:
    """The one owner of what is known about nodes. All methods are told the time and never wait."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[str, NodeView] = OrderedDict()  # the longest silent first
        self._superseded: dict[tuple[str, str], None] = {}
        self.sick: set[str] = set()  # nodes whose hardware has something to say
        self.changes = 0  # grows whenever a share comes, goes, is of another round, or its ranks die or live again

    def __len__(self) -> int:
        return len(self._nodes)

    def node(self, name: str) -> NodeView | None:
        """Return what is known of a node."""
        return self._nodes.get(name)

    def nodes(self) -> Iterable[NodeView]:
        """Return all nodes, the longest silent first."""
        return self._nodes.values()

    def fold(self, heartbeat: Heartbeat, now_s: float) -> Folded:
        """Take one heartbeat in."""
        view = self._nodes.get(heartbeat.node)
        if view is None:
            view = self._nodes[heartbeat.node] = NodeView(heartbeat.node)
        if not self._is_next(view, heartbeat, now_s):
            return Folded(accepted=False, send_full=False, node=view)
        view.seq = heartbeat.seq
        view.heard_s = now_s
        view.sent_mono_s = heartbeat.mono_s
        self._nodes.move_to_end(heartbeat.node)
        if heartbeat.host is not None:
            view.host = heartbeat.host
        if heartbeat.findings is not None:
            view.findings = heartbeat.findings
            (self.sick.add if view.findings else self.sick.discard)(heartbeat.node)
        if heartbeat.full:
            view.complete = True
            view.metrics = heartbeat.metrics
            named = {report.job for report in heartbeat.jobs}
            for job in [job for job in view.shares if job not in named]:
                del view.shares[job]
                self.changes += 1
        for report in heartbeat.jobs:
            self.changes += _fold_share(view.shares, report, full=heartbeat.full)
        return Folded(accepted=True, send_full=not view.complete, node=view)

    def _is_next(self, view: NodeView, heartbeat: Heartbeat, now_s: float) -> bool:
        """Say whether the heartbeat is newer than what is known, and note gaps, stalls and new agents."""
        if heartbeat.agent_id != view.agent_id:
            if (heartbeat.node, heartbeat.agent_id) in self._superseded and now_s - view.heard_s < TAKEOVER_S:
                return False
            self._take_over(view, heartbeat)
            return True
        if heartbeat.seq <= view.seq:
            return False
        if heartbeat.seq != view.seq + 1:
            view.complete = False
        if heartbeat.mono_s - view.sent_mono_s > STALL_S:
            view.floor_mono_s = heartbeat.mono_s
        return True

    def _take_over(self, view: NodeView, heartbeat: Heartbeat) -> None:
        if view.agent_id:
            self._superseded[heartbeat.node, view.agent_id] = None
            # 1,000: enough to cover every late heartbeat in flight, small enough to never matter.
            while len(self._superseded) > 1000:
                del self._superseded[next(iter(self._superseded))]
        self._superseded.pop((heartbeat.node, heartbeat.agent_id), None)
        view.agent_id = heartbeat.agent_id
        view.complete = False
        view.floor_mono_s = heartbeat.mono_s

    def restart_clocks(self, now_s: float) -> None:
        """Begin all patience anew: the controller itself was away, so nobody is to blame for what it did not hear."""
        for view in self._nodes.values():
            view.heard_s = now_s
            view.floor_mono_s = view.sent_mono_s

    def forget(self, before_s: float) -> None:
        """Drop nodes that were last heard before ``before_s``."""
        while self._nodes:
            name, view = next(iter(self._nodes.items()))
            if view.heard_s >= before_s:
                return
            del self._nodes[name]
            self.sick.discard(name)
            self.changes += 1

    def share(self, node: str, job: str, round_: int) -> Share | None:
        """Return a node's share of a job if it speaks of that round."""
        view = self._nodes.get(node)
        share = view.shares.get(job) if view is not None else None
        return share if share is not None and share.round == round_ else None

    def lives(self, node: str, job: str, round_: int, since_s: float) -> bool:
        """Say whether a node was heard of since then, and says that a rank of the round lives.

        Asked of 12,500 nodes each second, so it takes less than a microsecond and looks at no rank.
        """
        view = self._nodes.get(node)
        if view is None or view.heard_s <= since_s:
            return False
        share = view.shares.get(job)
        return share is not None and share.lives and share.round == round_

    def silent(self, since_s: float) -> Iterator[str]:
        """Yield the nodes that were not heard since then, the longest silent first."""
        for name, view in self._nodes.items():
            if view.heard_s > since_s:
                return
            yield name

    def has_moved(self, job: str, round_: int, nodes: Iterable[str]) -> bool:
        """Say whether a rank of the round has moved since its node's patience began, or none can be seen to move."""
        seen = False
        for name in nodes:
            share = self.share(name, job, round_)
            if share is None:
                continue
            floor_mono_s = self._nodes[name].floor_mono_s
            for report in share.ranks.values():
                if report.progress is not None:
                    seen = True
                    if report.progress.moved_mono_s > floor_mono_s:
                        return True
        return not seen

    def reached(self, job: str, round_: int, nodes: Iterable[str]) -> dict[int, Reached]:
        """Return how far the ranks of a round are; empty when one of them doesn't show both steps and collectives."""
        reached = {}
        for name in nodes:
            share = self.share(name, job, round_)
            for rank, report in (share.ranks if share is not None else {}).items():
                if report.progress is None or report.collective is None:
                    return {}
                reached[rank] = Reached(report.progress.step, report.collective.completed)
        return reached

    def ranks(self, job: str, round_: int, nodes: Iterable[str], now_s: float) -> Iterator[RankView]:
        """Yield the ranks of a job's round as the given nodes describe them."""
        for name in nodes:
            view = self._nodes.get(name)
            share = view.shares.get(job) if view is not None else None
            if view is None or share is None or share.round != round_:
                continue
            for report in share.ranks.values():
                yield view_rank(view, report, now_s)


def view_rank(view: NodeView, report: RankReport, now_s: float) -> RankView:
    """Return a rank's ages as of its node's last heartbeat."""
    sent, floor = view.sent_mono_s, view.floor_mono_s
    progress, process = report.progress, report.process
    silent_s = phase_s = stopped_s = 0.0
    if progress is not None:
        silent_s = max(0.0, sent - max(progress.moved_mono_s, floor))
        phase_s = max(0.0, sent - progress.phase_since_mono_s)
    if process.state == "T":
        stopped_s = max(0.0, sent - max(process.stopped_since_mono_s, floor))
    return RankView(view.node, report, silent_s, stopped_s, phase_s, max(0.0, now_s - view.heard_s))


def _fold_share(shares: dict[str, Share], report: JobReport, *, full: bool) -> bool:
    """Take in what a node says of one job; tell whether another round is spoken of, or life has come or gone."""
    before = share = shares.get(report.job)
    was = (before.round, before.lives) if before is not None else None
    if share is None or full or report.round != share.round:
        share = shares[report.job] = Share(report.round, report.run_dir)
    for rank in report.ranks:
        if rank.round == report.round:
            # Steps are handed on when they come (slowness); kept here they would be in every status, and 100 MB.
            share.ranks[rank.rank] = _replace(rank, work=()) if rank.work else rank
    share.lives = any(rank.process.state not in GONE for rank in share.ranks.values())
    return was != (share.round, share.lives)
