# SPDX-License-Identifier: Apache-2.0
"""Whose a file is that tells no rank itself: by its likes, by names of tasks, by events of pods; or nobody's."""

from pathlib import Path

import pytest

from megascale_ops.postmortem.examine import examine
from megascale_ops.postmortem.pieces import find, gather, rank_of
from megascale_ops.schema.health import Verdict

LOST = "[rank{}]: torch.distributed.DistBackendError: NCCL error: remote process exited, NCCL version 2.18.1\n"
EVICTED = (
    "4m2s        Warning   Evicted   pod/{}   The node was low on resource: memory. Container main was using 9Gi.\n"
)
TASK = "UnavailableError: Collective ops is aborted\nremote target /job:{}/replica:0/task:0:\n"


def ranks(folder: Path, files: dict[str, str]) -> dict[str, int]:
    """Return the rank of each file, by its name."""
    for name, text in files.items():
        (folder / name).write_text(text)
    return {piece.path.name: piece.rank for piece in gather(find([folder])).pieces}


def judge(folder: Path, files: dict[str, str]) -> Verdict:
    """Judge the logs of a folder, by their names."""
    ranks(folder, files)
    return examine([folder]).verdicts[0]


@pytest.mark.parametrize(
    ("files", "rank"),
    [
        ({"worker-0.log": LOST.format(0), "worker-2.log": LOST.format(2)}, 1),
        ({"worker-0.log": LOST.format(4), "worker-2.log": LOST.format(6)}, 5),
        ({"worker-0.log": LOST.format(0), "worker-2.log": LOST.format(7)}, -1),  # nodes of several ranks, it seems
        ({"worker-0.log": LOST.format(0)}, -1),  # one may be so by chance
        ({"worker-0.log": LOST.format(0) + LOST.format(1), "worker-2.log": LOST.format(4) + LOST.format(5)}, -1),
        ({"other-0.log": LOST.format(0), "other-2.log": LOST.format(2)}, -1),  # of another kind
    ],
    ids=["same", "shifted", "apart", "one-witness", "nodes", "other-names"],
)
def test_a_files_number_is_its_rank_where_its_likes_say_so(tmp_path: Path, files: dict[str, str], rank: int) -> None:
    """Two of a kind with one rank each, as far from their numbers."""
    assert ranks(tmp_path, {**files, "worker-1.log": "step 890 loss 0.30\n"})["worker-1.log"] == rank


@pytest.mark.parametrize(("job", "rank"), [("worker", 0), ("chief", -1)])
def test_tasks_of_tensorflow_are_named_by_their_job(tmp_path: Path, job: str, rank: int) -> None:
    """A worker is a process there; where another job is spoken of, the number of a worker is none of its tasks."""
    found = ranks(tmp_path, {"worker1.log": TASK.format(job), "worker0.log": "Fatal Python error: Aborted\n"})

    assert found["worker0.log"] == rank


@pytest.mark.parametrize(
    ("events", "culprits"),
    [
        (EVICTED.format("zutils-worker-1"), (1,)),
        (EVICTED.format("worker-1"), (1,)),
        (EVICTED.format("zutils-worker-11"), ()),
        (EVICTED.format("zutils-worker-1") + EVICTED.format("eval-worker-1"), ()),  # which of them is not told
        (EVICTED.format("zutils-worker-1").replace("Warning", "Normal "), ()),
    ],
    ids=["end", "whole", "other", "two-jobs", "normal"],
)
def test_an_event_of_a_pod_is_of_the_log_that_is_named_so(
    tmp_path: Path, events: str, culprits: tuple[int, ...]
) -> None:
    """An eviction explains why that log just ends."""
    logs = {"worker-0.log": LOST.format(0), "worker-1.log": "step 890\n", "worker-2.log": LOST.format(2)}

    verdict = judge(tmp_path, {**logs, "events.txt": f"LAST SEEN   TYPE   REASON   OBJECT   MESSAGE\n{events}"})

    assert verdict.culprits == culprits, verdict.reason


WHY = "slurmstepd: error: *** JOB 1203 ON c7 CANCELLED AT 2026-08-12T22:20:11{} ***\n"


def test_a_rank_that_a_batch_system_took_from_others_is_named(tmp_path: Path) -> None:
    """They lost it; where Slurm gives no reason of its own, it may have tidied up behind them, and nobody is named."""
    files = {"rank0.log": WHY.format(" DUE TO PREEMPTION"), "rank1.log": LOST.format(1)}

    assert judge(tmp_path, files).culprits == (0,)
    assert judge(tmp_path, {**files, "rank0.log": WHY.format("")}).culprits == ()


@pytest.mark.parametrize(
    ("text", "fault", "culprits"),
    [
        (WHY.format(" DUE TO PREEMPTION"), "killed", ()),
        (WHY.format(""), "killed", (0,)),
        ("torch.OutOfMemoryError: CUDA out of memory.\n" + WHY.format(" DUE TO PREEMPTION"), "out_of_memory", (0,)),
    ],
    ids=["reason", "no-reason", "own-cause"],
)
def test_a_batch_systems_reason_in_a_ranks_own_log_names_nobody(
    tmp_path: Path, text: str, fault: str, culprits: tuple[int, ...]
) -> None:
    """It took the job away; a rank that had a cause of its own before is named all the same."""
    verdict = judge(tmp_path, {"1203_0_log.err": text})

    assert (verdict.fault, verdict.culprits) == (fault, culprits), verdict.reason


@pytest.mark.parametrize(
    ("first", "second", "fault", "culprits"),
    [
        (LOST.format(0), "[rank1]: step 200\nKilled\n", "killed", (1,)),
        (LOST.format(0), "step 200\nKilled\n", "unknown", ()),  # of all ranks that have no tags
        (LOST.format(0), LOST.format(0) + "Killed\n", "unknown", ()),  # the output and the errors of one rank
        (LOST.format(0), LOST.format(1) + LOST.format(2) + "Killed\n", "unknown", ()),
    ],
    ids=["one-each", "no-tag", "same", "several"],
)
def test_a_shells_word_below_the_lines_of_one_rank_is_that_ranks(
    tmp_path: Path, first: str, second: str, fault: str, culprits: tuple[int, ...]
) -> None:
    """Of two logs of one rank each; where a log may be of several, the word is of nobody."""
    verdict = judge(tmp_path, {"a.log": first, "b.log": second})

    assert (verdict.fault, verdict.culprits) == (fault, culprits), verdict.reason


@pytest.mark.parametrize(
    ("names", "rank"),
    [
        (["rank{}/node0/err.txt", "global_rank_{}/a/b.txt"], 2),
        (["gpt-{}-xb4kz.log", "gpt-node-0-{}-6d2ks.log"], 2),  # a pod's five signs behind its index
        (["frank{}s/node0/err.txt", "gpt-v{}-abcde.log"], -1),
    ],
)
def test_folders_of_ranks_and_pods_endings(tmp_path: Path, names: list[str], rank: int) -> None:
    """A folder of a rank may hold those of its nodes; Kubernetes appends no vowels."""
    assert [rank_of(tmp_path / name.format(2)) for name in names] == [rank] * len(names)
