"""What a router counts for and against a worker: its queue, its company, the pages there are."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from tests.unit.gateway.routes import FACTS, PAGE, chosen, names, pager, stored, want, worker

from pagemesh.gateway.calls.events import Worker
from pagemesh.gateway.routing.router import Router


def test_of_two_decode_workers_the_one_to_avoid_gets_no_handover_however_idle(
    router: Router,
) -> None:
    router.announced(worker("p", "prefill"))
    router.announced(worker("d", "decode"))
    router.announced(worker("other", "decode", waiting=10_000))
    assert names(chosen(router, want(avoid=frozenset({Worker("d", 1)})))) == ("p", "other")


def test_handovers_on_their_way_count_for_the_decode_worker(router: Router) -> None:
    router.announced(worker("p", "prefill"))
    for name in ("x", "y"):
        router.announced(worker(name, "decode"))
    assert {names(chosen(router, want())) for _ in range(2)} == {("p", "x"), ("p", "y")}


def test_a_host_whose_decode_worker_has_much_company_is_left_for_one_that_has_none(
    router: Router,
) -> None:
    for host, running in (("a", 8), ("b", 0)):
        router.announced(worker(f"p-{host}", "prefill", host=host))
        router.announced(worker(f"d-{host}", "decode", host=host, running=running))
    assert names(chosen(router, want())) == ("p-b", "d-b")


def test_company_on_cores_of_its_own_is_nothing_to_a_prefill_worker(router: Router) -> None:
    router.announced(worker("p", "prefill", cores=b"\x01"))
    router.announced(worker("beside", "decode", cores=b"\x01"))
    router.announced(worker("apart", "decode", cores=b"\x02", running=8))
    assert names(chosen(router, want())) == ("p", "beside")


def test_every_choice_of_a_request_needs_pages_to_grow_into(router: Router) -> None:
    for host, free, waiting in (("a", 40, 0), ("b", 100, 50)):
        router.announced(worker(f"d-{host}", "decode", host=host, waiting=waiting))
        router.announced(pager(host, free=free))
    eight = replace(want(growth=64), choice_count=8)
    assert 320 + 64 < 40 * PAGE < 320 + 8 * 64
    assert names(chosen(router, eight)) == ("d-b", "")


def test_what_was_sent_weighs_as_much_as_is_computed_of_it(router: Router) -> None:
    for host in ("a", "b"):
        router.announced(worker(f"d-{host}", "decode", host=host))
        router.announced(pager(host))
    router.pages_changed(stored("a", 1, 18))
    assert [names(chosen(router, want())) for _ in range(3)] == [("d-a", "")] * 3


def test_the_last_token_of_a_prompt_is_computed_even_if_all_of_it_is_cached(
    router: Router,
) -> None:
    for one in (worker("d", "decode"), pager("a")):
        router.announced(one)
    router.pages_changed(stored("a", 1, 20))
    assert chosen(router, want(20 * PAGE)).predicted_tokens == 20 * PAGE - 1


@pytest.mark.parametrize("pools", [(100, 50), (50, 100)])
def test_a_model_is_as_large_as_its_smallest_worker(router: Router, pools: tuple[int, int]) -> None:
    for pages in pools:
        facts = msgspec.structs.replace(FACTS, pool_pages=pages)
        router.announced(msgspec.structs.replace(worker(f"d-{pages}", "decode"), model=facts))
    assert router.models()["tiny"].pool_pages == 50
