# SPDX-License-Identifier: Apache-2.0
"""Stop and kill ranks: only processes that the runner listed, and only while they are still the same process.

The whole process group gets the signal, because a rank's data loaders must not outlive it. A pid alone proves nothing
(it may have been given to another process since), so its start time must be the listed one as well.
"""

import os
import signal

from megascale_agents.collectors import process
from megascale_ops.schema.identity import RankProcess
from megascale_ops.schema.messages import EvidenceItem

SIGNALS = {"stop": signal.SIGTERM, "kill": signal.SIGKILL}


def send(kind: str, rank: int, listed: RankProcess | None) -> EvidenceItem:
    """Send the signal of an order (``stop``: SIGTERM, ``kill``: SIGKILL) to one rank's process group."""
    number = SIGNALS[kind]
    if listed is None:
        return _item(rank, ok=False, text=f"{number.name} not sent: the runner of this node did not start the rank")
    seen = process.read_once(listed.pid)
    if seen.start_ticks != listed.start_ticks or not seen.state:
        return _item(rank, ok=True, text=f"{number.name} not needed: process {listed.pid} is gone")
    try:
        if seen.group == listed.pid:
            os.killpg(listed.pid, number)
            whom = "process group"
        else:
            os.kill(listed.pid, number)
            whom = "process"
    except ProcessLookupError:
        return _item(rank, ok=True, text=f"{number.name} not needed: process {listed.pid} is gone")
    except PermissionError as error:
        return _item(rank, ok=False, text=f"{number.name} to process {listed.pid}: {error}")
    return _item(rank, ok=True, text=f"{number.name} sent to {whom} {listed.pid}")


def _item(rank: int, *, ok: bool, text: str) -> EvidenceItem:
    return EvidenceItem(kind="signal", ok=ok, rank=rank, text=text)
