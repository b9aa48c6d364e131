"""Choosing workers, and what the choice is made from."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from tests.unit.gateway.routes import (
    FACTS,
    KEYS,
    PAGE,
    SALT,
    chosen,
    names,
    pager,
    sent,
    stored,
    want,
    worker,
)

from pagemesh.gateway.calls.events import PagesFrom, Route, Worker
from pagemesh.gateway.routing.page_index import IndexState, PageIndex
from pagemesh.gateway.routing.router import Router
from pagemesh.wire.errors import Busy, NoCapacity, NotReady, Superseded
from pagemesh.wire.identity import tenant_root
from pagemesh.wire.pager_reports import PagesChanged, PagesSnapshot
from pagemesh.wire.presence import Load, PageNeeds, Role, State


def leading(index: PageIndex) -> int:
    """How many of ``KEYS`` the index has in a row, from the first on."""
    return sum(1 for _ in itertools.takewhile(index.__contains__, KEYS.tolist()))


def test_a_long_prompt_goes_to_prefill_and_is_handed_to_decode(router: Router) -> None:
    for one in (worker("p", "prefill"), worker("d", "decode")):
        router.announced(one)
    route = chosen(router, want())
    assert names(route) == ("p", "d")
    assert route.root == tenant_root(FACTS.model_root, SALT)


def test_a_short_prompt_or_suffix_goes_straight_to_decode(router: Router) -> None:
    for one in (worker("p", "prefill"), worker("d", "decode"), pager("a")):
        router.announced(one)
    assert names(chosen(router, want(64))) == ("d", "")
    assert names(chosen(router, want(65))) == ("p", "d")
    router.pages_changed(stored("a", 1, 18))
    route = chosen(router, want())
    assert names(route) == ("d", "")
    assert route.predicted_tokens == 18 * PAGE
    assert names(chosen(router, want(), read_cache=False)) == ("p", "d")


def test_a_route_says_how_pages_are_asked_for_once_pager_and_worker_have_said_it(
    router: Router,
) -> None:
    needs = PageNeeds(growth_tokens=32, first_tokens=64)
    router.announced(worker("d", "decode"))
    assert chosen(router, want()).pages is None, "the worker asks for itself"
    router.announced(msgspec.structs.replace(worker("d", "decode"), needs=needs))
    assert chosen(router, want()).pages is None, "no pager is known"
    router.announced(pager("a", epoch=0))
    assert chosen(router, want()).pages is None, "it has no pool"
    router.announced(pager("a", epoch=3))
    assert chosen(router, want()).pages == PagesFrom("a", 3, needs)
    for running, pages in ((7, PagesFrom("a", 3, needs)), (8, None)):
        load = Load(running_count=running, sequence_count_max=8)
        router.announced(msgspec.structs.replace(worker("d", "decode"), needs=needs, load=load))
        assert chosen(router, want()).pages == pages, "a worker of eight refuses the ninth"


def test_a_new_life_has_none_of_what_was_sent_to_the_last_one(router: Router) -> None:
    router.announced(worker("p", "prefill", cores=b"\x03"))
    router.announced(worker("d", "decode", cores=b"\x03"))
    old = sent(router, want())
    router.announced(worker("d", "decode", cores=b"\x03", incarnation=2))
    fresh = sent(router, want())
    assert names(fresh) == ("p", "d")
    router.count(old, -1)
    assert names(chosen(router, want())) == ("d", "")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_with_one_role_missing_the_other_does_all(router: Router, role: Role) -> None:
    router.announced(worker("only", role))
    for tokens in (10, 320):
        assert names(chosen(router, want(tokens))) == ("only", "")


def test_with_nobody_ready_it_says_so(router: Router) -> None:
    router.announced(worker("p", "prefill", state="starting"))
    router.announced(worker("d", "decode", state="draining"))
    found = router.choose("tiny", SALT, want())
    assert isinstance(found, NotReady) and found.retry_after_ms > 0
    assert isinstance(router.choose("other", SALT, want()), NotReady)


def test_a_request_goes_to_workers_of_its_model_however_idle_others_are(router: Router) -> None:
    facts = msgspec.structs.replace(FACTS, model="other")
    router.announced(msgspec.structs.replace(worker("idle", "decode"), model=facts))
    assert isinstance(router.choose("tiny", SALT, want()), NotReady)
    router.announced(worker("d", "decode", waiting=1_000_000))
    assert names(chosen(router, want())) == ("d", "")


def test_what_fits_no_pool_is_told_so(router: Router) -> None:
    router.announced(worker("d", "decode"))
    assert isinstance(router.choose("tiny", SALT, want(growth=2_000)), NoCapacity)


def test_what_fills_a_pool_to_its_last_token_fits(router: Router) -> None:
    router.announced(worker("d", "decode"))
    room = FACTS.pool_pages * PAGE - 320
    assert names(chosen(router, want(growth=room))) == ("d", "")


def test_the_host_that_has_the_prefix_is_preferred_until_its_queue_is_longer(
    router: Router,
) -> None:
    for host in ("a", "b"):
        router.announced(worker(f"d-{host}", "decode", host=host))
        router.announced(pager(host))
    router.pages_changed(stored("b", 1, 10))
    assert names(chosen(router, want())) == ("d-b", "")
    router.announced(worker("d-b", "decode", host="b", waiting=500))
    router.announced(worker("d-a", "decode", host="a"))
    assert names(chosen(router, want())) == ("d-a", "")


def test_a_route_tells_what_it_passed_over_on_another_host(router: Router) -> None:
    for host in ("a", "b"):
        router.announced(worker(f"d-{host}", "decode", host=host))
        router.announced(pager(host))
    router.pages_changed(stored("a", 1, 4))
    router.pages_changed(stored("b", 1, 10))
    best = chosen(router, want())
    assert (best.predicted_tokens, best.elsewhere_tokens) == (10 * PAGE, 0)
    router.announced(worker("d-b", "decode", host="b", waiting=500))
    quick = chosen(router, want())
    assert (quick.predicted_tokens, quick.elsewhere_tokens) == (4 * PAGE, 6 * PAGE)


def test_work_sent_since_the_last_announcement_counts(router: Router) -> None:
    for name in ("x", "y"):
        router.announced(worker(name, "decode"))
    assert {chosen(router, want()).worker.name for _ in range(2)} == {"x", "y"}


def test_a_host_short_of_pages_is_used_last(router: Router) -> None:
    for host, free in (("a", 0), ("b", 100)):
        router.announced(worker(f"d-{host}", "decode", host=host))
        router.announced(pager(host, free=free))
    assert names(chosen(router, want())) == ("d-b", "")


def test_a_host_without_a_pager_is_used_only_when_there_is_no_other(router: Router) -> None:
    for host, waiting in (("a", 0), ("b", 1_000_000)):
        router.announced(worker(f"d-{host}", "decode", host=host, waiting=waiting))
        router.announced(pager(host))
    assert names(chosen(router, want())) == ("d-a", "")
    router.lost(Worker("pager-a", 1))
    assert names(chosen(router, want())) == ("d-b", "")
    assert names(chosen(router, want(avoid=frozenset({Worker("d-b", 1)})))) == ("d-a", "")
    router.lost(Worker("pager-b", 1))
    assert names(chosen(router, want())) == ("d-a", "")


def test_an_avoided_worker_is_used_only_when_there_is_no_other(router: Router) -> None:
    router.announced(worker("x", "decode"))
    avoid = frozenset({Worker("x", 1)})
    assert names(chosen(router, want(avoid=avoid))) == ("x", "")
    router.announced(worker("y", "decode", waiting=1_000_000))
    assert names(chosen(router, want(avoid=avoid))) == ("y", "")


def test_of_two_routes_that_with_fewer_workers_to_avoid_is_taken(router: Router) -> None:
    router.announced(worker("p", "prefill"))
    router.announced(worker("q", "prefill", waiting=10_000))
    router.announced(worker("d", "decode"))
    avoid = frozenset({Worker("p", 1), Worker("d", 1)})
    assert names(chosen(router, want(avoid=avoid))) == ("q", "d")


def test_a_short_prompt_goes_to_prefill_when_all_decode_workers_are_to_be_avoided(
    router: Router,
) -> None:
    for one in (worker("p", "prefill"), worker("d", "decode"), worker("e", "decode")):
        router.announced(one)
    d, e, p = (Worker(name, 1) for name in "dep")
    assert names(chosen(router, want(64, avoid=frozenset({d})))) == ("e", "")
    assert names(chosen(router, want(64, avoid=frozenset({d, e})))) == ("p", "d")
    assert names(chosen(router, want(64, avoid=frozenset({d, e, p})))) == ("d", "")


def test_other_weights_do_not_continue_a_sequence(router: Router) -> None:
    router.announced(worker("d", "decode"))
    assert isinstance(router.choose("tiny", SALT, want(model_root=b"x" * 32)), Superseded)
    assert names(chosen(router, want(model_root=FACTS.model_root))) == ("d", "")


def test_a_handover_stays_on_one_host(router: Router) -> None:
    router.announced(worker("p", "prefill", host="a"))
    router.announced(worker("d", "decode", host="b", waiting=10_000))
    assert names(chosen(router, want())) == ("p", "")


def test_who_is_lost_is_not_chosen_and_a_late_loss_of_an_older_life_is_ignored(
    router: Router,
) -> None:
    router.announced(worker("d", "decode"))
    router.lost(Worker("d", 99))
    assert names(chosen(router, want())) == ("d", "")
    router.lost(Worker("d", 1))
    assert isinstance(router.choose("tiny", SALT, want()), Busy)
    assert router.models() == {}


def test_who_does_not_listen_is_not_chosen_until_it_announces_itself(router: Router) -> None:
    router.announced(worker("d", "decode"))
    router.absent(Worker("d", 1))
    assert isinstance(router.choose("tiny", SALT, want()), Busy)
    router.announced(worker("d", "decode"))
    assert names(chosen(router, want())) == ("d", "")


@pytest.mark.parametrize("state", ["ready", "draining"])
def test_that_a_worker_does_not_listen_is_news_once_until_it_announces_itself(
    router: Router, state: State
) -> None:
    for _ in range(2):
        router.announced(worker("d", "decode", state=state))
        assert [router.absent(Worker("d", 1)) for _ in range(3)] == [True, False, False]
    assert not router.absent(Worker("d", 2))


def test_that_an_older_life_does_not_listen_says_nothing_of_the_newer(router: Router) -> None:
    router.announced(worker("d", "decode", incarnation=2))
    assert not router.absent(Worker("d", 1))
    assert names(chosen(router, want())) == ("d", "")


def test_a_tenants_pages_are_nothing_to_another(router: Router) -> None:
    for one in (worker("d", "decode"), pager("a")):
        router.announced(one)
    router.pages_changed(stored("a", 1, 20))
    other = router.choose("tiny", b"o" * 32, want())
    assert isinstance(other, Route) and other.predicted_tokens == 0


def test_a_gap_in_page_events_asks_for_a_snapshot_and_takes_it_in_parts() -> None:
    index = PageIndex(keys_max=1_000)
    assert index.announced(epoch=1, sequence=0)
    last = PagesSnapshot(host="a", epoch=1, sequence=0, first=0, keys=b"", more=False)
    assert index.snapshot(last) == 0 and index.state is IndexState.FRESH
    assert not index.changed(stored("a", 1, 2))
    assert index.changed(stored("a", 3, 1, first=5))
    keys = KEYS.astype("<u8").tobytes()
    first = PagesSnapshot(host="a", epoch=1, sequence=3, first=0, keys=keys[:80], more=True)
    assert index.snapshot(first) == 10
    rest = PagesSnapshot(host="a", epoch=1, sequence=3, first=10, keys=keys[80:], more=False)
    assert index.snapshot(rest) == 0
    assert index.state is IndexState.FRESH
    assert leading(index) == 20
    assert not index.announced(epoch=1, sequence=3)
    assert index.announced(epoch=1, sequence=4)
    index.check()


def test_a_page_removed_while_a_snapshot_comes_in_stays_removed() -> None:
    index = PageIndex(keys_max=1_000)
    index.announced(epoch=1, sequence=0)
    gone = KEYS[:1].astype("<u8").tobytes()
    index.changed(PagesChanged(host="a", epoch=1, sequence=1, removed=gone))
    keys = KEYS.astype("<u8").tobytes()
    index.snapshot(PagesSnapshot(host="a", epoch=1, sequence=0, first=0, keys=keys, more=False))
    assert leading(index) == 0
    assert len(index) == 19
    index.check()


def test_an_event_between_two_parts_of_a_listing_counts_even_if_it_is_heard_after_the_second() -> (
    None
):
    index = PageIndex(keys_max=1_000)
    index.announced(epoch=1, sequence=0)
    keys = KEYS.astype("<u8").tobytes()
    first = PagesSnapshot(host="a", epoch=1, sequence=0, first=0, keys=keys[:80], more=True)
    assert index.snapshot(first) == 10
    rest = PagesSnapshot(host="a", epoch=1, sequence=1, first=10, keys=keys[80:], more=False)
    assert index.snapshot(rest) == 0
    assert not index.changed(PagesChanged(host="a", epoch=1, sequence=1, removed=keys[40:48]))
    assert leading(index) == 5


def test_a_listing_is_begun_anew_if_an_event_was_missed_after_its_first_part() -> None:
    index = PageIndex(keys_max=1_000)
    index.announced(epoch=1, sequence=0)
    keys = KEYS.astype("<u8").tobytes()
    index.snapshot(PagesSnapshot(host="a", epoch=1, sequence=0, first=0, keys=keys[:80], more=True))
    assert index.changed(stored("a", 2, 1))
    rest = PagesSnapshot(host="a", epoch=1, sequence=2, first=10, keys=keys[80:], more=False)
    assert index.snapshot(rest) == 0
    assert index.announced(epoch=1, sequence=2)
    whole = PagesSnapshot(host="a", epoch=1, sequence=2, first=0, keys=keys[8:], more=False)
    index.snapshot(whole)
    assert len(index) == 19
    index.check()


def test_a_listing_that_is_older_than_the_events_heard_meanwhile_is_followed_by_the_next() -> None:
    index = PageIndex(keys_max=1_000)
    index.announced(epoch=1, sequence=0)
    index.changed(stored("a", 1, 1))
    keys = KEYS.astype("<u8").tobytes()
    index.snapshot(PagesSnapshot(host="a", epoch=1, sequence=0, first=0, keys=keys, more=False))
    assert not index.changed(stored("a", 2, 1)), "nothing was missed"


def test_a_key_whose_removal_was_missed_goes_with_the_next_listing() -> None:
    index = PageIndex(keys_max=1_000)
    index.announced(epoch=1, sequence=0)
    keys = KEYS.astype("<u8").tobytes()
    index.snapshot(PagesSnapshot(host="a", epoch=1, sequence=0, first=0, keys=keys, more=False))
    assert index.changed(PagesChanged(host="a", epoch=1, sequence=3, stored=keys[:8]))
    assert leading(index) == 20, "what was known helps until the listing is here"
    rest = PagesSnapshot(host="a", epoch=1, sequence=3, first=0, keys=keys[8:80], more=False)
    index.snapshot(rest)
    assert leading(index) == len(index) == 10


def test_a_new_life_of_the_pager_forgets_what_the_last_one_said() -> None:
    index = PageIndex(keys_max=1_000)
    index.announced(epoch=1, sequence=0)
    index.changed(stored("a", 1, 20))
    assert index.changed(stored("a", 1, 5, epoch=2))
    assert len(index) == 0


def test_what_a_pager_that_is_gone_had_cached_draws_nobody(router: Router) -> None:
    needs = PageNeeds(growth_tokens=32, first_tokens=64)
    router.announced(msgspec.structs.replace(worker("d", "decode"), needs=needs))
    router.announced(pager("a"))
    router.pages_changed(stored("a", 1, 18))
    router.lost(Worker("pager-a", 2))
    assert chosen(router, want()).predicted_tokens == 18 * PAGE
    router.lost(Worker("pager-a", 1))
    route = chosen(router, want())
    assert (route.predicted_tokens, route.pages) == (0, None)


@pytest.mark.parametrize("late", [1, 2])
def test_a_listing_that_two_lives_of_the_pager_gave_in_part_is_asked_for_anew(late: int) -> None:
    index = PageIndex(keys_max=1_000)
    keys = KEYS.astype("<u8").tobytes()
    index.announced(epoch=1, sequence=0)
    first = PagesSnapshot(host="a", epoch=1, sequence=0, first=0, keys=keys[:80], more=True)
    assert index.snapshot(first) == 10
    index.announced(epoch=2, sequence=0)
    gone = KEYS[:1].astype("<u8").tobytes()
    index.changed(PagesChanged(host="a", epoch=2, sequence=1, removed=gone))
    rest = PagesSnapshot(host="a", epoch=late, sequence=0, first=10, keys=keys[80:], more=False)
    assert index.snapshot(rest) == 0
    index.check()
    assert index.announced(epoch=2, sequence=1)
    whole = PagesSnapshot(host="a", epoch=2, sequence=1, first=0, keys=keys, more=False)
    assert index.snapshot(whole) == 0 and index.state is IndexState.FRESH
    assert leading(index) == 20


def test_a_page_that_one_life_of_the_pager_removed_may_be_listed_by_the_next() -> None:
    index = PageIndex(keys_max=1_000)
    index.announced(epoch=1, sequence=0)
    keys = KEYS.astype("<u8").tobytes()
    index.changed(PagesChanged(host="a", epoch=1, sequence=1, removed=keys[:8]))
    index.announced(epoch=2, sequence=0)
    index.snapshot(PagesSnapshot(host="a", epoch=2, sequence=0, first=0, keys=keys, more=False))
    assert leading(index) == 20
    index.check()


def test_a_full_index_keeps_what_was_stored_first_and_takes_others_when_it_has_room() -> None:
    index = PageIndex(keys_max=5)
    index.announced(epoch=1, sequence=0)
    for sequence, first in enumerate((0, 3, 10), 1):
        index.changed(stored("a", sequence, 3, first=first))
        index.check()
    assert leading(index) == len(index) == 5
    gone = KEYS[2:5].astype("<u8").tobytes()
    index.changed(PagesChanged(host="a", epoch=1, sequence=4, removed=gone))
    index.changed(stored("a", 5, 2, first=2))
    assert leading(index) == len(index) == 4
