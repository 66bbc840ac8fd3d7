# SPDX-License-Identifier: Apache-2.0
"""Where a hung rank stands, in the words of a verdict: with the line of the script, and told once."""

import msgspec
import pytest

from megascale_ops.diagnosis.hangs.evidence import gather
from megascale_ops.schema.messages import EvidenceItem
from tests.fakes.hung_job import ABSENT, WAITING, judge_job, made_calls, one_absent, rank_view, said_of, stack_of

LOADER = ("select (selectors.py:415)", "__next__ (torch/utils/data/dataloader.py:725)", "main (/home/u/train.py:15)")


@pytest.mark.parametrize(
    ("frames", "place"),
    [
        (LOADER, "select (selectors.py:415) from main (/home/u/train.py:15)"),
        (LOADER[:2], "select (selectors.py:415)"),
        (("fetch (/home/u/data.py:3)", "main (/home/u/train.py:15)"), "fetch (/home/u/data.py:3)"),
    ],
)
def test_a_place_in_a_library_is_told_with_the_line_that_led_there(frames: tuple[str, ...], place: str) -> None:
    """Of a wait in Python's own files the script's line tells where to look; a line of the script needs no other."""
    judged = one_absent(ABSENT, stack_of("in_data_loader", frames=frames))

    assert f"it waits for its data loader in {place}; silent" in judged.verdict.reason
    assert f"rank 1 is in {place}, at one look" in [one.text for one in judged.verdict.evidence]


@pytest.mark.parametrize("worker", ["process 9 in decode (/home/u/data.py:12)", ""])
def test_the_worker_of_a_loader_is_told_with_its_line(worker: str) -> None:
    """The reason for the wait is there; where no worker is seen at work nothing is added."""
    stack = msgspec.structs.replace(stack_of("in_data_loader", frames=LOADER), worker=worker)

    reason = one_absent(ABSENT, stack).verdict.reason

    more = f", and its loader's {worker}" if worker else ""
    assert f"from main (/home/u/train.py:15){more}; silent" in reason


def test_a_worker_that_is_done_is_told_no_more() -> None:
    """The newest look counts: the one that was at work has handed its batch in."""
    before = EvidenceItem("stacks", ok=True, rank=1, frames=LOADER, worker="process 9 in decode (/home/u/data.py:12)")
    after = msgspec.structs.replace(before, worker="")

    assert gather([before])[1].worker == before.worker
    assert gather([before, after])[1].worker == ""


@pytest.mark.parametrize("inside", [True, False])
def test_a_wrong_call_is_told_once_with_its_line(*, inside: bool) -> None:
    """Number and group are told once; the line only of a rank that is in that call still."""
    after = () if inside else ("barrier",)
    wrong = made_calls("all_reduce", "all_gather", "broadcast", *after, last=41 + len(after))
    stack = stack_of("in_collective", frames=("broadcast (torch/distributed/c10d.py:9)", "main (/home/u/train.py:7)"))
    evidence = [*said_of(0, WAITING), *said_of(1, WAITING), *said_of(2, wrong, stack), *said_of(3, WAITING)]

    reason = judge_job([rank_view(rank) for rank in range(4)], evidence).verdict.reason

    line = "; that call is in main (/home/u/train.py:7)" if inside else ""
    assert reason.startswith(f"rank 2 called broadcast #41 of group 0, where the others called all_reduce{line}; ")
    assert ("train.py" in reason) is inside
