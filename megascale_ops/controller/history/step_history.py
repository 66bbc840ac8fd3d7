# SPDX-License-Identifier: Apache-2.0
"""The steps of one job from its start to now, in bounded memory: rank by time, coarser the longer the job lives.

Time is cut into buckets of one length. When there is no room for another bucket, the oldest two of that length are
merged into one of twice the length; once all are merged, that is the length. So a new bucket costs one merge at most,
all buckets are of one length or of twice that, and at least half of the room is always used.

Of the loss a bucket keeps the sum over all ranks, their number, and how often it was no number: a mean, not ranks' own.

Room: at most MOST_BUCKETS, and at most MOST_CELLS cells of 24 bytes (six float32) over all ranks. That is 512 buckets
up to 3,072 ranks, 128 for 12,288 ranks, and 38 MB from there on.

The steps of large jobs are put by as rows (``step_table``) and taken by NumPy, all of a tenth of a second at once; then
they are handed on to the detectors.

Steps carry no time of their own. The newest of a report ended before the report was sent, at most a heartbeat before;
the others ended before it by what it and its successors took.

Pure: the time when a report was sent is an argument.
"""

import operator
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import starmap

import numpy as np

from megascale_ops.controller.cluster.steady import Fields, Ranks
from megascale_ops.controller.history.step_costs import StepCosts
from megascale_ops.diagnosis.statistics.cooperative import Pieces
from megascale_ops.diagnosis.stragglers.step_table import (
    CHECKPOINT_S,
    END_S,
    LOSS,
    LOSS_IS_FINITE,
    NUMBER,
    RANK,
    STEP,
    WAITING_S,
    WALL_S,
    WEIGHT,
    StepRows,
    Table,
    columns,
)
from megascale_ops.schema.events import OVER
from megascale_ops.schema.history import FIELDS, Bucket, Losses, Place, Turn
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.progress import MOST_WORK, StepWork
from megascale_ops.schema.ranges import MOST_RANKS

MOST_BUCKETS = 512
LEAST_BUCKETS = 16
MOST_CELLS = 12_288 * 128
# 1 s: a heartbeat; nothing finer is known of when a step ended.
FIRST_LENGTH_S = 1.0
# 4,096 changes of state: 500 restarts. Of more, the newest are kept.
MOST_TURNS = 4_096
_NONE = -(1 << 62)

# Rows that were taken, where every rank is, and which of them have come or moved since the call before.
HandOn = Callable[[Table, Mapping[int, Place], Iterable[int]], None]


class _Open:
    """One bucket while it may still change; ``start_s`` counts from the history's origin."""

    __slots__ = ("cells", "length_s", "losses", "start_s", "step")

    def __init__(self, start_s: float, length_s: float, ranks: int) -> None:
        self.start_s = start_s
        self.length_s = length_s
        self.step = -1
        self.cells = tuple(array("f", bytes(4 * ranks)) for _ in FIELDS)
        self.losses = Losses()

    def grow(self, ranks: int) -> None:
        more = bytes(4 * (ranks - len(self.cells[0])))
        for cells in self.cells:
            cells.frombytes(more)

    def add_rows(self, rows: Table) -> None:
        """Take steps of many ranks; a rank may have made several."""
        rank, weight = rows[:, RANK].astype(np.intp), rows[:, WEIGHT]
        took_s, waited_s, saved_s = rows[:, WALL_S], rows[:, WAITING_S], rows[:, CHECKPOINT_S]
        own_s = took_s - waited_s - saved_s
        added = (weight, weight * took_s, weight * waited_s, weight * saved_s, took_s, own_s)
        for field, cells, values in zip(FIELDS, self.cells, added, strict=True):
            put = np.maximum if field.startswith("longest") else np.add
            put.at(np.frombuffer(cells, np.float32), rank, values.astype(np.float32))
        self.step = max(self.step, int(rows[:, STEP].max()))
        has_loss = ~np.isnan(rows[:, LOSS])
        self.add_losses(
            float((rows[has_loss, LOSS] * weight[has_loss]).sum()),
            float(weight[has_loss].sum()),
            int((rows[:, LOSS_IS_FINITE] == 0).sum()),
        )

    def add_losses(self, total: float, steps: float, astray: int) -> None:
        """Take what steps told of the loss; of most jobs nothing."""
        if steps or astray:
            known = self.losses
            self.losses = Losses(known.total + total, known.steps + steps, known.astray + astray)

    def absorb(self, other: "_Open") -> None:
        ranks = max(len(self.cells[0]), len(other.cells[0]))
        for bucket in (self, other):
            if len(bucket.cells[0]) < ranks:
                bucket.grow(ranks)
        pairs = zip(FIELDS, self.cells, other.cells, strict=True)
        self.cells = tuple(_merged(field.startswith("longest"), mine, others) for field, mine, others in pairs)
        self.step = max(self.step, other.step)
        self.add_losses(*other.losses)


def _merged(longest: bool, mine: "array[float]", others: "array[float]") -> "array[float]":
    """Return the longer, or the sum, of each rank's two cells."""
    pair = np.frombuffer(mine, np.float32), np.frombuffer(others, np.float32)
    return array("f", (np.maximum if longest else np.add)(*pair).tobytes())


class StepHistory:
    """One life of one job. Owned by ``Histories``.

    Args:
        origin_s: wall clock seconds from which buckets count; a stepped wall clock moves it and nothing else.
        known_s: since when it gets steps, wall clock seconds; 0: since the origin.
        most_cells: of all buckets together.
        hand_on: gets the rows of a large job once they are taken; None: they are not handed on.
    """

    def __init__(
        self,
        origin_s: float,
        *,
        known_s: float = 0.0,
        most_buckets: int = MOST_BUCKETS,
        most_cells: int = MOST_CELLS,
        hand_on: HandOn | None = None,
    ) -> None:
        self.origin_s = float(int(origin_s))
        self.known_s = known_s or origin_s
        self.length_s = FIRST_LENGTH_S
        self.turns: list[Turn] = []
        self.forgotten_turns = 0
        self.costs = StepCosts()  # the same steps as the ledger needs them
        self._most_buckets = most_buckets
        self._most_cells = most_cells
        self._buckets: list[_Open] = []
        self._coarse = 0  # how many of them, from the oldest, are of twice the length
        self._ranks = 0
        self._hand_on = hand_on
        self._places: dict[int, Place] = {}
        self._came: set[int] = set()  # ranks that are in another place than when rows were last handed on
        self._numbers: dict[tuple[int, int], int] = {}  # of the groups of equals: by pipeline and tensor coordinate
        self._equals = array("q")  # by rank: the number of its group
        self._told = array("q")  # by rank: the last step that was reported in this round, _NONE before the first
        self._waiting = StepRows()

    @property
    def capacity(self) -> int:
        """How many buckets there may be with as many ranks as were seen."""
        return max(LEAST_BUCKETS, min(self._most_buckets, self._most_cells // max(1, self._ranks)))

    def ingest_steps(self, rank: int, node: str, mesh: Mesh, works: Sequence[StepWork], sent_wall_s: float) -> None:
        """Take the finished steps of one rank's report, oldest first."""
        if not self._know(rank, node, mesh):
            return
        weight = self._weight(rank, works)
        end_s = max(0.0, sent_wall_s - self.origin_s)
        bucket = self._at(end_s)
        ended = []
        for work in reversed(works):
            ended.append((work, end_s + self.origin_s))
            if not bucket.start_s <= end_s < bucket.start_s + bucket.length_s:
                bucket = self._at(end_s)
            self._add(bucket, rank, work, weight)
            end_s = max(0.0, end_s - work.wall_s)
        self.costs.ingest_steps(rank, ended[::-1], weight, self._ranks)

    def put_by(self, rank: int, node: str, mesh: Mesh, works: Sequence[StepWork], sent_wall_s: float) -> None:
        """Do the same later, with all that is put by until :meth:`reckon`. Worth it from LARGE ranks on."""
        if not self._know(rank, node, mesh):
            return
        weight = self._weight(rank, works)
        end_s = max(0.0, sent_wall_s - self.origin_s)
        numbers = self.costs.count(rank, works)
        if len(works) == 1:  # nearly always
            self._waiting.put(rank, numbers[0], end_s, weight, works[0])
            return
        ends_s = [end_s]
        for work in works[:0:-1]:
            end_s = max(0.0, end_s - work.wall_s)
            ends_s.append(end_s)
        for work, number, end_s in zip(works, numbers, reversed(ends_s), strict=True):
            self._waiting.put(rank, number, end_s, weight, work)

    def put_rows_by(self, ranks: Ranks, steps: Sequence[Fields], sent_wall_s: Table) -> None:
        """Do the same with the steps of many ranks that are known already.

        Args:
            ranks: whose they are, none of them twice.
            steps: finished ones, oldest first and fewer than MOST_WORK: (ranks, 12), the fields of ``StepWork``.
            sent_wall_s: by rank, when its report was sent.
        """
        end_s = np.maximum(0.0, sent_wall_s - self.origin_s)
        ends_s = [end_s]
        for one in reversed(steps[1:]):
            end_s = np.maximum(0.0, end_s - one[:, WALL_S - STEP])
            ends_s.append(end_s)
        for one, end_s in zip(steps, reversed(ends_s), strict=True):
            numbers = self.costs.count_rows(ranks, one[:, 0])
            rows = columns(len(ranks))
            rows[:, RANK], rows[:, NUMBER], rows[:, END_S], rows[:, WEIGHT] = ranks, numbers, end_s, 1.0
            rows[:, STEP:] = one
            self._waiting.put_rows(rows)
        np.frombuffer(self._told, np.int64)[ranks] = steps[-1][:, 0].astype(np.int64)

    def knows(self, rank: int, node: str, mesh: Mesh) -> bool:
        """Return whether a rank is known to be there."""
        place = self._places.get(rank)
        return place is not None and place.node == node and place.mesh == mesh

    def _know(self, rank: int, node: str, mesh: Mesh) -> bool:
        """Note where a rank is; False for one that cannot be."""
        place = self._places.get(rank)
        if place is not None and place.node == node and (place.mesh is mesh or place.mesh == mesh):
            return True
        if not 0 <= rank < MOST_RANKS:
            return False
        self._ranks = max(self._ranks, rank + 1)
        self._settle(Place(rank, node, mesh))
        return True

    def _settle(self, place: Place) -> None:
        self._places[place.rank] = place
        self._came.add(place.rank)
        missing = max(0, place.rank + 1 - len(self._equals))
        self._equals.extend([-1] * missing)
        self._told.extend([_NONE] * missing)
        coordinates = (place.mesh.pp, place.mesh.tp)
        self._equals[place.rank] = self._numbers.setdefault(coordinates, len(self._numbers))

    def reckon(self) -> None:
        """Take what was put by into the buckets and the costs, and hand it on."""
        if not self._waiting:
            return
        taken = rows = self._waiting.drain_table()
        self.costs.take_rows(rows, self.origin_s, self._ranks)
        while len(rows):
            bucket = self._at(float(rows[0, END_S]))
            if self._ranks > len(bucket.cells[0]):
                bucket.grow(self._ranks)
            inside = (rows[:, END_S] >= bucket.start_s) & (rows[:, END_S] < bucket.start_s + bucket.length_s)
            inside[0] = True  # it was found for this one
            if inside.all():  # nearly always
                bucket.add_rows(rows)
                break
            bucket.add_rows(rows[inside])
            rows = rows[~inside]
        if self._hand_on is not None:
            self._hand_on(taken, self._places, self._came)
        self._came.clear()

    def _weight(self, rank: int, works: Sequence[StepWork]) -> float:
        """Return how many steps each reported one stands for: if a report has no room for all, it has the newest."""
        before = self._told[rank]
        self._told[rank] = works[-1].step
        if len(works) < MOST_WORK or before == _NONE:
            return 1.0
        return 1.0 + max(0, works[0].step - before - 1) / len(works)

    def _add(self, bucket: _Open, rank: int, work: StepWork, weight: float) -> None:
        if rank >= len(bucket.cells[0]):
            bucket.grow(self._ranks)
        steps, wall_s, waiting_s, checkpoint_s, longest_s, longest_own_s = bucket.cells
        took_s, waited_s, saved_s = work.wall_s, work.waiting_s, work.checkpoint_s
        steps[rank] += weight
        wall_s[rank] += weight * took_s
        waiting_s[rank] += weight * waited_s
        if saved_s:
            checkpoint_s[rank] += weight * saved_s
        longest_s[rank] = max(longest_s[rank], took_s)
        longest_own_s[rank] = max(longest_own_s[rank], took_s - waited_s - saved_s)
        bucket.step = max(bucket.step, work.step)
        if work.loss is not None:
            bucket.add_losses(weight * work.loss, weight, 0)
        elif not work.loss_is_finite:
            bucket.add_losses(0.0, 0.0, 1)

    def _at(self, at_s: float) -> _Open:
        """Return the bucket of a point in time, a new one when there is none."""
        buckets = self._buckets
        if buckets and buckets[-1].start_s <= at_s < buckets[-1].start_s + buckets[-1].length_s:
            return buckets[-1]  # nearly always
        place = bisect_right(buckets, at_s, key=operator.attrgetter("start_s"))
        if place and at_s < buckets[place - 1].start_s + buckets[place - 1].length_s:
            return buckets[place - 1]
        coarse = place < self._coarse
        length_s = self.length_s * (2 if coarse else 1)
        made = _Open(at_s // length_s * length_s, length_s, self._ranks)
        buckets.insert(place, made)
        self._coarse += coarse
        while len(buckets) > self.capacity:
            self._widen_one()
        return made if made in buckets else self._at(at_s)

    def _widen_one(self) -> None:
        """Let the oldest bucket of the shorter length have twice of it, together with its neighbour."""
        if self._coarse >= len(self._buckets):
            self.length_s *= 2
            self._coarse = 0
        bucket = self._buckets[self._coarse]
        bucket.length_s = 2 * self.length_s
        bucket.start_s = bucket.start_s // bucket.length_s * bucket.length_s
        self._coarse += 1
        if self._coarse < len(self._buckets):
            following = self._buckets[self._coarse]
            if following.start_s < bucket.start_s + bucket.length_s:
                bucket.absorb(following)
                del self._buckets[self._coarse]

    def turn(self, wall_s: float, state: str, round_: int) -> None:
        """Note that the job came into a state; another round counts its steps anew."""
        self.reckon()
        if self.turns and round_ != self.turns[-1].round:
            self._told = array("q", [_NONE]) * len(self._told)
            self.costs.end_round(self._equals)
        elif state in OVER:
            self.costs.end_round(self._equals)
        self.turns.append(Turn(wall_s, state, round_))
        if len(self.turns) > MOST_TURNS:
            self.forgotten_turns += len(self.turns) - MOST_TURNS
            del self.turns[: len(self.turns) - MOST_TURNS]

    def shift(self, step_s: float) -> None:
        """Move everything with a wall clock that was stepped."""
        self.reckon()
        self.origin_s += step_s
        self.known_s += step_s
        self.costs.shift(step_s)
        self.turns = list(starmap(Turn, ((one.wall_s + step_s, one.state, one.round) for one in self.turns)))

    def pieces(self, now_s: float) -> Pieces[None]:
        """Let time pass, wall clock seconds: steps that all ranks have reported are reckoned, in pieces."""
        self.reckon()
        yield from self.costs.pieces(now_s, self._equals)

    def places(self) -> tuple[Place, ...]:
        """Return where the ranks are."""
        return tuple(self._places[rank] for rank in sorted(self._places))

    def buckets(self) -> tuple[Bucket, ...]:
        """Return all buckets, oldest first. Their cells are the ones that go on being filled."""
        self.reckon()
        return tuple(
            Bucket(one.start_s + self.origin_s, one.length_s, one.step, one.cells, one.losses) for one in self._buckets
        )

    def restore(
        self, turns: Sequence[Turn], forgotten_turns: int, places: Sequence[Place], buckets: Sequence[Bucket]
    ) -> None:
        """Go on with what another controller has kept; buckets keep the lengths that they have."""
        self.turns = list(turns)
        self.forgotten_turns = forgotten_turns
        for place in places:
            self._settle(place)
        self._ranks = max((len(bucket.cells[0]) for bucket in buckets), default=0)
        self.origin_s = buckets[0].start_s if buckets else self.origin_s
        self.length_s = min((bucket.length_s for bucket in buckets), default=FIRST_LENGTH_S)
        for bucket in buckets:
            kept = _Open(bucket.start_s - self.origin_s, bucket.length_s, 0)
            kept.step, kept.cells, kept.losses = bucket.step, bucket.cells, bucket.losses
            self._buckets.append(kept)
        self._coarse = sum(bucket.length_s > self.length_s for bucket in buckets)
