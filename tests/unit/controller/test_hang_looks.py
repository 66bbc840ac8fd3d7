# SPDX-License-Identifier: Apache-2.0
"""Evidence of one rank, look after look: what counts is what it shows now, and silence takes nothing back.

All jobs train in steps of 50 ms; patience for a step is 5 s, and silence has lasted 3 s.
"""

import pytest

from megascale_ops.schema.messages import EvidenceItem
from tests.fakes.hung_job import ABSENT, one_absent, stack_of

LOADS = stack_of("in_data_loader", frames=("next (torch/utils/data/dataloader.py:700)",))
SPINS = stack_of("in_python", frames=("spin (train.py:40)", "main (train.py:90)"))


def _process(*marks: str) -> EvidenceItem:
    return EvidenceItem("process", ok=True, marks=marks)


def _failed(*marks: str, kind: str = "stacks") -> EvidenceItem:
    return EvidenceItem(kind, ok=False, marks=marks)


@pytest.mark.parametrize("before", [("stopped",), ("uninterruptible",), ("in_syscall", "in_storage")])
def test_what_a_later_look_does_not_show_any_more_counts_no_more(before: tuple[str, ...]) -> None:
    """A process that was stopped or slept on a disk once, and runs at all later looks, is neither now."""
    found = one_absent(ABSENT, _process(*before), SPINS, _process(), SPINS, _process(), SPINS, busy=1.0)

    assert (found.verdict.fault, found.verdict.culprits) == ("stuck", (1,))
    assert found.patience_s == 10.0


def test_no_answer_takes_nothing_back_that_an_earlier_look_saw() -> None:
    """It was seen at its data loader and then answered no more: that is where it is, and it did give evidence."""
    found = one_absent(ABSENT, LOADS, _failed("no_answer"))

    assert (found.verdict.fault, found.verdict.culprits) == ("data_stall", (1,))
    assert found.verdict.confidence >= 0.9
    assert "no_answer" not in [finding.name for finding in found.verdict.evidence]


def test_why_there_was_no_answer_counts_until_the_next_one() -> None:
    """Stopped when its recorder was asked first; at the second time it ran, and had nothing to answer with."""
    stopped = _failed("no_answer", "stopped", kind="flight_recorder")

    still = one_absent(stopped, SPINS, busy=1.0)
    no_more = one_absent(stopped, SPINS, _failed(kind="flight_recorder"), SPINS, busy=1.0)

    assert (still.verdict.fault, no_more.verdict.fault) == ("frozen", "stuck")
