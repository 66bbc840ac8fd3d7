# SPDX-License-Identifier: Apache-2.0
"""The agent's link to its controller: the same requests over ``HttpClient``, which loads in a few milliseconds.

An agent says one thing a second to one host. For that aiohttp costs 0.2 to 0.4 s of its start (it loads certificates
when it is imported) and 13 MB for as long as it lives. ``https://`` trusts whom the system trusts, or SSL_CERT_FILE.
"""

import asyncio

from megascale_ops.link import Link
from megascale_ops.link.answers import TAKEN, Reply
from megascale_ops.link.http_client import HttpClient

# 4 MB: what comes back are orders, a few KB of them.
_MOST_BYTES = 4_000_000


class LightLink(Link):
    """A link without aiohttp; arguments and errors are those of ``Link``."""

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 5.0) -> None:
        super().__init__(url, token, timeout_s)
        self._clients = {url: HttpClient(url, {}, tls=self._tls, most_bytes=_MOST_BYTES) for url in self.urls}

    async def close(self) -> None:
        """Close the connections, those in use too; a later request opens new ones."""
        for client in self._clients.values():
            client.close()
        await super().close()

    async def _send(
        self, method: str, path: str, query: dict[str, str] | None, data: bytes | None, wait_s: float
    ) -> Reply:
        patience_s = self._timeout_s + wait_s
        exchange = self._clients[self.url].begin(
            method, path, query=query, body=data, headers=self._headers, patience_s=patience_s
        )
        try:
            async with asyncio.timeout(patience_s):
                return await asyncio.wrap_future(exchange.reply)
        except TimeoutError as error:
            raise TimeoutError(TAKEN if exchange.is_connected else str(error)) from error
        finally:  # also after the deadline, or when the caller was cancelled: its thread ends
            exchange.cut(TimeoutError())
