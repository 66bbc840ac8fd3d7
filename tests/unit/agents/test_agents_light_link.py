# SPDX-License-Identifier: Apache-2.0
"""The agent's link over ``http.client``, against a real server that answers well, badly, late or not at all."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from megascale_agents.uplink.http_link import LightLink

from megascale_ops.errors import ControllerUnreachableError, MegascaleError, RefusedError, UsageError
from tests.fakes.certificates import make_certificate, serving_with

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(talk: Talk, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Serve on a free port of this host; every conversation is over at the end."""
    ended: list[asyncio.Task[None]] = []

    async def tracked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        ended.append(task)
        try:
            await talk(reader, writer)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async with await asyncio.start_server(tracked, "127.0.0.1", 0, ssl=tls) as server:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.wait_for(asyncio.gather(*ended, return_exceptions=True), 10.0)


def answers(status: bytes, body: bytes, *, seen: list[bytes] | None = None, keep: bool = True) -> Talk:
    """Return what answers each request with the same."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                if seen is not None:
                    seen.append(request)
                end = b"" if keep else b"Connection: close\r\n"
                writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n%s\r\n%s" % (status, len(body), end, body))
                await writer.drain()
                if not keep:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass

    return talk


@pytest.mark.parametrize("keep", [True, False])
async def test_requests_carry_the_token_and_use_a_connection_again(*, keep: bool) -> None:
    """Two requests, whether the controller keeps the connection or not."""
    seen: list[bytes] = []
    async with serving(answers(b"404 Not Found", b'{"error":"no such job"}', seen=seen, keep=keep)) as url:
        link = LightLink(f"{url}/below", "s3cret")
        for _ in range(2):
            with pytest.raises(RefusedError, match="no such job"):
                await link.status("gpt")
        await link.close()

    assert len(seen) == 2
    assert all(b"Authorization: Bearer s3cret" in request for request in seen)
    assert seen[0].startswith(b"GET /below/v1/status")


@pytest.mark.parametrize(
    "said", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 5000000\r\n\r\n" + b"x" * 5_000_000, b""]
)
async def test_what_is_no_answer_is_no_controller(said: bytes) -> None:
    """Another protocol, an answer without end, or none: one error, and no hang."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)

    async with serving(talk) as url:
        link = LightLink(url)
        with pytest.raises(ControllerUnreachableError):
            await link.status("gpt")
        await link.close()


async def test_a_controller_that_is_silent_is_not_waited_for() -> None:
    """The deadline ends the request and the thread that waits."""
    asked = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()  # until the agent goes

    async with serving(talk) as url:
        link = LightLink(url, timeout_s=0.05)
        with pytest.raises(ControllerUnreachableError, match=r"0\.05 s"):
            await link.status("gpt")
        await link.close()

    assert asked.is_set()


async def test_nobody_there_is_said_so() -> None:
    """A port without a listener."""
    async with serving(answers(b"200 OK", b"{}")) as url:
        pass

    with pytest.raises(ControllerUnreachableError, match="no controller answers"):
        await LightLink(url).status("gpt")


async def test_tls_trusts_only_whom_the_system_trusts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate that cannot be verified is no controller; one that can carries requests as plain HTTP does."""
    certificate = make_certificate(tmp_path)
    seen: list[bytes] = []
    answer = answers(b"404 Not Found", b'{"error":"no such job"}', seen=seen)
    async with serving(answer, serving_with(certificate)) as url:
        stranger = LightLink(url)
        with pytest.raises(ControllerUnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
            await stranger.status("gpt")
        await stranger.close()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        link = LightLink(url, "s3cret")
        for _ in range(2):
            with pytest.raises(RefusedError, match="no such job"):
                await link.status("gpt")
        await link.close()

    assert url.startswith("https:")
    assert len(seen) == 2
    assert all(b"Authorization: Bearer s3cret" in request for request in seen)


async def test_a_name_and_a_password_in_the_address_are_said() -> None:
    """To a proxy before the controller; a token goes before them."""
    seen: list[bytes] = []
    async with serving(answers(b"404 Not Found", b'{"error":"no such job"}', seen=seen)) as url:
        for token in (None, "s3cret"):
            link = LightLink(url.replace("//", "//me:p%40ss@"), token)
            with pytest.raises(RefusedError):
                await link.status("gpt")
            await link.close()

    assert b"Authorization: Basic bWU6cEBzcw==" in seen[0]
    assert b"Authorization: Bearer s3cret" in seen[1]


def test_an_address_without_a_scheme_is_refused() -> None:
    """Before anything is sent."""
    with pytest.raises(UsageError):
        LightLink("c:7070")
    assert issubclass(UsageError, MegascaleError)
