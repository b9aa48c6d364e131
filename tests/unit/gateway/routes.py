"""Workers, pagers and prompts for tests of the router, and its choices."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from pagemesh.gateway.calls.events import ChooseRoute, Route, Worker
from pagemesh.gateway.routing.router import Router
from pagemesh.wire.identity import prefix_keys, tenant_root
from pagemesh.wire.pager_reports import PagesChanged
from pagemesh.wire.presence import Announce, Load, ModelFacts, Role, State

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
_NUMBERS = itertools.count(1)
KEYS = prefix_keys(SECRET, tenant_root(FACTS.model_root, SALT), TOKENS, PAGE)


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


def chosen(router: Router, asked: ChooseRoute, *, read_cache: bool = True) -> Route:
    found = router.choose("tiny", SALT, asked, read_cache=read_cache)
    assert isinstance(found, Route), found
    return found


def names(route: Route) -> tuple[str, str]:
    return route.worker.name, route.decode.name if route.decode else ""


def sent(router: Router, asked: ChooseRoute) -> Route:
    """The route of another request in flight, with a unique prompt of the same length."""
    own = (asked.tokens + 1_000 * next(_NUMBERS)).astype("<u4")
    route = chosen(router, replace(asked, tokens=own))
    router.count(route, 1)
    return route
