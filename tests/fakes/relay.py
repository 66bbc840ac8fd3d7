# SPDX-License-Identifier: Apache-2.0
"""A relay in user space that can delay, throttle, hold back and cut: a bad network where the kernel offers none.

It listens on a loopback port, or a Unix socket, and hands every connection on to one target. A *cut* closes what is
open and refuses what comes (an unplugged machine whose packets are answered with resets); *holding* keeps connections
open and lets nothing through (packets that are dropped on the way); *delay* and *rate* make a link slow without losing
anything.
"""

import asyncio
import contextlib
import threading
from typing import Self

# 16 KiB: small enough that a throttled link is slow for all, large enough to cost nothing when it is not throttled.
CHUNK_BYTES = 16 * 1024


class Relay:
    """One link, run by a thread of its own. Attributes may be set at any time and hold from then on.

    Args:
        target: port, or path of a Unix socket, to hand on to.
        target_host: of that port.
        listen_at: path of a Unix socket to listen at; "": a loopback port.

    Attributes:
        port: Where it listens; the same for as long as it lives.
        delay_s: What each chunk waits before it is handed on, in each direction.
        bytes_per_s: What each direction of each connection lets through; 0: as much as comes.
        connections: How many were accepted so far.
    """

    def __init__(self, target: int | str, target_host: str = "127.0.0.1", listen_at: str = "") -> None:
        self._target, self._host, self._listen_at = target, target_host, listen_at
        self.delay_s = 0.0
        self.bytes_per_s = 0
        self.connections = 0
        self.port = 0
        self._is_cut = False
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._passing = asyncio.Event()
        self._server: asyncio.AbstractServer | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()
        assert self._ready.wait(60.0), "the relay did not start"

    @property
    def url(self) -> str:
        """The controller's address as seen through the relay."""
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Close every connection and refuse new ones."""
        self._is_cut = True
        asyncio.run_coroutine_threadsafe(self._close_all(), self._loop).result(60.0)

    def hold(self) -> None:
        """Keep connections open, take new ones, and let nothing through."""
        self._loop.call_soon_threadsafe(self._passing.clear)

    def heal(self) -> None:
        """Let everything through again; what was held back arrives late."""
        self._is_cut = False
        self._loop.call_soon_threadsafe(self._passing.set)

    def close(self) -> None:
        """End it."""
        self._is_cut = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(60.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60.0)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        self._ready.set()
        self._loop.run_forever()

    async def _listen(self) -> None:
        self._passing.set()
        if self._listen_at:
            self._server = await asyncio.start_unix_server(self._take, self._listen_at)
            return
        server = self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]

    async def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._close_all()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _close_all(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()  # a reset, as from a machine without this connection
        self._open.clear()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self._is_cut:
            writer.transport.abort()
            return
        try:
            if isinstance(self._target, str):
                far_reader, far_writer = await asyncio.open_unix_connection(self._target)
            else:
                far_reader, far_writer = await asyncio.open_connection(self._host, self._target)
        except OSError:
            writer.transport.abort()  # no listener there: refuse as the target's kernel would
            return
        ends = {writer, far_writer}
        self._open |= ends
        try:
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        finally:
            self._open -= ends
            for end in ends:
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(CHUNK_BYTES):
                pause_s = self.delay_s + (len(chunk) / self.bytes_per_s if self.bytes_per_s else 0.0)
                if pause_s:
                    await asyncio.sleep(pause_s)
                await self._passing.wait()
                writer.write(chunk)
                await writer.drain()
        # One side is done: the other is closed at once, half-closed connections are not kept.
        writer.close()
