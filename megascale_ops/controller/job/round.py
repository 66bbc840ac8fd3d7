# SPDX-License-Identifier: Apache-2.0
"""What is known of one round: it begins when the round is formed, and all of it is void when the next one is.

``Transitions.move`` puts a new one in its place, whole, so nothing of a round can outlive it. A controller that is
started again has forgotten how ranks ended and which nodes left; runners report it again. How far the round had come is
in the record.
"""

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from megascale_ops.controller.record.job_record import STATES, JobRecord
from megascale_ops.controller.record.state_machine import FINAL
from megascale_ops.schema.messages import Leave, RankExit
from megascale_ops.schema.policy import JobPolicy

if TYPE_CHECKING:
    from megascale_ops.controller.job.round_progress import Pace
    from megascale_ops.controller.job.stood import Stood
    from megascale_ops.diagnosis.hangs.lost_nodes import Together
    from megascale_ops.diagnosis.hangs.suspicion import Suspicion
    from megascale_ops.schema.events import Incident
    from megascale_ops.schema.progress import Progress

NEVER_S = float("-inf")
# 60 s: 10 GB of each rank are written in 3 to 7 s to a local disk; shared storage takes longer.
WRITTEN_S = 60.0


class Exit(msgspec.Struct, frozen=True):
    """How a rank ended; ``ended_s`` on the controller's clock."""

    node: str
    exit: RankExit
    ended_s: float


class Hold(NamedTuple):
    """Until when a judgement stands if nothing happens but that time passes, and what it rests on besides ages."""

    until_s: float  # the controller's clock
    stirred: int  # the registry's number of the last heartbeat that told of more
    policy: JobPolicy
    price_s: float  # of a restart
    habits: dict[str, float]


class SilenceCheck:
    """One judgement of which ranks stand still, and what has happened since: void when the next judgement is made."""

    __slots__ = ("at_s", "hold", "judged_s", "odd", "suspicion")

    def __init__(self, at_s: float = NEVER_S) -> None:
        self.at_s = at_s  # when it was made, or last found to stand as it is
        self.judged_s = at_s
        self.suspicion: Suspicion | None = None
        self.odd = False  # a heartbeat triggers the next judgement
        self.hold: Hold | None = None

    def stand(self, now_s: float) -> None:
        """Note that it stands: its suspects are older, and nothing else has changed."""
        assert self.suspicion is not None
        self.suspicion = self.suspicion._replace(age_s=self.suspicion.age_s + now_s - self.at_s)
        self.at_s = now_s


class LifeSigns(NamedTuple):
    """That the members plainly lived: so many parts of them, one after the other, and no change since."""

    changes: int  # the registry's
    parts: int


class Answer(NamedTuple):
    """The decision on a warning or an offer; published again when any of it changes."""

    action: str
    rule: str
    dry_run: bool
    policy: JobPolicy  # under which it was decided


class Saves(NamedTuple):
    """When steps with a checkpoint in them have ended, of any round, wall clock seconds; 0: none is known.

    Many jobs go on while a checkpoint is written, and no report tells when it is: until then a restart begins at the
    one before, which is written when the next one is begun.
    """

    newest_wall_s: float = 0.0
    before_wall_s: float = 0.0

    def with_newest(self, saved_wall_s: float) -> "Saves":
        """Return them with the newest, 0 where none is known."""
        return Saves(saved_wall_s, self.newest_wall_s) if saved_wall_s > self.newest_wall_s else self

    def held_wall_s(self, wall_s: float) -> float:
        """Return when the newest one was made that is written by now, 0 where none is."""
        return self.newest_wall_s if wall_s - self.newest_wall_s >= WRITTEN_S else self.before_wall_s

    def shifted(self, step_s: float) -> "Saves":
        """Return them moved with a wall clock that was stepped."""
        return Saves(*(one + step_s if one else 0.0 for one in self))


class Told:
    """What was published of one warning: void when the warning ends."""

    __slots__ = ("answer", "at_s")

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.at_s = NEVER_S  # when its numbers were last published


class Round:
    """One round of a job. Owned by the job.

    Args:
        record: the job's, with the members of this round.
        formed_wall_s: when it was formed; 0: before this controller began.
    """

    def __init__(self, record: JobRecord, *, formed_wall_s: float = 0.0) -> None:
        self.places = {member.node: place for place, member in enumerate(record.members)}
        self.formed_wall_s = formed_wall_s
        # Furthest that a heartbeat has reported; of a job that is over, how far it came in all.
        self.step = record.best_step if STATES[record.state] in FINAL else record.furthest
        self.steps_began_wall_s = 0.0  # by reports; 0 before the first step
        self.is_numbered = True  # the steps have the script's own numbers; else they are counted from 0 in each round
        self.last_step_wall_s = 0.0
        self.saves = Saves()
        self.has_started = False  # every rank has made a step
        self.is_counted = False  # what its steps cover is in the job's useful time
        self.paces: dict[str, Pace] = {}  # by node, until the job has caught up
        self.exits: dict[int, Exit] = {}  # by rank
        self.unmet: dict[str, tuple[str, ...]] = {}  # by node: the nodes it could not reach
        self.left: dict[str, Leave] = {}  # by node: the last word of its runner
        self.finished_s: float | None = None  # since when all have left well, and their last steps are waited for
        self.gone: dict[int, float] = {}  # by rank: when its process was first seen gone
        self.silence = SilenceCheck()
        self.stood: Stood | None = None  # what a look at nodes that stand came to, of many that tell so together
        self.compared_s = NEVER_S  # when it was last looked whether all ranks go on, since nodes are silent
        self.scanned_s = NEVER_S  # when all nodes, or all ranks, were last looked at
        self.life_signs = LifeSigns(0, 0)
        self.together: Together | None = None  # how far the others are while nodes are silent
        self.all_heard: int | None = None  # the registry's number of when all nodes were found to report the round
        self.unheard_s: float | None = None  # when the whole job was last unheard
        self.warnings: dict[str, Incident] = {}  # what is wrong and not worth a stop, by the key of its detector
        self.told: dict[str, Told] = {}  # by the key of a warning
        self.offer_told: tuple[tuple[str, ...], Answer] | None = None  # nodes that could be taken in, and the answer
        self.weighed_s = NEVER_S  # when the warnings were last weighed
        self.cut: set[str] = set()  # nodes with a logged cut of their reports
        self.passed_wall_s = 0.0  # when it was seen beyond the step that no checkpoint is restored from
        self.bad_gpus_told: set[str] = set()

    def note_step(self, progress: "Progress", moved_wall_s: float) -> None:
        """Note the furthest step, and the time that the round's steps cover."""
        self.step = progress.step
        self.is_numbered = progress.step_is_absolute
        self.note_moved(moved_wall_s)
        if not self.steps_began_wall_s:
            began_wall_s = moved_wall_s - progress.steps_seen * progress.step_p50_s
            self.steps_began_wall_s = max(began_wall_s, self.formed_wall_s)

    def note_moved(self, moved_wall_s: float) -> None:
        """Note when a rank moved that had made the furthest step."""
        self.last_step_wall_s = max(self.last_step_wall_s, moved_wall_s)

    @property
    def reached_step(self) -> int:
        """Furthest step, by heartbeats and the ends of ranks; -1 before the first."""
        return max(self.step, max((end.exit.step for end in self.exits.values()), default=-1))

    @property
    def covered_s(self) -> float:
        """How long the round's steps took."""
        return max(0.0, self.last_step_wall_s - self.steps_began_wall_s) if self.steps_began_wall_s else 0.0

    def since_saved_s(self, wall_s: float) -> float:
        """Return for how long steps were made that no checkpoint holds; -1: none is known, or no step was made."""
        if not (self.saves.newest_wall_s and self.steps_began_wall_s):
            return -1.0
        return max(0.0, wall_s - max(self.saves.held_wall_s(wall_s), self.steps_began_wall_s))

    def unsaved_s(self, wall_s: float) -> float:
        """Return how long the steps took that a restart would make again: at most all of this round's.

        A wait is none of it, and a round that has made no step has nothing to lose.
        """
        if not self.steps_began_wall_s:
            return 0.0
        return max(0.0, self.last_step_wall_s - max(self.saves.held_wall_s(wall_s), self.steps_began_wall_s))

    @property
    def uncounted_s(self) -> float:
        """What of it is not yet in the job's useful time."""
        return 0.0 if self.is_counted else self.covered_s

    def end_warning(self, key: str) -> "Incident | None":
        """Remove and return a warning that is over, with what was published of it; None where there is none."""
        self.told.pop(key, None)
        return self.warnings.pop(key, None)

    def shift(self, step_s: float) -> None:
        """Move every point in time with a wall clock that was stepped."""
        if self.formed_wall_s:
            self.formed_wall_s += step_s
        if self.steps_began_wall_s:
            self.steps_began_wall_s += step_s
        if self.last_step_wall_s:
            self.last_step_wall_s += step_s
        self.saves = self.saves.shifted(step_s)
