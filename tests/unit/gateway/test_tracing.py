"""What a request leaves in a trace: one span for it, with the route and the submits under it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from tests.support.otlp import ReceivedSpan, Receiver
from tests.unit.gateway.fake_mesh import fake_mesh
from tests.unit.gateway.support import MODEL

from pagemesh.runtime.nats_server import NatsServer
from pagemesh.runtime.settings import TelemetryConfig
from pagemesh.runtime.spans import set_up_spans
from pagemesh.wire.errors import NoCapacity

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
WORDS = "my private words"


@pytest.fixture
async def spans(
    shared_nats_server: NatsServer, model_folder: Path, trace_receiver: Receiver
) -> list[ReceivedSpan]:
    """Of one request that was answered, and one that was refused."""
    telemetry = TelemetryConfig(otlp=trace_receiver.url)
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
    body = {"model": MODEL, "prompt": WORDS, "max_tokens": 4, "seed": 9, "request_id": "label"}
    with set_up_spans(telemetry, service="gateway"):
        async with (
            fake_mesh(shared_nats_server.url, model_folder) as mesh,
            httpx.AsyncClient(base_url=mesh.url) as http,
        ):
            mesh.worker.cached_tokens = 5
            assert (await http.post("/v1/completions", json=body, headers=headers)).is_success
            mesh.worker.refusal = NoCapacity("never")
            refused = await http.post(
                "/v1/completions", json=body, headers={"traceparent": "00-" + "z" * 5_000}
            )
            assert refused.status_code == 400
        return await asyncio.to_thread(
            trace_receiver.wait_for, lambda found: len(found) >= 6, timeout_s=10.0
        )


async def test_the_trace_of_a_request_is_its_callers_and_connected(
    spans: list[ReceivedSpan],
) -> None:
    ours = [span for span in spans if span.trace_id == TRACE]
    (request,) = [span for span in ours if span.name == f"text_completion {MODEL}"]
    assert request.parent_id == CALLER
    children = {span.name for span in ours if span.parent_id == request.span_id}
    assert children == {"route", "submit pagemesh.mesh.v1.worker.{name}"}
    for child in ours:
        assert request.start_ns <= child.start_ns <= child.end_ns <= request.end_ns


async def test_the_request_span_tells_usage_and_what_became_of_cached_tokens(
    spans: list[ReceivedSpan],
) -> None:
    (request,) = [s for s in spans if s.trace_id == TRACE and s.name.startswith("text_")]
    told = request.attributes
    assert told["gen_ai.request.model"] == MODEL
    assert told["gen_ai.request.seed"] == 9
    assert told["pagemesh.client_request_id"] == "label"
    assert told["gen_ai.usage.output_tokens"] == 4
    assert told["gen_ai.usage.cache_read.input_tokens"] == 5
    assert told["pagemesh.tokens.delivered"] == 5
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    first_s = told["gen_ai.response.time_to_first_chunk"]
    assert isinstance(first_s, float) and 0 < first_s < 10


async def test_a_failed_request_has_a_status_and_a_forged_parent_a_new_trace(
    spans: list[ReceivedSpan],
) -> None:
    (request,) = [s for s in spans if s.trace_id != TRACE and s.name.startswith("text_")]
    assert request.error and request.parent_id == ""
    assert request.attributes["error.type"] == "context_length_exceeded"


async def test_no_word_of_a_prompt_is_in_a_span(spans: list[ReceivedSpan]) -> None:
    for span in spans:
        assert WORDS not in repr(span) and "private" not in repr(span)
