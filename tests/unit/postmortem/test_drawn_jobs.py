# SPDX-License-Identifier: Apache-2.0
"""Dumps and stacks of jobs of drawn parallel layouts, as ``inspect`` gets them (``tests/fakes/drawn_jobs.py``)."""

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from megascale_ops.errors import UsageError
from megascale_ops.postmortem.examine import examine
from tests.fakes import drawn_jobs
from tests.matrix import wide

# Those that stay are judged in all ways in which any of them is.
# Right at least; an innocent one at most, and for sure; nobody at most.
SCORES = [
    pytest.param(range(60), (32, 5, 2, 11), id="all"),
    pytest.param((*range(21), 57), (11, 2, 0, 3), id="some"),
]


@pytest.mark.parametrize(("jobs", "limits"), wide(SCORES, keep=["some"]))
def test_drawn_jobs_name_the_faulty_ranks_and_hardly_an_innocent_one(
    tmp_path: Path, jobs: Sequence[int], limits: tuple[int, int, int, int]
) -> None:
    """Of 60 jobs 32 at least have the faulty ranks named, five at most an innocent one (two for sure), 11 nobody.

    Of 22 of them 11, two, none for sure, and three.

    A rank that disagrees with a faulty one is none: which of the two is wrong can't always be told.
    """
    score: Counter[str] = Counter()
    drawn = filter(None, map(drawn_jobs.draw, range(910_000, 911_000)))
    for number, job in enumerate(itertools.islice(drawn, 60)):
        if number not in jobs:
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        for rank, dump in job.dumps.items():
            (folder / f"nccl_trace_rank_{rank}").write_bytes(dump)
        for rank, stack in job.stacks.items():
            (folder / f"stack_rank_{rank}.txt").write_text(stack)
        try:
            found = examine([folder]).verdicts[0]
        except UsageError:
            continue
        faulty = bool(job.culprits)
        if set(found.culprits) - set(job.culprits) - set(job.also):
            score["innocent"] += 1
            score["innocent for sure"] += found.confidence >= 0.9
        elif not found.culprits:
            score["nobody"] += faulty
        elif found.culprits == job.culprits:
            score["right"] += 1

    right, innocent, for_sure, nobody = limits
    assert score["right"] >= right, score
    assert score["innocent"] <= innocent, score
    assert score["innocent for sure"] <= for_sure, score
    assert score["nobody"] <= nobody, score
