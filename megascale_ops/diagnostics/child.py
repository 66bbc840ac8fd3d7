# SPDX-License-Identifier: Apache-2.0
"""The process of one check: ``python -m megascale_ops.diagnostics.child MODULE``, started by ``children.py``.

It loads what is slow to load, says that it is ready, waits for the word to begin, measures, answers. The answer leaves
by a descriptor of its own, since libraries print what they please on the other two. It dies with the program that
started it. Its end of the conversation, one line each:

    {"task"...}        in   what to do
    ready              out  imports are done, nothing of the machine has been used yet
    go                 in   measure now
    {"reading": ...}   out  or {"unmeasured": "why"}, {"error": "what"}
"""

import ctypes
import errno
import importlib
import os
import signal
import sys
from typing import BinaryIO

import msgspec

from megascale_ops.diagnostics.check import CheckModule, Reading, Task, UnmeasuredError

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
# Rights and absence say nothing of the hardware.
_NO_VERDICT = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOSPC, errno.EDQUOT)
_MOST_ERROR = 500


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What comes back: one of the three."""

    reading: Reading | None = None
    unmeasured: str = ""
    error: str = ""


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it died before that call: no signal will come
        os._exit(1)


def answer_of(module: CheckModule, task: Task) -> Answer:
    """Measure, and put whatever comes of it into an answer."""
    try:
        return Answer(reading=module.measure(task))
    except UnmeasuredError as error:
        return Answer(unmeasured=str(error))
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return Answer(unmeasured=what) if error.errno in _NO_VERDICT else Answer(error=what)
    except Exception as error:  # noqa: BLE001  a driver's own kinds; it is told to the program that asked
        first_line = next(iter(str(error).strip().splitlines()), "")
        return Answer(error=f"{type(error).__name__}: {first_line}"[:_MOST_ERROR])


def main(arguments: list[str], orders: BinaryIO) -> None:
    """Do one check; ``arguments``: the module, the parent's process id, the descriptor to answer by."""
    name, parent, descriptor = arguments
    die_with(int(parent))
    with os.fdopen(int(descriptor), "wb", buffering=0) as answers:
        task = msgspec.json.decode(orders.readline(), type=Task)
        module: CheckModule = importlib.import_module(name)  # type: ignore[assignment]  # a check's file has its names
        if "torch" in module.CHECK.needs:
            importlib.import_module("torch")
        answers.write(b"ready\n")
        if orders.readline() != b"go\n":
            return
        answers.write(msgspec.json.encode(answer_of(module, task)) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:], sys.stdin.buffer)
    # Past the interpreter's end: a driver that hangs while its library is unloaded has answered already.
    os._exit(0)
