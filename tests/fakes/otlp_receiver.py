# SPDX-License-Identifier: Apache-2.0
"""A small real OTLP receiver: takes spans and logs over HTTP, and decodes them with OpenTelemetry's own protobuf."""

import contextlib
import gzip
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

KINDS = {
    "/v1/traces": (ExportTraceServiceRequest, ExportTraceServiceResponse),
    "/v1/logs": (ExportLogsServiceRequest, ExportLogsServiceResponse),
}


class Received(NamedTuple):
    """One span or log: the decoded message, its attributes as Python values, and those of its resource."""

    message: Any
    attributes: dict[str, Any]
    resource: dict[str, Any]
    headers: dict[str, str]


class Receiver:
    """What has come, and how to answer."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.logs: list[Received] = []
        self.status = 200
        self.refused = 0
        self.url = ""
        self._news = threading.Condition()

    def take(self, path: str, body: bytes, headers: dict[str, str]) -> bytes:
        """Decode one request."""
        request, reply = KINDS[path]
        message = request.FromString(body)
        with self._news:
            if path == "/v1/traces":
                self.spans += [
                    Received(span, values(span.attributes), values(of.resource.attributes), headers)
                    for of in message.resource_spans
                    for scope in of.scope_spans
                    for span in scope.spans
                ]
            else:
                self.logs += [
                    Received(record, values(record.attributes), values(of.resource.attributes), headers)
                    for of in message.resource_logs
                    for scope in of.scope_logs
                    for record in scope.log_records
                ]
            self._news.notify_all()
        return bytes(reply().SerializeToString())

    def refuse(self) -> None:
        """Count a request that was not taken."""
        with self._news:
            self.refused += 1
            self._news.notify_all()

    def until(self, has: Callable[["Receiver"], bool], what: str, within_s: float = 150.0) -> None:
        """Wait until something has come; fails with what was waited for."""
        with self._news:
            if not self._news.wait_for(lambda: has(self), within_s):
                names = [one.message.name for one in self.spans]
                raise AssertionError(f"{what} did not come within {within_s} s; spans {names}, {len(self.logs)} logs")


def values(attributes: Any) -> dict[str, Any]:  # noqa: ANN401  protobuf's messages have no types
    """Return OTLP's attributes as Python values."""
    return {one.key: _value(one.value) for one in attributes}


def _value(one: Any) -> Any:  # noqa: ANN401  same
    kind = one.WhichOneof("value")
    if kind == "array_value":
        return [_value(inner) for inner in one.array_value.values]
    return getattr(one, kind) if kind else None


@contextlib.contextmanager
def otlp_receiver() -> Iterator[Receiver]:
    """Serve on a loopback port until the block ends."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            """Take what an exporter sends."""
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            status = receiver.status
            is_taken = status == 200
            answer = (
                receiver.take(self.path, body, {name.lower(): value for name, value in self.headers.items()})
                if is_taken
                else b""
            )
            self.send_response(status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)
            if not is_taken:
                receiver.refuse()

        def log_message(self, *_args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, name="otlp receiver", daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10.0)
