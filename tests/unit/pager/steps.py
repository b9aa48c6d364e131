"""Steps of many pager tests: cache prompts, and send the requests of operators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.unit.pager.rig import ROOT, Rig, Worker

from pagemesh.pager.tree.node import Node
from pagemesh.wire.cache_messages import (
    AskCacheStats,
    CacheInvalidated,
    CacheStats,
    InvalidateCache,
    PinPrefix,
    PrefixPinned,
)
from pagemesh.wire.messages import Message
from pagemesh.wire.pager_messages import Granted

OTHER = bytes(32)
"""Another root."""


def cache(worker: Worker, number: int, tokens: Iterable[int], **how: Any) -> Granted:
    """Compute ``tokens`` and leave their pages cached."""
    ids = list(tokens)
    lease = worker.granted(number, ids, **how)
    worker.release(lease, ids)
    return lease


def pin(rig: Rig, tokens: Iterable[int], root: bytes = ROOT, ttl_s: int | None = None) -> Message:
    return rig.ask(PinPrefix(root=root.hex(), tokens=list(tokens), ttl_s=ttl_s))


def pinned(rig: Rig, tokens: Iterable[int], ttl_s: int | None = None) -> PrefixPinned:
    answer = pin(rig, tokens, ttl_s=ttl_s)
    assert isinstance(answer, PrefixPinned), answer
    return answer


def stats(rig: Rig) -> CacheStats:
    answer = rig.ask(AskCacheStats())
    assert isinstance(answer, CacheStats)
    return answer


def invalidated(rig: Rig, what: str, name: str = "") -> CacheInvalidated:
    answer = rig.ask(InvalidateCache(what=what, name=name))  # type: ignore[arg-type]
    assert isinstance(answer, CacheInvalidated), answer
    return answer


def lives(rig: Rig) -> dict[int, int]:
    """The time until which each page that can be found is kept, in ms."""
    return {page: node.expires_ms for node in _nodes(rig) for page in node.pages}


def in_use(rig: Rig) -> set[int]:
    """Those of these pages that are pinned."""
    return {page for node in _nodes(rig) if node.pins for page in node.pages}


def _nodes(rig: Rig) -> list[Node]:
    trees = rig.core.books.forest.trees.values()
    return [node for tree in trees for node in tree.root.below()]
