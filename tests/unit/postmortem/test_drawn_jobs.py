# SPDX-License-Identifier: Apache-2.0
"""Dumps and stacks of jobs of drawn parallel layouts, as ``inspect`` gets them (``tests/fakes/drawn_jobs.py``)."""

import itertools
from collections import Counter
from pathlib import Path

import pytest

from megascale_ops.errors import UsageError
from megascale_ops.postmortem.examine import examine
from tests.fakes import drawn_jobs
from tests.matrix import wide


@pytest.mark.parametrize("jobs", wide([20, 60], keep=[20]))
def test_drawn_jobs_name_the_faulty_ranks_and_hardly_an_innocent_one(tmp_path: Path, jobs: int) -> None:
    """Of 60 jobs 32 at least have the faulty ranks named, five at most an innocent one (two for sure), 11 nobody.

    And of fewer as many of each hundred.

    A rank that disagrees with a faulty one is none: which of the two is wrong can't always be told.
    """
    score: Counter[str] = Counter()
    for number, job in enumerate(itertools.islice(filter(None, map(drawn_jobs.draw, range(910_000, 911_000))), jobs)):
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

    assert score["right"] >= 32 * jobs // 60, score
    assert score["innocent"] <= 5 * jobs // 60, score
    assert score["innocent for sure"] <= 2 * jobs // 60, score
    assert score["nobody"] <= 11 * jobs // 60, score
