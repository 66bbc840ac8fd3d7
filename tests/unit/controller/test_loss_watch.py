# SPDX-License-Identifier: Apache-2.0
"""A loss that is no number or jumps is told; one that is merely noisy, or falls, is not."""

import random

from megascale_ops.diagnosis.stragglers.loss import LossWatch
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import StepWork

POLICY = JobPolicy()


def take(watch: LossWatch, rank: int, losses: list[float | None], first: int = 0) -> None:
    """Hand losses in; None is no finite number."""
    for step, loss in enumerate(losses, first):
        watch.ingest_losses(
            rank, f"node-{rank}", (StepWork(step, 0.05, loss=loss, loss_is_finite=loss is not None),), POLICY
        )


def noisy(seed: int, steps: int) -> list[float | None]:
    """Return a loss that falls from 10 to about 2, with noise."""
    order = random.Random(seed)  # noqa: S311  no secret
    return [2.0 + 8.0 / (1 + step / 50) + order.gauss(0.0, 0.3) for step in range(steps)]


def test_a_noisy_falling_loss_is_well() -> None:
    """In 20 runs of 2,000 steps nothing is told."""
    for seed in range(20):
        watch = LossWatch()
        take(watch, 0, noisy(seed, 2000))
        assert watch.verdicts(1) == {}, seed


def test_no_number_is_told_at_once_and_for_whom_it_began() -> None:
    """The rank whose loss was no number first, although all follow one step later."""
    watch = LossWatch()
    for rank in range(4):
        take(watch, rank, noisy(rank, 50))
    take(watch, 1, [None, None], first=50)
    for rank in (0, 2, 3):
        take(watch, rank, [2.0, None], first=50)

    verdict = watch.verdicts(3)["loss_nan"]

    assert (verdict.fault, verdict.culprits, verdict.since_step, verdict.round) == ("loss_nan", (1,), 50, 3)
    assert "rank 1 is no finite number since step 50; 4 ranks have it now" in verdict.reason


def test_a_jump_for_several_steps_is_a_spike_and_ends() -> None:
    """Three steps in a row; after twenty that are well it is over."""
    watch = LossWatch()
    take(watch, 0, noisy(1, 300))
    take(watch, 0, [40.0, 45.0], first=300)
    assert watch.verdicts(1) == {}

    take(watch, 0, [50.0], first=302)

    assert watch.verdicts(1)["loss_spike"].since_step == 300
    take(watch, 0, [3.0] * 20, first=303)
    assert watch.verdicts(1) == {}


def test_one_bad_batch_is_no_spike() -> None:
    """It is not reported, however high."""
    watch = LossWatch()
    take(watch, 0, noisy(1, 300))

    take(watch, 0, [1e9, 3.0, 1e9, 3.0], first=300)

    assert watch.verdicts(1) == {}


def test_a_new_normal_is_learned() -> None:
    """After 64 steps at another level the loss is what it is."""
    watch = LossWatch()
    take(watch, 0, noisy(1, 300))

    take(watch, 0, [40.0] * 120, first=300)

    assert watch.verdicts(1) == {}


def test_steps_without_a_loss_say_nothing() -> None:
    """No loss is no bad loss."""
    watch = LossWatch()

    watch.ingest_losses(0, "n", [StepWork(step, 0.05) for step in range(100)], POLICY)

    assert watch.verdicts(1) == {}
