# SPDX-License-Identifier: Apache-2.0
"""The one file that imports OpenTelemetry: our records into its spans and logs, and those to its OTLP exporters.

Spans are ended and logs are emitted one by one, in the sender's thread; so the library's own queues and threads, whose
waits have no bound, are not needed.
"""

import logging
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider, ReadableLogRecord
from opentelemetry.sdk._logs.export import LogRecordExporter, LogRecordExportResult, SimpleLogRecordProcessor
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags

from megascale_ops.controller.telemetry.records import Identity, Log, Span

SCOPE = "megascale_ops"
NS = 1_000_000_000


class _Given(IdGenerator):
    """Identities that follow from what a span is about."""

    def __init__(self) -> None:
        self.next = Identity(1, 1)

    def generate_trace_id(self) -> int:
        return self.next.trace

    def generate_span_id(self) -> int:
        return self.next.span


class _Spans(SpanExporter):
    """The library's exporter, whose answer is kept."""

    def __init__(self, endpoint: str, timeout_s: float) -> None:
        self._exporter = OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces", timeout=timeout_s)
        self.is_taken = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        self.is_taken = result is SpanExportResult.SUCCESS
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # the library's


class _Logs(LogRecordExporter):
    """The same for logs."""

    def __init__(self, endpoint: str, timeout_s: float) -> None:
        self._exporter = OTLPLogExporter(endpoint=f"{endpoint}/v1/logs", timeout=timeout_s)
        self.is_taken = False

    def export(self, batch: Sequence[ReadableLogRecord]) -> LogRecordExportResult:
        result = self._exporter.export(batch)
        self.is_taken = result is LogRecordExportResult.SUCCESS
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # the library's

    def force_flush(self, timeout_millis: int = 0) -> bool:  # noqa: ARG002  the library's signature
        return True


class _Why(logging.Handler):
    """Keeps the library's first sentence, which has the reason, instead of printing each: the sender tells it once."""

    def __init__(self) -> None:
        super().__init__()
        self.said = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.said = self.said or record.getMessage().partition("\n")[0][:200]


class Pipeline:
    """Our records to one collector; see ``Sender``."""

    def __init__(self, endpoint: str, timeout_s: float) -> None:
        self._why = _Why()
        library = logging.getLogger("opentelemetry")
        library.propagate = False
        library.addHandler(self._why)
        resource = Resource({"service.name": "megascale-ops-controller"}).merge(OTELResourceDetector().detect())
        self._ids = _Given()
        self._spans, self._logs = _Spans(endpoint, timeout_s), _Logs(endpoint, timeout_s)
        traces = TracerProvider(sampler=ALWAYS_ON, resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        traces.add_span_processor(SimpleSpanProcessor(self._spans))
        logs = LoggerProvider(resource=resource, shutdown_on_exit=False)
        logs.add_log_record_processor(SimpleLogRecordProcessor(self._logs))
        self._tracer, self._logger = traces.get_tracer(SCOPE), logs.get_logger(SCOPE)

    def send(self, record: Span | Log) -> str:
        """Send a record, at most for the time of an attempt; return why it was not taken, "" when it was."""
        self._why.said = ""
        self._spans.is_taken = self._logs.is_taken = False
        if isinstance(record, Span):
            self._send_span(record)
            is_taken = self._spans.is_taken
        else:
            self._send_log(record)
            is_taken = self._logs.is_taken
        return "" if is_taken else self._why.said or "no reason is given"

    def _send_span(self, record: Span) -> None:
        self._ids.next = record.identity
        span = self._tracer.start_span(
            record.name,
            trace.set_span_in_context(trace.INVALID_SPAN),
            start_time=_ns(record.began_s),
            attributes=record.attributes,
        )
        for name, at_s in record.events:
            span.add_event(name, timestamp=_ns(at_s))
        if record.error:
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(_ns(record.ended_s))

    def _send_log(self, record: Log) -> None:
        identity = record.identity
        about = SpanContext(identity.trace, identity.span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
        self._logger.emit(
            LogRecord(
                timestamp=_ns(record.at_s),
                observed_timestamp=_ns(record.at_s),
                context=trace.set_span_in_context(NonRecordingSpan(about)),
                severity_number=SeverityNumber.ERROR if record.is_error else SeverityNumber.WARN,
                severity_text="ERROR" if record.is_error else "WARN",
                body=record.text,
                attributes=record.attributes,
                event_name="megascale.verdict",
            )
        )

    def give_up(self) -> None:
        """Wake an attempt that waits to try again; from any thread."""
        self._spans.shutdown()
        self._logs.shutdown()

    def close(self) -> None:
        """End connections."""
        self.give_up()
        logging.getLogger("opentelemetry").removeHandler(self._why)


def _ns(wall_s: float) -> int:
    return round(wall_s * NS)
