# SPDX-License-Identifier: Apache-2.0
"""What launchers print when one of their ranks has ended: which one, and how. Pure.

A launcher is the parent of its ranks, so only it gets their exit statuses; but each prints them. Rows for
torchrun (and accelerate, which runs it), ``torch.multiprocessing.spawn``, Lightning's own launcher, deepspeed, Open
MPI, Hydra (MPICH, Intel MPI) and srun. A row is made of the words of the line, not of where it stands in a version's
table: programs add columns, colours and time stamps around it.
"""

import re
import signal
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import NamedTuple

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# Python refuses to read numbers of more than 4,300 digits; no rank, process or status has a hundred.
_NO_NUMBER = re.compile(r"\d{100,}")
# 64 ranks a node, each named at most twice; a script's output in the form of such lines is bounded.
_MOST = 256


class Said(NamedTuple):
    """A launcher's line about one rank; -1 where it names none. ``code`` is as subprocess writes it."""

    code: int
    rank: int = -1
    local_rank: int = -1
    pid: int = -1
    error: str = ""  # "ValueError: no data": the last line of the traceback that it prints
    line: str = ""  # its words


def read_words(text: str) -> tuple[Said, ...]:
    """Return a launcher's lines about ranks that failed, in the order of the text."""
    plain = _NO_NUMBER.sub("#", _COLOURS.sub("", text))
    failed = ((at, said) for read in _READERS for at, said in read(plain) if said.code != 0)
    # No further than that: a line of srun may name hundreds of tasks, and a tail has thousands of lines.
    found = list(islice(failed, _MOST))
    return tuple(said for _, said in sorted(found, key=lambda pair: pair[0]))


def _code(text: str) -> int:
    """Return an exit status as subprocess writes it; 137 of a shell or a container is a SIGKILL."""
    code = int(text)
    return 128 - code if 128 < code < 128 + signal.NSIG else code


def _of_signal(name: str) -> int:
    """Return the exit status of a process that died of a signal, by its name, number or description."""
    number = int(name) if name.isdecimal() else 0
    word = name.upper() if name.upper().startswith("SIG") else f"SIG{name.upper()}"
    known = _signals()
    return -(number or known.get(word, 0) or known.get(name.lower(), 0) or signal.SIGKILL)


@cache
def _signals() -> dict[str, int]:
    """Return the numbers of all signals by name (SIGKILL) and by description (killed): 60 us to make."""
    named = {one.name: int(one) for one in signal.Signals}
    return {(signal.strsignal(one) or "").lower(): int(one) for one in signal.Signals} | named


_Found = Iterator[tuple[int, Said]]
_TORCHRUN = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)[^\n]*")
# The table that follows it: one block a rank, each field on a line of its own.
_TORCHRUN_BLOCK = re.compile(
    r"rank *: (\d+) \(local_rank: (\d+)\)[^\n]*\n[^\n]*exitcode *: (-?\d+) \(pid: (\d+)\)", re.MULTILINE
)
_SPAWN_SIGNAL = re.compile(r"ProcessExitedException: process (\d+) terminated with signal (\w+)[^\n]*")
_SPAWN_CODE = re.compile(r"ProcessExitedException: process (\d+) terminated with exit code (\d+)[^\n]*")
# A traceback's frames are indented; the first line that is not is the exception.
_SPAWN_RAISED = re.compile(
    r"-- Process (\d+) terminated with the following error:\n\s*Traceback[^\n]*\n(?:(?:[ \t][^\n]*)?\n)*(\S[^\n]*)"
)
_LIGHTNING = re.compile(r"\[rank: (\d+)\] Child process with PID (\d+) terminated with code (-?\d+)[^\n]*")
_DEEPSPEED = re.compile(r"--local_rank=(\d+)[^\n]*\] exits with return code = (-?\d+)")
_OPEN_MPI_SIGNAL = re.compile(
    r"process rank\s+(\d+)\s+with\s+PID\s+(\d+)\s+on\s+node\s+\S+\s+exited\s+on\s+signal\s+(\d+)[^\n]*"
)
_OPEN_MPI_CODE = re.compile(r"Process name:\s+\[\[\d+,\d+\],(\d+)\]\s+Exit code:\s+(-?\d+)")
_HYDRA = re.compile(r"(?:RANK (\d+) )?PID (\d+) RUNNING AT \S+[\s=|]*(EXIT CODE|EXIT STATUS|KILLED BY SIGNAL): (\d+)")
_HYDRA_SIGNAL = re.compile(r"EXIT STRING: [^\n]*\(signal (\d+)\)")
_SRUN_CODE = re.compile(r"srun: error: \S+: tasks? ([\d,\[\]-]+): Exited with exit code (\d+)")
_SRUN_SIGNAL = re.compile(r"srun: error: \S+: tasks? ([\d,\[\]-]+): ([A-Z][A-Za-z ]+?)(?: \(core dumped\))?(?=\n|$)")


def _torchrun(text: str) -> _Found:
    for match in _TORCHRUN.finditer(text):
        code, local_rank, pid = (int(group) for group in match.groups())
        yield match.start(), Said(code, local_rank=local_rank, pid=pid, line=match[0])
    for match in _TORCHRUN_BLOCK.finditer(text):
        rank, local_rank, code, pid = (int(group) for group in match.groups())
        yield match.start(), Said(code, rank, local_rank, pid, line=f"rank {rank}: exitcode {code} (pid: {pid})")


def _spawn(text: str) -> _Found:
    for match in _SPAWN_SIGNAL.finditer(text):
        yield match.start(), Said(_of_signal(match[2]), local_rank=int(match[1]), line=match[0])
    for match in _SPAWN_CODE.finditer(text):
        yield match.start(), Said(_code(match[2]), local_rank=int(match[1]), line=match[0])
    for match in _SPAWN_RAISED.finditer(text):
        line = f"process {match[1]} terminated with the following error: {match[2]}"
        yield match.start(), Said(1, local_rank=int(match[1]), error=match[2].strip(), line=line)


def _lightning(text: str) -> _Found:
    for match in _LIGHTNING.finditer(text):
        yield match.start(), Said(int(match[3]), local_rank=int(match[1]), pid=int(match[2]), line=match[0])


def _deepspeed(text: str) -> _Found:
    for match in _DEEPSPEED.finditer(text):
        yield match.start(), Said(_code(match[2]), local_rank=int(match[1]), line=match[0])


def _mpi(text: str) -> _Found:
    for match in _OPEN_MPI_SIGNAL.finditer(text):
        pid = int(match[2]) or -1  # 0 where Open MPI has forgotten it
        yield match.start(), Said(-int(match[3]), rank=int(match[1]), pid=pid, line=" ".join(match[0].split()))
    for match in _OPEN_MPI_CODE.finditer(text):
        yield match.start(), Said(_code(match[2]), rank=int(match[1]), line=" ".join(match[0].split()))
    signals = {int(match[1]) for match in _HYDRA_SIGNAL.finditer(text)}
    for match in _HYDRA.finditer(text):
        number = int(match[4])  # MPICH prints a signal as an exit code, and notes below that it was one
        code = -number if match[3] == "KILLED BY SIGNAL" or number in signals else _code(match[4])
        line = f"PID {match[2]} {match[3].lower()}: {number}"
        yield match.start(), Said(code, rank=int(match[1] or -1), pid=int(match[2]), line=line)


def _srun(text: str) -> _Found:
    for match in _SRUN_CODE.finditer(text):
        code = _code(match[2])
        for rank in _tasks(match[1]) if code else ():
            yield match.start(), Said(code, rank=rank, line=match[0])
    for match in _SRUN_SIGNAL.finditer(text):
        if match[2].startswith("Exited"):
            continue
        code = _of_signal(match[2].strip())
        for rank in _tasks(match[1]):
            yield match.start(), Said(code, rank=rank, line=match[0])


def _tasks(text: str) -> Iterator[int]:
    """Return the numbers in ``0``, ``1,3`` and ``[0-2,5]``."""
    for part in text.strip("[]").split(","):
        low, _, high = part.partition("-")
        if low.isdecimal() and (not high or high.isdecimal()):
            yield from range(int(low), min(int(high or low), int(low) + _MOST) + 1)


_READERS: tuple[Callable[[str], _Found], ...] = (_torchrun, _spawn, _lightning, _deepspeed, _mpi, _srun)
