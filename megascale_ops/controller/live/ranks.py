# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job as columns: what each does now, and where each is.

Going through 12,288 ranks takes 15 ms, so it is a generator that pauses after every 96 nodes.

Pure: the time is an argument; reads what the registry knows.
"""

from array import array
from collections.abc import Generator, Iterable, Mapping

from megascale_ops.controller.cluster.node_view import NodeView
from megascale_ops.controller.cluster.registry import Registry
from megascale_ops.controller.detectors.skew import SLOW_LINK, STRAGGLER
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.record.state_machine import FINAL, State
from megascale_ops.diagnosis.rank_view import GONE
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.live import JUDGED, MOST_GPUS, TYPES, UNKNOWN, Layout, packed
from megascale_ops.schema.progress import PHASES, RankReport

# 96 nodes of 8 ranks: 1.5 ms between two pauses.
NODES_A_TIME = 96
# 2 s: of a node that missed two heartbeats it is not known whether its ranks move; that counts as quiet.
UNHEARD_S = 2.0
# A median of 1,024 ranks is known well enough.
SAMPLED = 1024
MOST_PHASES = 255
NOBODY = 255  # a phase, or a place on a node, that is not known
_OK, _SLOW, _SUSPECT, _LOST, _GONE, _UNHEARD, _STARTING = range(len(JUDGED))
# While a round begins a rank has no report; later its report is missing. With its job a rank has ended.
_FIRST = {State.RESTARTING: _STARTING, **dict.fromkeys(FINAL, _GONE)}


class Seen:
    """The ranks of one round while they are gone through."""

    def __init__(self, ranks: int, job: Job, now_s: float) -> None:
        # What a rank is of which no step is known: one with a black box, one without.
        self.with_box, self.without_box = (_STARTING if starts else _OK for starts in job.unstepped(now_s))
        self.well = _GONE if job.is_over else _OK
        self.stepped = 0  # ranks that have made a step in this round
        self.step = array("q", [-1]) * ranks
        self.quiet = array("H", [UNKNOWN]) * ranks
        self.phase = array("B", [NOBODY]) * ranks
        self.looks = array("B", [_FIRST.get(job.state, _UNHEARD)]) * ranks
        self.judged = self.looks  # with what is judged of them
        self.step_s: list[float] = []  # typical steps of a sample of reporting ranks
        self.sampled = max(1, ranks // SAMPLED)

    @property
    def furthest(self) -> int:
        """The furthest finished step of any rank, -1 before the first."""
        return max(self.step, default=-1)

    def behind(self) -> bytes:
        """Return how many steps each rank is behind the furthest."""
        furthest = self.furthest
        # Ranks share a few steps: reckoned once for each, 1 ms for 12,288 ranks instead of 4.
        known = {step: min(UNKNOWN - 1, furthest - step) if step >= 0 else UNKNOWN for step in set(self.step)}
        return packed("behind", map(known.__getitem__, self.step))

    def counts(self) -> tuple[int, ...]:
        """Return how many ranks there are of each of JUDGED."""
        judged = self.judged.tobytes()
        return tuple(judged.count(number) for number in range(len(JUDGED)))

    def judge(self, job: Job) -> None:
        """Mark who is slow, and who is suspected, as of now: what a headline says of the same moment must fit."""
        self.judged = array("B", self.looks)
        for key, warning in job.round.warnings.items():
            if warning.verdict is not None and key.startswith((STRAGGLER, SLOW_LINK)):
                self._mark(warning.verdict.culprits, _SLOW)
        suspicion = job.told_suspicion
        if suspicion is not None:
            self._mark(suspicion.verdict.culprits, _LOST if suspicion.lost else _SUSPECT)
        elif job.incident is not None and job.incident.verdict is not None and job.incident.round == job.record.round:
            self._mark(job.incident.verdict.culprits, _LOST)

    def _mark(self, ranks: tuple[int, ...], judged: int) -> None:
        for rank in ranks:
            if 0 <= rank < len(self.judged) and (self.judged[rank] < judged or self.judged[rank] == _STARTING):
                self.judged[rank] = judged


class Ranks:
    """The ranks of one job from frame to frame. Owned by its feed."""

    def __init__(self) -> None:
        self.layout = Layout()
        self._layout_of = (0, 0, 0, 0, 0)
        self._phases: dict[str, int] = {name: place for place, name in enumerate(PHASES)}

    @property
    def phases(self) -> tuple[str, ...]:
        """Names of phases, by their number in the column."""
        return tuple(self._phases)

    def go_through(self, job: Job, registry: Registry, world_size: int, now_s: float) -> Generator[None, None, Seen]:
        """Return the last report of each rank of the round."""
        seen = Seen(world_size, job, now_s)
        for place, name in enumerate(job.nodes):
            if place % NODES_A_TIME == NODES_A_TIME - 1:
                yield
            share = registry.share(name, job.name, job.record.round)
            view = registry.node(name, job.name)
            if share is not None and view is not None:
                self._read(view, share.ranks, seen, now_s)
        yield
        return seen

    def _read(self, view: NodeView, ranks: Mapping[int, RankReport], seen: Seen, now_s: float) -> None:
        unheard_s = now_s - view.heard_s
        until_s = view.sent_mono_s + (unheard_s if unheard_s > UNHEARD_S else 0.0)
        phases, ranks_known = self._phases, len(seen.step)
        # Names of their own: this loop runs 12,288 times a second, and each look-up in ``seen`` costs 0.4 ms of that.
        step, quiet, phase, looks = seen.step, seen.quiet, seen.phase, seen.looks
        for rank, report in ranks.items():
            if rank >= ranks_known:
                continue
            looks[rank] = _GONE if report.process.state in GONE else seen.well
            progress = report.progress
            if progress is None:
                looks[rank] = looks[rank] or seen.without_box
                continue
            if progress.steps_seen:
                seen.stepped += 1
            else:
                looks[rank] = looks[rank] or seen.with_box
            step[rank] = progress.step
            quiet_s = until_s - progress.moved_mono_s
            quiet[rank] = 0 if quiet_s < 1.0 else min(UNKNOWN - 1, int(quiet_s))
            known = phases.get(progress.phase)
            phase[rank] = known if known is not None else self._new_phase(progress.phase)
            if rank % seen.sampled == 0 and progress.step_p50_s > 0:
                seen.step_s.append(progress.step_p50_s)

    def _new_phase(self, name: str) -> int:
        if len(self._phases) >= MOST_PHASES:
            return NOBODY
        return self._phases.setdefault(name, len(self._phases))

    def look_at_layout(self, job: Job, registry: Registry, world_size: int) -> Generator[None, None, None]:
        """Find out where ranks are, when that may have changed: in a new round, or when more of them have reported."""
        shares = [(name, registry.share(name, job.name, job.record.round)) for name in job.nodes]
        told = sum(len(share.ranks) for _name, share in shares if share is not None)
        gpus = _gpus([share.ranks for _name, share in shares if share is not None], world_size)
        # An agent finds out later than the first report which GPU a process computes on.
        known = (job.record.life, job.record.round, world_size, told, len(gpus) - gpus.count(""))
        if known == self._layout_of:
            return
        yield
        mesh = {name: array(TYPES[name], [-1]) * world_size for name in Mesh.__struct_fields__}
        node = array("H", [UNKNOWN]) * world_size
        local = array("B", [NOBODY]) * world_size
        pid = array("I", [0]) * world_size
        meshed = False
        for place, (_name, share) in enumerate(shares[:UNKNOWN]):
            if place % NODES_A_TIME == NODES_A_TIME - 1:
                yield
            for rank, report in share.ranks.items() if share is not None else ():
                if rank >= world_size:
                    continue
                node[rank], local[rank] = place, min(NOBODY, max(0, report.local_rank))
                pid[rank] = max(0, report.pid)
                if report.mesh != Mesh():
                    meshed = True
                    for name, column in mesh.items():
                        column[rank] = getattr(report.mesh, name)
        columns = {"node": node, "local": local, "pid": pid, **(mesh if meshed else {})}
        packed_columns = {name: packed(name, column) for name, column in columns.items()}
        self.layout = Layout(tuple(name for name, _share in shares), **packed_columns, gpus=gpus if any(gpus) else ())
        self._layout_of = known


def _gpus(shares: Iterable[Mapping[int, RankReport]], world_size: int) -> tuple[str, ...]:
    """Return the GPU of each rank, "" where it is not known; none of a job of more than ``MOST_GPUS`` ranks."""
    if world_size > MOST_GPUS:
        return ()
    found = [""] * world_size
    for ranks in shares:
        for rank, report in ranks.items():
            if rank < world_size:
                found[rank] = report.gpu
    return tuple(found)
