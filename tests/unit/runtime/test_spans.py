"""Spans: built later, exported to a real receiver, never in anybody's way."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from structlog.testing import capture_logs
from tests.support.otlp import Receiver

from pagemesh.runtime import spans, trace
from pagemesh.runtime.clock import MonotonicClock
from pagemesh.runtime.ports import free_port
from pagemesh.runtime.settings import TelemetryConfig
from pagemesh.runtime.spans import SpanEvent, record_span, set_up_spans


def now_us() -> int:
    return MonotonicClock().now_us()


def dropped() -> float:
    value: float = spans._dropped._value.get()
    return value


def test_a_recorded_span_reaches_the_collector_whole(trace_receiver: Receiver) -> None:
    root = trace.new_trace()
    child, link = root.child(), trace.new_trace()
    start_us = now_us()
    with set_up_spans(TelemetryConfig(otlp=trace_receiver.url), service="pager"):
        record_span("request", root, start_us=start_us, end_us=start_us + 9_000, kind="server")
        record_span(
            "admit",
            child,
            start_us=start_us + 1_000,
            end_us=start_us + 3_000,
            attributes={"pagemesh.page.count": 4, "hit": True, "names": ["a", "b"]},
            events=[SpanEvent("granted", start_us + 2_000, {"pages": 4})],
            links=[link],
            error="NoCapacity",
        )
        received = trace_receiver.wait_for(lambda found: len(found) == 2)
    by_name = {span.name: span for span in received}
    parent, admit = by_name["request"], by_name["admit"]
    assert parent.service == "pagemesh-pager"
    assert parent.parent_id == ""
    assert not parent.error
    assert (admit.trace_id, admit.parent_id) == (parent.trace_id, parent.span_id)
    assert parent.trace_id == f"{root.trace_id:032x}"
    assert admit.end_ns - admit.start_ns == 2_000_000
    assert abs(parent.start_ns - time.time_ns()) < 60_000_000_000
    assert admit.attributes == {
        "pagemesh.page.count": 4, "hit": True, "names": ["a", "b"], "error.type": "NoCapacity",
    }  # fmt: skip
    assert (admit.events, admit.error) == (("granted",), True)
    assert admit.links == (f"{link.span_id:016x}",)


def test_what_is_left_is_sent_at_the_end(trace_receiver: Receiver) -> None:
    with set_up_spans(TelemetryConfig(otlp=trace_receiver.url), service="x"):
        for _ in range(1_500):
            record_span("s", trace.new_trace(), start_us=1, end_us=2)
    assert len(trace_receiver.spans) == 1_500


def test_an_unsampled_trace_records_nothing(trace_receiver: Receiver) -> None:
    with set_up_spans(TelemetryConfig(otlp=trace_receiver.url), service="x"):
        record_span("s", trace.new_trace(ratio=0.0), start_us=1, end_us=2)
    assert trace_receiver.spans == []


def test_without_an_endpoint_recording_does_nothing() -> None:
    threads, before = threading.active_count(), dropped()
    with set_up_spans(TelemetryConfig(otlp=""), service="x"):
        record_span("s", trace.new_trace(), start_us=1, end_us=2)
        assert threading.active_count() == threads, "nobody is there to send it"
    assert dropped() == before


def record_many(count: int) -> float:
    """Mean seconds a call."""
    started = time.perf_counter()
    for _ in range(count):
        record_span("s", trace.new_trace(), start_us=1, end_us=2, attributes={"a": 1})
    return (time.perf_counter() - started) / count


def test_a_collector_that_is_down_costs_nothing_but_the_spans() -> None:
    before = dropped()
    config = TelemetryConfig(otlp=f"http://127.0.0.1:{free_port()}")
    with set_up_spans(config, service="x"):
        mean_s = record_many(500)
        started = time.monotonic()
    assert mean_s < 0.001
    assert time.monotonic() - started < 4.0
    assert dropped() - before == 500


class Moody:
    """A collector that takes what it is said to take, in turn."""

    def __init__(self, *answers: SpanExportResult) -> None:
        self._answers = list(answers)

    def export(self, _spans: Sequence[ReadableSpan], /) -> SpanExportResult:
        return self._answers.pop(0)

    def shutdown(self) -> None:
        assert not self._answers


def test_a_collector_that_takes_nothing_is_told_of_once_and_when_it_does_again() -> None:
    fails, works = SpanExportResult.FAILURE, SpanExportResult.SUCCESS
    with capture_logs() as logs:
        sink = spans.SpanSink(Moody(works, fails, fails, works, works), Resource({}), "http://c:1")
        root = trace.new_trace()
        for _ in range(5):
            sink.record(spans.SpanRecord("s", root, 1, 2, {}, (), (), "internal", ""))
            sink._wake.set()
            while sink._queue:
                time.sleep(0.001)
            sink._wake.clear()
        time.sleep(0.05)  # the last is out of the queue before it is out
        sink.close()
    assert [line["event"] for line in logs] == ["spans.not_taken", "spans.taken_again"]
    assert logs[0]["collector"] == "http://c:1" and "--otlp" in logs[0]["next"]


def test_spans_that_are_left_when_a_collector_takes_none_at_the_end_are_counted_as_lost() -> None:
    class Failing:
        def export(self, _spans: Sequence[ReadableSpan], /) -> SpanExportResult:
            while not sink._closing:
                time.sleep(0.001)
            return SpanExportResult.FAILURE

        def shutdown(self) -> None:
            pass

    sink, before = spans.SpanSink(Failing(), Resource({})), dropped()
    for _ in range(1_500):
        sink.record(spans.SpanRecord("s", trace.new_trace(), 1, 2, {}, (), (), "internal", ""))
    sink.close()
    assert dropped() - before == 1_500


def test_a_collector_that_hangs_neither_blocks_nor_delays_the_end(
    trace_receiver: Receiver,
) -> None:
    trace_receiver.delay_s = 30.0
    before = dropped()
    with set_up_spans(TelemetryConfig(otlp=trace_receiver.url), service="x"):
        mean_s = record_many(spans.QUEUE_COUNT_MAX + 2_000)
        started = time.monotonic()
    assert mean_s < 0.001
    assert time.monotonic() - started < 6.0
    assert dropped() - before >= 1_000


def test_attributes_and_events_are_bounded(trace_receiver: Receiver) -> None:
    with set_up_spans(TelemetryConfig(otlp=trace_receiver.url), service="x"):
        record_span(
            "s",
            trace.new_trace(),
            start_us=5,
            end_us=2,
            attributes={"long": "x" * 100_000} | {f"k{i}": i for i in range(1_000)},
            events=[SpanEvent("e", 1)] * 10_000,
        )
    (span,) = trace_receiver.spans
    assert len(str(span.attributes["long"])) == 1_024
    assert len(span.attributes) == 64
    assert len(span.events) == 256
    assert span.end_ns == span.start_ns
