# SPDX-License-Identifier: Apache-2.0
"""Stop and kill ranks, and ask them to save: only processes that the runner listed, while they are still the same.

The whole process group gets the signal, because a rank's data loaders must not outlive it. A round file is a user's
word: that the process is the job's is shown, and it is held while the signal is sent (``ownership/processes.py``).
"""

import signal
from pathlib import Path

from megascale_agents.collectors import process
from megascale_agents.evidence.stacks import catches
from megascale_agents.ownership import processes
from megascale_agents.ownership.processes import Bounds, GoneError, NotOfJobError
from megascale_ops.schema.identity import RankProcess
from megascale_ops.schema.messages import EvidenceItem

CHECKPOINT = "checkpoint"
SIGNALS = {"stop": signal.SIGTERM, "kill": signal.SIGKILL, CHECKPOINT: signal.SIGUSR1}


def send(kind: str, rank: int, listed: RankProcess | None, bounds: Bounds) -> EvidenceItem:
    """Send the signal of an order to one rank's process group (``stop``: SIGTERM, ``kill``: SIGKILL).

    ``checkpoint``, SIGUSR1, goes to the rank's process alone, and only if its script has
    a handler: it would die of the signal, or write its stacks.
    """
    number = SIGNALS[kind]
    if listed is None:
        return _item(rank, ok=False, text=f"{number.name} not sent: the runner of this node did not start the rank")
    try:
        with processes.held(listed.pid, listed.start_ticks, bounds) as held:
            if kind == CHECKPOINT and not _saves_on(listed.pid, rank, number):
                return _item(rank, ok=False, text=f"{number.name} not sent: the script has no handler for it")
            leads = kind != CHECKPOINT and process.read_once(listed.pid).group == listed.pid
            if leads:
                processes.signal_group(held, number, bounds)
            else:
                held.signal(number)
    except (GoneError, ProcessLookupError):
        return _item(rank, ok=True, text=f"{number.name} not needed: process {listed.pid} is gone")
    except NotOfJobError as error:
        return _item(rank, ok=False, text=f"{number.name} not sent: {error}")
    except PermissionError as error:
        return _item(rank, ok=False, text=f"{number.name} to process {listed.pid}: {error}")
    whom = "process group" if leads else "process"
    return _item(rank, ok=True, text=f"{number.name} sent to {whom} {listed.pid}")


def _saves_on(pid: int, rank: int, number: int) -> bool:
    """Say whether a process has a handler of its script's own: the recorder's holds ``<rank>.stacks`` open.

    Where the script takes SIGUSR1 for itself the recorder removes that file, and its name then says so.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        names = {handle.readlink().name for handle in Path(f"/proc/{pid}/fd").iterdir() if handle.is_symlink()}
    except OSError:
        return False  # gone, or not readable
    return catches(status, number) and f"{rank}.stacks" not in names


def _item(rank: int, *, ok: bool, text: str) -> EvidenceItem:
    return EvidenceItem(kind="signal", ok=ok, rank=rank, text=text)
