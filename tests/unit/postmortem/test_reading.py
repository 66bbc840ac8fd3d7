# SPDX-License-Identifier: Apache-2.0
"""The end of a file as text, however it was written; and folders as launchers and batch systems leave them."""

import bz2
import gzip
import lzma
from collections.abc import Mapping
from pathlib import Path

import pytest

from megascale_ops.postmortem.examine import examine
from megascale_ops.postmortem.reading import read

ERROR = 'Traceback (most recent call last):\n  File "/app/train.py", line 8, in <module>\n{}\n'
FULL = ERROR.format("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
LOST = ERROR.format("torch.distributed.DistBackendError: NCCL error in: x.hpp:268, remote process exited")
KEY = ERROR.format("KeyError: 'old'")


def written(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files below a folder."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return folder


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, bytes])
def test_a_packed_log_is_read(tmp_path: Path, pack: type[bytes]) -> None:
    """As log rotation packs it; one that was cut short as far as it goes."""
    data = pack(b"step 1\n" * 5000)
    path = tmp_path / "rank3.log"
    path.write_bytes(data)

    assert read(path).data == b"step 1\n" * 5000
    assert read(path, 7).data == b"step 1\n"
    assert read(path, 7).is_cut


def test_a_packed_log_that_is_broken_is_an_error(tmp_path: Path) -> None:
    """What can be had of it counts; of one with nothing it is said that it can't be read."""
    path = written(tmp_path, {"rank3.log.gz": gzip.compress(bytes(range(256)))[:40]}) / "rank3.log.gz"

    with pytest.raises(OSError, match="can't be unpacked"):
        read(path)


def test_what_is_no_text_is_left_out_and_said(tmp_path: Path) -> None:
    """A core and weights beside the logs; a log of Windows and one of PowerShell are text."""
    noise = bytes(range(256)) * 200
    files: dict[str, str | bytes] = {
        "core.77": noise,
        "rank9.safetensors": noise,
        "rank0.log": LOST.replace("\n", "\r\n"),
    }
    files |= {"rank1.log": FULL.encode("utf-16"), "rank2.log": LOST}

    found = examine([written(tmp_path, files)])

    assert (found.verdicts[0].fault, found.verdicts[0].culprits) == ("out_of_memory", (1,))
    assert found.logs == 3
    assert any("core.77 and 1 more" in note for note in found.notes)


def test_the_output_of_a_rank_does_not_make_its_errors_old(tmp_path: Path) -> None:
    """Slurm's .out and .err are two files of one time: a hundred steps in one are not after the error in the other."""
    files = {f"j-9-r{rank}.err": FULL if rank == 2 else LOST for rank in range(4)}
    files |= {f"j-9-r{rank}.out": "step 1 loss 2.0\n" * 300 for rank in range(4)}

    found = examine([written(tmp_path, files)]).verdicts[0]

    assert (found.fault, found.culprits) == ("out_of_memory", (2,))


def test_older_files_come_first(tmp_path: Path) -> None:
    """A log that was put by is older than the one that is written, and an attempt than the one after it."""
    put_by: dict[str, str | bytes] = {
        "rank0.log.1.gz": gzip.compress((KEY + "step 1 loss 2.0\n" * 300).encode()),
        "rank0.log": LOST,
    }
    tries = {f"attempt_0/{rank}/stderr.log": KEY if rank == 1 else LOST for rank in range(3)}
    tries |= {f"attempt_1/{rank}/stderr.log": FULL if rank == 2 else LOST for rank in range(3)}

    rotated = examine([written(tmp_path / "a", {**put_by, "rank1.log": FULL})]).verdicts[0]
    retried = examine([written(tmp_path / "b", tries)])

    assert rotated.culprits == (1,)
    assert retried.verdicts[0].culprits == (2,)
    assert retried.notes == ("only attempt 1 was judged: what came before it is over",)


def test_a_log_that_names_no_rank_names_none(tmp_path: Path) -> None:
    """Not even the first, which it was until now; a launcher's word in it, or a tag, names one."""
    report = "rank      : 9 (local_rank: 1)\n  exitcode  : 1 (pid: 71)\n"

    alone = examine([written(tmp_path / "a", {"job.log": FULL})]).verdicts[0]
    told = examine([written(tmp_path / "b", {"job.log": FULL + report})]).verdicts[0]
    job = examine([written(tmp_path / "c", {"slurm-812.out": FULL})]).verdicts[0]

    assert (alone.fault, alone.culprits) == ("out_of_memory", ())
    assert (told.fault, told.culprits) == ("out_of_memory", (9,))
    assert job.culprits == ()


def test_tracebacks_of_all_ranks_in_one_log_are_of_the_first_that_is_no_victims(tmp_path: Path) -> None:
    """With a launcher's report they are of the rank that it saw fail first, and who followed is no rival."""
    report = (
        "[1]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : 1 (pid: 70)\nRoot Cause (first observed failure):\n"
        "[0]:\n  rank      : 2 (local_rank: 2)\n  exitcode  : 1 (pid: 72)\n"
    )
    told = examine([written(tmp_path / "a", {"job.log": KEY + LOST + LOST + report})]).verdicts[0]
    alone = examine([written(tmp_path / "b", {"job.log": LOST + KEY + LOST})]).verdicts[0]
    victims = examine([written(tmp_path / "c", {"job.log": LOST + LOST})]).verdicts[0]
    long_ago = KEY + LOST + "step 1 loss 2.0\n" * 300 + LOST + LOST
    survived = examine([written(tmp_path / "d", {"job.log": long_ago})]).verdicts[0]

    assert (told.fault, told.culprits, told.confidence) == ("exception", (2,), 0.95)
    assert (alone.fault, alone.culprits) == ("exception", ())
    assert (victims.fault, victims.culprits) == ("unknown", ())
    assert survived.fault == "unknown"


def test_a_crash_that_a_launcher_saw_is_not_hidden_by_the_words_of_others(tmp_path: Path) -> None:
    """A memory fault is the rank's own; an abort may be how one that lost a peer ended."""
    noticed = "mpirun noticed that process rank 2 with PID 9 on node a exited on signal {}.\n"

    crashed = examine([written(tmp_path / "a", {"job.log": LOST + noticed.format("11 (Segmentation fault)")})])
    aborted = examine([written(tmp_path / "b", {"job.log": LOST + noticed.format("6 (Aborted)")})])

    assert (crashed.verdicts[0].fault, crashed.verdicts[0].culprits) == ("segfault", (2,))
    assert aborted.verdicts[0].culprits == ()


def test_a_pods_number_counts_behind_its_master(tmp_path: Path) -> None:
    """Kubeflow's master is rank 0, so worker 1 is rank 2; without a master the file is named."""
    pods = {"b-master-0.log": LOST, "b-worker-0.log": LOST, "b-worker-1.log": FULL}

    with_master = examine([written(tmp_path / "a", pods)]).verdicts[0]
    without = examine([written(tmp_path / "b", {name: pods[name] for name in ("b-worker-0.log", "b-worker-1.log")})])

    assert with_master.culprits == (2,)
    assert without.verdicts[0].culprits == ()
    assert without.verdicts[0].reason.startswith("b-worker-1.log: ")
