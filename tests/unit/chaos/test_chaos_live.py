# SPDX-License-Identifier: Apache-2.0
"""What would be done to a user's running job is said beforehand, and what can't be done is refused in one sentence."""

from pathlib import Path

import msgspec
import pytest

from megascale_ops.chaos.faults import BY_NAME
from megascale_ops.chaos.live import plan_deed
from megascale_ops.errors import UsageError
from megascale_ops.schema.identity import RankProcess, RoundFile


@pytest.fixture
def box_root(tmp_path: Path) -> Path:
    """Where the job llama with ranks 4 and 5 has its black boxes."""
    ranks = tuple(RankProcess(rank=rank, local_rank=rank - 4, pid=700 + rank, start_ticks=1) for rank in (4, 5))
    found = RoundFile(
        version=1,
        job="llama",
        node="n1",
        round=3,
        runner_pid=600,
        runner_start_ticks=1,
        run_dir="/runs/llama",
        ranks=ranks,
        agent_pid=601,
    )
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "n1.round.json").write_bytes(msgspec.json.encode(found))
    return tmp_path


def test_the_deed_names_the_process(box_root: Path) -> None:
    """Before anything is done it is said what would be done, to whom."""
    assert (
        plan_deed(BY_NAME["sigstop"], "llama", 5, box_root / "llama").sentence
        == "SIGSTOP to rank 5 of job llama, process 705"
    )
    assert plan_deed(BY_NAME["agent_killed"], "llama", 0, box_root / "llama").pid == 601


@pytest.mark.parametrize(
    ("fault", "job", "rank", "sentence"),
    [
        ("sigkill", "llama", 1, "job 'llama' has no rank 1 on this machine: it has 4, 5"),
        ("sigkill", "lama", 5, "no job 'lama' runs on this machine"),
        ("gil_held", "llama", 5, "gil_held can't be done to a job that runs already"),
        ("controller_killed", "llama", 5, "job 'llama' has no controller of its own on this machine"),
    ],
)
def test_what_can_not_be_done_is_refused(box_root: Path, fault: str, job: str, rank: int, sentence: str) -> None:
    """One sentence, and nothing is touched."""
    with pytest.raises(UsageError, match="^" + sentence):
        plan_deed(BY_NAME[fault], job, rank, box_root / job)
