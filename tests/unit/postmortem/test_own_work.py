# SPDX-License-Identifier: Apache-2.0
"""A rank that evaluates while the others wait for it may rightly do so: one look calls it busy, and no more."""

import pytest

from megascale_ops.diagnosis.hangs.stack_groups import Stood, judge

WAITS = Stood("in_collective", "barrier", "run_eval (train.py:215)", "idle")


@pytest.mark.parametrize(
    ("frames", "state", "fault", "sure"),
    [
        (("_score (lm_eval/models/hf.py:12)", "evaluate (lm_eval/evaluator.py:522)"), "active+gil", "busy", 0.6),
        (("inner (m.py:3)", "run_validation (train.py:88)"), "active", "busy", 0.6),
        (("inner (m.py:3)", "evaluate (train.py:88)"), "idle", "sleeping", 0.8),
        (("inner (m.py:3)", "train_step (train.py:88)"), "active+gil", "stuck", 0.8),
        (("retrieval (m.py:3)", "main (evaluate.py:88)"), "active", "stuck", 0.8),
    ],
)
def test_an_evaluation_is_busy_and_not_stuck(frames: tuple[str, ...], state: str, fault: str, sure: float) -> None:
    """By the functions that it is in, where its thread runs; the name of a file or of another function says nothing."""
    works = Stood("in_script", "", frames[0], state, frames=frames)

    verdict = judge({0: works, 1: WAITS, 2: WAITS})

    assert verdict is not None
    assert (verdict.fault, verdict.culprits, verdict.confidence) == (fault, (0,), sure)
