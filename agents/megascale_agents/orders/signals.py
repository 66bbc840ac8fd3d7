# SPDX-License-Identifier: Apache-2.0
"""Stop and kill ranks: only processes that the runner listed, and only while they are still the same process.

The whole process group gets the signal, because a rank's data loaders must not outlive it. A round file is a user's
word: that the process is the job's is shown, and it is held while the signal is sent (``ownership/processes.py``).
"""

import signal

from megascale_agents.collectors import process
from megascale_agents.ownership import processes
from megascale_agents.ownership.processes import Bounds, GoneError, NotOfJobError
from megascale_ops.schema.identity import RankProcess
from megascale_ops.schema.messages import EvidenceItem

SIGNALS = {"stop": signal.SIGTERM, "kill": signal.SIGKILL}


def send(kind: str, rank: int, listed: RankProcess | None, bounds: Bounds) -> EvidenceItem:
    """Send the signal of an order (``stop``: SIGTERM, ``kill``: SIGKILL) to one rank's process group."""
    number = SIGNALS[kind]
    if listed is None:
        return _item(rank, ok=False, text=f"{number.name} not sent: the runner of this node did not start the rank")
    try:
        with processes.held(listed.pid, listed.start_ticks, bounds) as held:
            leads = process.read_once(listed.pid).group == listed.pid
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


def _item(rank: int, *, ok: bool, text: str) -> EvidenceItem:
    return EvidenceItem(kind="signal", ok=ok, rank=rank, text=text)
