"""One request is one connected trace through all four services."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.integration.mesh import Mesh
from tests.support.otlp import ReceivedSpan, Receiver, ReceiverServer

pytestmark = pytest.mark.slow
MODEL = "tiny"
TRACE_ID, OTHER_TRACE_ID = "5b8aa5a2d2c872e8321cf37308d69df2", "0af7651916cd43dd8448eb211c80319c"
CALLER_SPAN = "5fb397be34d26b51"
SERVICES = {"pagemesh-gateway", "pagemesh-prefill", "pagemesh-decode", "pagemesh-pager"}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with ReceiverServer() as made:
        yield made


@pytest.fixture(scope="module")
def mesh(module_pool_dir: Path, tiny_model: Path, receiver: Receiver) -> Iterator[Mesh]:
    with Mesh(
        module_pool_dir, model=tiny_model, env={"PAGEMESH_OTLP": receiver.url}, handover=True
    ) as made:
        yield made


def complete(mesh: Mesh, first: int, trace_id: str) -> None:
    """Ask about 200 tokens, from ``first`` on."""
    prompt = [(first + index) % 200 for index in range(200)]
    body = {
        "model": MODEL, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    headers = {"traceparent": f"00-{trace_id}-{CALLER_SPAN}-01"}
    answer = httpx.post(f"{mesh.url}/v1/completions", json=body, headers=headers, timeout=60.0)
    assert answer.status_code == 200, answer.text


def outside(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
    """Spans whose parent is not (yet) among ``spans``: services export on their own time."""
    known = {span.span_id for span in spans}
    return [span for span in spans if span.parent_id not in known]


def whole(spans: list[ReceivedSpan]) -> bool:
    return {span.service for span in spans} >= SERVICES and len(outside(spans)) == 1


def without(spans: list[ReceivedSpan], trace_id: str) -> list[ReceivedSpan]:
    return [span for span in spans if span.trace_id != trace_id]


def test_a_request_is_one_trace_with_spans_of_all_four_services(
    mesh: Mesh, receiver: Receiver
) -> None:
    complete(mesh, 0, TRACE_ID)
    spans = receiver.wait_for(lambda spans: whole(without(spans, OTHER_TRACE_ID)), timeout_s=20.0)
    spans = without(spans, OTHER_TRACE_ID)
    assert {span.trace_id for span in spans} == {TRACE_ID}
    [root] = outside(spans)
    assert (root.service, root.parent_id) == ("pagemesh-gateway", CALLER_SPAN)
    assert all(root.start_ns <= span.start_ns <= span.end_ns for span in spans)
    names = {span.name for span in spans}
    assert {
        "route",
        "queue",
        "admit",
        "prefill chunk",
        "commit",
        "ticket",
        "redeem",
        "decode",
    } < names

    [admitted] = [span for span in spans if span.name == "pager.admit"]
    assert admitted.attributes["pagemesh.tokens.available"] == 0
    [sequence] = [span for span in spans if span.name == "decode sequence"]
    assert sequence.attributes["gen_ai.usage.output_tokens"] == 15, "the first is prefill's"


def test_a_hit_is_explained_on_the_span(mesh: Mesh, receiver: Receiver) -> None:
    def admissions(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
        return [span for span in without(spans, TRACE_ID) if span.name == "pager.admit"]

    complete(mesh, 100, OTHER_TRACE_ID)
    complete(mesh, 100, OTHER_TRACE_ID)
    spans = receiver.wait_for(lambda spans: len(admissions(spans)) == 2, timeout_s=20.0)
    last = max(admissions(spans), key=lambda span: span.start_ns)
    facts = {
        name.removeprefix("pagemesh.tokens."): value
        for name, value in last.attributes.items()
        if name.startswith("pagemesh.tokens.")
    }
    lost = {name: value for name, value in facts.items() if name.startswith("lost.")}
    assert facts["delivered"] == facts["selected"] == 192, "every full page"
    assert isinstance(facts["available"], int)
    assert all(isinstance(value, int) for value in lost.values())
    assert facts["available"] - 192 == sum(int(str(value)) for value in lost.values())
