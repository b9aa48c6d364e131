"""Identical prompts at once, over HTTP and with real processes: one computes them for all."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.mesh import Mesh
from tests.support.otlp import ReceivedSpan, Receiver

from pagemesh.runtime.bus import Bus
from pagemesh.runtime.ids import host_name, new_service_name
from pagemesh.runtime.ports import free_port
from pagemesh.runtime.rpc import call
from pagemesh.wire import subjects
from pagemesh.wire.pager_reports import InspectPager, PagerReport

PAGE_SIZE = 16
PROMPT = [index * 7 % 256 for index in range(1_000)]
SHARED_TOKENS = len(PROMPT) // PAGE_SIZE * PAGE_SIZE
CLIENT_COUNT = 16
SAMPLED = {"traceparent": "00-5b8aa5a2d2c872e8321cf37308d69df2-5fb397be34d26b51-01"}
PORTS = {"pager": 0, "decode": 1, "prefill": 2}
"""Where each service's metrics are, from the first port on."""


async def complete(client: httpx.AsyncClient, max_tokens: int) -> dict[str, Any]:
    body = {
        "model": "tiny", "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    answer = await client.post("/v1/completions", json=body, headers=SAMPLED)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def complete_at_once(mesh: Mesh, max_tokens: int) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=90.0) as client:
        return await asyncio.gather(*(complete(client, max_tokens) for _ in range(CLIENT_COUNT)))


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def tokens_of(answer: dict[str, Any]) -> list[int]:
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def free_ports(count: int) -> int:
    """The first of ``count`` ports in a row that nobody listens on."""
    for _ in range(100):
        first = free_port()
        try:
            with ExitStack() as stack:
                for port in range(first, first + count):
                    one = stack.enter_context(socket.socket())
                    one.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            continue
        return first
    raise AssertionError(f"no {count} free ports in a row")


def metric(first_port: int, service: str, name: str) -> float:
    text = httpx.get(f"http://127.0.0.1:{first_port + PORTS[service]}/metrics", timeout=5.0).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


@pytest.mark.slow
@pytest.mark.parametrize("handover", [True, False])
def test_sixteen_identical_prompts_at_once_compute_the_prefix_once(
    pool_dir: Path, tiny_model: Path, trace_receiver: Receiver, handover: bool
) -> None:
    port = free_ports(len(PORTS) + 1)
    env = {
        "PAGEMESH_STEP_TOKENS_MAX": "16", "PAGEMESH_METRICS_PORT": str(port),
        "PAGEMESH_OTLP": trace_receiver.url,
    }  # fmt: skip
    with Mesh(pool_dir, model=tiny_model, pool_bytes=32 << 20, handover=handover, env=env) as mesh:
        answers = asyncio.run(complete_at_once(mesh, max_tokens=1))
        assert sorted(map(cached, answers)) == [0, *[SHARED_TOKENS] * (CLIENT_COUNT - 1)]
        computed = sum(
            metric(port, service, "pagemesh_computed_tokens_total")
            for service in ("prefill", "decode")
        )
        rest = len(PROMPT) - SHARED_TOKENS
        assert computed == len(PROMPT) + (CLIENT_COUNT - 1) * rest
        mesh.wait_for(
            lambda: metric(port, "pager", "pagemesh_pager_in_flight_saved_tokens_total") > 0,
            "the pager's metrics to say what was saved",
        )
        assert metric(port, "pager", "pagemesh_pager_in_flight_waiters") == 0
        mesh.wait_idle()
        spans = trace_receiver.wait_for(
            lambda spans: len(waits(spans, handover)) >= CLIENT_COUNT // 2, timeout_s=20.0
        )
    saved = {span.attributes["pagemesh.in_flight.tokens"] for span in waits(spans, handover)}
    assert saved <= set(range(PAGE_SIZE, SHARED_TOKENS + 1, PAGE_SIZE)), "those not there yet"
    assert any(span.attributes["pagemesh.in_flight.waited_ms"] for span in waits(spans, handover))


def waits(spans: list[ReceivedSpan], handover: bool) -> list[ReceivedSpan]:
    """The sequences that waited for what another one computed."""
    name = "prefill sequence" if handover else "decode sequence"
    return [
        span
        for span in spans
        if span.name == name and "pagemesh.in_flight.tokens" in span.attributes
    ]


async def kill_in_the_middle(mesh: Mesh) -> list[dict[str, Any]]:
    """The answers; prefill is killed when it has computed a part and most others wait for it."""
    name = new_service_name("test")
    async with Bus.connect(mesh.bus_config("operator"), role="operator", name=name) as bus:
        answers = asyncio.create_task(complete_at_once(mesh, max_tokens=8))
        while True:
            subject = subjects.pager_report(host_name())
            report = await call(bus, subject, InspectPager(), PagerReport, timeout_ms=5_000)
            filled = max((lease.filled_tokens for lease in report.leases), default=0)
            assert filled < SHARED_TOKENS and not answers.done(), "too late to be in the middle"
            if filled >= 2 * PAGE_SIZE and report.waiter_count >= CLIENT_COUNT // 2:
                break
        mesh.kill("prefill")
        return await answers


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_when_the_one_that_computes_for_all_is_killed_the_rest_is_computed_once_still(
    pool_dir: Path, tiny_model: Path
) -> None:
    env = {"PAGEMESH_STEP_TOKENS_MAX": "4"}
    with Mesh(
        pool_dir, model=tiny_model, deterministic=True, pool_bytes=32 << 20, handover=True, env=env
    ) as mesh:
        answers = asyncio.run(kill_in_the_middle(mesh))
        assert all(tokens_of(answer) == tokens_of(answers[0]) for answer in answers)
        uncached = sum(len(PROMPT) - cached(answer) for answer in answers)
        assert uncached <= len(PROMPT) + (CLIENT_COUNT - 1) * PAGE_SIZE
        mesh.wait_ready()
        mesh.wait_idle()
        [calm, *_] = asyncio.run(complete_at_once(mesh, max_tokens=8))
        assert tokens_of(calm) == tokens_of(answers[0])
