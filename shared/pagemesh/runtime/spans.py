"""Spans, built after the fact.

    hop: record_span (1 us) --> [ queue, bounded ] --> a thread builds, batches and exports

Building a span costs tens of microseconds and exporting may hang, so neither happens on the
event loop. Without an endpoint nothing is recorded. When the collector is down or slow, the queue
overflows and spans are counted as dropped, without any effect on serving. The log has one warning
when the collector stops taking spans, and a line when it takes them again.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from pagemesh.runtime import ids, metrics, semconv
from pagemesh.runtime.clock import wall_ns
from pagemesh.runtime.logs import get_logger
from pagemesh.runtime.ports import shown_urls
from pagemesh.runtime.settings import TelemetryConfig
from pagemesh.runtime.trace import TraceContext
from pagemesh.runtime.version import VERSION

Attribute = str | bool | int | float | Sequence[str] | Sequence[int]
Attributes = Mapping[str, Attribute]
Kind = Literal["internal", "server", "client", "producer", "consumer"]

QUEUE_COUNT_MAX = 16_384
_BATCH_COUNT_MAX = 512
_PERIOD_S = 0.25
_EXPORT_TIMEOUT_S = 2.0
_CLOSE_TIMEOUT_S = 2.5
_TEXT_CHARACTERS_MAX = 1_024
_ATTRIBUTE_COUNT_MAX = 64
_EVENT_COUNT_MAX = 256
_SCOPE = InstrumentationScope("pagemesh", VERSION)
_NO_ATTRIBUTES: Attributes = {}
_log = get_logger(__name__)

_exported = metrics.counter("spans_exported_total", "Spans accepted by the collector.")
_dropped = metrics.counter(
    "spans_dropped_total", "Spans dropped because the queue was full or the collector unavailable."
)


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened within a span; ``at_us`` is a monotonic time."""

    name: str
    at_us: int
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """A finished span as it was recorded; times are monotonic microseconds of this host."""

    name: str
    context: TraceContext
    start_us: int
    end_us: int
    attributes: Attributes
    events: Sequence[SpanEvent]
    links: Sequence[TraceContext]
    kind: Kind
    error: str


class Exporter(Protocol):
    def export(self, spans: Sequence[ReadableSpan], /) -> SpanExportResult: ...

    def shutdown(self) -> None: ...


class SpanSink:
    """The queue and the thread behind it. ``close`` sends what is left, within a time limit."""

    def __init__(self, exporter: Exporter, resource: Resource, where: str = "") -> None:
        self._exporter = exporter
        self._where = where
        self._failing = False
        self._resource = resource
        self._queue: deque[SpanRecord] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="pagemesh-spans", daemon=True)
        self._thread.start()

    def record(self, record: SpanRecord) -> None:
        """Never blocks; if the queue is full, the new span is dropped and counted."""
        if len(self._queue) >= QUEUE_COUNT_MAX or self._closing:
            _dropped.inc()
            return
        self._queue.append(record)

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._exporter.shutdown()
        _dropped.inc(len(self._queue))

    def _work(self) -> None:
        while not self._closing:
            self._wake.wait(_PERIOD_S)
            self._send_all()

    def _send_all(self) -> None:
        while self._queue:
            count = min(len(self._queue), _BATCH_COUNT_MAX)
            batch = [_build(self._queue.popleft(), self._resource) for _ in range(count)]
            try:
                sent = self._exporter.export(batch) is SpanExportResult.SUCCESS
            except Exception:  # whatever the exporter does, serving goes on
                sent = False
            (_exported if sent else _dropped).inc(count)
            self._tell(sent)
            if self._closing and not sent:
                return

    def _tell(self, sent: bool) -> None:
        if sent and self._failing:
            _log.warning("spans.taken_again", collector=self._where)
        elif not sent and not self._failing and not self._closing:
            next_ = (
                "spans are dropped until the collector accepts them; check PAGEMESH_OTLP (--otlp)"
            )
            _log.warning("spans.not_taken", collector=self._where, next=next_)
        self._failing = not sent


_sink: SpanSink | None = None


@contextlib.contextmanager
def set_up_spans(config: TelemetryConfig, *, service: str, name: str = "") -> Iterator[None]:
    """Record spans for as long as the context lasts, if an endpoint is configured. Use once a
    process. Raises ``ConfigError`` when the endpoint is not a URL."""
    global _sink
    endpoint = config.traces_url
    if not endpoint:
        yield
        return
    resource = Resource(
        {
            semconv.SERVICE_NAME: f"pagemesh-{service}",
            semconv.SERVICE_VERSION: VERSION,
            semconv.SERVICE_INSTANCE_ID: name or service,
            semconv.HOST_NAME: ids.host_name(),
        }
    )
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
    _sink = SpanSink(exporter, resource, shown_urls(endpoint))
    try:
        yield
    finally:
        sink, _sink = _sink, None
        sink.close()


def record_span(
    name: str,
    context: TraceContext,
    *,
    start_us: int,
    end_us: int,
    attributes: Attributes = _NO_ATTRIBUTES,
    events: Sequence[SpanEvent] = (),
    links: Sequence[TraceContext] = (),
    kind: Kind = "internal",
    error: str = "",
) -> None:
    """Record the span that ``context`` stands for, from times of the monotonic clock.

    ``error`` is a low-cardinality word (a fault's code), never the text of an exception.
    Costs next to nothing when the trace is not sampled or nobody collects.
    """
    if _sink is None or not context.sampled:
        return
    _sink.record(
        SpanRecord(name, context, start_us, end_us, attributes, events, links, kind, error)
    )


def _build(record: SpanRecord, resource: Resource) -> ReadableSpan:
    context = record.context
    attributes = _bounded(record.attributes)
    status = Status(StatusCode.UNSET)
    if record.error:
        attributes[semconv.ERROR_TYPE] = record.error
        status = Status(StatusCode.ERROR, record.error)
    parent = None
    if context.parent_id:
        parent = _span_context(context.trace_id, context.parent_id, context.sampled)
    return ReadableSpan(
        name=record.name,
        context=_span_context(context.trace_id, context.span_id, context.sampled),
        parent=parent,
        resource=resource,
        attributes=attributes,
        events=[
            Event(event.name, _bounded(event.attributes), wall_ns(event.at_us))
            for event in record.events[:_EVENT_COUNT_MAX]
        ],
        links=[
            Link(_span_context(link.trace_id, link.span_id, link.sampled))
            for link in record.links[:_EVENT_COUNT_MAX]
        ],
        kind=SpanKind[record.kind.upper()],
        status=status,
        start_time=wall_ns(record.start_us),
        end_time=wall_ns(max(record.start_us, record.end_us)),
        instrumentation_scope=_SCOPE,
    )


def _span_context(trace_id: int, span_id: int, sampled: bool) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=flags)


def _bounded(attributes: Attributes) -> dict[str, Attribute]:
    out: dict[str, Attribute] = {}
    for key, value in attributes.items():
        if len(out) == _ATTRIBUTE_COUNT_MAX:
            break
        out[key] = value[:_TEXT_CHARACTERS_MAX] if isinstance(value, str) else value
    return out
