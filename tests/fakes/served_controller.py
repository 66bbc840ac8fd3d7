# SPDX-License-Identifier: Apache-2.0
"""A real controller on a loopback port, inside the test's own event loop."""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from megascale_ops.controller.journal.store import Store, open_store
from megascale_ops.controller.loop import Loop
from megascale_ops.controller.recording.recorded_loop import RecordedLoop
from megascale_ops.controller.recording.ring import Ring
from megascale_ops.controller.server.api import Api
from megascale_ops.controller.server.listen import listening


class Served:
    """What a test needs of it."""

    def __init__(self, url: str, loop: Loop, store: Store, api: Api) -> None:
        self.url = url
        self.loop = loop
        self.store = store
        self.api = api


def _loop(store: Store, post: Callable[..., object], record: Path | None) -> Loop:
    if record is None:
        return Loop(store, clock=time.monotonic, wall=time.time, post=post)
    ring = Ring(record, most_bytes=1 << 26, keep_s=1e9, clock=time.monotonic, wall=time.time)
    return RecordedLoop(store, ring, clock=time.monotonic, wall=time.time, post=post)


@contextlib.asynccontextmanager
async def serve_controller(
    folder: Path,
    token: str = "",
    *,
    open_page: bool = False,
    tls: ssl.SSLContext | None = None,
    logs_of: Path | None = None,
    record: Path | None = None,
) -> AsyncIterator[Served]:
    """Serve until the block ends; the journal is ``folder/ops.db``. ``record``: where what comes in is recorded."""
    events = asyncio.get_running_loop()
    store = open_store(f"sqlite:///{folder}/ops.db")
    loop = _loop(store, events.call_soon_threadsafe, record)
    loop.restore(store.jobs(), store.newest_incidents(10))
    listener = socket.create_server(("127.0.0.1", 0))
    try:
        api = Api(loop, store, token, open_page=open_page, logs_of=logs_of)
        async with listening(api, listener, tls):
            ticking = asyncio.create_task(loop.run())
            try:
                scheme = "http" if tls is None else "https"
                yield Served(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}", loop, store, api)
            finally:
                ticking.cancel()
                await asyncio.gather(ticking, return_exceptions=True)
        assert not loop.faults.total, loop.faults.now()
    finally:
        store.close()
