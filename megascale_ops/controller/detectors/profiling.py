# SPDX-License-Identifier: Apache-2.0
"""Kernel timings on demand: which ranks are asked, what has come back, and the comparison.

A profile stops nothing and belongs to no incident, so it is not journaled: a controller that is started again has
forgotten it, and a client that waits for it gets that answer. One at a time of each job. Its orders go to the agents
directly; the agents' own deadline ends them, and ours, ``SLACK_S`` later, ends an agent that does not answer.
"""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from megascale_ops.controller.cluster.registry import Registry
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.transitions import Transitions
from megascale_ops.controller.record.state_machine import ACTIVE
from megascale_ops.diagnosis.stragglers import kernel_compare
from megascale_ops.errors import RefusedError, UsageError
from megascale_ops.schema.folding import named, no_rank
from megascale_ops.schema.kernels import (
    MOST_DEADLINE_S,
    MOST_STEPS,
    ProfileAsk,
    ProfileRank,
    ProfileView,
    RankKernels,
)
from megascale_ops.schema.messages import Evidence, Order

KIND = "profile"
# 5 s: a heartbeat takes the order to the agent within 1, the agent's answer has 2 of its own.
SLACK_S = 5.0
# Above 1,000 ranks the 12 longest kernels of each: 150,000 rows, compared in 2 s.
_MANY_RANKS, _FEW_KERNELS = 1000, 12


class Profile:
    """One profile of one job's round."""

    def __init__(self, name: str, job: Job, ask: ProfileAsk, until_s: float) -> None:
        self.name = name
        self.job = job
        self.round = job.record.round
        self.ask = ask
        self.until_s = until_s
        self.nodes: dict[int, str] = {}
        self.pending: dict[str, tuple[int, ...]] = {}  # by node
        self.found: dict[int, RankKernels] = {}
        self.paths: dict[int, str] = {}
        self.texts: dict[int, str] = {}  # of ranks without an answer
        self.groups: dict[int, int] = {}
        self.compared: ProfileView | None = None

    def end(self, node: str, text: str) -> None:
        """Nothing more comes from a node."""
        for rank in self.pending.pop(node, ()):
            if rank not in self.found:
                self.texts.setdefault(rank, text)


class Profiling:
    """The newest profile of each job.

    Args:
        moves: holds the orders that agents are given.
        registry: which ranks are where.
        clock: monotonic seconds.
        wall: wall clock seconds, for the name of a profile.
    """

    def __init__(
        self, transitions: Transitions, registry: Registry, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self._transitions = transitions
        self._registry = registry
        self._clock = clock
        self._wall = wall
        self._profiles: dict[str, Profile] = {}

    def begin(self, job: Job, ask: ProfileAsk) -> ProfileView:
        """Ask ranks to profile their next steps.

        Raises:
            UsageError: the numbers can't be, or there is no such rank.
            RefusedError: the job does not train now, or is being profiled.
        """
        _check(job, ask)
        before = self._profiles.get(job.name)
        if before is not None and self._is_open(before):
            left_s = before.until_s - self._clock()
            raise RefusedError(f"job {job.name} is being profiled already ({before.name}), for {left_s:.0f} s at most")
        stamp = f"{datetime.fromtimestamp(self._wall(), UTC):%Y%m%d-%H%M%S}"
        name = f"{stamp}b" if before is not None and before.name == stamp else stamp
        profile = Profile(name, job, ask, self._clock() + ask.deadline_s + SLACK_S)
        wanted = set(ask.ranks) or set(range(job.record.world_size))
        for node in job.nodes:
            self._ask_node(profile, node, wanted)
        for rank in sorted(wanted - profile.nodes.keys()):
            profile.texts[rank] = "no agent has told of it in this round"
        self._profiles[job.name] = profile
        what = f"{ask.steps} steps" if ask.steps else "what was sampled last"
        who = named(sorted(ask.ranks)) if ask.ranks else "all ranks"
        self._transitions.note(job, "profile", f"profile {profile.name}: {what} of {who}")
        self._transitions.save(job)
        return self.view(job.name, profile.name)

    def _ask_node(self, profile: Profile, node: str, wanted: set[int]) -> None:
        """Order a node's agent to ask its ranks, if it has any that are wanted."""
        share = self._registry.share(node, profile.job.name, profile.round)
        here = {rank: report for rank, report in share.ranks.items() if rank in wanted} if share is not None else {}
        if not here:
            return
        ranks = tuple(sorted(here))
        for rank in ranks:
            profile.nodes[rank] = node
            profile.groups[rank] = here[rank].mesh.pp
        profile.pending[node] = ranks
        if not self._transitions.agent_is_fresh(profile.job.name, node, self._clock()):
            profile.end(node, f"the agent of node {node} is not heard")
            return
        order = Order(
            id=f"{profile.name}:{node}",
            job=profile.job.name,
            node=node,
            kind=KIND,
            round=profile.round,
            ranks=ranks,
            reason="kernel timings are wanted",
            deadline_s=profile.ask.deadline_s,
            steps=profile.ask.steps,
        )
        self._transitions.agent_orders.setdefault(node, {})[order.id] = order

    def ingest_evidence(self, evidence: Evidence) -> bool:
        """Take an agent's evidence; return whether it belongs to a profile."""
        profile = self._profiles.get(evidence.job)
        name, _, node = evidence.order.partition(":")
        if evidence.incident or profile is None or profile.name != name or node != evidence.node:
            return False
        if node not in profile.pending:  # too late, or twice: what is known is being compared, maybe in this moment
            return True
        for item in evidence.items:
            if profile.nodes.get(item.rank, evidence.node) != evidence.node:
                continue
            if item.kernels is not None and item.ok:
                self._keep(profile, item.rank, item.kernels)
                profile.paths[item.rank] = item.path
            else:
                ranks = (item.rank,) if item.rank >= 0 else profile.pending.get(node, ())
                profile.texts.update(dict.fromkeys(ranks, item.text))
        profile.end(node, "its agent has answered without it")
        self.forget(node, (evidence.order,))
        return True

    def _keep(self, profile: Profile, rank: int, found: RankKernels) -> None:
        if len(profile.nodes) > _MANY_RANKS:
            found = RankKernels(
                found.id, found.device, found.steps, found.first_step, found.span_s, found.own_s,
                found.kernels[:_FEW_KERNELS],
            )  # fmt: skip
        profile.found[rank] = found
        profile.compared = None

    def forget(self, node: str, ids: Iterable[str]) -> None:
        """Orders are done: they are not given again."""
        held = self._transitions.agent_orders.get(node)
        if held is None:
            return
        for order_id in ids:
            if order_id in held and held[order_id].kind == KIND:
                del held[order_id]
        if not held:
            del self._transitions.agent_orders[node]

    def _is_open(self, profile: Profile) -> bool:
        """Return whether answers are still awaited; end what has taken too long, or whose round is over."""
        over = ""
        if profile.job.record.round != profile.round or profile.job.state not in ACTIVE:
            over = f"round {profile.round} ended meanwhile"
        elif self._clock() >= profile.until_s:
            over = "no answer of its agent"
        if over:
            for node in list(profile.pending):
                profile.end(node, over)
                self.forget(node, (f"{profile.name}:{node}",))
        return bool(profile.pending)

    def poll_profiles(self) -> None:
        """Let time pass."""
        for profile in self._profiles.values():
            if profile.pending:
                self._is_open(profile)

    def is_done(self, job: str, name: str) -> bool:
        """Return whether a profile is known and nothing more of it is awaited."""
        profile = self._profiles.get(job)
        return profile is not None and profile.name == name and not self._is_open(profile)

    def view(self, job: str, name: str) -> ProfileView:
        """Return what is known of a profile; compared once all have answered or can't any more.

        Raises:
            RefusedError: this controller knows no such profile.
        """
        profile = self._profiles.get(job)
        if profile is None or profile.name != name:
            raise RefusedError(
                f"this controller knows no profile {name!r} of job {job}: it was started again meanwhile"
            )
        if self._is_open(profile):
            return ProfileView(job, name, "waiting", profile.ask.steps, ranks=_told(profile))
        if profile.compared is None:
            profile.compared = _compared(profile)
        return profile.compared


def _check(job: Job, ask: ProfileAsk) -> None:
    if job.state not in ACTIVE:
        raise RefusedError(f"job {job.name} is {job.state.value.replace('_', ' ')}: only ranks that run are profiled")
    if not 0 <= ask.steps <= MOST_STEPS:
        raise UsageError(f"{ask.steps} steps can't be profiled: 1 to {MOST_STEPS}")
    if not 1.0 <= ask.deadline_s <= MOST_DEADLINE_S:
        raise UsageError(f"{ask.deadline_s:g} s can't be the deadline of a profile: 1 to {MOST_DEADLINE_S:g}")
    size = job.record.world_size
    unknown = [rank for rank in ask.ranks if not 0 <= rank < size]
    if unknown:
        raise UsageError(no_rank(job.name, size, unknown))


def _compared(profile: Profile) -> ProfileView:
    """Compare what came."""
    found = kernel_compare.compare(profile.found, profile.groups)
    ranks = [
        ProfileRank(
            rank, profile.nodes.get(rank, ""), "", profile.paths.get(rank, ""), one.span_s, one.own_s, one.ratio,
            one.is_slow,
        )
        for rank, one in found.ranks.items()
    ]  # fmt: skip
    device = next((kernels.device for kernels in profile.found.values()), "")
    return ProfileView(
        profile.job.name, profile.name, "done", profile.ask.steps, device,
        found.verdict if profile.found else "no rank has answered",
        tuple(sorted((*ranks, *_told(profile)), key=lambda one: one.rank)), found.rows, found.left_out,
    )  # fmt: skip


def _told(profile: Profile) -> tuple[ProfileRank, ...]:
    """Return the ranks that have no answer, and why."""
    return tuple(ProfileRank(rank, profile.nodes.get(rank, ""), text) for rank, text in sorted(profile.texts.items()))
