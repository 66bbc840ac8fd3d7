# SPDX-License-Identifier: Apache-2.0
"""The loss as scripts have it, and the collector's pauses."""

import gc
import math

import pytest
import torch

from megascale_ops.recorder.recording.gc_times import CollectorClock
from megascale_ops.recorder.recording.loss import LossKeeper


@pytest.mark.parametrize(
    "value", [2.5, torch.tensor(2.5), torch.tensor([2.5]), torch.tensor(2.5, requires_grad=True) * 1.0]
)
def test_a_loss_is_a_number_or_a_tensor(value: object) -> None:
    """Read once; then there is none until the next."""
    keeper = LossKeeper()

    keeper.keep(value)

    assert keeper.read() == 2.5
    assert keeper.read() is None


def test_what_is_no_number_is_kept_as_it_is() -> None:
    """NaN is news, not an error."""
    keeper = LossKeeper()

    keeper.keep_root(torch.tensor(math.nan))

    assert math.isnan(keeper.read() or 0.0)


def test_a_root_that_is_no_scalar_is_no_loss() -> None:
    """A backward pass may begin with anything."""
    keeper = LossKeeper()

    keeper.keep_root(torch.ones(3))
    keeper.keep_root(None)

    assert keeper.read() is None


def test_the_pauses_of_the_collector_are_added_up() -> None:
    """Each once; none without a collection."""
    clock = CollectorClock()
    clock.start()
    try:
        gc.collect()
        paused_s = clock.take_s()
        gc.disable()
        quiet_s = clock.take_s()
    finally:
        gc.enable()
        gc.callbacks.pop()

    assert paused_s > 0
    assert quiet_s == 0
