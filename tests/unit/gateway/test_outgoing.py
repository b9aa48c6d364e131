"""What workers and their pager are told of a request: all that was asked for, nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from tests.unit.gateway.support import DECODE, PREFILL, REQUEST, ROUTE, frame, spec
from tests.unit.gateway.test_request import OTHER_ROUTE, Desk, of

from pagemesh.gateway.calls import events as ev
from pagemesh.gateway.calls.events import PagesFrom
from pagemesh.gateway.calls.spec import RequestSpec
from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.messages import Order, SequenceKey
from pagemesh.wire.pager_messages import Admit, AskedAs
from pagemesh.wire.presence import PageNeeds
from pagemesh.wire.tokens import pack
from pagemesh.wire.work_messages import Beams, ChoiceStart, Submit, TopLogprobs

TERMS = CacheTerms(tenant="alice", pool_share=0.25, pages_max=7, ttl_s=60, disk_share=0.5)
NEEDS = PageNeeds(growth_tokens=32, first_tokens=64)
BESIDE = replace(ROUTE, pages=PagesFrom("a", 9, NEEDS))
LEFT_MS = 59_000
PROMPT = pack(range(1, 9))


def asked(**more: Any) -> RequestSpec:
    """Nothing of it is what is taken where nothing is said."""
    return replace(
        spec(stop_tokens=(3,)), gateway_incarnation=77, priority=-3, arrival_us=123, terms=TERMS,
        **more,
    )  # fmt: skip


def submitted(given: RequestSpec, route: ev.Route = ROUTE) -> ev.SendSubmit:
    desk = Desk(given)
    desk.now_ms = given.deadline_ms - LEFT_MS
    (sent,) = of(desk.start(route), ev.SendSubmit)
    return sent


@pytest.mark.parametrize("read_cache", [True, False])
def test_a_worker_is_told_all_that_was_asked_for(read_cache: bool) -> None:
    given = asked(choice_count=2, read_cache=read_cache)
    sent = submitted(given)
    assert (sent.worker, sent.pages) == (PREFILL, None)
    assert sent.message == Submit(
        request=REQUEST, attempt=1, gateway="gateway-1", gateway_incarnation=77, priority=-3,
        arrival_us=123, root=ROUTE.root, model_root=ROUTE.model_root, prompt=PROMPT,
        choices=[ChoiceStart(choice=0), ChoiceStart(choice=1)], sampling=given.sampling,
        read_cache=read_cache, terms=TERMS, decode=DECODE.name, deadline_ms=LEFT_MS,
    )  # fmt: skip


def test_its_pager_is_told_what_the_worker_would_ask_for() -> None:
    sent = submitted(asked(), BESIDE)
    asked_as = AskedAs(incarnation=PREFILL.incarnation, epoch=9)
    assert sent.message.asked_as == asked_as
    assert sent.pages is not None and sent.pages.host == "a"
    assert sent.pages.message == Admit(
        key=SequenceKey(request=REQUEST, attempt=1, choice=0),
        order=Order(priority=-3, arrival_us=123, request=REQUEST, choice=0),
        worker=PREFILL.name, incarnation=PREFILL.incarnation, epoch=9, root=ROUTE.root,
        tokens=PROMPT, reserve_tokens=8 + 32, terms=TERMS, tokens_max=8 + 99, first_tokens=64,
        deadline_ms=LEFT_MS,
    )  # fmt: skip


def test_a_worker_alone_hands_nothing_over() -> None:
    assert submitted(asked(), OTHER_ROUTE).message.decode is None


def test_a_search_has_its_worker_ask_for_pages_and_is_routed_for_all_of_its_beams() -> None:
    given = asked(choice_count=2)
    beams = structs.replace(given.sampling, beams=Beams(width=4, keep=2))
    given = replace(given, sampling=beams)
    assert submitted(given, BESIDE).pages is None
    (route,) = of(Desk(given).feed(ev.Begin()), ev.ChooseRoute)
    assert (route.choice_count, route.growth_tokens) == (4, 100)


def test_a_prompts_scores_are_asked_for_until_they_are_there() -> None:
    desk = Desk(asked(prompt_logprobs=True))
    (sent,) = of(desk.start(), ev.SendSubmit)
    assert sent.message.prompt_logprobs
    scores = TopLogprobs(chosen=bytes(4 * 7))
    desk.arrive(structs.replace(frame(0, [5]), prompt_logprobs=scores))
    desk.feed(ev.WorkerLost(DECODE))
    desk.wait(100)
    (again,) = of(desk.place(OTHER_ROUTE), ev.SendSubmit)
    assert not again.message.prompt_logprobs


def test_choices_that_are_begun_again_avoid_all_that_failed_one_of_them() -> None:
    desk = Desk(asked(choice_count=2))
    desk.start()
    desk.arrive(frame(0, [5], choice=0), PREFILL)
    desk.arrive(frame(0, [5], choice=1), DECODE)
    desk.feed(ev.WorkerLost(PREFILL), ev.WorkerLost(DECODE))
    (route,) = of(desk.wait(100), ev.ChooseRoute)
    assert route.avoid == {PREFILL, DECODE}
    assert np.array_equal(route.tokens, [*range(1, 9), 5]) and route.choice_count == 2


def test_who_is_lost_is_not_told_to_stop() -> None:
    desk = Desk(asked())
    desk.start()
    aborts = of(desk.feed(ev.WorkerLost(PREFILL)), ev.SendAbort)
    assert [(one.worker, one.message.attempt) for one in aborts] == [(DECODE, 1)]
