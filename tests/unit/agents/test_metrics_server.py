# SPDX-License-Identifier: Apache-2.0
"""``/metrics`` over real HTTP: what it answers, whom it refuses, how many at once, and that it ends."""

import asyncio
import contextlib
import select
import socket
import threading
from collections.abc import AsyncIterator
from unittest.mock import patch

import aiohttp
import pytest
from megascale_agents.config import Address
from megascale_agents.counters import Tally
from megascale_agents.metrics import arrivals
from megascale_agents.metrics import server as metrics_server
from megascale_agents.metrics.arrivals import MOST_ARRIVING
from megascale_agents.metrics.page import AgentCollector
from megascale_agents.metrics.server import MOST_AT_ONCE, MetricsServer
from megascale_agents.startup import deferred_imports
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.parser import text_string_to_metric_families

from megascale_ops.errors import UsageError
from megascale_ops.schema.health import HostReading
from tests.fakes.scraped import OPEN_METRICS, open_samples, samples

ANYWHERE = Address("127.0.0.1", 0)


class Served:
    """A page of a node without ranks, served on a free port."""

    def __init__(self, token: str | None = None) -> None:
        tally = Tally("node-a")
        self.collector = AgentCollector("node-a", list, lambda: HostReading(cpu_busy=0.25, cores=8), tally)
        self.listening, self.url = deferred_imports.listen(ANYWHERE)
        self.root = self.url.removesuffix("/metrics")
        self.address: tuple[str, int] = self.listening.getsockname()
        self.server = MetricsServer(self.collector, self.listening, token)

    def connect(self) -> socket.socket:
        """Connect and say nothing."""
        return socket.create_connection(self.address, 10.0)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """A server, and every thread of it ended."""
    before = set(threading.enumerate())
    made = Served()
    yield made
    await made.server.close()
    for thread in set(threading.enumerate()) - before:
        if "asyncio" not in thread.name:  # those of to_thread are not the server's
            await asyncio.to_thread(thread.join, 10.0)
            assert not thread.is_alive()


def said(connection: socket.socket) -> bytes:
    """Read until the other side ends."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


async def until_open(served: Served, number: int) -> None:
    """Wait until so many connections are being served."""
    async with asyncio.timeout(30.0):
        while len(served.server._open) < number:  # noqa: ASYNC110  it has no events
            await asyncio.sleep(0)


async def test_the_page_is_what_prometheus_reads() -> None:
    """Parsed by the client's own parser; beyond loopback only with the token."""
    served = Served("s3crét")
    try:
        async with aiohttp.ClientSession() as session:
            for wrong in ({}, {"Authorization": "Bearer s3cret"}):
                async with session.get(served.url, headers=wrong) as refused:
                    assert refused.status == 401
                    assert await refused.json() == {"error": "a token is needed: Authorization: Bearer TOKEN"}
            async with session.get(served.url, headers={"Authorization": "Bearer s3crét"}) as page:
                families = list(text_string_to_metric_families(await page.text()))
                assert (page.status, page.headers["Content-Type"]) == (200, CONTENT_TYPE_PLAIN_0_0_4)
            async with session.get(f"{served.root}/healthz") as health:  # for probes, which have no token
                assert (health.status, await health.json()) == (200, {"status": "ok"})
    finally:
        await served.server.close()

    names = {family.name for family in families}
    assert "megascale_host_cpu_busy_ratio" in names
    assert "process_resident_memory_bytes" in names


async def test_a_part_of_the_page_can_be_asked_for(served: Served) -> None:
    """What belongs to jobs, or what belongs to the node; together they are the whole. Anything else is refused."""
    found: dict[str, set[str]] = {}
    async with aiohttp.ClientSession() as session:
        for part in ("", "job", "node"):
            async with session.get(served.url, params={"part": part}) as page:
                found[part] = {sample.name for sample in samples(await page.read())}
        async with session.get(served.url, params={"part": "gpus"}) as refused:
            said = await refused.json()

    assert found["job"] | found["node"] == found[""]
    assert not found["job"] & found["node"]
    assert {"megascale_host_load_1m", "process_open_fds"} <= found["node"]
    assert (refused.status, said) == (400, {"error": "part 'gpus' can't be: job or node, or none"})


async def test_open_metrics_are_for_who_accepts_them(served: Served) -> None:
    """Read by the library's parser of OpenMetrics; the series are those of the text format."""
    pages = []
    async with aiohttp.ClientSession() as session:
        for accept in (OPEN_METRICS, "*/*"):
            async with session.get(served.url, headers={"Accept": accept}) as answer:
                pages.append((answer.headers["Content-Type"], await answer.read()))
    (kind, page), (_, classic) = pages

    assert kind.startswith("application/openmetrics-text; version=1.0.0;")
    assert page.endswith(b"\n# EOF\n")
    told = {(one.name, *one.labels.values()) for one in open_samples(page)}
    assert told == {(one.name, *one.labels.values()) for one in samples(classic)}
    assert ("megascale_host_cpu_busy_ratio", "node-a") in told


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("HEAD", "/metrics", 200),
        ("GET", "/", 404),
        ("POST", "/nothing", 404),
        ("POST", "/metrics", 405),
        ("DELETE", "/healthz", 405),
    ],
)
async def test_what_is_not_there_or_not_to_be_changed_is_refused(
    served: Served, method: str, path: str, status: int
) -> None:
    """In a line of plain text, as every server does."""
    async with aiohttp.ClientSession() as session, session.request(method, served.root + path) as answer:
        text = await answer.text()

    assert answer.status == status
    assert answer.headers["Connection"] == "close"
    assert status == 200 or text.startswith(f"{status}: ")
    assert answer.headers.get("Allow") == ("GET,HEAD" if status == 405 else None)
    assert (status == 200) == (int(answer.headers["Content-Length"]) > 1000)


@pytest.mark.parametrize(
    "what", [b"SSH-2.0-OpenSSH_9.2\r\n", b"GET " + b"x" * 70_000 + b" HTTP/1.1\r\n", b"\0\0\r\n\r\n", b""]
)
async def test_what_is_no_request_costs_nobody_else_anything(served: Served, what: bytes) -> None:
    """Another protocol, a line without end, or a client that has gone: it is refused, and the next one is answered."""
    with served.connect() as other:
        other.sendall(what)
        other.shutdown(socket.SHUT_WR)
        answer = await asyncio.to_thread(said, other)
    async with aiohttp.ClientSession() as session, session.get(served.url) as page:
        assert page.status == 200

    assert b"Traceback" not in answer
    assert not what or answer.split()[1][:1] == b"4", answer


async def test_a_page_that_cannot_be_built_is_an_error_and_no_end(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The scraper gets an error status, the log says why, and the next scrape is answered."""

    def broken(_part: str) -> None:
        raise KeyError("no such metric")

    async with aiohttp.ClientSession() as session:
        with monkeypatch.context() as patched:
            patched.setattr(served.collector, "page", broken)
            async with session.get(served.url) as failed:
                assert failed.status == 500
        async with session.get(served.url) as page:
            assert page.status == 200

    assert "no such metric" in caplog.text


@pytest.mark.parametrize("what", [b"", b"GET /metrics HTTP/1.1\r\nX: "], ids=["nothing", "half a head"])
@pytest.mark.parametrize("number", [40, 2 * MOST_ARRIVING])
async def test_who_says_nothing_or_half_of_it_holds_nobody_up(served: Served, what: bytes, number: int) -> None:
    """Five times as many as there are threads, and more than may wait: probes and scrapers are answered at once."""
    with contextlib.ExitStack() as ends:
        # By each call the server begins a thread. To count the process's would count those that other tests have left.
        begun = ends.enter_context(patch.object(served.server, "process_request", wraps=served.server.process_request))
        for one in [ends.enter_context(await asyncio.to_thread(served.connect)) for _ in range(number)]:
            with contextlib.suppress(ConnectionError):  # it had to give way already
                one.sendall(what)
        async with aiohttp.ClientSession() as session:
            for path in ("/healthz", "/metrics"):
                async with asyncio.timeout(arrivals.ARRIVE_S), session.get(served.root + path) as page:
                    assert page.status == 200

        assert begun.call_count == 2  # no thread for those that send nothing
        assert len(served.server._arrivals) <= MOST_ARRIVING


async def test_half_a_head_has_a_deadline(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection ends, however its bytes trickle."""
    monkeypatch.setattr(arrivals, "ARRIVE_S", 0.2)
    with served.connect() as slow:
        slow.sendall(b"GET /healthz HTTP/1.1\r\n")

        with contextlib.suppress(ConnectionError):  # what it has sent was not read
            assert await asyncio.to_thread(slow.recv, 1) == b""


async def test_a_head_in_pieces_is_answered(served: Served) -> None:
    """The control: a slow but honest one."""
    with served.connect() as slow:
        for piece in (b"GET /hea", b"lthz HTTP/1.1\r\nHo", b"st: a\r\n\r\n"):
            slow.sendall(piece)
            await asyncio.to_thread(select.select, [slow], [], [], 0.1)
        answer = await asyncio.to_thread(said, slow)

    assert answer.startswith(b"HTTP/1.1 200 ")


async def test_a_probe_waits_for_no_scraper(served: Served) -> None:
    """All threads are busy, and scrapers wait their turn; the probe has a thread of its own."""
    busy = [asyncio.get_running_loop().call_later(60.0, lambda: None) for _ in range(MOST_AT_ONCE)]
    held = [socket.socketpair() for _ in busy]
    served.server._open.update({pair[0]: timer for pair, timer in zip(held, busy, strict=True)})
    async with aiohttp.ClientSession() as session:
        scrape = asyncio.create_task(session.get(served.url))
        async with asyncio.timeout(30.0), session.get(f"{served.root}/healthz") as health:
            assert health.status == 200
        is_early = scrape.done()
        served.server._forget(held[0][0])
        async with asyncio.timeout(30.0), await scrape as page:
            assert page.status == 200

    for pair in held:
        served.server._forget(pair[0])
        for one in pair:
            one.close()
    assert not is_early


async def test_a_loop_without_time_is_said_to_who_asks(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe must see that the daemon stands still, though the thread that answers does not."""
    monkeypatch.setattr(metrics_server, "_SILENCE_S", 0.05)
    request = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"

    with served.connect() as one:
        one.sendall(request)
        await until_open(served, 1)
        answer = said(one)  # the loop stands still until it is answered

    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"the agent is busy" in answer


async def test_the_end_waits_for_nobody(served: Served) -> None:
    """Clients connected when the agent ends are cut off, and no more are accepted."""
    with served.connect() as silent:
        async with asyncio.timeout(30.0):
            while not len(served.server._arrivals):  # noqa: ASYNC110  it has no events
                await asyncio.sleep(0)

        await served.server.close()

        assert silent.recv(1) == b""
    with pytest.raises(ConnectionError):
        served.connect()


def test_a_taken_port_is_one_sentence_or_no_matter() -> None:
    """A port that was asked for must be free; the default may be another one."""
    first, url = deferred_imports.listen(ANYWHERE)
    port = int(url.rsplit(":", 1)[1].split("/")[0])
    with first:
        with pytest.raises(UsageError, match=f"127.0.0.1:{port} can't be used"):
            deferred_imports.listen(Address("127.0.0.1", port))
        other, other_url = deferred_imports.listen(Address("127.0.0.1", port, any_port=True))
        other.close()

    assert other_url != url


async def test_who_asks_before_it_is_served_only_waits() -> None:
    """The port is taken when the agent starts, the page comes with the modules that it needs."""
    listening, url = deferred_imports.listen(ANYWHERE)
    async with aiohttp.ClientSession() as session:
        asked = asyncio.create_task(session.get(url))
        await asyncio.to_thread(select.select, [listening], [], [], 5.0)  # until it has sent its request
        server = MetricsServer(AgentCollector("node-a", list, lambda: None, Tally("node-a")), listening, None)
        try:
            async with await asked as page:
                assert page.status == 200
        finally:
            await server.close()
