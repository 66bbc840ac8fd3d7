# SPDX-License-Identifier: Apache-2.0
"""Weights that stand still are told where they should move, and nowhere else: a manager saves, in one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from megascale_ops.checkpoint import CheckpointManager
from megascale_ops.checkpoint.trust import alarms
from megascale_ops.checkpoint.trust.alarms import Findings

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9),
    "plain": torch.optim.SGD,
}


class Job:
    """A model of two layers, and an optimizer that makes steps or seems to."""

    def __init__(self, folder: Path, kind: str = "adamw", lr: float = 0.1) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.optimizer = OPTIMIZERS[kind](self.model.parameters(), lr=lr)
        self.manager = CheckpointManager(folder, keep=50)
        self.step = 0

    def state(self) -> dict[str, Any]:
        """What is saved."""
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self, steps: int = 1) -> None:
        """Steps on fresh data."""
        for _ in range(steps):
            self.model(torch.randn(8, 4)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def train_in_vain(self) -> None:
        """A step whose weights are lost: the optimizer moves, what is saved does not."""
        kept = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.train()
        with torch.no_grad():
            for parameter, old in zip(self.model.parameters(), kept, strict=True):
                parameter.copy_(old)

    def save(self) -> list[str]:
        """The alarms of a save."""
        self.manager.save(self.step, self.state())
        return [alarm.fault for alarm in self.manager.alarms]

    def found(self) -> Findings:
        """What stands in the newest checkpoint."""
        found = alarms.decode((self.manager.path / f"step-{self.step:08d}" / alarms.FILE_NAME).read_bytes())
        assert found is not None
        return found


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_weights_that_stand_still_are_told(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """At the save that finds it, not at those before nor after; an optimizer without any state counts its steps."""
    job = Job(tmp_path, kind)
    job.train()
    assert job.save() == []
    job.train()
    assert job.save() == []

    job.train_in_vain()
    assert job.save() == ["stale_weights"]
    (alarm,) = job.manager.alarms

    assert "'optimizer' has changed by a bit between steps 2 and 3" in alarm.text
    assert job.found().alarms == (alarm,)
    CheckpointManager(tmp_path).restore({"model": job.model})
    assert "what is restored was told of when it was saved, at step 3: no parameter" in caplog.text
    job.train()
    assert job.save() == []


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_no_step_is_no_alarm(tmp_path: Path, kind: str) -> None:
    """The number that is saved under goes on (a scaler skips steps), the optimizer does not."""
    job = Job(tmp_path, kind)
    job.train()
    found = [job.save()]
    for _ in range(3):
        job.step += 10
        found.append(job.save())

    assert found == [[]] * 4


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_learning_rate_of_zero_is_no_alarm(tmp_path: Path, kind: str) -> None:
    """Nor where the rate has risen since: the only step in between was made with zero."""
    job = Job(tmp_path, kind, lr=0.0)
    found = [job.save()]
    for rate in (0.0, 0.0, 0.1):
        job.train()
        for group in job.optimizer.param_groups:
            group["lr"] = rate
        found.append(job.save())
    job.train()
    found.append(job.save())

    assert found == [[]] * 5


def test_a_rate_that_is_zero_in_one_group_is_no_alarm(tmp_path: Path) -> None:
    """The group that moves has a rate of zero, the one with a rate has no gradients."""
    job = Job(tmp_path)
    first, last = job.model[0], job.model[2]
    job.optimizer = torch.optim.AdamW(
        [{"params": first.parameters(), "lr": 0.1}, {"params": last.parameters(), "lr": 0.0}]
    )
    found = [job.save()]
    for _ in range(3):
        last(torch.randn(8, 4)).sum().backward()
        job.optimizer.step()
        job.step += 1
        found.append(job.save())

    assert found == [[]] * 4


def test_what_is_frozen_is_no_alarm(tmp_path: Path) -> None:
    """A model of which one layer trains; one of which nothing does."""
    job = Job(tmp_path / "part")
    job.model[0].requires_grad_(requires_grad=False)
    whole = Job(tmp_path / "whole")
    whole.model.requires_grad_(requires_grad=False)
    found = []
    for _ in range(3):
        job.train()
        whole.step += 1
        whole.optimizer.step()
        found += [job.save(), whole.save()]

    assert found == [[]] * 6
    assert job.found().unchanged == ()


def test_a_step_saved_again_is_no_alarm(tmp_path: Path) -> None:
    """Not even where the optimizer's state differs."""
    job = Job(tmp_path)
    job.train()
    job.save()
    with torch.no_grad():
        job.optimizer.state[job.model[0].weight]["exp_avg"] += 1

    assert job.save() == []


def test_a_restore_begins_anew(tmp_path: Path) -> None:
    """What was saved before it says nothing of what is saved after."""
    job = Job(tmp_path)
    job.train()
    job.save()
    job.train()
    job.save()
    job.manager.restore(job.state())
    job.step = 7

    assert job.save() == []


def test_one_tensor_that_stands_still_is_told_and_no_alarm(tmp_path: Path) -> None:
    """It requires gradients and gets none: an expert that no token reaches, a head that is not called."""
    job = Job(tmp_path)
    unused = nn.Linear(3, 3)
    job.model.add_module("unused", nn.Identity())
    job.model.unused.weight = unused.weight  # type: ignore[assignment]  # a parameter
    job.save()
    job.train()

    assert job.save() == []
    assert job.found().unchanged == ("model.unused.weight",)
    assert job.found().since == 0


def test_state_dicts_are_watched_as_well(tmp_path: Path) -> None:
    """The module as an object, its optimizer as what ``state_dict`` gives; and the other way round."""
    for number, state in enumerate(
        (
            lambda job: {"model": job.model, "optimizer": job.optimizer.state_dict()},
            lambda job: {"model": job.model.state_dict(), "optimizer": job.optimizer},
        )
    ):
        job = Job(tmp_path / str(number))
        job.state = lambda job=job, state=state: state(job)  # type: ignore[method-assign, misc]  # of one job
        job.train()
        job.save()
        job.train()
        assert job.save() == []
        job.train_in_vain()
        assert job.save() == ["stale_weights"], number


@pytest.mark.parametrize("lr", [0.1, 0.0])
def test_an_optimizer_by_the_names_of_its_parameters_is_watched_as_well(tmp_path: Path, lr: float) -> None:
    """As torch's ``get_optimizer_state_dict`` gives it, for stages of a pipeline; a rate of zero is no alarm."""
    job = Job(tmp_path, lr=lr)

    def save() -> list[str]:
        state = {"model": job.model, "optimizer": get_optimizer_state_dict(job.model, job.optimizer)}
        job.manager.save(job.step, state)
        return [alarm.fault for alarm in job.manager.alarms]

    job.train()
    found = [save()]
    job.train()
    found.append(save())
    job.train_in_vain()

    assert [*found, save()] == [[], [], ["stale_weights"] if lr else []]


def test_two_optimizers_are_told_apart(tmp_path: Path) -> None:
    """One trains for a while, the other rests: no alarm; then the second's weights are lost while the first's move."""
    left, right = Job(tmp_path / "left"), Job(tmp_path / "right")
    manager = CheckpointManager(tmp_path / "both", keep=50)
    state = {"left": left.model, "right": right.model, "by left": left.optimizer, "by right": right.optimizer}
    left.train(2)
    right.train(2)
    manager.save(0, state)
    left.train(2)
    manager.save(1, state)
    assert not manager.alarms

    left.train()
    right.train_in_vain()
    manager.save(2, state)

    assert ["'by right'" in alarm.text for alarm in manager.alarms] == [True]


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    """Then nothing is digested and nothing is left beside the tensors."""
    job = Job(tmp_path)
    job.manager = CheckpointManager(tmp_path, freshness=False)
    job.train()
    job.save()
    job.train_in_vain()

    assert job.save() == []
    assert not (tmp_path / "step-00000002" / alarms.FILE_NAME).exists()


class Odd(torch.optim.SGD):
    """An optimizer whose learning rates are of its own kind, and which lists no parameters as others do."""

    def __init__(self, parameters: Any, lr: float) -> None:  # noqa: ANN401  as torch's
        super().__init__(parameters, lr)
        for group in self.param_groups:
            group["lr"] = "fast"


def test_an_optimizer_of_an_unknown_kind_costs_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A rate that is no number tells nothing; what can't be looked at is logged, and saved."""
    job = Job(tmp_path)
    job.optimizer = Odd(job.model.parameters(), 0.1)
    job.save()
    job.step += 1
    assert job.save() == []
    del job.optimizer.param_groups[0]["params"]
    job.step += 1
    broken = {"state": {}, "param_groups": 5}

    job.manager.save(job.step, {"model": job.model, "optimizer": broken})

    assert "what is saved could not be looked at" in caplog.text
    assert (tmp_path / "step-00000002" / "manifest.json").exists()


def test_a_listener_that_fails_costs_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is removed, and that is told."""

    def broken(*_: object) -> None:
        raise RuntimeError("no")

    alarms.listeners.append(broken)
    Job(tmp_path).save()

    assert broken not in alarms.listeners
    assert "a listener failed at step 0" in caplog.text
