# SPDX-License-Identifier: Apache-2.0
"""What counts as a step, whose events count, and what the box is told."""

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import BoxIdentity, RestoresRecord, SavesRecord
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.checkpoint.trust.verdicts import Alarm
from megascale_ops.recorder.recording.api import Recorder
from megascale_ops.recorder.recording.recording import Recording


class Optimizer:
    """Something that steps; the recording knows it by identity only."""


@pytest.fixture
def box(tmp_path: Path) -> tuple[Recording, BoxReader]:
    """Return a recording and what reads its box."""
    identity = BoxIdentity(job="j", node="n", rank=0, local_rank=0, world_size=1, pid=1, start_ticks=1, round=1)
    return Recording(BoxWriter.create(tmp_path, identity)), BoxReader(tmp_path / "0.box")


def train_step(recording: Recording, optimizer: object, backwards: int = 1) -> None:
    """Do what the hooks see of one step."""
    for _ in range(backwards):
        recording.data_begin()
        recording.data_end()
        recording.backward_begin()
        recording.backward_end()
    recording.optimizer_begin(optimizer)
    recording.optimizer_end(optimizer)


def in_thread(work: Callable[[], None]) -> None:
    """Do ``work`` in another thread."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)


def test_the_optimizer_ends_steps(box: tuple[Recording, BoxReader]) -> None:
    """Steps count from 0, and the rank is running from its first event on."""
    recording, reader = box
    assert reader.progress().state == "starting"

    optimizer = Optimizer()
    for _ in range(3):
        train_step(recording, optimizer)

    found = reader.progress()
    assert (found.state, found.step, found.steps_seen, found.step_is_absolute) == ("running", 2, 3, False)
    assert [record.step for record in reader.steps()] == [0, 1, 2]


def test_gradient_accumulation_is_one_step(box: tuple[Recording, BoxReader]) -> None:
    """Four backward passes and one optimizer step are one step."""
    recording, reader = box

    train_step(recording, Optimizer(), backwards=4)

    assert reader.progress().steps_seen == 1


def test_of_two_optimizers_the_first_counts(box: tuple[Recording, BoxReader]) -> None:
    """A GAN's generator and discriminator together make one step."""
    recording, reader = box
    first, second = Optimizer(), Optimizer()

    for _ in range(5):
        train_step(recording, first)
        train_step(recording, second)

    assert reader.progress().steps_seen == 5


def test_a_new_optimizer_takes_over_from_one_that_is_gone(box: tuple[Recording, BoxReader]) -> None:
    """A script that makes its optimizer anew goes on being counted."""
    recording, reader = box
    first = Optimizer()
    train_step(recording, first)
    del first

    train_step(recording, Optimizer())

    assert reader.progress().steps_seen == 2


def test_an_optimizer_inside_an_optimizer_is_one_step(box: tuple[Recording, BoxReader]) -> None:
    """Wrappers such as sharded optimizers step an inner one; a closure runs the backward pass inside."""
    recording, reader = box
    outer, inner = Optimizer(), Optimizer()

    recording.optimizer_begin(outer)
    recording.optimizer_begin(inner)
    recording.backward_begin()
    recording.backward_end()
    assert reader.progress().phase == "optimizer"
    recording.optimizer_end(inner)
    recording.optimizer_end(outer)

    assert reader.progress().steps_seen == 1


def test_a_backward_pass_inside_another_is_part_of_it(box: tuple[Recording, BoxReader]) -> None:
    """Recomputation calls backward inside backward: the phase ends with the outer one."""
    recording, reader = box

    recording.backward_begin()
    recording.backward_begin()
    recording.backward_end()
    inside = reader.progress().phase
    recording.backward_end()

    assert (inside, reader.progress().phase) == ("backward", "other")


def test_explicit_steps_do_not_count_twice(box: tuple[Recording, BoxReader]) -> None:
    """From its first call on only ``recorder.step()`` counts, and that call merges with the optimizer's step."""
    recording, reader = box
    optimizer = Optimizer()

    for _ in range(4):
        train_step(recording, optimizer)
        recording.step()

    found = reader.progress()
    assert (found.step, found.steps_seen, found.step_is_absolute) == (3, 4, False)


def test_explicit_numbers_are_the_scripts(box: tuple[Recording, BoxReader]) -> None:
    """A number given is absolute, and the next one without a number follows it."""
    recording, reader = box
    optimizer = Optimizer()

    for number in (700, 701):
        train_step(recording, optimizer)
        recording.step(number)
    recording.step()

    found = reader.progress()
    assert (found.step, found.steps_seen, found.step_is_absolute) == (702, 3, True)


def test_a_script_can_say_what_it_waited_for(box: tuple[Recording, BoxReader]) -> None:
    """It is no work of its own, and never more than has passed; without a word of it a step has none."""
    recording, reader = box
    recorder = Recorder()
    recorder.attach(recording)

    for number in range(3):
        if number == 2:
            recorder.waited(3600.0)
        recorder.step(number)

    before, waiting = reader.steps()[-2:]
    assert (before.step, before.waiting_s) == (1, 0.0)
    assert waiting.step == 2
    assert 0.0 < waiting.waiting_s <= waiting.wall_s
    Recorder().waited(1.0)  # outside of a run it does nothing


class Model:
    """Something that is put into evaluation mode."""


def test_a_model_in_evaluation_mode_makes_its_batches_quiet(box: tuple[Recording, BoxReader]) -> None:
    """With gradients on, too: from its second batch on the phase is "eval", until the model goes back."""
    recording, reader = box
    optimizer, model, shown = Optimizer(), Model(), []
    train_step(recording, optimizer)

    recording.model_evaluates(model)
    for _ in range(3):
        recording.data_begin()
        recording.data_end()
        shown.append(reader.progress().phase)
    recording.model_trains(Model())  # another one
    shown.append(reader.progress().phase)
    recording.model_trains(model)
    shown.append(reader.progress().phase)
    train_step(recording, optimizer)

    assert shown == ["forward", "eval", "eval", "eval", "other"]
    assert reader.progress().steps_seen == 2


def test_a_model_that_learns_in_evaluation_mode_trains(box: tuple[Recording, BoxReader]) -> None:
    """Fine-tuning with frozen statistics: its batches are those of steps."""
    recording, reader = box
    optimizer, model = Optimizer(), Model()
    train_step(recording, optimizer)

    recording.model_evaluates(model)
    for _ in range(3):
        recording.data_begin()
        recording.data_end()
        assert reader.progress().phase == "forward"
        recording.backward_begin()
        recording.backward_end()
        recording.optimizer_begin(optimizer)
        recording.optimizer_end(optimizer)

    assert reader.progress().steps_seen == 4


def test_a_teacher_before_the_first_step_evaluates_nothing(box: tuple[Recording, BoxReader]) -> None:
    """Models that are put into evaluation mode while a script starts leave it starting."""
    recording, reader = box
    model = Model()

    recording.model_evaluates(model)

    assert (reader.progress().phase, recording.evaluated) == ("startup", None)


def test_eval_counts_no_steps(box: tuple[Recording, BoxReader]) -> None:
    """Neither a data loader nor an optimizer inside phase("eval") makes a step."""
    recording, reader = box
    optimizer = Optimizer()
    train_step(recording, optimizer)

    recording.phase_begin("eval")
    train_step(recording, optimizer)
    shown = reader.progress().phase
    recording.phase_end()

    assert (shown, reader.progress().steps_seen) == ("eval", 1)


def test_checkpoints_know_the_step(box: tuple[Recording, BoxReader]) -> None:
    """A restore sets the absolute step, a save shows its phase and corrects the number."""
    recording, reader = box
    optimizer = Optimizer()

    recording.checkpoint("restored", 400)
    train_step(recording, optimizer)
    assert (reader.progress().step, reader.progress().step_is_absolute) == (401, True)
    recording.checkpoint("save_begin", 402)
    assert reader.progress().phase == "checkpoint"
    recording.checkpoint("save_end", 402)

    assert (reader.progress().step, reader.progress().phase) == (402, "other")


def test_how_a_save_in_the_background_ends_moves_no_step(box: tuple[Recording, BoxReader]) -> None:
    """It is of an earlier step, and may be told in the training thread as well."""
    recording, reader = box
    recording.checkpoint("save_begin", 41)
    recording.checkpoint("save_end", 41)

    recording.checkpoint("sealed", 31)
    recording.checkpoint("save_failed", 31)

    assert reader.progress().step == 41
    assert reader.progress().phase != "checkpoint"


def test_what_is_known_of_saves_reaches_the_box(box: tuple[Recording, BoxReader]) -> None:
    """From any thread; not from a child that a fork made."""
    recording, reader = box
    record = SavesRecord(41, 0.5, 3.0, 31, 1000.0, 1, 0)
    recording.saves(record)
    recording.live = False

    recording.saves(msgspec.structs.replace(record, step=99))

    assert reader.saves() == record


def test_what_is_known_of_restores_reaches_the_box(box: tuple[Recording, BoxReader]) -> None:
    """Not from a child that a fork made."""
    recording, reader = box
    record = RestoresRecord(41, 2.5, 1000, 1, 0, 0, 0, 1, 0)
    recording.restores(record)
    recording.live = False

    recording.restores(msgspec.structs.replace(record, step=99))

    assert reader.restores() == record


def test_the_scripts_own_number_beats_the_checkpoints(box: tuple[Recording, BoxReader]) -> None:
    """A save that counts differently does not change what the script said."""
    recording, reader = box
    recording.step(10)

    recording.checkpoint("save_begin", 11)

    assert reader.progress().step == 10


def test_other_threads_are_not_the_rank(box: tuple[Recording, BoxReader]) -> None:
    """Once the training thread steps, no other thread's events are written."""
    recording, reader = box
    train_step(recording, Optimizer())

    in_thread(lambda: train_step(recording, Optimizer()))
    in_thread(lambda: recording.phase_begin("checkpoint"))

    assert (reader.progress().steps_seen, reader.progress().phase) == (1, "other")


def test_training_in_another_thread_is_followed(box: tuple[Recording, BoxReader]) -> None:
    """A framework that trains in a thread of its own is recorded, if the main thread has not stepped."""
    recording, reader = box

    def train() -> None:
        optimizer = Optimizer()
        train_step(recording, optimizer)
        train_step(recording, optimizer)

    in_thread(train)

    assert reader.progress().steps_seen == 2


def test_a_child_writes_nothing(box: tuple[Recording, BoxReader]) -> None:
    """After a fork the child's events do not reach the parent's box."""
    recording, reader = box
    before = reader.raw()

    recording.leave()
    train_step(recording, Optimizer())
    recording.step(5)
    recording.phase_begin("eval")
    recording.phase_end()
    recording.checkpoint("restored", 3)

    assert reader.raw() == before


@pytest.mark.parametrize(("rank", "said"), [(0, ["stale_weights"]), (1, ["silent_corruption"]), (2, [])])
def test_what_a_checkpoint_finds_is_told_by_whom_it_is_about(tmp_path: Path, rank: int, said: list[str]) -> None:
    """Of the whole job by rank 0, from whichever thread saves; what is over is over in the box as well."""
    identity = BoxIdentity(job="j", node="n", rank=0, local_rank=0, world_size=3, pid=1, start_ticks=1, round=1)
    recording, alarms = (
        Recording(BoxWriter.create(tmp_path, identity), rank),
        [
            Alarm("silent_corruption", (1,), "rank 1 differs"),
            Alarm("stale_weights", (), "nothing moves"),
        ],
    )
    reader = BoxReader(tmp_path / "0.box")

    in_thread(lambda: recording.found(7, alarms))
    assert [one.fault for one in reader.findings()] == said
    recording.found(8, alarms)
    assert {one.step for one in reader.findings()} <= {7}
    recording.found(9, [])
    assert reader.findings() == ()


def test_a_finding_that_stands_is_not_driven_out_by_others(box: tuple[Recording, BoxReader]) -> None:
    """The ring has five places; of three classes one stands from the beginning, since then, and two come and go."""
    recording, reader = box
    stands = Alarm("stale_weights", (), "none has changed")

    for step in range(20):
        others = [Alarm(fault, (0,), f"{step}") for fault in ("silent_corruption", "replicas_differ")]
        recording.found(step, [stands, *others[: step % 3]])

    assert [(one.fault, one.step, one.text) for one in reader.findings()] == [
        ("silent_corruption", 19, "19"),
        ("stale_weights", 0, "none has changed"),
    ]
