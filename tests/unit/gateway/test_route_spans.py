"""The spans of a request's searches for workers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.gateway.support import PREFILL, eventually
from tests.unit.gateway.test_life import LateWay, life

from pagemesh.gateway import life as life_module
from pagemesh.gateway.calls import events as ev
from pagemesh.gateway.outbox import Outbox


@pytest.mark.parametrize("tries", [3, 4])
async def test_a_search_for_a_worker_is_one_span_however_long_it_takes(
    tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: list[dict[str, Any]] = []
    monkeypatch.setattr(life_module, "record_span", lambda *_, **told: spans.append(told))
    router = LateWay(b"secret")
    made = life(Outbox(characters_max=100), router)
    made.feed(ev.Begin())
    async with asyncio.timeout(20):
        while router.tries < tries:
            assert spans == []
            await asyncio.sleep(0.01)
    if tries == 3:  # the client gives up while nobody is there
        made.feed(ev.ClientGone("left"))
    (route,) = spans
    assert route["error"] == ("NotReady" if tries == 3 else "")
    assert route["attributes"]["pagemesh.route.tries"] == tries
    assert route["end_us"] - route["start_us"] > 100_000
    assert ("pagemesh.worker" in route["attributes"]) == (tries == 4)
    made.feed(ev.ClientGone("left"))
    assert len(spans) == 1


async def test_the_route_of_a_further_attempt_says_what_ended_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spans: list[dict[str, Any]] = []
    monkeypatch.setattr(life_module, "record_span", lambda *_, **told: spans.append(told))
    made = life(Outbox())
    made.feed(ev.Begin())
    made.feed(ev.WorkerLost(PREFILL))
    await eventually(lambda: made.core.attempt_count == 2)
    made.feed(ev.ClientGone("left"))
    first, second = (
        one["attributes"] for one in spans if "pagemesh.route.tries" in one["attributes"]
    )
    assert "pagemesh.route.after" not in first
    assert second["pagemesh.route.after"] == "Gone"
    assert second["pagemesh.route.avoided"] == PREFILL.name
