# SPDX-License-Identifier: Apache-2.0
"""What launchers print of a rank that has ended, in lines of the shape that each of them has."""

import pytest

from megascale_ops.runner.wrapped.launcher_words import Said, read_words

TORCHRUN = """\
E1103 08:12:44.100000 4411 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: -9) local_rank: 3 \
(pid: 4419) of binary: /opt/env/bin/python3
Traceback (most recent call last):
  File "/opt/env/bin/torchrun", line 7, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
pretrain.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-03_08:12:44
  host      : gpu-a
  rank      : 11 (local_rank: 3)
  exitcode  : -9 (pid: 4419)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 4419
============================================================
"""
SPAWN_RAISED = """\
Traceback (most recent call last):
  File "/s/train.py", line 40, in <module>
    mp.spawn(work, nprocs=4)
torch.multiprocessing.spawn.ProcessRaisedException:

-- Process 2 terminated with the following error:
Traceback (most recent call last):
  File "/env/torch/multiprocessing/spawn.py", line 87, in _wrap
    fn(i, *args)

  File "/s/train.py", line 31, in work
    raise KeyError("shard-17")
KeyError: 'shard-17'

"""
HYDRA = """\
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 871 RUNNING AT gpu-b
=   EXIT CODE: {code}
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
===================================================================================
{more}"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TORCHRUN, [(-9, -1, 3, 4419), (-9, 11, 3, 4419)]),
        (
            "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGSEGV\n",
            [(-11, -1, 1, -1)],
        ),
        (
            "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with exit code 3\n",
            [(3, -1, 0, -1)],
        ),
        (SPAWN_RAISED, [(1, -1, 2, -1)]),
        (
            "\x1b[33m[rank: 1] Child process with PID 77 terminated with code -9. Forcefully terminating all other\n",
            [(-9, -1, 1, 77)],
        ),
        (
            "[ERROR] [launch.py:325] ['python3', 'ft.py', '--local_rank=5', '--bf16'] exits with return code = -7\n",
            [(-7, -1, 5, -1)],
        ),
        (
            "mpirun noticed that process rank 2 with PID 0 on node gpu-c exited on signal 11 (Segmentation fault).\n",
            [(-11, 2, -1, -1)],
        ),
        ("  Process name: [[40013,1],3]\n  Exit code:    42\n", [(42, 3, -1, -1)]),
        (
            HYDRA.format(code=9, more="YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n"),
            [(-9, -1, -1, 871)],
        ),
        (HYDRA.format(code=9, more=""), [(9, -1, -1, 871)]),
        ("=   RANK 3 PID 5 RUNNING AT gpu-d\n=   KILLED BY SIGNAL: 9 (Killed)\n", [(-9, 3, -1, 5)]),
        ("srun: error: gpu-a: task 7: Exited with exit code 137\n", [(-9, 7, -1, -1)]),
        ("srun: error: gpu-a: tasks [4-5,7]: Killed\n", [(-9, 4, -1, -1), (-9, 5, -1, -1), (-9, 7, -1, -1)]),
        ("srun: error: gpu-a: task 0: Segmentation fault (core dumped)\n", [(-11, 0, -1, -1)]),
        # Nothing of the kind: what ended well, a script's lines about its own children, another program's words.
        ("srun: error: gpu-a: task 0: Exited with exit code 0\n", []),
        ("process 3 of the pipeline terminated with a warning\nexit code: 0, rank 2, killed 3 stragglers\n", []),
        ("srun: job 4711 queued and waiting for resources\n", []),
        ("", []),
    ],
)
def test_the_rank_and_its_status_are_read(text: str, expected: list[tuple[int, int, int, int]]) -> None:
    """Rank or local rank, process and status as far as each launcher prints them; other words name no rank."""
    assert [(one.code, one.rank, one.local_rank, one.pid) for one in read_words(text)] == expected


def test_an_exception_is_read_from_its_traceback() -> None:
    """The first line of a traceback that is not indented is the exception."""
    (said,) = read_words(SPAWN_RAISED)

    assert said.error == "KeyError: 'shard-17'"


@pytest.mark.parametrize("end", ["Killed", "Exited with exit code 3"])
def test_a_script_that_prints_such_lines_for_ever_is_read_for_a_while(end: str) -> None:
    """256 are kept, of megabytes, and the rest is not asked for."""
    line = f"srun: error: n: tasks [0-99999999]: {end}\n"

    found = read_words(line * 2000)

    assert len(found) == 256
    assert [one.rank for one in found] == list(range(256))
    assert isinstance(found[0], Said)


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: n: tasks [0-{}]: Killed",
        "srun: error: n: task 3: Exited with exit code {}",
        "failed (exitcode: -9) local_rank: 3 (pid: {})",
        "ProcessExitedException: process {} terminated with signal SIGKILL",
        "ProcessExitedException: process 3 terminated with exit code {}",
        "process rank 3 with PID {} on node n exited on signal 9",
    ],
)
def test_numbers_that_are_none_name_nobody(line: str) -> None:
    """Python reads no number of 5,000 digits: such a line is passed over, and the next one is read."""
    (said,) = read_words(line.format("9" * 5000) + "\nsrun: error: n: task 1: Killed\n")

    assert said.rank == 1


def test_a_signal_in_digits_that_are_no_number_is_a_kill() -> None:
    """Characters such as a raised 2 are digits and no number: the signal is unknown, and the process is named."""
    (said,) = read_words("ProcessExitedException: process 3 terminated with signal \N{SUPERSCRIPT TWO}\n")

    assert (said.code, said.local_rank) == (-9, 3)
