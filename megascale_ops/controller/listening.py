# SPDX-License-Identifier: Apache-2.0
"""From a bound socket to answers: heartbeats by the short way, everything else by aiohttp, and the end of both."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator

from aiohttp import web

from megascale_ops.controller.api import Api
from megascale_ops.controller.beat_protocol import BeatProtocol
from megascale_ops.schema.messages import MAX_BODY_BYTES

# 4096: all agents of a large cluster come back within the same second after a restart.
BACKLOG = 4096
# Long polls are cut off: whoever waits asks the next controller.
SHUTDOWN_S = 0.2
# 75 s: aiohttp's, for connections on which nobody speaks; the slowest agents speak every 8 s.
IDLE_S = 75.0


@contextlib.asynccontextmanager
async def listening(api: Api, listener: socket.socket, tls: ssl.SSLContext | None = None) -> AsyncIterator[None]:
    """Answer on ``listener`` until the block ends; then no connection is left open."""
    runner = web.AppRunner(
        api.application(), access_log=None, handle_signals=False, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S
    )
    await runner.setup()
    others = runner.server
    assert others is not None
    ours: set[BeatProtocol] = set()

    def connection() -> BeatProtocol:
        return BeatProtocol(api.beat, others, most_bytes=MAX_BODY_BYTES, idle_s=IDLE_S, open_=ours)

    async with contextlib.AsyncExitStack() as to_end:
        to_end.push_async_callback(runner.cleanup)
        server = await asyncio.get_running_loop().create_server(connection, sock=listener, ssl=tls, backlog=BACKLOG)
        try:
            yield
        finally:
            server.close()
            for one in list(ours):
                one.close()
