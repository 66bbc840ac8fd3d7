# SPDX-License-Identifier: Apache-2.0
"""Copies from GPUs are put on streams in the right order; what they do there is tested on a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megascale_ops.checkpoint.background import copying
from megascale_ops.checkpoint.background.copying import Copier
from tests.fakes.copy_streams import FakeGpus

# Storages of a parameter and of a moment; 3 is no optimizer's.
STEPS = frozenset({1, 2})


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    """Two GPUs."""
    fake = FakeGpus()
    for name in ("Stream", "Event", "current_stream", "device", "stream", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(copying, "_copy_all", fake.copy_all)
    return fake


@pytest.fixture
def overlapped() -> Iterator[Copier]:
    """One that lets a save return early."""
    copier = Copier(overlapped=True)
    yield copier
    copier.close()


def take_a_step() -> None:
    """An optimizer's, of the script."""
    parameter: Any = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter]).step()


def test_a_copy_waits_for_the_training_and_the_host_for_the_copy(gpus: FakeGpus) -> None:
    """Not overlapped: all of it, and nothing is pending."""
    copier = Copier(overlapped=False)

    copier.finish(copier.start([gpus.source("weight", 1), gpus.source("mean", 3)], STEPS))

    assert gpus.log == [
        "copies of gpu0 waits for training on gpu0",
        *("copy weight", "copy mean", "weight is kept for copies of gpu0", "mean is kept for copies of gpu0"),
        *("event copies of gpu0#1", "host waits for copies of gpu0#1"),
    ]
    assert copier.pending == {}


def test_the_host_waits_only_for_what_no_optimizer_holds(gpus: FakeGpus, overlapped: Copier) -> None:
    """It is copied first; the rest is pending."""
    overlapped.finish(overlapped.start([gpus.source("weight", 1), gpus.source("mean", 3)], STEPS))

    copies = [line for line in gpus.log if "copy" in line or "event" in line or "host" in line]
    assert copies == [
        *("copy mean", "event copies of gpu0#1", "copy weight", "event copies of gpu0#2"),
        "host waits for copies of gpu0#1",
    ]
    assert list(overlapped.pending) == ["gpu0"]


def test_a_step_waits_on_every_gpu_and_the_host_does_not(gpus: FakeGpus, overlapped: Copier) -> None:
    """By the hook on all optimizers; once nothing is pending, and while a graph is captured, no stream waits."""
    take_a_step()
    assert gpus.log == []
    overlapped.finish(overlapped.start([gpus.source("weight", 1), gpus.source("other", 2, "gpu1")], STEPS))
    gpus.log.clear()

    gpus.capturing = True
    take_a_step()
    assert gpus.log == []
    gpus.capturing = False
    take_a_step()

    assert gpus.log == [f"training on gpu{number} waits for copies of gpu{number}#1" for number in (0, 1)]


def test_after_the_end_no_step_waits(gpus: FakeGpus) -> None:
    """The copies are waited for, and the hook is gone."""
    copier = Copier(overlapped=True)
    copier.finish(copier.start([gpus.source("weight", 1)], STEPS))
    gpus.log.clear()

    copier.close()
    take_a_step()

    assert gpus.log == ["host waits for copies of gpu0#1"]
