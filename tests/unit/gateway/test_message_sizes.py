"""No request is taken whose messages the bus could not carry, were it begun again elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from tests.unit.gateway.support import DECODE, REQUEST, frame, spec
from tests.unit.gateway.test_openai_api import FACTS, chat, completion
from tests.unit.gateway.test_request import OTHER_ROUTE, Desk, of

from pagemesh.gateway.api.api_errors import ApiError
from pagemesh.gateway.calls import events as ev
from pagemesh.gateway.calls.prepare import Work, carried_tokens, fit, too_narrow
from pagemesh.wire import codec
from pagemesh.wire.messages import Order, SequenceKey
from pagemesh.wire.pager_messages import Declare, HeldLease
from pagemesh.wire.tokens import pack, pack_extents

STOCK_BYTES = 1 << 20
LARGE = structs.replace(FACTS, context_tokens_max=1 << 22, pool_pages=1 << 20)
MOST = carried_tokens(STOCK_BYTES)


def fitted(prompt_tokens: int, ask: Any = None) -> Work:
    (work,) = fit(
        ask or chat(), [np.ones(prompt_tokens, "<u4")], LARGE, frozenset(), seed=1,
        message_bytes_max=STOCK_BYTES,
    )  # fmt: skip
    return work


def test_the_longest_sequence_that_is_taken_can_be_declared_in_a_message() -> None:
    """However its pages lie."""
    key = SequenceKey(request=REQUEST, attempt=1, choice=0)
    order = Order(priority=0, arrival_us=1, request=REQUEST, choice=0)
    line = HeldLease(
        lease=1, lease_slot=1, key=key, order=order, root=bytes(32), granted_at=1,
        extents=pack_extents(2 * np.arange(-(-MOST // 16), dtype="<u4")),
        tokens=pack(np.arange(MOST, dtype="<u4")),
    )  # fmt: skip
    message = Declare(worker="w", incarnation=1, epoch=1, number=1, leases=[line])
    assert 0.9 * STOCK_BYTES < len(codec.encode(message)) < STOCK_BYTES


def test_an_answer_of_no_given_length_is_as_long_as_the_bus_carries() -> None:
    assert fitted(MOST - 1_000).sampling.max_tokens == 1_000
    assert fitted(1_000, completion()).sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "param"),
    [(1_000, MOST - 999, "max_tokens"), (MOST, None, "messages"), (MOST + 1, None, "messages")],
)
def test_what_the_bus_could_not_carry_is_refused_with_the_servers_setting(
    prompt_tokens: int, max_tokens: int | None, param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        fitted(prompt_tokens, chat(max_tokens=max_tokens))
    told = (caught.value.status, caught.value.code, caught.value.param)
    assert told == (400, "context_length_exceeded", param)
    for word in (f"{MOST} tokens", f"{prompt_tokens}", "max_payload of 1048576"):
        assert word in caught.value.message


def test_a_bus_that_cannot_carry_a_page_is_not_the_clients_fault() -> None:
    least = next(size for size in range(1 << 16, 1 << 17) if carried_tokens(size) == 16)
    assert too_narrow(least, 16) == ""
    for size in (8_192, least - 1):
        with pytest.raises(ApiError) as caught:
            fit(chat(), [np.ones(2, "<u4")], LARGE, frozenset(), seed=1, message_bytes_max=size)
        error = caught.value
        assert (error.status, error.code, bool(error.retry_after_ms)) == (503, "not_ready", True)
        assert f"max_payload of {size} bytes" in error.message and "8388608" in error.message


def test_choices_that_one_message_cannot_carry_are_begun_again_in_several() -> None:
    desk = Desk(replace(spec(choices=3, max_tokens=8), submit_tokens_max=8 + 5))
    desk.start()
    for choice in range(3):
        desk.arrive(frame(0, [5, 6], choice=choice))
    routes = of(desk.feed(ev.WorkerLost(DECODE)) + desk.wait(2_000), ev.ChooseRoute)
    assert [route.choice_count for route in routes] == [2]
    placed = desk.feed(ev.Routed(OTHER_ROUTE))
    assert [route.choice_count for route in of(placed, ev.ChooseRoute)] == [1]
    placed += desk.feed(ev.Routed(OTHER_ROUTE))
    begun = [submit.message for submit in of(placed, ev.SendSubmit)]
    assert [(one.attempt, [c.choice for c in one.choices]) for one in begun] == [
        (2, [0, 1]),
        (3, [2]),
    ]


def test_choices_of_which_a_message_carries_one_are_begun_again_one_after_the_other() -> None:
    desk = Desk(replace(spec(choices=2), submit_tokens_max=8 + 4))
    desk.start()
    for choice in range(2):
        desk.arrive(frame(0, [5, 6, 7], choice=choice))
    desk.feed(ev.WorkerLost(DECODE))
    begun = []
    for _ in range(2):
        desk.wait(100)
        (submit,) = of(desk.place(OTHER_ROUTE), ev.SendSubmit)
        begun.append([one.choice for one in submit.message.choices])
    assert begun == [[0], [1]]
