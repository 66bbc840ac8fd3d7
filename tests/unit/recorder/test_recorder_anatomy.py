# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes, told in seconds that we make up."""

import pytest

from megascale_ops.blackbox.records import StepRecord
from megascale_ops.recorder.recording.anatomy import Anatomy


def one_step(anatomy: Anatomy, start_s: float) -> StepRecord:
    """Data 1 s, forward 2 s, backward 4 s, other 0.5 s, optimizer 0.25 s."""
    anatomy.observe("data", start_s)
    anatomy.observe("forward", start_s + 1)
    anatomy.observe("backward", start_s + 3)
    anatomy.observe("other", start_s + 7)
    anatomy.observe("optimizer", start_s + 7.5)
    return StepRecord(*anatomy.finish(0, start_s + 7.75))


def test_the_parts_of_a_step() -> None:
    """Each part gets its own time; what lies between belongs to none, but to the step."""
    record = one_step(Anatomy(), 100.0)

    assert record == StepRecord(0, 107.75, 7.75, 1.0, 2.0, 4.0, 0.25, 0.0, 0.0)


def test_start_up_is_no_part_of_the_first_step() -> None:
    """What came before the first event is start-up."""
    anatomy = Anatomy()

    assert anatomy.phase == "startup"
    assert one_step(anatomy, 5000.0).wall_s == 7.75


def test_steps_follow_each_other_without_gaps() -> None:
    """The time between two steps belongs to the second."""
    anatomy = Anatomy()
    one_step(anatomy, 100.0)

    assert one_step(anatomy, 110.0).wall_s == pytest.approx(110 + 7.75 - 107.75)


def test_without_a_data_loader_the_forward_pass_begins_after_the_step() -> None:
    """Nothing else tells where it begins."""
    anatomy = Anatomy()
    anatomy.observe("backward", 10.0)
    anatomy.observe("optimizer", 12.0)
    anatomy.finish(0, 13.0)

    assert anatomy.phase == "forward"
    anatomy.observe("backward", 14.0)
    anatomy.observe("optimizer", 15.0)
    assert StepRecord(*anatomy.finish(1, 16.0)).forward_s == 1.0


def test_with_a_data_loader_it_begins_with_the_batch() -> None:
    """Logging after the step is not the forward pass."""
    anatomy = Anatomy()
    one_step(anatomy, 100.0)

    assert anatomy.phase == "other"


def test_eval_is_no_part_of_a_step() -> None:
    """A minute of evaluation between two steps does not make the second slow, nor do its batches count as data."""
    anatomy = Anatomy()
    one_step(anatomy, 100.0)

    anatomy.declare("eval", 108.0)
    anatomy.observe("data", 110.0)
    anatomy.observe("forward", 120.0)
    assert (anatomy.phase, anatomy.may_step) == ("eval", False)
    anatomy.undeclare(168.0)
    record = one_step(anatomy, 168.0)

    assert record.wall_s == pytest.approx(0.25 + 7.75)
    assert (record.data_s, record.forward_s) == (1.0, 2.0)


def test_a_checkpoint_is_a_part_of_its_step() -> None:
    """Its time is told apart, so that patience need not learn it."""
    anatomy = Anatomy()
    one_step(anatomy, 100.0)

    anatomy.declare("checkpoint", 108.0)
    anatomy.undeclare(138.0)
    record = one_step(anatomy, 138.0)

    assert record.checkpoint_s == 30.0
    assert record.wall_s == pytest.approx(38.0)


def test_phases_nest() -> None:
    """The innermost is shown; the one around it comes back; an end too many is ignored."""
    anatomy = Anatomy()
    anatomy.observe("data", 1.0)

    anatomy.declare("rollout", 2.0)
    anatomy.declare("checkpoint", 3.0)
    shown = [anatomy.phase]
    for at in (4.0, 5.0, 6.0):
        anatomy.undeclare(at)
        shown.append(anatomy.phase)

    assert shown == ["checkpoint", "rollout", "data", "data"]


def test_a_loop_inside_a_phase_of_its_own_name_still_steps() -> None:
    """Only eval and checkpoints hold no steps."""
    anatomy = Anatomy()

    anatomy.declare("epoch", 1.0)

    assert anatomy.may_step
    assert one_step(anatomy, 2.0).wall_s == pytest.approx(8.75)


def test_waiting_is_added_up_and_starts_again() -> None:
    """Time in blocking collectives is told per step."""
    anatomy = Anatomy()
    one_step(anatomy, 1.0)
    anatomy.waited(0.5, 9.5)
    anatomy.waited(0.25, 10.0)

    assert one_step(anatomy, 11.0).waiting_s == 0.75
    assert one_step(anatomy, 19.0).waiting_s == 0.0


def test_waiting_is_no_part_of_the_work_it_lies_in() -> None:
    """What the backward pass waited for others is taken out of it."""
    anatomy = Anatomy()
    one_step(anatomy, 1.0)
    anatomy.observe("backward", 10.0)
    anatomy.waited(1.5, 14.0)
    anatomy.observe("other", 14.0)

    record = StepRecord(*anatomy.finish(1, 15.0))

    assert (record.backward_s, record.waiting_s) == (2.5, 1.5)


def test_a_wait_inside_another_counts_once() -> None:
    """An all-reduce that waits by ``Work.wait`` tells both."""
    anatomy = Anatomy()
    one_step(anatomy, 1.0)
    anatomy.waited(1.0, 12.0)
    anatomy.waited(1.25, 12.0)
    anatomy.waited(0.5, 13.0)

    assert StepRecord(*anatomy.finish(1, 15.0)).waiting_s == 1.5


def test_an_evaluation_that_waits_is_an_evaluation() -> None:
    """Its waiting is not the step's, so that no step has less than no work."""
    anatomy = Anatomy()
    one_step(anatomy, 1.0)
    anatomy.declare("eval", 9.0)
    anatomy.waited(5.0, 15.0)
    anatomy.undeclare(16.0)

    record = StepRecord(*anatomy.finish(1, 17.0))

    assert (record.wall_s, record.waiting_s) == (1.25, 0.0)


def test_what_is_loaded_before_the_first_step_is_start_up() -> None:
    """A checkpoint that is read, or an evaluation, before anything was trained is no part of the first step."""
    anatomy = Anatomy()
    anatomy.declare("checkpoint", 10.0)
    anatomy.undeclare(70.0)

    assert one_step(anatomy, 100.0).wall_s == 7.75


class Story:
    """A script in seconds: each event lasts until the next one."""

    def __init__(self) -> None:
        self.anatomy = Anatomy()
        self.now_s = 100.0
        self.train()

    def train(self, seconds: float = 1.0) -> StepRecord:
        """Make a step: batch, forward, backward, optimizer, each this long."""
        self.see("data", seconds)
        self.see("forward", seconds)
        self.learn(seconds)
        return self.finish()

    def learn(self, seconds: float = 1.0) -> None:
        """Make a backward pass and let the optimizer begin."""
        self.see("backward", seconds)
        self.see("optimizer", seconds)

    def finish(self) -> StepRecord:
        """End the step."""
        return StepRecord(*self.anatomy.finish(0, self.now_s))

    def see(self, phase: str, seconds: float = 0.0) -> None:
        """Let a hook see something, and time pass."""
        self.anatomy.observe(phase, self.now_s)
        self.now_s += seconds

    def fetch(self, seconds: float = 1.0, work_s: float = 2.0) -> str:
        """Ask for a batch with gradients off, and work on it; return the phase that is shown meanwhile."""
        self.anatomy.observe_quietly(self.now_s)
        self.now_s += seconds
        self.see("forward", work_s)
        return self.anatomy.phase

    def quieten(self, seconds: float = 0.0) -> None:
        """Put the model into evaluation mode."""
        self.anatomy.quieten(self.now_s)
        self.now_s += seconds

    def learn_again(self) -> None:
        """Put it back."""
        self.anatomy.learn_again(self.now_s)


def parts(record: StepRecord) -> tuple[float, ...]:
    """Return a step's time and its parts."""
    return record.wall_s, record.data_s, record.forward_s, record.backward_s, record.optimizer_s


def test_an_evaluation_that_nobody_declares_is_no_part_of_the_next_step() -> None:
    """Batches fetched with gradients off, from which nothing is learned: the next step takes what steps take."""
    story = Story()

    shown = [story.fetch() for _ in range(10)]
    story.anatomy.observe_quietly(story.now_s)  # one more requested: there is none
    story.see("other")
    after = story.anatomy.phase
    record = story.train()

    assert shown[1:] == ["eval"] * 9
    assert after == "other"
    assert parts(record) == (4.0, 1.0, 1.0, 1.0, 1.0)


def test_an_evaluation_of_a_few_batches_ends_with_the_next_step() -> None:
    """A loop that is left before its loader has no batch left is as good, also with a single batch."""
    story = Story()

    for _ in range(3):
        story.fetch()
    long = story.train()
    story.fetch()
    short = story.train()

    assert parts(long) == parts(short) == (4.0, 1.0, 1.0, 1.0, 1.0)


def test_a_loader_read_with_gradients_off_is_training() -> None:
    """Where each batch is learned from, time stays where it was, and the phases shown are those of a step."""
    story = Story()

    for _ in range(3):
        assert story.fetch() == "forward"
        story.learn()
        assert parts(story.finish()) == (5.0, 1.0, 2.0, 1.0, 1.0)


def test_a_model_in_evaluation_mode_and_back() -> None:
    """Forward passes without a loader, between ``model.eval()`` and ``model.train()``, are an evaluation."""
    story = Story()

    story.quieten(seconds=50.0)
    story.learn_again()

    assert parts(story.train()) == (4.0, 1.0, 1.0, 1.0, 1.0)


def test_a_model_that_learns_in_evaluation_mode_trains() -> None:
    """Frozen statistics: the mode alone says nothing, a backward pass in between tells."""
    story = Story()

    story.quieten(seconds=3.0)
    story.fetch()
    story.learn()
    story.learn_again()

    assert story.finish().wall_s == 8.0


def test_what_an_evaluation_waits_is_not_the_steps_waiting() -> None:
    """Ranks that evaluate unevenly wait for each other inside it."""
    story = Story()

    story.fetch()
    story.anatomy.waited(1.5, story.now_s)
    story.fetch()
    record = story.train()

    assert (record.wall_s, record.waiting_s) == (4.0, 0.0)


def test_a_checkpoint_inside_an_evaluation_stays_one() -> None:
    """The best model is saved while others are evaluated: its time is the checkpoint's."""
    story = Story()

    for _ in range(2):
        story.fetch()
    story.anatomy.declare("checkpoint", story.now_s)
    story.now_s += 5.0
    story.anatomy.undeclare(story.now_s)
    story.fetch()
    record = story.train()

    assert (record.wall_s, record.checkpoint_s) == (9.0, 5.0)


def test_the_script_knows_better_what_it_does() -> None:
    """A phase of a name of its own is booked as ever, whatever its gradients are."""
    story = Story()

    story.quieten()
    story.anatomy.declare("rollout", story.now_s)
    story.fetch()
    story.fetch()
    story.anatomy.undeclare(story.now_s)
    story.learn_again()

    assert story.train().wall_s == 10.0
