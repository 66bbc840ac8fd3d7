# SPDX-License-Identifier: Apache-2.0
"""From a bound socket to answers: admission, deadlines, aiohttp, the end of all."""

import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple, Protocol

from aiohttp import web

from megascale_ops.controller.server.admission import Admission, Tls, most_connections, raise_limit
from megascale_ops.controller.server.connections import Connection, Connections, Patience
from megascale_ops.schema.wording import printable

log = logging.getLogger(__name__)

# 4096: all agents of a large cluster come back within the same second after a restart.
BACKLOG = 4096
# Long polls are cut off: clients repeat them to the next controller.
SHUTDOWN_S = 0.2


class Application(Protocol):
    """What is served: a leader's addresses or a standby's."""

    @property
    def application(self) -> Callable[[], web.Application]:
        """Makes the application."""


class Served(NamedTuple):
    """One that needs no more than a function."""

    application: Callable[[], web.Application]


class OneLine(logging.Filter):
    """aiohttp logs only what it could not read of a body, for our handlers raise nothing: one line, no traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Make one line of a record, none of a client that left before its answer (a RuntimeError of uvloop)."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, RuntimeError) and "the handler is closed" in str(error):
            return False
        if error is not None:
            record.msg, record.args = (
                "a request could not be read: %s: %s",
                (type(error).__name__, printable(str(error))),
            )
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.exc_info = record.exc_text = None
        return True


@contextlib.asynccontextmanager
async def listening(
    api: Application,
    listener: socket.socket,
    tls: Tls = None,
    *,
    patience: Patience = Patience(),  # noqa: B008  frozen
    most: int = 0,
) -> AsyncIterator[Admission]:
    """Answer on ``listener`` until the block ends; then no connection is left open.

    ``most`` connections are open at a time; 0: as many as the system's limit leaves room for.
    """
    foreign = logging.getLogger(f"{__name__}.foreign")
    foreign.addFilter(_ONE_LINE)
    runner = web.AppRunner(
        api.application(),
        access_log=None,
        handle_signals=False,
        handler_cancellation=True,
        shutdown_timeout=SHUTDOWN_S,
    )
    await runner.setup()
    server = runner.server
    assert server is not None
    connections = Connections(patience)

    async with contextlib.AsyncExitStack() as to_end:
        to_end.push_async_callback(runner.cleanup)
        to_end.callback(connections.close)
        admission = Admission(
            listener,
            lambda: Connection(server, connections, foreign),
            connections.open,
            most=most or most_connections(raise_limit()),
            tls=tls,
        )
        try:
            yield admission
        finally:
            await admission.close()


_ONE_LINE = OneLine()
