# SPDX-License-Identifier: Apache-2.0
"""Ask a rank's faulthandler for stacks without waking a thread: the signal goes to one thread, chosen here.

A signal with a handler ends the system call in which it finds a thread: ``nanosleep``, ``poll``, ``select`` and a
dozen more return early even where the handler was installed with SA_RESTART (signal(7)). Python tries again by itself
(PEP 475), code in C may not, and a script that sleeps there would go on too soon. Sent to a process, a signal goes to
its main thread. So it is sent to a thread (tgkill(2)), and no other thread's call is touched:

    the main thread runs        to the main thread: there is no call to end, and its frames hold still meanwhile
    the main thread sleeps      to the recorder's own thread, which Python puts back to sleep; frames hold still, too
    there is no such thread     not sent: before the script imports torch, and at its very end

The last also where the main thread runs: only the recorder's thread looks whether the script has taken the signal for
itself, and removes the file then without which no agent sends it.
The handler writes the stacks of all threads, whichever it runs in, and needs no GIL.
"""

import contextlib
import signal
from pathlib import Path

from megascale_agents.collectors import process
from megascale_agents.evidence.flight_recorder import NoAnswerError
from megascale_agents.ownership.processes import Held
from megascale_ops.schema.environment import BEAT_THREAD


def ask(held: Held) -> None:
    """Send SIGUSR1 to the thread of a rank's process that may take it.

    Raises:
        NoAnswerError: no thread may.
        OSError: the process is gone, or not the job's any more.
    """
    thread = taker(held.pid)
    if not thread:
        raise NoAnswerError(
            "no answer: a signal could wake the script, and the recorder has no thread there to take it"
        )
    held.signal_thread(thread, int(signal.SIGUSR1))


def taker(pid: int) -> int:
    """Return the thread that takes the signal, 0 where none may."""
    own = _recorders(pid)
    thread = pid if own and process.read_once(pid).state == "R" else own
    return thread if thread and takes(_status(pid, thread)) else 0


def _recorders(pid: int) -> int:
    """Return the recorder's thread in a process, 0 where there is none."""
    for path in Path(f"/proc/{pid}/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # threads come and go
            if path.read_text(encoding="utf-8", errors="replace").strip() == BEAT_THREAD:
                return int(path.parent.name)
    return 0


def takes(status: str) -> bool:
    """Return whether a thread does not block SIGUSR1, by the text of /proc/PID/task/TID/status (line ``SigBlk``)."""
    for line in status.splitlines():
        if line.startswith("SigBlk:"):
            return not int(line.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1
    return False


def _status(pid: int, thread: int) -> str:
    return Path(f"/proc/{pid}/task/{thread}/status").read_text(encoding="ascii", errors="replace")
