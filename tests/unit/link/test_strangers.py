# SPDX-License-Identifier: Apache-2.0
"""What answers at a controller's address and is none is named, with what to do, by every client and in time."""

import asyncio
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from megascale_agents.uplink.http_link import LightLink

from megascale_ops.errors import ControllerUnreachableError, MegascaleError, RefusedError, StrangerError
from megascale_ops.link import BlockingLink, Link
from megascale_ops.link.answers import Reply, is_strange, speaks_otherwise, stranger
from megascale_ops.link.listeners import first_words
from megascale_ops.schema.messages import Heartbeat, HeartbeatReply
from megascale_ops.schema.version import MARK_HEADER
from tests.fakes.certificates import make_certificate, serving_with

URL = "http://c:7070"


def _http(status: str, body: str = "", *headers: str) -> bytes:
    lines = (f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers)
    return ("\r\n".join(lines) + "\r\n\r\n" + body).encode()


def _after(words: bytes) -> Callable[[socket.socket], None]:
    """Say the words once something was asked."""

    def talk(connection: socket.socket) -> None:
        if connection.recv(65536):
            connection.sendall(words)

    return talk


def _at_once(words: bytes) -> Callable[[socket.socket], None]:
    """Say the words without having been asked, and then no more."""

    def talk(connection: socket.socket) -> None:
        connection.sendall(words)
        connection.recv(65536)

    return talk


@contextmanager
def _listening(talk: Callable[[socket.socket], None], scheme: str = "http") -> Iterator[str]:
    """Yield the address of a port whose connections are handled by ``talk``, each in a thread, and then closed."""
    with closing(socket.create_server(("127.0.0.1", 0))) as door:
        door.settimeout(0.1)
        ended = threading.Event()

        def one(connection: socket.socket) -> None:
            with suppress(OSError), connection:
                connection.settimeout(5)
                talk(connection)
                connection.shutdown(socket.SHUT_WR)

        def take() -> None:
            while not ended.is_set():
                with suppress(TimeoutError):
                    threading.Thread(target=one, args=(door.accept()[0],), daemon=True).start()

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        try:
            yield f"{scheme}://127.0.0.1:{door.getsockname()[1]}"
        finally:
            ended.set()
            thread.join(5)


def _asked_by_thread(url: str) -> MegascaleError:
    link = BlockingLink(url, timeout_s=2.0)
    try:
        with pytest.raises(MegascaleError) as told:
            link.status()
    finally:
        link.close()
    return told.value


def _asked_by_loop(url: str, kind: type[Link] = Link) -> MegascaleError:
    async def ask() -> MegascaleError:
        async with kind(url, timeout_s=2.0) as link:
            with pytest.raises(MegascaleError) as told:
                await link.heartbeat(Heartbeat(node="n", agent_id="a", seq=1, mono_s=0.0, wall_s=0.0))
        return told.value

    return asyncio.run(ask())


_STRANGERS = {
    "page": (_after(_http("200 OK", "<html><title>Grafana</title>", "Server: nginx/1.2")), "a web page, 'Grafana'"),
    "not found": (_after(_http("404 Gone", "<h1>?</h1>", "Server: Apache")), r"web page .*\(HTTP 404, server Apache"),
    "JSON of another kind": (_after(_http("200 OK", '{"status":"success","data":[]}')), "JSON of another kind"),
    "a list": (_after(_http("200 OK", "[1]")), "JSON of another kind"),
    "an error of another kind": (_after(_http("404 No", '{"detail":"Not Found"}')), "JSON of another kind"),
    "nothing": (_after(_http("200 OK")), "it says nothing"),
    "text": (_after(_http("500 Oops", "Oops\nmore")), "it says 'Oops' .*HTTP 500"),
    "redirect": (_after(_http("302 Found", "", "Location: https://login/?a=1")), "sends on to https://login/"),
    "login": (_after(_http("401 Unauthorized", "<html>")), "lets nobody in"),
    "wants TLS": (
        _after(_http("400 Bad", "Client sent an HTTP request to an HTTPS server.")),
        "is it https://127.0.0.1",
    ),
    "TLS": (_after(b"\x15\x03\x01\x00\x02\x02\x46"), "speaks TLS: is it https://127.0.0.1"),
    "SSH": (_at_once(b"SSH-2.0-OpenSSH_9.6\r\n"), "an SSH server listens"),
    "Redis": (_after(b"-ERR unknown command\r\n"), "a Redis server listens"),
    "noise": (_after(bytes(range(128, 160))), "speaks no HTTP"),
}


@pytest.mark.parametrize("who", _STRANGERS)
def test_a_stranger_is_named_with_its_address_and_what_to_do(who: str) -> None:
    """By the client of threads, of a loop and of the agent, and none quotes a parser."""
    talk, sentence = _STRANGERS[who]

    with _listening(talk) as url:
        told = [_asked_by_thread(url), _asked_by_loop(url), _asked_by_loop(url, LightLink)]

    for error in told:
        assert isinstance(error, StrangerError), error
        assert url.partition("://")[2] in str(error)
        assert "malformed" not in str(error)
        assert "truncated" not in str(error)
        assert "\n" not in str(error)
    assert [str(one) for one in told if not re.search(sentence, str(one))] == []


def test_a_port_that_takes_connections_and_closes_them_may_be_a_controller_that_comes() -> None:
    """As one behind a relay that has not started: it is waited for, and no stranger."""
    with _listening(lambda _connection: None) as url:
        told = _asked_by_thread(url)

    assert isinstance(told, ControllerUnreachableError)
    assert not isinstance(told, StrangerError)
    assert "takes the connection and closes it" in str(told)


def _silent(connection: socket.socket) -> None:
    """Hear a request, and wait for the next one, until the client is gone."""
    while connection.recv(65536):
        pass


def test_a_port_that_says_nothing_is_told_from_one_that_is_not_there() -> None:
    """Within the deadline, and without a second one for finding out who it is."""
    with _listening(_silent) as url:
        told = _asked_by_thread(url)

    assert not isinstance(told, StrangerError)
    assert "in 2 s: what listens there takes connections and says nothing" in str(told)


def test_a_proxy_whose_controller_is_away_is_waited_for() -> None:
    """And named, since its address may be the wrong one."""
    with _listening(_after(_http("502 Bad Gateway", "<html>", "Server: nginx"))) as url:
        told = _asked_by_thread(url)

    assert not isinstance(told, StrangerError)
    assert "HTTP 502, of a proxy (nginx) that does not reach it" in str(told)


def test_the_wrong_scheme_is_named_in_both_directions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real TLS server asked in plain closes without a word in HTTP; a plain one asked in TLS speaks no TLS."""
    certificate = make_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    tls = serving_with(certificate)

    def secure(connection: socket.socket) -> None:
        with suppress(ssl.SSLError):
            tls.wrap_socket(connection, server_side=True).recv(100)

    with _listening(secure) as url:
        assert f"speaks TLS: is it https://{url[7:]}?" in str(_asked_by_thread(url))
    with _listening(_after(_http("400 Bad")), "https") as url:
        assert f"speaks no TLS: is it http://{url[8:]}?" in str(_asked_by_thread(url))


def test_an_answer_without_fields_is_a_controllers() -> None:
    """A reply of defaults alone is an empty object; one that only a later version's fields fill carries the mark."""
    known = HeartbeatReply.__struct_fields__

    assert not is_strange(Reply(200, b"{}"), known)
    assert not is_strange(Reply(200, b'{"orders":[]}'), known)
    assert not is_strange(Reply(200, b'{"later":1}', {MARK_HEADER.lower(): "2"}), known)
    assert is_strange(Reply(200, b'{"later":1}'), known)


def test_a_refusal_in_our_words_is_one_and_whoever_signs_it_not_is_named() -> None:
    """Other programs have a field ``error``, too."""
    refusal = '{"error":"no such thing"}'
    with _listening(_after(_http("404 No", refusal))) as url:
        unsigned = _asked_by_thread(url)
    with _listening(_after(_http("404 No", refusal, f"{MARK_HEADER}: 1"))) as url:
        signed = _asked_by_thread(url)

    assert isinstance(unsigned, RefusedError)
    assert isinstance(signed, RefusedError)
    assert str(signed) == "no such thing"
    assert "is a controller there?" in str(unsigned)


def test_nobody_is_heard_where_nobody_listens() -> None:
    """A closed port has no first words; this one is bound and takes no connections."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert first_words(f"http://127.0.0.1:{bound.getsockname()[1]}", 1.0) is None


@pytest.mark.parametrize("text", ["\x1b[2J", "a\nb", "é", "x" * 300])
def test_what_a_stranger_says_does_nothing_to_a_terminal(text: str) -> None:
    """Titles, servers and addresses are foreign text: one line, short, and shown instead of obeyed."""
    said = [
        stranger(URL, "/x", Reply(200, f"<title>{text}</title>".encode(), {"server": text})),
        stranger(URL, "/x", Reply(302, b"", {"location": text})),
        stranger(URL, "/x", Reply(200, text.encode())),
        speaks_otherwise(URL, text.encode()),
    ]

    assert all(one.isprintable() and len(one) < 400 for one in said)
