"""Where a prompt went lately, what begins alike goes too, before any pager has told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.unit.gateway.routes import (
    FACTS,
    PAGE,
    SALT,
    chosen,
    names,
    pager,
    stored,
    want,
    worker,
)

from pagemesh.gateway.calls.events import Worker
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


def remembered(*answered: tuple[str, int]) -> RecentPrompts:
    """So many tokens that hosts have computed."""
    recent = RecentPrompts()
    for host, count in answered:
        recent.answered(ROOT, tokens(count), host, P)
    return recent


def test_of_prompts_that_begin_alike_the_longest_beginning_counts() -> None:
    recent = remembered(("a", 100), ("b", 50))
    recent.answered(ROOT, tokens(100, differs_at=40), "a", P)
    assert recent.shared_tokens(ROOT, tokens(120), ()) == {"a": 100, "b": 50}
    assert recent.shared_tokens(ROOT, tokens(120, differs_at=70), ()) == {"a": 70, "b": 50}
    assert recent.shared_tokens(ROOT, tokens(30), ()) == {"a": 30, "b": 30}
    assert recent.shared_tokens(ROOT, tokens(120, differs_at=5), ()) == {}
    assert recent.shared_tokens(b"o" * 32, tokens(120), ()) == {}, "of another tenant"
    recent.check()


def test_a_prompt_is_forgotten_when_its_pager_has_told_twice_since() -> None:
    recent = remembered(("a", 64))
    recent.told("b")
    recent.told("a")
    assert recent.shared_tokens(ROOT, tokens(64), ()) == {"a": 64}, "told before it was cached"
    recent.told("b")
    recent.told("a")
    assert recent.shared_tokens(ROOT, tokens(64), ()) == {}
    recent.check()


def test_what_a_worker_to_avoid_computed_does_not_count() -> None:
    recent = remembered(("a", 96))
    recent.answered(ROOT, tokens(64), "a", D)
    assert recent.shared_tokens(ROOT, tokens(96), {P}) == {"a": 64}
    assert recent.shared_tokens(ROOT, tokens(96), {P, D}) == {}


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_prompts, "PROMPTS_MAX", 3)
    monkeypatch.setattr(recent_prompts, "TOKEN_COUNT_MAX", 200)
    recent = remembered(("a", 201), ("a", 15))
    assert recent.shared_tokens(ROOT, tokens(300), ()) == {}, "too long, and too short to tell"
    for number in range(4):
        recent.answered(ROOT, tokens(40), f"{number}", P)
        recent.check()
    assert set(recent.shared_tokens(ROOT, tokens(40), ())) == {"1", "2", "3"}
    recent.answered(ROOT, tokens(150), "last", P)
    assert set(recent.shared_tokens(ROOT, tokens(40), ())) == {"3", "last"}
    recent.check()


def test_of_many_that_begin_alike_the_latest_are_looked_at() -> None:
    count = recent_prompts.COMPARED_MAX + 1
    recent = remembered(*((f"{number}", 32) for number in range(count)))
    found = recent.shared_tokens(ROOT, tokens(32), ())
    assert set(found) == {f"{number}" for number in range(1, count)}


# Of a router -------------------------------------------------------------------------------------


def test_the_next_turn_goes_straight_to_decode_before_any_pager_has_told(router: Router) -> None:
    for one in (worker("p", "prefill"), worker("d", "decode"), pager("a")):
        router.announced(one)
    first = chosen(router, want(256))
    assert names(first) == ("p", "d")
    assert names(chosen(router, want(300))) == ("p", "d"), "chosen, and not sent"
    router.count(first, 1)
    assert names(chosen(router, want(300))) == ("p", "d"), "sent, and not answered"
    router.count(first, -1)
    assert names(chosen(router, want(300))) == ("p", "d"), "given up without an answer"
    router.count(first, 1)
    router.count(first, -1, answered=True)
    following = chosen(router, want(300))
    assert names(following) == ("d", "") and following.predicted_tokens == 256
    assert names(chosen(router, want(300), read_cache=False)) == ("p", "d")
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
    router.count(first, -1, answered=True)
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
    router.count(first, -1, answered=True)
    router.announced(worker(first.worker.name, "decode", host=first.worker.name[-1]))  # no queue
    again = chosen(router, want(320))
    assert again.worker == first.worker
    assert again.predicted_tokens == 319 and again.root == tenant_root(FACTS.model_root, SALT)
    other = chosen(router, want(320, avoid=frozenset({first.worker})))
    assert other.worker != first.worker and other.predicted_tokens == 0


def test_what_a_host_has_that_is_gone_says_nothing_of_the_one_that_is_there(router: Router) -> None:
    router.announced(worker("d", "decode", host="a"))
    first = chosen(router, want(320))
    router.count(first, -1, answered=True)
    router.announced(worker("e", "decode", host="b"))
    router.announced(pager("b"))
    router.pages_changed(stored("b", 1, 12))
    router.lost(first.worker)
    there = chosen(router, want(320))
    assert (there.worker.name, there.predicted_tokens) == ("e", 12 * PAGE)
