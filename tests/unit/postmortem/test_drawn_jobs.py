# SPDX-License-Identifier: Apache-2.0
"""Dumps and stacks of jobs of drawn parallel layouts, as ``inspect`` gets them (``tests/fakes/drawn_jobs.py``)."""

import itertools
from collections import Counter
from pathlib import Path

from megascale_ops.errors import UsageError
from megascale_ops.postmortem.examine import examine
from tests.fakes import drawn_jobs


def test_drawn_jobs_are_judged_right_or_not_for_sure(tmp_path: Path) -> None:
    """Of 60 jobs half at least have the faulty ranks named, and five at most an innocent one for sure."""
    score: Counter[str] = Counter()
    for number, job in enumerate(itertools.islice(filter(None, map(drawn_jobs.draw, range(910_000, 911_000))), 60)):
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
        if found.culprits == job.culprits:
            score["right"] += 1
        elif set(found.culprits) - set(job.culprits) and found.confidence >= 0.9:
            score["wrong"] += 1

    assert score["right"] >= 30, score
    assert score["wrong"] <= 5, score
