"""A real OTLP/HTTP receiver on loopback: it accepts protobuf and keeps the spans."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

Value = str | bool | int | float | bytes | list["Value"] | None


def _value(any_value: AnyValue) -> Value:
    kind = any_value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in any_value.array_value.values]
    return None if kind is None else getattr(any_value, kind)


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty for a root span."""
    start_ns: int
    end_ns: int
    attributes: dict[str, Value]
    events: tuple[str, ...]
    links: tuple[str, ...]
    error: bool


@dataclass(slots=True)
class Receiver:
    """``delay_s`` makes it hang, ``status`` makes it fail."""

    url: str = ""
    delay_s: float = 0.0
    status: int = 200
    _spans: list[ReceivedSpan] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def spans(self) -> list[ReceivedSpan]:
        with self._lock:
            return list(self._spans)

    def wait_for(
        self, wanted: Callable[[list[ReceivedSpan]], bool], *, timeout_s: float = 10.0
    ) -> list[ReceivedSpan]:
        """The spans, once ``wanted`` returns True for them. Raises ``TimeoutError``."""
        deadline = time.monotonic() + timeout_s
        while True:
            spans = self.spans
            if wanted(spans):
                return spans
            if time.monotonic() > deadline:
                raise TimeoutError(f"got {[span.name for span in spans]}")
            time.sleep(0.02)

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            for resource_spans in request.resource_spans:
                service = ""
                for pair in resource_spans.resource.attributes:
                    if pair.key == "service.name":
                        service = pair.value.string_value
                for scope in resource_spans.scope_spans:
                    self._spans.extend(_received(service, span) for span in scope.spans)


def _received(service: str, span: Span) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes={pair.key: _value(pair.value) for pair in span.attributes},
        events=tuple(event.name for event in span.events),
        links=tuple(link.span_id.hex() for link in span.links),
        error=span.status.code == 2,
    )


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, receiver: Receiver) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.receiver = receiver
        receiver.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        receiver = self.server.receiver
        if receiver.delay_s:
            time.sleep(receiver.delay_s)
        if receiver.status == 200:
            receiver.take(body)
        answer = ExportTraceServiceResponse().SerializeToString()
        try:
            self.send_response(receiver.status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)
        except OSError:
            return  # the exporter gave up waiting

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


class ReceiverServer:
    """Context manager around a ``Receiver``."""

    def __enter__(self) -> Receiver:
        self._receiver = Receiver()
        self._server = _Server(self._receiver)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self._receiver

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
