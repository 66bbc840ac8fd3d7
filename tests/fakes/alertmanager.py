# SPDX-License-Identifier: Apache-2.0
"""A real Alertmanager, started by a test on a free loopback port, and a webhook that keeps what it is sent.

    with Webhook() as webhook, RealAlertmanager(tmp_path, configuration) as manager:
        manager.post({"alertname": "JobNoProgress", "job": "gpt"})
        webhook.wait_for("/pager", "JobNoProgress")

The server chooses its port itself and says it in its log. A test is skipped where there is no Alertmanager (Debian's
package ``prometheus-alertmanager``).
"""

import json
import threading
import urllib.request
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.fakes.servers import RealServer, opener, until


class Webhook:
    """Takes what Alertmanager sends, by the path it is sent to."""

    def __init__(self) -> None:
        self._sent: list[tuple[str, dict[str, Any]]] = []
        sent = self._sent

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                sent.extend((self.path, alert) for alert in body["alerts"])
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        """Begin to listen."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self._server.shutdown()
        self._thread.join(5.0)
        self._server.server_close()

    def sent(self, path: str, status: str = "firing") -> list[dict[str, str]]:
        """Return the labels of every alert that was sent to a path, in the order in which they came."""
        return [alert["labels"] for at, alert in list(self._sent) if at == path and alert["status"] == status]

    def annotations(self, alertname: str) -> dict[str, str]:
        """Return the annotations of the newest alert of a name."""
        found: list[dict[str, str]] = [
            alert["annotations"] for _, alert in list(self._sent) if alert["labels"]["alertname"] == alertname
        ]
        return found[-1]

    def wait_for(self, path: str, alertname: str, status: str = "firing", **labels: str) -> None:
        """Wait until an alert with these labels was sent to a path."""
        wanted = {"alertname": alertname, **labels}.items()
        until(
            lambda: any(wanted <= one.items() for one in self.sent(path, status)),
            f"{dict(wanted)} is {status} at {path}",
            why=lambda: f"sent: {self._sent}",
        )


class RealAlertmanager(RealServer):
    """A running Alertmanager.

    Args:
        folder: for its configuration, data and log; it makes one of its own in there.
        configuration: text of ``alertmanager.yml``.
    """

    def __init__(self, folder: Path, configuration: str) -> None:
        super().__init__(folder, "alertmanager", ("prometheus-alertmanager", "alertmanager"), configuration)

    def arguments(self) -> list[str]:
        """Return where its data lie, and that it is alone."""
        return [f"--storage.path={self.folder / 'data'}", "--cluster.listen-address="]

    def post(self, *alerts: Mapping[str, str], ends: str = "") -> None:
        """Tell of alerts by their labels, as Prometheus does; ``ends``: a time in RFC 3339 at which they are over."""
        body = json.dumps([{"labels": dict(labels), **({"endsAt": ends} if ends else {})} for labels in alerts])
        self._ask("/api/v2/alerts", body.encode())

    def states(self) -> dict[frozenset[tuple[str, str]], str]:
        """Return the state of every alert by its labels: active or suppressed."""
        return {frozenset(one["labels"].items()): one["status"]["state"] for one in self._ask("/api/v2/alerts")}

    def _ask(self, path: str, body: bytes | None = None) -> Any:  # noqa: ANN401  JSON
        request = urllib.request.Request(
            f"http://{self.address}{path}", data=body, headers={"Content-Type": "application/json"}
        )
        with opener.open(request, timeout=60.0) as answer:
            text = answer.read()
        return json.loads(text) if text else None
