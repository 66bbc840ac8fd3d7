# SPDX-License-Identifier: Apache-2.0
"""Send spans and logs by OTLP (HTTP, protobuf) from a thread of its own, through a bounded queue.

The OpenTelemetry library is imported in that thread, so neither the controller's start nor its loop waits for it. An
endpoint that is away costs records: the queue fills, what comes then is counted and dropped, and the log says so once
for each time that it is away. Headers, compression, certificates and resource attributes are what the library's own
variables say (OTEL_EXPORTER_OTLP_HEADERS, OTEL_RESOURCE_ATTRIBUTES ...).
"""

import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from megascale_ops.controller.telemetry.records import Log, Span
from megascale_ops.errors import UsageError

if TYPE_CHECKING:
    from megascale_ops.controller.telemetry.pipeline import Pipeline

log = logging.getLogger(__name__)

# 2,048 records of 1 to 4 KB: an hour of one job's, or ten minutes of a bad night with fifty.
MOST_WAITING = 2048
# 5 s an attempt: a collector is near; longer than that it is away.
TIMEOUT_S = 5.0


def base_of(endpoint: str) -> str:
    """Return an endpoint without its last slash.

    Raises:
        UsageError: it is no address of an HTTP server.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        shown = endpoint.rpartition("@")[2]  # without a password
        raise UsageError(f"OTLP endpoint {shown!r} can't be used: it looks like http://HOST:4318, for HTTP")
    return endpoint.rstrip("/")


class Sender:
    """The way to one collector.

    Args:
        endpoint: its base address; ``/v1/traces`` and ``/v1/logs`` are added.
        counts: where records are counted: ``sent``, ``failed`` (not taken) and ``left_out`` (no room in the queue).

    Raises:
        UsageError: it is no address of an HTTP server.
    """

    def __init__(self, endpoint: str, counts: Counter[str] | None = None) -> None:
        self._base = base_of(endpoint)
        parts = urlsplit(self._base)
        self.goes_to = f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
        self._waiting: queue.Queue[Span | Log | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._pipeline: Pipeline | None = None
        self._is_on = False
        self._is_away = False
        self._end_s: float | None = None  # of the time to send in, once it is running out
        # Each key has one thread that counts it.
        self.counts: Counter[str] = Counter() if counts is None else counts
        self.counts.update(dict.fromkeys(("sent", "failed", "left_out"), 0))

    def start(self) -> None:
        """Begin to send."""
        self._is_on = True
        self._thread.start()

    def put(self, record: Span | Log) -> bool:
        """Take a record to be sent; return whether there was room for it."""
        if not self._is_on:
            return False
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self.counts["left_out"] += 1
            return False
        return True

    def stop(self, within_s: float) -> None:
        """Send what waits, but no longer than that; then end."""
        if not self._is_on:
            return
        self._is_on = False
        self._end_s = time.monotonic() + within_s
        with contextlib.suppress(queue.Full):  # it is awake then
            self._waiting.put_nowait(None)
        self._thread.join(within_s)
        if self._thread.is_alive() and self._pipeline is not None:
            self._pipeline.give_up()
        lost = self._lost() + self._waiting.qsize()
        if lost:
            log.warning("%d spans and logs did not reach the OpenTelemetry collector at %s", lost, self.goes_to)

    def _lost(self) -> int:
        return self.counts["failed"] + self.counts["left_out"]

    def _run(self) -> None:
        try:
            from megascale_ops.controller.telemetry.pipeline import Pipeline

            self._pipeline = Pipeline(self._base, TIMEOUT_S)
        except ImportError as error:
            self._is_on = False
            log.warning(
                "nothing is sent to %s: OpenTelemetry is not installed (%s); pip install 'megascale-ops[otel]'",
                self.goes_to,
                error.name or error,
            )
            return
        except Exception:  # a boundary: what the library does not take must not end the controller, and is logged
            self._is_on = False
            log.exception("no spans and logs are sent to %s", self.goes_to)
            return
        log.info("incidents, verdicts and steps are sent to the OpenTelemetry collector at %s", self.goes_to)
        self._serve(self._pipeline.send)
        self._pipeline.close()

    def _serve(self, send: Callable[[Span | Log], str]) -> None:
        """Send what comes, until there is nothing left, or no time."""
        while self._end_s is None or time.monotonic() < self._end_s:
            record = self._waiting.get()
            if record is None:
                return
            try:
                error = send(record)
            except Exception as bug:  # noqa: BLE001  a boundary: one record must not stop the others; logged below
                error = f"an error of ours, {type(bug).__name__}: {bug}"
            self._tell(error)

    def _tell(self, error: str) -> None:
        """Count, and say when the collector goes away and comes back."""
        self.counts["failed" if error else "sent"] += 1
        if bool(error) == self._is_away:
            return
        self._is_away = bool(error)
        if error:
            log.warning("the OpenTelemetry collector at %s takes nothing (%s); training goes on", self.goes_to, error)
        else:
            log.warning("the OpenTelemetry collector at %s is back; %d records were lost", self.goes_to, self._lost())
