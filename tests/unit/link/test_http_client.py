# SPDX-License-Identifier: Apache-2.0
"""The client of threads against real servers that answer well, badly, slowly, elsewhere or not at all."""

import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from megascale_ops.errors import MegascaleError
from megascale_ops.grafana.asking import Prometheus
from megascale_ops.link.http_client import HttpClient
from tests.fakes.certificates import make_certificate, serving_with

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
TOKEN = {"Authorization": "Bearer s3cret"}
Answer = Callable[[socket.socket, bytes], None]


class Server:
    """Answers each request as it is told to, in a thread for each connection."""

    def __init__(self, answer: Answer, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> None:
        self._answer = answer
        self._tls = tls
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port = int(self._listener.getsockname()[1])
        self.requests: list[bytes] = []
        self.connections = 0
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._take)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self.port}"

    def _take(self) -> None:
        with suppress(OSError):
            while True:
                connection, _address = self._listener.accept()
                self._open.append(connection)
                self._threads.append(threading.Thread(target=self._talk, args=(connection,)))
                self._threads[-1].start()

    def _talk(self, raw: socket.socket) -> None:
        with (
            suppress(OSError),
            raw if self._tls is None else self._tls.wrap_socket(raw, server_side=True) as connection,
        ):
            self.connections += 1
            while request := _one_request(connection):
                self.requests.append(request)
                self._answer(connection, request)

    def close(self) -> None:
        """End all conversations."""
        for one in (self._listener, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(30)


def _one_request(connection: socket.socket) -> bytes:
    """Return a request, its body too, in whatever pieces it comes; b"" when the other side has gone."""
    came = b""
    while piece := connection.recv(65536):
        came += piece
        head, end, body = came.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        if end and len(body) >= (int(length[1]) if length else 0):
            return came
    return b""


@contextmanager
def serving(answer: Answer, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> Iterator[Server]:
    """Serve until the block ends."""
    server = Server(answer, tls, host)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def asking(url: str, headers: dict[str, str] | None = None, most_bytes: int = 1000) -> Iterator[HttpClient]:
    """Yield a client, which is closed at the end."""
    client = HttpClient(url, headers or {}, most_bytes=most_bytes)
    try:
        yield client
    finally:
        client.close()


def says(*pieces: bytes) -> Answer:
    """Return what answers each request with the same."""

    def answer(connection: socket.socket, _request: bytes) -> None:
        for piece in pieces:
            connection.sendall(piece)

    return answer


def trickles(start: bytes) -> Answer:
    """Return what goes on for ever, a byte at a time and never silent for long, until the other side goes."""

    def answer(connection: socket.socket, _request: bytes) -> None:
        connection.sendall(start)
        while True:
            connection.sendall(b"x")
            threading.Event().wait(0.01)

    return answer


def test_requests_say_what_they_are_given_and_use_a_connection_again() -> None:
    """Method, path below the address, query, body and headers; one connection for three requests."""
    with serving(says(OK)) as server, asking(f"{server.url}/below", TOKEN) as client:
        replies = [
            client.ask("POST", "/v1/x", query={"a": "b c&d"}, body=b"[1]", patience_s=30.0),
            client.ask("GET", "/v1/y", patience_s=30.0),
            client.ask("DELETE", "/v1/z%2Fz", patience_s=30.0),
        ]

    assert [reply[:2] for reply in replies] == [(200, b"{}")] * 3
    assert server.connections == 1
    firsts = [one.split(b"\r\n", 1)[0] for one in server.requests]
    assert firsts[0] == b"POST /below/v1/x?a=b+c%26d HTTP/1.1"
    assert firsts[1:] == [b"GET /below/v1/y HTTP/1.1", b"DELETE /below/v1/z%2Fz HTTP/1.1"]
    assert server.requests[0].endswith(b"\r\n\r\n[1]")
    assert all(b"authorization: bearer s3cret" in one.lower() for one in server.requests)


@pytest.mark.parametrize(
    "start",
    [
        b"",  # not even a status
        b"HTTP/1.1 200 OK\r\nX-Long: ",  # a head without end
        b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",  # until it closes
    ],
)
def test_the_deadline_is_for_the_whole_answer(start: bytes) -> None:
    """A server that sends a byte now and then is not waited for, and no thread keeps waiting."""
    with serving(trickles(start)) as server, asking(server.url) as client:
        with pytest.raises(TimeoutError):
            client.ask("GET", "/", patience_s=0.2)
        for thread in threading.enumerate():
            if thread.name == "megascale-http":
                thread.join(30)
                assert not thread.is_alive()


def test_a_name_that_is_looked_up_for_ever_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline holds before there is a socket, too."""
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_options: over.wait(30) and [])
    with asking("http://controller.example") as client, ExitStack() as stack:
        stack.callback(over.set)
        with pytest.raises(TimeoutError):
            client.ask("GET", "/", patience_s=0.1)


def test_a_closed_client_ends_its_requests_and_can_ask_again() -> None:
    """Who waits is told at once."""
    asked = threading.Event()

    def answer(connection: socket.socket, request: bytes) -> None:
        asked.set()
        if b"/again" in request:
            connection.sendall(OK)

    with serving(answer) as server, asking(server.url) as client, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.ask, "GET", "/", patience_s=60.0)
        assert asked.wait(30)
        client.close()
        with pytest.raises(ConnectionAbortedError, match="closed while waiting"):
            waiting.result(30)

        assert client.ask("GET", "/again", patience_s=30.0).status == 200


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", ConnectionError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", ConnectionError),  # ends early
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n" + b"x" * 5000, ConnectionError),  # too long
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000, ConnectionError),
        (b"", ConnectionResetError),  # as where it was closed in the meantime: asking again is worth it
    ],
)
def test_what_is_no_answer_is_an_error_of_the_connection(said: bytes, kind: type[OSError]) -> None:
    """Another protocol, an answer that ends early, one without end, or none; the next request is not harmed."""
    once = iter([said])

    def answer(connection: socket.socket, _request: bytes) -> None:
        connection.sendall(next(once, OK))
        if not said or said.startswith((b"SSH", b"HTTP/1.1 200 OK\r\nContent-Length: 9")):
            connection.shutdown(socket.SHUT_RDWR)

    with serving(answer) as server, asking(server.url) as client:
        with pytest.raises(kind):
            client.ask("GET", "/", patience_s=30.0)
        once = iter([OK])

        assert client.ask("GET", "/", patience_s=30.0)[:2] == (200, b"{}")


def test_nobody_there_is_a_refused_connection() -> None:
    """In the system's own words."""
    with serving(says(OK)) as server:
        pass

    with asking(server.url) as client, pytest.raises(ConnectionRefusedError):
        client.ask("GET", "/", patience_s=30.0)


def test_a_token_goes_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A redirect is an answer, and a proxy of the environment is not asked."""
    with serving(says(OK)) as elsewhere:
        redirect = b"HTTP/1.1 307 Go\r\nLocation: %b/there\r\nContent-Length: 0\r\n\r\n" % elsewhere.url.encode()
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, elsewhere.url)
        with serving(says(redirect)) as server, asking(server.url, TOKEN) as client:
            reply = client.ask("POST", "/", body=b"{}", patience_s=30.0)
            with closing(Prometheus(server.url, "s3cret")) as prometheus, pytest.raises(MegascaleError, match="307"):
                prometheus.series("up")

    assert reply.status == 307
    assert elsewhere.requests == []


def test_many_threads_ask_at_once() -> None:
    """Each gets its own answer."""

    def answer(connection: socket.socket, request: bytes) -> None:
        said = request.split(b" ")[1]
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(said), said))

    with serving(answer) as server, asking(server.url) as client, ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda number: client.ask("GET", f"/{number}", patience_s=60.0), range(200)))

    assert [reply.body for reply in replies] == [b"/%d" % number for number in range(200)]
    assert server.connections <= 16


def test_name_and_password_of_an_address_are_said_unless_there_is_a_token() -> None:
    """To a proxy before the controller."""
    with serving(says(OK)) as server:
        url = server.url.replace("//", "//me:p%40ss@")
        for headers in ({}, TOKEN):
            with asking(url, headers) as client:
                client.ask("GET", "/", patience_s=30.0)

    assert b"basic bwu6cebzcw==" in server.requests[0].lower()
    assert b"bearer s3cret" in server.requests[1].lower()


def test_an_address_of_ipv6_is_asked() -> None:
    """The header Host has its brackets."""
    with serving(says(OK), host="::1") as server, asking(f"http://[::1]:{server.port}") as client:
        assert client.ask("GET", "/", patience_s=30.0).status == 200

    assert b"host: [::1]:%d" % server.port in server.requests[0].lower()


def test_tls_trusts_whom_it_was_told_to_trust(tmp_path: Path) -> None:
    """A certificate that cannot be verified is no server; one that can carries requests as plain HTTP does."""
    certificate = make_certificate(tmp_path)
    with serving(says(OK), serving_with(certificate)) as server:
        with asking(server.url) as stranger, pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            stranger.ask("GET", "/", patience_s=30.0)
        client = HttpClient(server.url, TOKEN, tls=ssl.create_default_context(cafile=certificate))
        replies = [client.ask("GET", "/", patience_s=30.0) for _ in range(2)]
        client.close()

    assert [reply[:2] for reply in replies] == [(200, b"{}")] * 2
    assert all(b"bearer s3cret" in one.lower() for one in server.requests)
