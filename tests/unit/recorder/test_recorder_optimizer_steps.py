# SPDX-License-Identifier: Apache-2.0
"""The step after a restart is the script's where only the optimizer's state tells it."""

from pathlib import Path
from typing import Any

import pytest

from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import BoxIdentity
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.recorder.recording.optimizer_steps import steps_made
from megascale_ops.recorder.recording.recording import Recording


class Optimizer:
    """Something with groups of parameters and a state for each, as torch's are."""

    def __init__(self, *states: Any, **group: Any) -> None:  # noqa: ANN401  what libraries keep is of any type
        self.state = dict(enumerate(states))
        self.param_groups = [group]


class Scalar:
    """A tensor, as far as it is asked."""

    def __init__(self, value: float, numel: int = 1) -> None:
        self._value, self._numel = value, numel

    def numel(self) -> int:
        """Return the number of elements."""
        return self._numel

    def __int__(self) -> int:
        return int(self._value)


class Odd(Optimizer):
    """An optimizer whose state cannot be asked for."""

    def __init__(self) -> None:
        super().__init__()
        del self.state

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  none at all
        raise RuntimeError(f"no {name} before the first step")


@pytest.fixture
def box(tmp_path: Path) -> tuple[Recording, BoxReader]:
    """Return a recording and what reads its box."""
    identity = BoxIdentity(job="j", node="n", rank=0, local_rank=0, world_size=1, pid=1, start_ticks=1, round=1)
    return Recording(BoxWriter.create(tmp_path, identity)), BoxReader(tmp_path / "0.box")


def step(recording: Recording, optimizer: object) -> None:
    """Do what the hooks see of one step."""
    recording.optimizer_begin(optimizer)
    recording.optimizer_end(optimizer)


@pytest.mark.parametrize(
    ("optimizer", "made"),
    [
        (Optimizer({"step": Scalar(40.0)}, {"step": Scalar(38.0)}), 40),
        (Optimizer({"step": 7}), 7),
        (Optimizer({}, {"momentum_buffer": None}), 0),
        (Optimizer(), 0),
        (Optimizer(step=12), 12),
        (Optimizer({"step": Scalar(1.0, numel=3)}), 0),
        (Optimizer({"step": float("nan")}, {"step": float("inf")}, {"step": "ten"}, {"step": -3}, {"step": True}), 0),
        (Optimizer(object(), None), 0),
        (object(), 0),
    ],
)
def test_what_an_optimizer_keeps(optimizer: Any, made: int) -> None:  # noqa: ANN401  of any type
    """A number, a tensor with one, or a group's: the furthest; what is no count is none."""
    assert steps_made(optimizer) == made


def test_a_loaded_optimizer_goes_on(box: tuple[Recording, BoxReader]) -> None:
    """After 40 steps (numbers 0 to 39) the next is number 40, as it would have been without a restart."""
    recording, reader = box

    optimizer = Optimizer({"step": Scalar(40.0)})
    step(recording, optimizer)

    found = reader.progress()
    assert (found.step, found.step_is_absolute, found.steps_seen) == (40, True, 1)


def test_a_new_optimizer_says_nothing(box: tuple[Recording, BoxReader]) -> None:
    """Weights may have been loaded without it: its first step need not be the script's, and is not called so."""
    recording, reader = box

    optimizer = Optimizer({})
    step(recording, optimizer)

    assert (reader.progress().step, reader.progress().step_is_absolute) == (0, False)


def test_of_two_loaded_optimizers_the_first_to_step_counts(box: tuple[Recording, BoxReader]) -> None:
    """A GAN whose discriminator makes five steps for each of its generator's goes on with the one that ends steps."""
    recording, reader = box
    generator, discriminator = Optimizer({"step": 100}), Optimizer({"step": 500})

    for _ in range(2):
        step(recording, generator)
        for _ in range(5):
            step(recording, discriminator)

    assert reader.progress().step == 101


def test_what_the_script_says_comes_first(box: tuple[Recording, BoxReader]) -> None:
    """A number that was told, or restored by our checkpoints, is not overruled by a state of another age."""
    recording, reader = box
    recording.checkpoint("restored", 700)

    optimizer = Optimizer({"step": 40})
    step(recording, optimizer)
    restored = reader.progress().step
    recording.step(900)
    step(recording, optimizer)

    assert (restored, reader.progress().step) == (701, 900)


def test_a_state_that_cannot_be_asked_is_left_alone(
    box: tuple[Recording, BoxReader], capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps are counted all the same, and one line says what is not known."""
    recording, reader = box
    optimizer = Odd()

    for _ in range(2):
        step(recording, optimizer)

    assert reader.progress().steps_seen == 2
    assert "the optimizer's own number of steps steps aside: RuntimeError" in capsys.readouterr().err
