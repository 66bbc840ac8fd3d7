# SPDX-License-Identifier: Apache-2.0
"""What the first heartbeat does not wait for: modules that are loaded, and a port that is served, when it is out.

A start shall take half a second at most, and what is here takes as long again. All of it is loaded soon after, in a
thread, and not when it is first needed: that may be in an incident, when the disk that the modules are on hangs.
"""

import asyncio
import errno
import os
import socket
from importlib import import_module

from megascale_agents import threads
from megascale_agents.collectors.table import COLLECTORS, module_of
from megascale_agents.config import Address
from megascale_ops.errors import UsageError

MODULES = (
    "megascale_agents.orders.executor",
    "megascale_agents.collectives.sample",
    "megascale_agents.hardware.hardware",
    *map(module_of, COLLECTORS),
)
FOR_METRICS = ("megascale_agents.metrics.server", "megascale_agents.metrics.hardware", "prometheus_client")


async def load(*, with_metrics: bool) -> None:
    """Import what is needed from now on; an agent without metrics needs no server."""

    def work() -> None:
        for name in (*MODULES, *(FOR_METRICS if with_metrics else ())):
            import_module(name)

    await threads.run(work, "load")


def end_with(pid: int, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> int:
    """Set ``stop`` when a process ends; return the handle on that process, -1 for none."""
    if not pid:
        return -1
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        stop.set()
        return -1
    loop.add_reader(handle, stop.set)
    return handle


def listen(address: Address) -> tuple[socket.socket, str]:
    """Take the port for ``/metrics``, so that an early scrape only waits; return it and its URL.

    Raises:
        UsageError: the port is taken, or the address is not ours.
    """
    for port in (address.port, 0) if address.any_port else (address.port,):
        try:
            family, _, _, _, place = socket.getaddrinfo(
                address.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            taken = socket.create_server(place[:2], family=family, backlog=128)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and address.any_port and port:
                continue
            raise UsageError(f"--metrics-listen {address.host}:{port} can't be used: {error.strerror}") from error
        break
    host, bound = taken.getsockname()[:2]
    return taken, f"http://[{host}]:{bound}/metrics" if ":" in host else f"http://{host}:{bound}/metrics"
