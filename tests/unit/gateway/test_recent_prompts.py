"""Where a prompt went lately, what begins alike goes too, before any pager has told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.unit.gateway.routes import (
    FACTS,
    PAGE,
    SALT,
    TOKENS,
    chosen,
    names,
    pager,
    stored,
    want,
    worker,
)

from pagemesh.gateway.calls.events import Route, Worker
from pagemesh.gateway.routing import recent_prompts
from pagemesh.gateway.routing.key_memory import KeyMemory
from pagemesh.gateway.routing.recent_prompts import RecentPrompts
from pagemesh.gateway.routing.router import Router
from pagemesh.wire.identity import tenant_root
from pagemesh.wire.tokens import U32

ROOT = b"r" * 32
P, D = Worker("p", 1), Worker("d", 1)


def tokens(count: int, *, differs_at: int | None = None) -> U32:
    made = np.arange(count, dtype="<u4")
    if differs_at is not None:
        made[differs_at:] += 1
    return made


def route(worker: Worker = P, root: bytes = ROOT) -> Route:
    return Route(worker, D, b"m" * 32, root, 0)


def test_of_prompts_that_begin_alike_the_longest_beginning_counts() -> None:
    recent = RecentPrompts()
    recent.sent(route(), "a", tokens(100))
    recent.sent(route(), "a", tokens(100, differs_at=40))
    recent.sent(route(), "b", tokens(50))
    assert recent.shared_tokens(ROOT, tokens(120), ()) == {"a": 100, "b": 50}
    assert recent.shared_tokens(ROOT, tokens(120, differs_at=70), ()) == {"a": 70, "b": 50}
    assert recent.shared_tokens(ROOT, tokens(30), ()) == {"a": 30, "b": 30}
    assert recent.shared_tokens(ROOT, tokens(120, differs_at=5), ()) == {}
    assert recent.shared_tokens(b"o" * 32, tokens(120), ()) == {}, "of another tenant"
    recent.check()


def test_what_is_over_is_forgotten_when_the_pager_has_told_twice_since() -> None:
    recent, sent = RecentPrompts(), route()
    recent.sent(sent, "a", tokens(64))
    for _ in range(5):
        recent.told("a")
    assert recent.shared_tokens(ROOT, tokens(64), ()) == {"a": 64}, "it is being computed"
    recent.ended(sent)
    recent.told("b")
    recent.told("a")
    assert recent.shared_tokens(ROOT, tokens(64), ()) == {"a": 64}, "told before it was cached"
    recent.told("a")
    assert recent.shared_tokens(ROOT, tokens(64), ()) == {}
    recent.check()


def test_what_a_lost_worker_was_computing_is_forgotten_and_what_it_has_computed_is_not() -> None:
    recent, over = RecentPrompts(), route()
    recent.sent(over, "a", tokens(64))
    recent.ended(over)
    recent.sent(route(), "a", tokens(96))
    recent.sent(route(D), "a", tokens(80))
    recent.lost(P)
    assert recent.shared_tokens(ROOT, tokens(96), ()) == {"a": 80}
    assert recent.shared_tokens(ROOT, tokens(96), {D}) == {"a": 64}
    recent.check()


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_prompts, "PROMPTS_MAX", 3)
    monkeypatch.setattr(recent_prompts, "TOKEN_COUNT_MAX", 200)
    recent, routes = RecentPrompts(), [route() for _ in range(7)]
    recent.sent(routes[0], "a", tokens(201))
    recent.sent(routes[1], "a", tokens(15))
    assert recent.shared_tokens(ROOT, tokens(300), ()) == {}, "too long, and too short to tell"
    for number, each in enumerate(routes[2:6]):
        recent.sent(each, f"{number}", tokens(40))
        recent.sent(each, f"{number}", tokens(40))
        recent.check()
    assert set(recent.shared_tokens(ROOT, tokens(40), ())) == {"1", "2", "3"}
    recent.sent(routes[6], "last", tokens(150))
    assert set(recent.shared_tokens(ROOT, tokens(40), ())) == {"3", "last"}
    recent.ended(routes[2])
    recent.check()


def test_of_many_that_begin_alike_the_latest_are_looked_at() -> None:
    recent = RecentPrompts()
    kept = [route() for _ in range(recent_prompts.COMPARED_MAX + 1)]
    for number, each in enumerate(kept):
        recent.sent(each, f"{number}", tokens(32))
    found = recent.shared_tokens(ROOT, tokens(32), ())
    assert set(found) == {f"{number}" for number in range(1, len(kept))}


# Of a router -------------------------------------------------------------------------------------


def test_the_next_turn_goes_straight_to_decode_before_any_pager_has_told(router: Router) -> None:
    for one in (worker("p", "prefill"), worker("d", "decode"), pager("a")):
        router.announced(one)
    first = chosen(router, want(256))
    assert names(first) == ("p", "d")
    assert names(chosen(router, want(300))) == ("p", "d"), "chosen, and not sent"
    router.count(first, 1)
    following = chosen(router, want(300))
    assert names(following) == ("d", "") and following.predicted_tokens == 256
    assert names(chosen(router, want(300), read_cache=False)) == ("p", "d")
    router.count(first, -1)
    router.pages_changed(stored("a", 1, 2))
    router.pages_changed(stored("a", 2, 2, first=2))
    assert chosen(router, want(300)).predicted_tokens == 4 * PAGE, "the pager has told"
    router.check()


def test_keys_are_made_only_where_the_index_could_change_something(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    look = KeyMemory.cached_pages

    def noted(memory: KeyMemory, root: bytes, tokens: U32, *rest: Any) -> dict[str, int]:
        looked.append(len(tokens))
        return look(memory, root, tokens, *rest)

    monkeypatch.setattr(KeyMemory, "cached_pages", noted)
    for one in (worker("p", "prefill"), worker("d", "decode"), pager("a")):
        router.announced(one)
    first = chosen(router, want(240))
    router.count(first, 1)
    for count, looks in ((304, []), (305, [305])):
        looked.clear()
        assert chosen(router, want(count)).predicted_tokens == 240
        assert looked == looks
    router.announced(worker("d", "decode", host="b"))
    looked.clear()
    chosen(router, want(304))
    assert looked == [304], "there are two hosts"


def test_what_begins_alike_goes_to_the_host_that_has_computed_it(router: Router) -> None:
    for host in ("a", "b"):
        router.announced(worker(f"d{host}", "decode", host=host))
        router.announced(pager(host))
    first = chosen(router, want(320))
    router.count(first, 1)
    router.announced(worker(first.worker.name, "decode", host=first.worker.name[-1]))  # no queue
    again = chosen(router, want(320))
    assert again.worker == first.worker
    assert again.predicted_tokens == 319 and again.root == tenant_root(FACTS.model_root, SALT)
    other = chosen(router, want(320, avoid=frozenset({first.worker})))
    assert other.worker != first.worker and other.predicted_tokens == 0


def test_what_a_lost_worker_should_have_computed_is_not_expected(router: Router) -> None:
    for one in (worker("p", "prefill"), worker("d", "decode"), worker("p2", "prefill")):
        router.announced(one)
    first = chosen(router, want(320))
    router.count(first, 1)
    router.lost(first.worker)
    assert chosen(router, want(len(TOKENS))).predicted_tokens == 0


def test_what_a_host_has_that_is_gone_says_nothing_of_the_one_that_is_there(router: Router) -> None:
    router.announced(worker("d", "decode", host="a"))
    first = chosen(router, want(320))
    router.count(first, 1)
    router.count(first, -1)
    router.announced(worker("e", "decode", host="b"))
    router.announced(pager("b"))
    router.pages_changed(stored("b", 1, 12))
    router.lost(first.worker)
    there = chosen(router, want(320))
    assert (there.worker.name, there.predicted_tokens) == ("e", 12 * PAGE)
