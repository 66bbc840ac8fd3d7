# SPDX-License-Identifier: Apache-2.0
"""A signal of Slurm's is a time limit, a preemption or a cancellation, and only two of them come back."""

import pytest

from megascale_ops.engines.slurm.answers import JobView, Settings
from megascale_ops.engines.slurm.requeue import decide

NOW = 1_000_000.0
SETTINGS = Settings(30.0, ())


def job(
    state: str = "RUNNING",
    reason: str = "None",
    *,
    may_requeue: bool = True,
    restarts: int = 0,
    ends_in_s: float = 120.0,
    preempted: float = 0.0,
) -> JobView:
    """A job as Slurm shows it."""
    return JobView(state, reason, may_requeue, restarts, NOW + ends_in_s, preempted)


@pytest.mark.parametrize(
    ("signal", "view", "kind", "save_s"),
    [
        ("SIGUSR1", job(), "limit", 105.0),
        ("SIGUSR1", job(ends_in_s=10), "limit", 0.0),
        ("SIGTERM", job("COMPLETING", "TimeLimit", ends_in_s=0), "limit", 15.0),
        ("SIGTERM", job("TIMEOUT", ends_in_s=0), "limit", 15.0),
        ("SIGTERM", job(preempted=NOW, ends_in_s=60), "preempted", 45.0),
        ("SIGTERM", job("CANCELLED"), "cancelled", 0.0),
        ("SIGTERM", job("COMPLETING"), "cancelled", 0.0),
        ("SIGTERM", job(), "cancelled", 0.0),
    ],
)
def test_a_signal_has_one_meaning(signal: str, view: JobView, kind: str, save_s: float) -> None:
    """And so much time for a checkpoint as leaves fifteen seconds for the end."""
    found = decide(signal, view, SETTINGS, 3, NOW)

    assert (found.kind, found.save_s, found.requeue) == (kind, save_s, kind != "cancelled")


def test_where_no_end_is_known_a_minute_must_do() -> None:
    """An unlimited job that somebody has signalled."""
    view = job()._replace(ends_wall_s=0.0)

    assert decide("SIGUSR1", view, SETTINGS, 3, NOW).save_s == 60.0


@pytest.mark.parametrize(("restarts", "again"), [(0, True), (2, True), (3, False), (9, False)])
def test_the_budget_ends(restarts: int, again: bool) -> None:
    """Slurm counts, so a job that it has requeued for a dead node has used up one, too."""
    found = decide("SIGUSR1", job(restarts=restarts), SETTINGS, 3, NOW)

    assert found.requeue is again
    assert ("which is its budget (--requeues 3)" in found.said) is not again


def test_a_job_that_slurm_may_not_requeue_ends() -> None:
    """And says why."""
    found = decide("SIGUSR1", job(may_requeue=False), SETTINGS, 3, NOW)

    assert not found.requeue
    assert "--no-requeue" in found.said
