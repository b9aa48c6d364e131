"""What a router takes note of at most, and whom it names as serving."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.unit.gateway.routes import (
    FACTS,
    PAGE,
    SALT,
    SECRET,
    chosen,
    names,
    pager,
    stored,
    want,
    worker,
)

from pagemesh.gateway.calls.events import Worker
from pagemesh.gateway.routing import router as router_module
from pagemesh.gateway.routing.router import Router, RouterLimits
from pagemesh.wire.errors import NotReady
from pagemesh.wire.presence import State


@pytest.fixture
def small() -> Iterator[Router]:
    """It takes note of two workers, and of the pages of two hosts."""
    made = Router(SECRET, RouterLimits(workers_max=2))
    yield made
    made.check()


@pytest.mark.parametrize(
    ("state", "serves"),
    [("starting", False), ("ready", True), ("draining", False), ("leaving", False)],
)
def test_a_model_is_served_by_those_that_are_ready(
    router: Router, state: State, serves: bool
) -> None:
    router.announced(worker("d", "decode"))
    router.announced(worker("d", "decode", state=state))
    assert router.models() == ({"tiny": FACTS} if serves else {})
    router.announced(worker("d", "decode"))
    router.absent(Worker("d", 1))
    assert router.models() == {}


def test_a_worker_too_many_is_not_noted_until_another_has_gone(small: Router) -> None:
    for name in ("a", "b"):
        small.announced(worker(name, "decode", state="starting"))
    small.announced(worker("c", "decode"))
    assert isinstance(small.choose("tiny", SALT, want()), NotReady)
    small.announced(worker("a", "decode"))
    assert names(chosen(small, want())) == ("a", ""), "it had been noted before"
    small.lost(Worker("a", 1))
    small.announced(worker("c", "decode"))
    assert names(chosen(small, want())) == ("c", "")


def test_of_hosts_too_many_the_one_that_came_first_is_forgotten(small: Router) -> None:
    small.announced(worker("d", "decode", host="a"))
    for host, predicted in (("a", 18 * PAGE), ("b", 18 * PAGE), ("c", 0)):
        small.announced(pager(host))
        small.pages_changed(stored(host, 1, 18))
        assert chosen(small, want()).predicted_tokens == predicted


def test_so_many_pages_of_a_prompt_are_looked_up_and_no_more(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_module, "_KEYED_PAGES_MAX", 4)
    for one in (worker("d", "decode"), pager("a")):
        router.announced(one)
    router.pages_changed(stored("a", 1, 18))
    assert chosen(router, want()).predicted_tokens == 4 * PAGE
