# SPDX-License-Identifier: Apache-2.0
"""The official client against servers that stall, drip, refuse or are none: one sentence, by the deadline."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megascale_ops.engines.actuator import EngineError, RightsError
from megascale_ops.engines.kubernetes.client import ClusterApi, ConflictError
from megascale_ops.engines.kubernetes.nodes import KubernetesNodes
from tests.processes.launch import free_port

pytestmark = pytest.mark.processes

Answer = Callable[[socket.socket, bytes], None]


class Served:
    """A port of the loopback where each connection is answered by a function."""

    def __init__(self, answer: Answer) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.asked: list[bytes] = []
        self.over = threading.Event()
        self._answer = answer
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End; a connection that is being answered ends too."""
        self.over.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(timeout=30)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                asked = connection.recv(65536)
                self.asked.append(asked)
                try:
                    self._answer(connection, asked)
                except OSError:
                    continue


@pytest.fixture
def served() -> Iterator[Callable[[Answer], Served]]:
    """Servers that are closed at the end."""
    all_of_them: list[Served] = []

    def start(answer: Answer) -> Served:
        all_of_them.append(Served(answer))
        return all_of_them[-1]

    yield start
    for one in all_of_them:
        one.close()


def api(url: str, deadline_s: float = 30.0) -> ClusterApi:
    """Return the calls to an address."""
    from kubernetes import client

    settings = client.Configuration(host=url)
    settings.retries = False
    return ClusterApi(client.ApiClient(settings), deadline_s)


def whole(status: int, body: bytes) -> Answer:
    """Return what answers with a status and a body, once a connection."""

    def answer(connection: socket.socket, _: bytes) -> None:
        head = (
            f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
        )
        connection.sendall(head.encode() + b"\r\n\r\n" + body)

    return answer


def test_nodes_come_page_by_page(served: Callable[[Answer], Served]) -> None:
    """All of them, each page by the word that the one before gave."""
    names = iter(["a", "b"])

    def answer(connection: socket.socket, asked: bytes) -> None:
        more = "" if b"continue=next" in asked else "next"
        page = {"metadata": {"continue": more}, "items": [{"metadata": {"name": next(names)}}]}
        whole(200, json.dumps(page).encode())(connection, asked)

    server = served(answer)

    assert [*KubernetesNodes(api(server.url)).states()] == ["a", "b"]
    assert b"limit=500" in server.asked[0]


@pytest.mark.parametrize("first", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n{"])
def test_a_server_that_stalls_is_left_at_the_deadline(served: Callable[[Answer], Served], first: bytes) -> None:
    """Before its head or within its body; and one that sends a byte now and then, too, which no single wait ends."""

    def answer(connection: socket.socket, _: bytes) -> None:
        connection.sendall(first)
        while first and not server.over.wait(0.05):
            connection.sendall(b" ")
        server.over.wait(90)

    server = served(answer)
    begun_s = time.monotonic()

    with pytest.raises(EngineError, match=r"the API server gave no answer within 0.5 s \(.+\); `kubectl"):
        api(server.url, 0.5).get("a")

    assert time.monotonic() - begun_s < 60  # it is not the server that has ended it


def test_a_server_that_is_away_is_told_of() -> None:
    """At once: one try, no retries."""
    with pytest.raises(EngineError, match=r"no answer within 30 s \(.*Connection refused\)"):
        api(f"http://127.0.0.1:{free_port()}").list()


def test_refusals_are_told_apart(served: Callable[[Answer], Served]) -> None:
    """Want of a right, a token that is not known, a node that has changed, and all else."""
    forbidden = b'{"message": "nodes is forbidden: User \\"bob\\" cannot list resource \\"nodes\\""}'

    with pytest.raises(RightsError, match=r"does not let bob list nodes: .* verbs: \[list\]"):
        api(served(whole(403, forbidden)).url).list()
    with pytest.raises(RightsError, match="does not know this token"):
        api(served(whole(401, b"{}")).url).list()
    changed = served(whole(409, b"{}"))
    with pytest.raises(ConflictError):
        api(changed.url).patch("a", {})
    assert b"application/strategic-merge-patch+json" in changed.asked[0]
    with pytest.raises(EngineError, match="the cluster has no node a"):
        api(served(whole(404, b"{}")).url).get("a")
    with pytest.raises(EngineError, match=r"refused to get nodes \(503\): busy"):
        api(served(whole(503, b"busy")).url).get("a")


@pytest.mark.parametrize("body", [b"<html>", b"[]"])
def test_what_is_no_api_server_is_said_to_be_none(served: Callable[[Answer], Served], body: bytes) -> None:
    """A proxy's page for its users, with status 200."""
    with pytest.raises(EngineError, match="what answers at the API server's address is none"):
        api(served(whole(200, body)).url).get("a")


def test_without_account_and_kubeconfig_there_is_no_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both are named; a pod without its account's token is one such."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    begun_s = time.monotonic()

    with pytest.raises(EngineError, match=r"neither a pod's service account .* nor a kubeconfig"):
        ClusterApi().list()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    with pytest.raises(EngineError, match="no way to the API server"):
        ClusterApi().list()

    assert time.monotonic() - begun_s < 60  # the deadline of neither call was waited for
