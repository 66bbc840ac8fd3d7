# SPDX-License-Identifier: Apache-2.0
"""Trials that outlive the call that held them: a line of JSON each, added as each one ends.

Ten runs of the matrix take hours. What a first call has held, until Ctrl-C or its ``--limit-s``, a second one reads,
and holds the rest. Only outcomes are kept; their grades are made anew, by the truth as it stands in code now.
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from megascale_ops import foreign
from megascale_ops.chaos.faults import BY_NAME, Fault
from megascale_ops.chaos.score import Outcome

# A trial has some 2 kB, the whole matrix a hundred rows: thousands of runs.
_MOST_BYTES = 1 << 30
_BEGINS = b'{"nproc":'


class Trial(msgspec.Struct, frozen=True):
    """One line: an outcome, and the job that it was had of."""

    nproc: int
    rank: int
    backend: str
    outcome: Outcome
    version: str = ""  # of MegaScale Ops
    shared_gpus: int = 0  # that all ranks had together, where they had to share


def read(path: Path) -> list[Trial]:
    """Return what a file holds, oldest first; nothing where there is no file yet.

    A last line without its end is what a call left that was killed while it wrote: that trial is held again.

    Raises:
        ValueError: a line is no trial of ours, nor the beginning of one; the message names file and line.
        OSError: the file can't be read.
    """
    try:
        lines = foreign.read(path, _MOST_BYTES, follow=True).splitlines(keepends=True)
    except FileNotFoundError:
        return []
    trials = []
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            if line[: len(_BEGINS)] != _BEGINS[: len(line)]:  # else `add` would cut off the end of another's file
                raise ValueError(f"{path}, line {number}: not the beginning of a trial of `chaos score`")
            break
        try:
            trial = msgspec.json.decode(line, type=Trial)
        except foreign.UNREADABLE as error:
            raise ValueError(f"{path}, line {number}: not a trial of `chaos score`: {error}") from error
        if trial.outcome.fault not in BY_NAME:
            raise ValueError(f"{path}, line {number}: there is no fault {trial.outcome.fault!r}")
        trials.append(trial)
    return trials


def add(path: Path, trial: Trial) -> None:
    """Add one trial and see it on the disk; an unfinished line before it is cut off.

    Raises:
        OSError: the file can't be written.
    """
    with path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        file.truncate(file.read(size).rfind(b"\n") + 1)
        file.write(msgspec.json.encode(trial) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def missing(wanted: Sequence[Fault], runs: int, held: Iterable[Outcome]) -> list[Fault]:
    """Return the rows whose trials are missing, the first of each row before the second of any.

    A trial that could not be held is none: what was in its way may be gone.
    """
    had = Counter(outcome.fault for outcome in held if not outcome.problem)
    return [row for run in range(runs) for row in wanted if run >= had[row.name]]
