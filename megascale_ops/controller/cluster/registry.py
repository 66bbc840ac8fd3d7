# SPDX-License-Identifier: Apache-2.0
"""The cluster as the agents last described it, folded from heartbeats.

Heartbeats come late, twice, out of order, with gaps, from an agent that was restarted, and after the controller itself
was restarted. The rules that make one view of them:

- Per agent the sequence number only rises; anything else is dropped.
- A gap, a new agent or a new controller means that something is unknown: ask for a full heartbeat until one came.
- A full heartbeat replaces what is known of the node, a partial one updates the ranks it names.
- A node may have several agents: each user's run brings one for what this user has there. Each has a view of its own
  (by node, what it serves, and the job that its token is for) and replaces none but its own forerunner. Of a job that
  two of them see, one reports: the one that began last, an agent of the node before one of a job, while it is heard.
- A node's share of a job belongs to one round; a judge asks for the ranks of one round and sees no other.

Two clocks never mix: ``heard_s`` is the controller's, everything ``*_mono_s`` is the sender's. How long a rank has been
silent is measured by its own node's clock as of the node's last heartbeat, so a late heartbeat accuses no rank.
"""

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from megascale_ops.controller.cluster.columns import NOWHERE, Columns, Counts, Flags, Holder, Numbers, Places
from megascale_ops.controller.cluster.node_view import Key, NodeView, Share
from megascale_ops.controller.cluster.steady import Sign, Steady
from megascale_ops.diagnosis.hangs.standing import is_as_before
from megascale_ops.diagnosis.hangs.suspicion import STALE_BEAT_S
from megascale_ops.diagnosis.rank_view import GONE, RankView, Reached
from megascale_ops.errors import RefusedError
from megascale_ops.schema.messages import Heartbeat, JobReport
from megascale_ops.schema.progress import RankReport

if TYPE_CHECKING:
    from megascale_ops.schema.health import HardwareFinding

# 60 s: the longest that an agent may be told to wait between two heartbeats.
_MOST_EVERY_S = 60.0
# 15 s: for so long a superseded agent is not believed any more; then it may be the only one that is left.
TAKEOVER_S = 15.0
# 1,100: a heartbeat names 1,024 jobs at most.
_MOST_JOBS = 1100
_replace = msgspec.structs.replace


class Folded(NamedTuple):
    """What became of one heartbeat."""

    accepted: bool
    send_full: bool
    node: NodeView


class Registry:
    """The one owner of what is known about nodes. All methods take the time as an argument and never wait."""

    def __init__(self) -> None:
        self._views: dict[Key, NodeView] = {}
        self._columns = Columns()
        self._by_place: dict[int, NodeView] = {}
        self._places: dict[str, int] = {}  # by node, as in ``_here``
        self._awaited: dict[str, tuple[int, int]] = {}  # by job: the round that nodes go on in, and its number
        self._rounds = 0
        self._here: dict[str, NodeView] = {}  # the only agent of a node, or one of several
        self._shared: dict[str, list[NodeView]] = {}  # nodes that have several
        self._begun = 0  # how often an agent began to report a job
        self._superseded: dict[tuple[Key, str], None] = {}
        self.sick: set[str] = set()  # nodes with hardware findings
        self.withheld: dict[str, str] = {}  # nodes that their engine has out of service, by its name of them, and why
        self.changes = 0  # grows whenever a share comes, goes, is of another round, or its ranks die or live again
        self._stirs = 0  # grows whenever a heartbeat tells of more than time passing

    def __len__(self) -> int:
        return len(self._views)

    def why_withheld(self, name: str) -> str:
        """Return why the cluster's engine has a node out of service, "" where it does not; its names have no domain."""
        return self.withheld.get(name) or self.withheld.get(name.partition(".")[0], "") if self.withheld else ""

    def node(self, name: str, job: str = "") -> NodeView | None:
        """Return what is known of a node: by the agent that reports a job, or by the one heard last."""
        if self._shared and name in self._shared:
            return _speaker(self._shared[name], job)
        return self._here.get(name)

    def nodes(self) -> Iterable[NodeView]:
        """Return every agent's view, the longest silent first; a node with several agents comes several times."""
        return [self._by_place[place] for place in self._columns.in_order()]

    def agents(self, name: str) -> int:
        """Return how many agents of a node are known."""
        return len(self._shared[name]) if name in self._shared else int(name in self._here)

    def agent(self, heartbeat: Heartbeat, only_job: str = "") -> NodeView | None:
        """Return what the agent of a heartbeat, or its forerunner, has said so far."""
        return self._views.get(_key(heartbeat, only_job))

    def speaks(self, view: NodeView, job: str) -> bool:
        """Return whether it is this agent that is believed, and given orders, as to a job."""
        return view.node not in self._shared or _speaker(self._shared[view.node], job) is view

    def findings(self, name: str, job: str) -> "tuple[HardwareFinding, ...]":
        """Return what is wrong with a node's hardware, by all agents that may report on a job."""
        views = self._shared.get(name) or ([self._here[name]] if name in self._here else [])
        return tuple(dict.fromkeys(one for view in views if view.only_job in ("", job) for one in view.findings))

    def fold(self, heartbeat: Heartbeat, now_s: float, only_job: str = "") -> Folded:
        """Take one heartbeat in, of an agent whose token is for ``only_job``, or for all."""
        key = _key(heartbeat, only_job)
        view = self._views.get(key) or self._add(key)
        if not self._is_next(view, heartbeat, now_s):
            return Folded(accepted=False, send_full=False, node=view)
        view.take_back()
        view.note(heartbeat.seq, heartbeat.mono_s, now_s)
        if heartbeat.every_s != view.every_s:
            view.speaks_every(min(heartbeat.every_s, _MOST_EVERY_S))
        sent_mono_s = heartbeat.mono_s
        view.only_job = only_job
        if heartbeat.host is not None:
            view.host = heartbeat.host
        if heartbeat.findings is not None and heartbeat.findings != view.findings:
            self._note_sick(view, heartbeat.findings)
        if heartbeat.full:
            view.complete = True
            view.metrics = heartbeat.metrics
            named = {report.job for report in heartbeat.jobs}
            for job in [job for job in view.shares if job not in named]:
                del view.shares[job]
                self.changes += 1
                self._stir(view)
        for report in heartbeat.jobs:
            if report.job not in view.shares:
                self._begin(view, report.job)
            share = view.shares.get(report.job)
            if share is None or not is_as_before(share.round, share.ranks, report, sent_mono_s, full=heartbeat.full):
                self._stir(view)
            self.changes += _fold_share(view.shares, report, full=heartbeat.full)
        return Folded(accepted=True, send_full=not view.complete, node=view)

    def awaits(self, sign: Sign, job: str, round_: int, *, tells: bool) -> NodeView | None:
        """Return the node whose next heartbeat this is, if nothing is missing or odd there; else None.

        Args:
            sign: the heartbeat.
            job: of which job's ranks it is; "": of a node that reports no job.
            round_: and of which round.
            tells: it tells of ranks, not only of its node.
        """
        node, agent_id, seq, mono_s, _wall_s, size = sign
        view = self._here.get(node)
        if (
            view is None
            or view.seq + 1 != seq
            or view.agent_id != agent_id
            or not view.complete
            or view.only_job
            or mono_s - view.sent_mono_s > view.fresh_s
            or (self._shared and node in self._shared)
        ):
            return None
        share = view.shares.get(job)
        if not job:
            return None if view.shares else view
        is_it = share is not None and share.round == round_ and (not tells or len(share) == size)
        return view if is_it else None

    def go_on(self, view: NodeView, sign: Sign, now_s: float, *, moves: bool) -> None:
        """Take in a heartbeat that was awaited; ``moves``: its ranks have."""
        if moves:
            self._stir(view)
        view.note(sign.seq, sign.mono_s, now_s)

    def lend(self, view: NodeView, job: str, round_: int) -> None:
        """Let a node's next heartbeats be taken in with those of many, as far as they are awaited."""
        known = self._awaited.get(job)
        if known is None or known[0] != round_:
            self._rounds += 1
            self._awaited.pop(job, None)
            known = self._awaited[job] = round_, self._rounds
            while len(self._awaited) > _MOST_JOBS:
                del self._awaited[next(iter(self._awaited))]
        view.lend(view.shares[job] if job else view.lent or Share(round_, ""), known[1])  # of no job: nothing is in it

    def places(self, nodes: Iterable[str]) -> Places:
        """Return the places of nodes, ``NOWHERE`` of those that are not known."""
        return np.array([*map(self._places.get, nodes, repeat(NOWHERE))], np.intp)

    def awaits_all(self, steady: Steady, places: Places, held: Iterable[str]) -> Flags:
        """Return of which signs all is as ``awaits`` and ``lend`` have found it: they can be taken in together.

        Args:
            steady: the heartbeats.
            places: of their nodes.
            held: nodes that are to be told something.
        """
        known = self._awaited.get(steady.job)
        if known is None or known[0] != steady.round:
            return np.zeros(len(places), bool)
        columns, signs = self._columns, steady.signs
        found: Flags = (columns.awaited[places] == known[1]) & (columns.seq[places] + 1 == signs.seq)
        found &= signs.mono_s - columns.sent_mono_s[places] <= columns.fresh_s[places]
        found &= columns.agents[places] == signs.agent_ids
        if steady.tells:
            found &= columns.size[places] == signs.size
        if steady.steps:
            found &= columns.is_placed[places]
        spoken_to = [place for node in held if (place := self._places.get(node)) is not None]
        if spoken_to:
            found &= ~np.isin(places, spoken_to)
        return found

    def go_on_all(self, steady: Steady, places: Places, which: Places, now_s: float) -> None:
        """Take in those signs of which ``awaits_all`` is true, as ``go_on`` and ``Share`` do with each."""
        columns, mono_s = self._columns, steady.signs.mono_s[which]
        here = places[which]
        moving = here
        if steady.stands:
            # A recorder may have been silent in so long a pause: what is known of its beats is looked at again.
            moving = here[mono_s - columns.sent_mono_s[here] + steady.beat_ago_s > STALE_BEAT_S]
        elif steady.told is None:
            moving = here[:0]
        columns.stirred[moving] = np.arange(self._stirs + 1, self._stirs + 1 + len(moving))
        self._stirs += len(moving)
        heard_s = columns.heard_s[here]
        columns.back_s[here[(heard_s != 0.0) & (now_s - heard_s > columns.fresh_s[here])]] = now_s
        columns.heard_s[here] = now_s
        columns.seq[here] = steady.signs.seq[which]
        columns.sent_mono_s[here] = mono_s
        columns.hear_all(here)
        if steady.told is not None:
            columns.told[here] = Holder(steady.told)
            columns.told_mono_s[here] = mono_s
            columns.stood_mono_s[here] = 0.0
        elif steady.stands:
            columns.stood_mono_s[here] = mono_s - steady.beat_ago_s

    def silent_for_s(self, places: Places, moved_mono_s: Numbers) -> Numbers:
        """Return for how long ranks that moved then, by their nodes' clocks, have not, as of their last heartbeats."""
        floor_mono_s = self._columns.floor_mono_s[places]
        silent_s: Numbers = np.maximum(0.0, self._columns.sent_mono_s[places] - np.maximum(moved_mono_s, floor_mono_s))
        return silent_s

    def stirred_at(self, places: Places) -> Counts:
        """Return the numbers of the last heartbeats in which these told of more than time passing."""
        return self._columns.stirred[places]

    def views(self, places: Places) -> list[NodeView]:
        """Return the agents that have these places."""
        return [*map(self._by_place.__getitem__, places.tolist())]

    def _add(self, key: Key) -> NodeView:
        """Make room for an agent that was not heard before."""
        view = self._views[key] = NodeView(key, self._columns)
        self._by_place[view.place] = view
        before = self._here.setdefault(key.node, view)
        self._places[key.node] = before.place
        if before is not view:
            before.take_back()
            self._shared.setdefault(key.node, [before]).append(view)
        return view

    def _begin(self, view: NodeView, job: str) -> None:
        """Note that an agent begins to report a job."""
        view.since.pop(job, None)
        self._begun += 1
        view.since[job] = self._begun
        while len(view.since) > _MOST_JOBS:
            del view.since[next(iter(view.since))]

    def _note_sick(self, view: NodeView, findings: "tuple[HardwareFinding, ...]") -> None:
        view.findings, node = findings, view.node
        self._stir(view)
        (self.sick.add if any(one.findings for one in self._shared.get(node) or [view]) else self.sick.discard)(node)

    def _is_next(self, view: NodeView, heartbeat: Heartbeat, now_s: float) -> bool:
        """Return whether the heartbeat is newer than what is known, and note gaps, stalls and new agents."""
        if heartbeat.agent_id != view.agent_id:
            if (view.key, heartbeat.agent_id) in self._superseded and now_s - view.heard_s < TAKEOVER_S:
                return False
            self._take_over(view, heartbeat)
            self._stir(view)
            return True
        if heartbeat.seq <= view.seq:
            return False
        if heartbeat.seq != view.seq + 1:
            view.complete = False
        if heartbeat.mono_s - view.sent_mono_s > view.fresh_s:
            view.floor_mono_s = heartbeat.mono_s
            self._stir(view)
        return True

    def _stir(self, view: NodeView) -> None:
        self._stirs += 1
        view.stirred = self._stirs

    def _take_over(self, view: NodeView, heartbeat: Heartbeat) -> None:
        if view.agent_id:
            self._superseded[view.key, view.agent_id] = None
            # 1,000: enough to cover every late heartbeat in flight, small enough to never matter.
            while len(self._superseded) > 1000:
                del self._superseded[next(iter(self._superseded))]
        self._superseded.pop((view.key, heartbeat.agent_id), None)
        view.agent_id = heartbeat.agent_id
        view.complete = False
        view.floor_mono_s = heartbeat.mono_s

    def restart_clocks(self, now_s: float) -> None:
        """Begin all patience anew: the controller itself was away, so no rank is to blame for what it did not hear."""
        for view in self._views.values():
            view.hear(now_s)
            view.floor_mono_s = view.sent_mono_s
            self._stir(view)

    def forget(self, before_s: float) -> None:
        """Drop agents that were last heard before ``before_s``."""
        for place in self._columns.silent(before_s):
            view = self._by_place[place]
            if view.heard_s < before_s:
                del self._views[view.key], self._by_place[place]
                view.take_back()
                self._drop(view)
                self._columns.drop(place)
                self.changes += 1

    def _drop(self, view: NodeView) -> None:
        left = [other for other in self._shared.pop(view.node, []) if other is not view]
        if not left:
            del self._here[view.node], self._places[view.node]
            self.sick.discard(view.node)
            return
        self._here[view.node] = left[0]
        self._places[view.node] = left[0].place
        if len(left) > 1:
            self._shared[view.node] = left
        self._note_sick(left[0], left[0].findings)

    def share(self, node: str, job: str, round_: int) -> Share | None:
        """Return a node's share of a job if its report is of that round."""
        view = self.node(node, job)
        share = view.shares.get(job) if view is not None else None
        return share if share is not None and share.round == round_ else None

    def agent_is_fresh(self, job: str, node: str, now_s: float) -> bool:
        """Return whether the agent that reports a job on a node was heard of late."""
        view = self.node(node, job)
        return view is not None and now_s - view.heard_s <= view.fresh_s

    def lives(self, node: str, job: str, round_: int, since_s: float) -> bool:
        """Return whether a node was heard since then, and reports a living rank of the round.

        Asked of 12,500 nodes each second, so it takes less than a microsecond and looks at no rank.
        """
        view = self.node(node, job) if self._shared else self._here.get(node)
        if view is None or view.heard_s <= since_s:
            return False
        share = view.shares.get(job)
        return share is not None and share.lives and share.round == round_

    def silent(self, since_s: float) -> Iterator[str]:
        """Yield the nodes of which an agent was not heard since then, the longest silent first."""
        for place in self._columns.silent(since_s):
            yield self._by_place[place].node

    def stirred(self, job: str, round_: int, nodes: Iterable[str], since_s: float) -> int | None:
        """Return a number that is another one once a heartbeat tells of these nodes' ranks of more than time passing.

        None where that can't be said: a node was not heard since then, reports no rank of the round, or has several
        agents, of which another one may be believed by and by.
        """
        newest = 0
        for name in nodes:
            view = self._here.get(name)
            if view is None or view.heard_s < since_s or (self._shared and name in self._shared):
                return None
            share = view.shares.get(job)
            if share is None or share.round != round_:
                return None
            newest = max(newest, view.stirred)
        return newest

    @property
    def shares_seen(self) -> int | None:
        """A number that is another one once a node reports a job no more, or another round; None: that can't be said.

        Of a node that has several agents another one may be believed by and by.
        """
        return None if self._shared else self.changes

    def has_moved(self, job: str, round_: int, nodes: Iterable[str]) -> bool:
        """Return whether a rank of the round has moved since its node's patience began, or none can be seen to move."""
        seen = False
        for name in nodes:
            view = self.node(name, job)
            share = view.shares.get(job) if view is not None else None
            if view is None or share is None or share.round != round_:
                continue
            floor_mono_s = view.floor_mono_s
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
            view = self.node(name, job)
            share = view.shares.get(job) if view is not None else None
            if view is None or share is None or share.round != round_:
                continue
            node, sent, floor = view.node, view.sent_mono_s, view.floor_mono_s
            heard_age_s = max(0.0, now_s - view.heard_s)
            for report in share.ranks.values():
                yield _aged(node, report, sent, floor, heard_age_s)


def _key(heartbeat: Heartbeat, only_job: str) -> Key:
    # An agent without the name of what it serves is one for its node, whatever its token is for.
    return Key(heartbeat.node, heartbeat.serves, only_job if heartbeat.serves else "")


def _speaker(views: list[NodeView], job: str) -> NodeView:
    """Return which of a node's agents reports a job: it has reported it, is heard, and began last."""
    newest_s = max(view.heard_s for view in views)
    heard = [view for view in views if newest_s - view.heard_s < TAKEOVER_S and view.only_job in ("", job)]
    return max(
        heard or views,
        key=lambda view: (
            job in view.shares,
            job in view.since,
            not view.only_job,
            view.since.get(job, 0),
            view.heard_s,
        ),
    )


def view_rank(view: NodeView, report: RankReport, now_s: float) -> RankView:
    """Return a rank's ages as of its node's last heartbeat."""
    return _aged(view.node, report, view.sent_mono_s, view.floor_mono_s, max(0.0, now_s - view.heard_s))


def _aged(node: str, report: RankReport, sent: float, floor: float, heard_age_s: float) -> RankView:
    progress, process = report.progress, report.process
    silent_s = phase_s = stopped_s = 0.0
    if progress is not None:
        silent_s = max(0.0, sent - max(progress.moved_mono_s, floor))
        phase_s = max(0.0, sent - progress.phase_since_mono_s)
    if process.state == "T":
        stopped_s = max(0.0, sent - max(process.stopped_since_mono_s, floor))
    return RankView(node, report, silent_s, stopped_s, phase_s, heard_age_s)


def _fold_share(shares: dict[str, Share], report: JobReport, *, full: bool) -> bool:
    """Take in a node's report of one job; return whether it is of another round, or a rank began or ceased to live."""
    before = share = shares.get(report.job)
    was = (before.round, before.lives) if before is not None else None
    if share is None or full or report.round != share.round:
        share = shares[report.job] = Share(report.round, report.run_dir)
    known, round_ = share.ranks, report.round
    for rank in report.ranks:
        if rank.round == round_:
            # Steps are handed on when they come (slowness); kept here they would be in every status, and 100 MB.
            known[rank.rank] = _replace(rank, work=()) if rank.work else rank
    share.is_plain = share.is_placed = None
    share.lives = False
    for rank in known.values():
        if rank.process.state not in GONE:  # nearly always the first
            share.lives = True
            break
    return was != (share.round, share.lives)


def check_may_take_over(known: NodeView, only_job: str, now_s: float) -> None:
    """Let the agent of one job put out its own job's agent, and one that is heard no more.

    Raises:
        RefusedError: another one lives, of another job or of the node itself.
    """
    if known.only_job != only_job and now_s - known.heard_s < TAKEOVER_S:
        whose = f"the agent of job {known.only_job}" if known.only_job else "an agent of its own"
        raise RefusedError(
            f"node {known.node} is spoken for by {whose}, and a token for job {only_job} can't put it out: give this "
            "agent and its run another --node name"
        )
