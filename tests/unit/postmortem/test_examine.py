# SPDX-License-Identifier: Apache-2.0
"""What a job left that nobody watched: who is elsewhere, who is behind, and nobody where all wait alike."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from megascale_ops.cli.main import main
from megascale_ops.errors import UsageError
from megascale_ops.postmortem.examine import examine
from megascale_ops.postmortem.pieces import rank_of
from tests.fakes import drawn_stacks, drawn_watchdog_logs
from tests.fakes.drawn_stacks import stacks_of
from tests.matrix import wide

README_COMMANDS = ("megascale-ops inspect FOLDER",)

WAITING = """Thread 0x00007f0000000000 (most recent call first):
  File "/opt/site-packages/torch/distributed/distributed_c10d.py", line 2810 in all_reduce
  File "/job/train.py", line 40 in step
"""
LOADING = """Thread 0x00007f0000000000 (most recent call first):
  File "/opt/site-packages/torch/utils/data/dataloader.py", line 1443 in _try_get_data
  File "/job/train.py", line 31 in next_batch
"""
# Those that stay are judged in all ways in which any of them is.
SEEDS = wide([range(8_000, 8_050), range(8_000, 8_120)], keep=[range(8_000, 8_050)])


def write(folder: Path, files: dict[str, str]) -> Path:
    """Write files below a folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_drawn_folders_of_real_stacks(tmp_path: Path, seeds: range) -> None:
    """Of 120 none names a wrong rank, and nearly all are right: who is elsewhere, and nobody where all wait alike."""
    score: Counter[str] = Counter()
    for seed in seeds:
        drawn = drawn_stacks.draw(seed)
        found = examine([write(tmp_path / "job", drawn.files)]).verdicts[0]
        shutil.rmtree(tmp_path / "job")
        if found.culprits == drawn.culprits and found.fault in drawn.classes:
            score["right"] += 1
        elif found.culprits:
            score["wrong"] += 1

    assert score["wrong"] == 0, score
    assert score["right"] >= 116 * len(seeds) // 120, score


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_drawn_logs_with_nothing_but_a_watchdogs_words(tmp_path: Path, seeds: range) -> None:
    """Of 120, each in files of its own: nobody is named wrongly, who is behind or called otherwise nearly always is."""
    score: Counter[str] = Counter()
    for seed in seeds:
        drawn = drawn_watchdog_logs.draw(seed)
        files = {f"rank_{rank}.log": text for rank, text in enumerate(drawn.texts)}
        found = examine([write(tmp_path / "job", files)]).verdicts[0]
        shutil.rmtree(tmp_path / "job")
        if found.culprits == drawn.culprits and found.fault in drawn.classes:
            score["right"] += 1
        elif found.culprits and found.confidence > 0.5:
            score["wrong"] += 1

    assert score["wrong"] == 0, score
    assert score["right"] >= 112 * len(seeds) // 120, score


def test_a_crash_explains_the_hang_of_the_others(tmp_path: Path) -> None:
    """One log ends with a full GPU, the others' stacks wait for that rank: the full GPU comes first."""
    error = (
        'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    )
    files = {f"rank{rank}.txt": WAITING for rank in (0, 1, 3)} | {"rank2.txt": error}

    found = examine([write(tmp_path, files)])

    assert (found.verdicts[0].fault, found.verdicts[0].culprits) == ("out_of_memory", (2,))
    assert (found.stacks, found.logs) == (3, 1)


def test_files_without_a_rank_are_named_by_their_files(tmp_path: Path) -> None:
    """No number is made up: the sentence has the file, and no culprit is named by number."""
    files = {"a.txt": WAITING, "b.txt": LOADING, "c.txt": WAITING, "d.txt": WAITING}

    found = examine([write(tmp_path, files)])

    assert found.verdicts[0].culprits == ()
    assert found.verdicts[0].fault == "data_stall"
    assert found.verdicts[0].reason.startswith("b.txt waits for its data loader in next_batch (train.py:31)")


def test_who_goes_on_between_two_looks_is_named_with_less_confidence(tmp_path: Path) -> None:
    """A rank whose stack was another one a look before works, though the others wait for it."""
    other = LOADING.replace("_try_get_data", "_next_index").replace("next_batch", "warm_up")
    files = {f"rank{rank}.txt": WAITING for rank in range(3)} | {"rank3.txt": f"{other}\n{LOADING}"}

    (found,) = examine([write(tmp_path, files)]).verdicts

    assert found.culprits == (3,)
    assert found.confidence < 0.6
    assert "goes on" in found.reason


def test_stages_of_a_pipeline_that_receive_and_send_name_nobody(tmp_path: Path) -> None:
    """Ranks that all wait, some in a send and one in a receive, are not told apart by that."""
    receiving = WAITING.replace("all_reduce", "recv").replace("40 in step", "44 in forward")
    files = {f"rank{rank}.txt": WAITING for rank in range(3)} | {"rank3.txt": receiving}

    (found,) = examine([write(tmp_path, files)]).verdicts

    assert found.culprits == ()


def test_tracebacks_of_an_interrupt_are_stacks(tmp_path: Path) -> None:
    """Ctrl-C ends a hung job, and each rank's traceback shows where it was; one that raised is no stack."""
    library = "/opt/site-packages/torch/"
    at = dict.fromkeys(range(4), f'{library}distributed/distributed_c10d.py", line 2810, in all_reduce')
    at[2] = f'{library}utils/data/dataloader.py", line 1443, in _try_get_data'
    text = 'Traceback (most recent call last):\n  File "/job/train.py", line 40, in step\n    step()\n  File "{}\n{}\n'
    files = {f"rank{rank}.log": text.format(place, "KeyboardInterrupt") for rank, place in at.items()}

    first = examine([write(tmp_path / "hung", files)]).verdicts[0]
    raised = {name: text.replace("KeyboardInterrupt", "ValueError: bad") for name, text in files.items()}
    other = examine([write(tmp_path / "raised", raised)])

    assert (first.fault, first.culprits) == ("data_stall", (2,))
    assert other.stacks == 0
    assert other.verdicts[0].fault == "exception_everywhere"


def test_a_process_that_is_gone_is_named(tmp_path: Path) -> None:
    """All that py-spy left of it is its complaint."""
    files = {f"rank{rank}.txt": stacks_of("py_spy")["dist_all_reduce"] for rank in range(3)}
    files["rank3.txt"] = "Error: Failed to find process 4321: No such process (os error 3)\n"

    (found,) = examine([write(tmp_path, files)]).verdicts

    assert (found.fault, found.culprits) == ("not_joined", (3,))


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank3.txt", 3), ("stacks_rank_0012.log", 12), ("nccl_trace_rank_7", 7), ("attempt_0/5/stderr.log", 5),
        ("job-r4.out", 4), ("2.txt", 2), ("node1_rank9.log", 9), ("global_rank=6.local_rank=2.txt", 6),
        ("train.log", -1), ("gpu1.txt", 1), ("slurm-99123_4.out", 4), ("py-spy-dump-3.txt", 3),
        ("1203_0_log.err", 0), ("1203_12_log.out", 12), ("1203_log.err", -1),
    ],
)  # fmt: skip
def test_names_tell_ranks(name: str, rank: int) -> None:
    """As launchers, schedulers and people name files."""
    assert rank_of(Path("/jobs") / name) == rank


def test_the_command_prints_a_verdict_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``inspect`` reads them when there are no black boxes."""
    write(tmp_path, {f"rank{rank}.txt": LOADING if rank == 1 else WAITING for rank in range(4)})

    words = [str(tmp_path) if word == "FOLDER" else word for word in README_COMMANDS[0].split()[1:]]
    codes = [main(words), main([*words, "--json"])]

    out = capsys.readouterr().out
    text, _, told = out.partition("{")
    assert codes == [0, 0]
    assert "data_stall: the rank waits for its data loader" in text
    assert "rank 1 waits for its data loader in next_batch (train.py:31)" in " ".join(text.split())
    assert json.loads("{" + told)["verdicts"][0]["culprits"] == [1]


WATCHED = (
    "[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, "
    "NumelIn=1024, NumelOut=1024, Timeout(ms)=600000) ran for 600021 milliseconds before timing out.\n"
)
SUMMARY = """Root Cause (first observed failure):
[0]:
  time      : 2026-11-20_12:00:00
  host      : vm
  rank      : 2 (local_rank: 2)
  exitcode  : -9 (pid: 77)
"""


def test_nothing_is_told_that_nobody_saw(tmp_path: Path) -> None:
    """Logs alone have no exit statuses and no times, these no name of a group, and there was no black box."""
    logs = {f"rank{rank}.log": WATCHED.format(rank=rank, seq=41 if rank == 2 else 42) for rank in range(4)}
    logs["rank4.log"] = "step 41\n"

    (verdict,) = examine([write(tmp_path, logs)]).verdicts

    told = " ".join((verdict.reason, verdict.otherwise, *(finding.text for finding in verdict.evidence)))
    assert verdict.culprits == (2,)
    assert not any(words in told for words in ("exit code", " s ago", "SIGTERM", "stopped", "black box", "group ?")), (
        told
    )
    assert {finding.source for finding in verdict.evidence} == {"log"}


def test_statuses_are_told_where_a_launcher_did(tmp_path: Path) -> None:
    """By its summary; without a time, which stands in none."""
    logs = {f"rank{rank}.log": WATCHED.format(rank=rank, seq=42) for rank in (0, 1, 3)}

    verdict = examine([write(tmp_path, {**logs, "launcher.log": SUMMARY})]).verdicts[0]

    assert verdict.culprits == (2,)
    (first,) = [finding.text for finding in verdict.evidence if finding.rank == 2]
    assert first.startswith("rank 2 (SIGKILL): "), first
    assert " s ago" not in first


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "there is no black box, log, stack or dump in"),
        ({"rank0.txt": WAITING}, "who is elsewhere shows only beside other ranks"),
    ],
)
def test_too_little_is_one_sentence(tmp_path: Path, files: dict[str, str], words: str) -> None:
    """An empty folder and the stack of one rank are no verdict."""
    with pytest.raises(UsageError, match=words):
        examine([write(tmp_path, files)])
