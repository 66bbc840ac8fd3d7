# SPDX-License-Identifier: Apache-2.0
"""The facts of a report: gathered by the command line, turned into numbers here.

Pure: the verb hands over the answers of a controller or the files of a run; ``reckon`` adds the ledger and the grid.
"""

from collections.abc import Sequence
from datetime import tzinfo
from typing import NamedTuple

from megascale_ops import account
from megascale_ops.cards import Reader
from megascale_ops.ledger import Ledger, keep_ledger
from megascale_ops.schema.events import Incident
from megascale_ops.schema.history import History, Place, Turn
from megascale_ops.trace.heatmap import Rows, Times, equals, fold, lay_out, step_times, worst
from megascale_ops.trace.report_neighbours import Neighbourhood, neighbourhood

# 5 % of a step: below it no rank is late, and a clean run is no drama.
LEAST_RANGE = 0.05
# 3 suspects: the newest ones that a verdict names, with their neighbours.
MOST_SUSPECTS = 3
SLOWEST_SHOWN = 8
# States of an incident that still goes on.
HOLDS = ("open", "watching")


class Told(NamedTuple):
    """An incident, with the rows of its verdict card: label and lines."""

    incident: Incident
    rows: tuple[tuple[str, tuple[str, ...]], ...]


class Setting(NamedTuple):
    """One setting of the job's policy; ``default`` is "" where a table decides."""

    name: str
    value: str
    default: str
    is_changed: bool  # by a person while the job lived


class Gathered(NamedTuple):
    """All facts of a job from a controller or the files of a run.

    ``notes``: what could not be read, and why. ``reader``: by which options a command finds what was read.
    """

    job: str
    state: str
    began_wall_s: float
    until_wall_s: float
    history: History | None
    told: tuple[Told, ...]
    settings: tuple[Setting, ...]
    notes: tuple[str, ...]
    source: str
    version: str
    made_wall_s: float
    zone: tzinfo
    reader: Reader = Reader()


class Slow(NamedTuple):
    """A rank's own work over the whole of what is shown, seconds of a step."""

    rank: int
    node: str
    late_s: float
    own_s: float
    waiting_s: float


class Report(NamedTuple):
    """What is shown. ``times`` and ``rows`` are None where no steps are known."""

    gathered: Gathered
    ledger: Ledger
    times: Times | None
    rows: Rows | None
    suspects: tuple[Neighbourhood, ...]
    slowest: tuple[Slow, ...]
    step_s: float  # typical, 0 where not known
    is_named: bool  # verdicts name the suspects; else the slowest stands in for them
    goodput: float = -1.0  # share of the wall time that was training; -1: not known

    @property
    def places(self) -> tuple[Place, ...]:
        """Where the ranks are."""
        return self.gathered.history.facts.places if self.gathered.history is not None else ()


def reckon(gathered: Gathered) -> Report:
    """Return what a report shows of what was gathered."""
    history = gathered.history
    times = lay_out(history) if history is not None else None
    turns: Sequence[Turn] = history.facts.turns if history is not None else ()
    places = history.facts.places if history is not None else ()
    incidents = [told.incident for told in gathered.told]
    groups = equals(places, len(times.own)) if times is not None else []
    kept = account.kept_in(history.facts) if history is not None else None
    if kept is not None:  # as the controller reckons it, from the same numbers
        ledger = account.paint(kept, incidents, gathered.until_wall_s).ledger()
    else:
        steps = step_times(times, groups) if times is not None else ()
        ledger = keep_ledger(gathered.began_wall_s, gathered.until_wall_s, turns, incidents, steps)
    named = _named(incidents)
    slowest = _slowest(times, places) if times is not None else ()
    suspects = named[:MOST_SUSPECTS] or [slow.rank for slow in slowest[:1]]
    return Report(
        gathered=gathered,
        ledger=ledger,
        times=times,
        rows=fold(times, places, named) if times is not None else None,
        suspects=tuple(neighbourhood(rank, places) for rank in suspects) if places else (),
        slowest=slowest,
        step_s=_typical(times) if times is not None else 0.0,
        is_named=bool(named),
        goodput=account.ratio(ledger, "train"),
    )


def in_order(told: Sequence[Told]) -> list[Told]:
    """Return incidents in the order in which a person asks for them: what still goes on, then the newest."""
    return sorted(told, key=lambda one: (one.incident.state not in HOLDS, -_at(one.incident)))


def _at(incident: Incident) -> float:
    return incident.marks.detected or incident.marks.began


def _named(incidents: Sequence[Incident]) -> list[int]:
    """Return the ranks that verdicts name, open incidents first, then the newest; not verdicts with over 4 culprits."""
    newest = sorted(incidents, key=lambda one: (one.state not in HOLDS, -_at(one)))
    named = [rank for one in newest if one.verdict and len(one.verdict.culprits) <= 4 for rank in one.verdict.culprits]
    return list(dict.fromkeys(named))


def _slowest(times: Times, places: Sequence[Place]) -> tuple[Slow, ...]:
    import numpy as np

    nodes = {place.rank: place.node for place in places}
    found = []
    for rank in worst(times)[:SLOWEST_SHOWN]:
        steps = times.steps[rank]
        seen = np.isfinite(times.own[rank])
        if not seen.any():
            continue
        late_s, own_s, waiting_s = (
            float(np.average(values[rank][seen], weights=steps[seen]))
            for values in (times.lateness, times.own, times.waiting)
        )
        found.append(Slow(rank, nodes.get(rank, ""), late_s, own_s, waiting_s))
    return tuple(sorted(found, key=lambda slow: -slow.late_s))


def _typical(times: Times) -> float:
    import numpy as np

    return float(np.nanmedian(times.step)) if np.isfinite(times.step).any() else 0.0
