# SPDX-License-Identifier: Apache-2.0
"""The process of checks: ``python -m megascale_ops.diagnostics.child PARENT DESCRIPTOR``, started by ``children.py``.

It loads what is slow to load, says that it is ready, and makes the checks that it is given, one after the other.
Answers leave by a descriptor of its own, since libraries print what they please on the other two. It dies with the
program that started it. The conversation, one line each:

    {"loads": [...]}                in   modules of others that its checks need
    ready                           out  they are loaded, and nothing of the machine has been used yet
    {"module": ..., "task": ...}    in   measure now
    {"reading": ...}                out  or {"unmeasured": "why"}, {"error": "what"}; then the next one
"""

import ctypes
import errno
import gc
import importlib
import os
import signal
import sys
from typing import BinaryIO

import msgspec

from megascale_ops.diagnostics.check import CheckModule, Reading, Task, UnmeasuredError

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
# Rights, absence and what this process may use say nothing of the hardware.
_NO_VERDICT = (
    errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOSPC, errno.EDQUOT, errno.EROFS,
    errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EFBIG,
)  # fmt: skip
_MOST_ERROR = 500


class Loads(msgspec.Struct, frozen=True):
    """What is to be loaded first."""

    loads: tuple[str, ...] = ()


class Order(msgspec.Struct, frozen=True):
    """One check to be made: its module, and its task."""

    module: str
    task: Task


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
        what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
        return Answer(unmeasured=what) if error.errno in _NO_VERDICT else Answer(error=what)
    except MemoryError:
        return Answer(unmeasured="there is not enough memory for it (a limit of the process or of its control group?)")
    except Exception as error:  # noqa: BLE001  a driver's own kinds; it is told to the program that asked
        first_line = next(iter(str(error).strip().splitlines()), "")
        return Answer(error=f"{type(error).__name__}: {first_line}"[:_MOST_ERROR])


def main(arguments: list[str], orders: BinaryIO) -> None:
    """Make checks until orders end; ``arguments``: the parent's process id, the descriptor to answer by."""
    parent, descriptor = arguments
    die_with(int(parent))
    with os.fdopen(int(descriptor), "wb", buffering=0) as answers:
        for name in msgspec.json.decode(orders.readline(), type=Loads).loads:
            importlib.import_module(name)
        answers.write(b"ready\n")
        while line := orders.readline():
            order = msgspec.json.decode(line, type=Order)
            module: CheckModule = importlib.import_module(order.module)  # type: ignore[assignment]  # it has its names
            answers.write(msgspec.json.encode(answer_of(module, order.task)) + b"\n")
            _tidy_up()


def _tidy_up() -> None:
    """Give back what a check has held of GPUs' memory: the next one wants room."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:], sys.stdin.buffer)
    # Past the interpreter's end: a driver that hangs while its library is unloaded has answered already.
    os._exit(0)
