"""Choosing workers, and what the choice is made from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from pagemesh.gateway.calls.events import ChooseRoute, PagesFrom, Route, Worker
from pagemesh.gateway.routing.page_index import IndexState, PageIndex
from pagemesh.gateway.routing.router import Router, RouterLimits
from pagemesh.wire.errors import Busy, NoCapacity, NotReady, Superseded
from pagemesh.wire.identity import prefix_keys, tenant_root
from pagemesh.wire.pager_reports import PagesChanged, PagesSnapshot
from pagemesh.wire.presence import Announce, Load, ModelFacts, PageNeeds, Role, State

SECRET = b"secret"
SALT = b"s" * 32
PAGE = 16
FACTS = ModelFacts(
    model="tiny",
    model_root=b"m" * 32,
    context_tokens_max=4_096,
    vocab_tokens=300,
    page_size=PAGE,
    pool_pages=100,
    deterministic=True,
)
TOKENS = np.arange(320, dtype="<u4") % 300
KEYS = prefix_keys(SECRET, tenant_root(FACTS.model_root, SALT), TOKENS, PAGE)


def leading(index: PageIndex) -> int:
    """How many of ``KEYS`` the index has in a row, from the first on."""
    return sum(1 for _ in itertools.takewhile(index.__contains__, KEYS.tolist()))


def worker(
    name: str,
    role: Role,
    *,
    host: str = "a",
    state: State = "ready",
    waiting: int = 0,
    running: int = 0,
    cores: bytes = b"",
    incarnation: int = 1,
) -> Announce:
    return Announce(
        role=role,
        name=name,
        incarnation=incarnation,
        host=host,
        state=state,
        load=Load(waiting_tokens=waiting, running_count=running),
        model=FACTS,
        cores=cores,
    )


def pager(host: str, *, sequence: int = 0, epoch: int = 1, free: int = 100) -> Announce:
    return Announce(
        role="pager",
        name=f"pager-{host}",
        incarnation=1,
        host=host,
        state="ready",
        event_sequence=sequence,
        epoch=epoch,
        free_pages=free,
    )


def stored(host: str, sequence: int, count: int, *, first: int = 0, epoch: int = 1) -> PagesChanged:
    keys = KEYS[first : first + count].astype("<u8").tobytes()
    return PagesChanged(host=host, epoch=epoch, sequence=sequence, stored=keys)


def want(
    tokens: int = 320,
    *,
    avoid: frozenset[Worker] = frozenset(),
    growth: int = 16,
    model_root: bytes | None = None,
) -> ChooseRoute:
    return ChooseRoute(TOKENS[:tokens], growth, 1, avoid, model_root)


@pytest.fixture
def router() -> Iterator[Router]:
    made = Router(SECRET, RouterLimits(short_suffix_tokens=64))
    yield made
    made.check()


def chosen(router: Router, asked: ChooseRoute, *, read_cache: bool = True) -> Route:
    found = router.choose("tiny", SALT, asked, read_cache=read_cache)
    assert isinstance(found, Route), found
    return found


def names(route: Route) -> tuple[str, str]:
    return route.worker.name, route.decode.name if route.decode else ""


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
    load = Load(running_count=8, sequence_count_max=8)
    router.announced(msgspec.structs.replace(worker("d", "decode"), needs=needs, load=load))
    assert chosen(router, want()).pages is None, "it would refuse them"


def sent(router: Router, asked: ChooseRoute) -> Route:
    """The route that one more goes by from now on."""
    route = chosen(router, asked)
    router.count(route, 1)
    return route


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


def test_what_fits_no_pool_is_told_so(router: Router) -> None:
    router.announced(worker("d", "decode"))
    assert isinstance(router.choose("tiny", SALT, want(growth=2_000)), NoCapacity)


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


def test_an_avoided_worker_is_used_only_when_there_is_no_other(router: Router) -> None:
    router.announced(worker("x", "decode"))
    avoid = frozenset({Worker("x", 1)})
    assert names(chosen(router, want(avoid=avoid))) == ("x", "")
    router.announced(worker("y", "decode", waiting=1_000_000))
    assert names(chosen(router, want(avoid=avoid))) == ("y", "")


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


def test_an_index_forgets_the_oldest_keys_above_its_limit() -> None:
    index = PageIndex(keys_max=5)
    index.announced(epoch=1, sequence=0)
    index.changed(stored("a", 1, 20))
    assert len(index) == 5
    index.check()
