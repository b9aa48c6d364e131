"""Who computes prompts where prefill and decode workers share their cores."""

from __future__ import annotations

import pytest
from tests.unit.gateway.routes import (
    PAGE,
    SECRET,
    chosen,
    names,
    pager,
    sent,
    stored,
    want,
    worker,
)

from pagemesh.gateway.calls.events import Worker
from pagemesh.gateway.routing.router import Router, RouterLimits


def test_who_has_company_on_shared_cores_computes_prompts_itself(router: Router) -> None:
    for role in ("prefill", "decode"):
        router.announced(worker(role[0], role, cores=b"\x03"))
    first, second = sent(router, want()), sent(router, want())
    assert (names(first), names(second)) == (("p", "d"), ("d", ""))
    router.announced(worker("d", "decode", cores=b"\x03", waiting=1))  # it heard of neither
    third = sent(router, want())
    assert names(third) == ("d", "")
    for route in (first, second):
        router.count(route, -1)
    assert names(chosen(router, want())) == ("d", ""), "the third is still there"
    router.count(third, -1)
    assert names(chosen(router, want())) == ("p", "d")


def test_what_other_gateways_sent_is_company_and_what_we_sent_is_not_counted_twice(
    router: Router,
) -> None:
    router.announced(worker("p", "prefill", cores=b"\x01"))
    router.announced(worker("d", "decode", cores=b"\x01", running=1))
    ours = sent(router, want())
    assert names(ours) == ("d", "")
    router.announced(worker("d", "decode", cores=b"\x01", running=2))
    router.count(ours, -1)
    assert names(chosen(router, want())) == ("d", "")
    router.count(ours, 1)
    router.announced(worker("d", "decode", cores=b"\x01", running=1))
    router.count(ours, -1)
    assert names(chosen(router, want())) == ("p", "d")


def test_what_a_worker_had_before_it_was_silent_is_not_taken_off_its_company(
    router: Router,
) -> None:
    router.announced(worker("p", "prefill", cores=b"\x01"))
    router.announced(worker("d", "decode", cores=b"\x01"))
    before = sent(router, want())
    router.lost(Worker("d", 1))
    router.announced(worker("d", "decode", cores=b"\x01", running=1))
    router.count(before, -1)
    assert names(chosen(router, want())) == ("d", "")


@pytest.mark.parametrize(
    ("prefill", "decode"), [(b"\x01", b"\x02"), (b"", b""), (b"\x03", b""), (b"", b"\x03")]
)
def test_a_prefill_worker_with_cores_of_its_own_gets_every_prompt(
    router: Router, prefill: bytes, decode: bytes
) -> None:
    router.announced(worker("p", "prefill", cores=prefill))
    router.announced(worker("d", "decode", cores=decode))
    assert [names(sent(router, want())) for _ in range(3)] == [("p", "d")] * 3


def test_beside_one_that_shares_a_prefill_worker_with_cores_of_its_own_gets_every_prompt(
    router: Router,
) -> None:
    router.announced(worker("p", "prefill", cores=b"\x01"))
    router.announced(worker("apart", "prefill", cores=b"\x02", waiting=10))
    router.announced(worker("d", "decode", cores=b"\x01", running=1))
    assert [names(sent(router, want())) for _ in range(3)] == [("apart", "d")] * 3
    avoid = frozenset({Worker("apart", 1)})
    assert names(chosen(router, want(avoid=avoid))) == ("d", "")


def test_on_shared_cores_a_suffix_has_to_be_longer_to_be_handed_over(router: Router) -> None:
    for role in ("prefill", "decode"):
        router.announced(worker(role[0], role, cores=b"\x03"))
    assert names(chosen(router, want(256))) == ("d", "")
    assert names(chosen(router, want(257))) == ("p", "d")
    router.announced(pager("a"))
    router.pages_changed(stored("a", 1, 4))
    route = chosen(router, want())
    assert names(route) == ("d", "") and route.predicted_tokens == 4 * PAGE
    avoid = frozenset({Worker("d", 1)})
    assert names(chosen(router, want(avoid=avoid))) == ("p", "d")


def test_where_all_prompts_are_to_be_handed_over_shared_cores_make_no_difference() -> None:
    router = Router(SECRET, RouterLimits(short_suffix_tokens=64, always_prefill=True))
    for role in ("prefill", "decode"):
        router.announced(worker(role[0], role, cores=b"\x03"))
    assert names(chosen(router, want(64))) == ("d", "")
    assert names(chosen(router, want(65))) == ("p", "d")


def test_company_of_any_decode_worker_on_the_cores_counts(router: Router) -> None:
    router.announced(worker("p", "prefill", cores=b"\x03"))
    router.announced(worker("busy", "decode", cores=b"\x03", running=8))
    router.announced(worker("free", "decode", cores=b"\x03"))
    assert names(chosen(router, want())) == ("free", "")


def test_a_decode_worker_to_avoid_is_not_given_prompts_for_its_company(router: Router) -> None:
    router.announced(worker("p", "prefill", cores=b"\x03"))
    router.announced(worker("d", "decode", cores=b"\x03", running=8))
    assert names(chosen(router, want(avoid=frozenset({Worker("d", 1)})))) == ("p", "d")
    both = frozenset({Worker("d", 1), Worker("p", 1)})
    assert names(chosen(router, want(avoid=both))) in (("p", "d"), ("d", ""))


def test_prompts_are_always_handed_over_where_that_is_wanted() -> None:
    router = Router(SECRET, RouterLimits(always_prefill=True))
    for role in ("prefill", "decode"):
        router.announced(worker(role[0], role, cores=b"\x03"))
    assert [names(sent(router, want())) for _ in range(3)] == [("p", "d")] * 3
