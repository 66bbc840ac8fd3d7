# SPDX-License-Identifier: Apache-2.0
"""Find the ranks that need longer for their own work than their equals, and make all the others wait.

A synchronous job is as fast as its slowest rank, and every rank shows the same step time: the culprit's is filled with
work, a victim's with waiting. So only *own work* is compared (the step without what was waited for others and without
checkpoints), of the same step, with the median of the other ranks of the same pipeline and tensor coordinates. What is
common to all (long sequences, an evaluation, a slow network) cancels there; what is random averages out.

Three ways to be slow, three tests on each rank's excess over that median, in units of the run's own noise:

- *much*: a cumulative sum with allowance 0.5 (``calibration`` says what that is); 20 % are named after 5 to 10 steps;
- *a little, or creeping*: another whose allowance is half of the smallest excess worth naming;
- *now and then*: single slow steps of a rank, counted against how often all others have such steps.

Each alarm must also be worth it (``straggler_share`` of a step, in the median of the slow steps) and have somebody who
waits for it. A name is taken back when the excess has been below half of that for as long as it took to name it.

Pure: told the steps, answers with who is slow. A step of many ranks is judged in pieces, so that whoever asks can do
something else in between.
"""

from collections.abc import Iterator, Sequence

from megascale_ops.controller.own_work import Held, Rank
from megascale_ops.controller.pieces import Pieces, run_through
from megascale_ops.controller.straggler_group import Group
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.messages import JobPolicy
from megascale_ops.schema.progress import StepWork

# Values a second that are looked at (1.5 us each); of jobs with more ranks than that only every n-th step is.
MOST_VALUES = 40_000.0


class Watch:
    """All ranks of one round of one job."""

    def __init__(self) -> None:
        self.groups: dict[tuple[int, int], Group] = {}
        self._seen: set[int] = set()
        self._stride = 1

    def take(self, rank: int, node: str, mesh: Mesh, works: Sequence[StepWork]) -> None:
        """Take finished steps of one rank."""
        self._seen.add(rank)
        group = self.groups.get((mesh.pp, mesh.tp))
        if group is None:
            group = self.groups[mesh.pp, mesh.tp] = Group()
        group.take(rank, node, works, self._stride)

    def advance(self, policy: JobPolicy, world_size: int) -> bool:
        """Judge what has come in; tell whether anything was judged. Nobody is, until all ranks were seen."""
        return run_through(self.pieces(policy, world_size))

    def pieces(self, policy: JobPolicy, world_size: int) -> Pieces[bool]:
        """Do the same piece by piece; more steps may be taken in between."""
        if len(self._seen) < world_size:
            return False
        moved = False
        for group in list(self.groups.values()):
            if (yield from group.advance(policy)):
                moved = True
                yield
        step_s = max((group.step_s for group in self.groups.values()), default=0.0)
        if step_s:
            self._stride = max(1, round(world_size / (MOST_VALUES * step_s)))
        return moved

    def held(self) -> Iterator[tuple[Group, Rank, Held]]:
        """Yield who is named now."""
        for group in self.groups.values():
            for place in sorted(group.held):
                yield group, group.rank(place), group.held[place]
