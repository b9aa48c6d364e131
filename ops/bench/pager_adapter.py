"""The pager core behind the interface of a harness that times prefix caches:

    prepare   pack the tokens and make the keys that a worker would send
    match     Admit: match the longest prefix, pin it, reserve the rest, all in one request
    alloc     Extend: one page more than the prompt takes, for the tokens to come
    commit    Commit: every full page of the prompt becomes matchable
    release   Release: the lease ends, its pages stay cached

Each call makes the message, has the production core handle it and takes the answer from its
commands, so the time is that of everything a pager process does between decoding a request and
encoding its answer, without the bus. As ``Admit`` reserves the whole prompt, the ``alloc`` of peers
is part of ``match`` here, and ``Extend`` is additional: a second round of accounting, for growth.

``PagerAdapter`` has the default eviction policy and ignores the commands about headers and lease
words; ``PublishingPagerAdapter`` performs them on a real pool file, through the native library,
before the call ends.
Keyed ids for the event stream are made after the answer has been sent, so neither includes them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagemesh.pager.events import Answer, Asked
from pagemesh.pager.eviction import POLICIES, make_policy
from pagemesh.pager.limits import PagerLimits, PoolFacts
from pagemesh.pager.state import PagerCore
from pagemesh.pager.storage.pool_store import PoolStore
from pagemesh.wire.messages import Message, Order, SequenceKey
from pagemesh.wire.pager_messages import (
    Admit,
    Commit,
    Committed,
    Extend,
    Extended,
    Fill,
    Granted,
    OpenSession,
    PoolSpec,
    Release,
    SessionOpened,
)

WORKER, INCARNATION, EPOCH = "bench", 1, 1
ROOT, LAYOUT = bytes(32), bytes(range(32))
PAGE_BYTES = 64
"""Bytes of K and V, which nobody writes here: small, so that large pools fit."""


class Request:
    """A sequence in progress. ``tokens`` is emptied once it has been admitted."""

    __slots__ = ("cached_tokens", "key", "lease", "order", "page_count", "token_count", "tokens")

    def __init__(self, number: int, tokens: bytes, page_size: int) -> None:
        name = f"{number:032x}"
        self.key = SequenceKey(request=name, attempt=1, choice=0)
        self.order = Order(priority=0, arrival_us=number, request=name, choice=0)
        self.tokens, self.token_count = tokens, len(tokens) // 4
        self.page_count = -(-len(tokens) // (4 * page_size))
        self.lease = self.cached_tokens = 0


class PagerAdapter:
    """The core alone, over ``page_count`` pages of ``page_size`` tokens."""

    name = "pagemesh"
    policy_name = next(iter(POLICIES))
    limits = PagerLimits()
    index_only = False

    def __init__(self, page_count: int, page_size: int) -> None:
        self._page_size = page_size
        self._page_count = page_count
        facts = self._open(page_count, page_size)
        policy = make_policy(self.policy_name, page_count)
        self.core = PagerCore(self.limits, facts, policy)
        self._epoch = facts.epoch
        self._count = 0
        spec = PoolSpec(layout_digest=LAYOUT, page_size=page_size, page_bytes=PAGE_BYTES)
        opened = OpenSession(
            worker=WORKER, incarnation=INCARNATION, role="prefill", lock_name="lock", pool=spec
        )
        assert isinstance(self.ask(opened), SessionOpened)

    def _open(self, page_count: int, page_size: int) -> PoolFacts:
        return PoolFacts("bench", EPOCH, 1, page_count, page_size, PAGE_BYTES, LAYOUT, "/nowhere")

    # The interface of the harness

    def native(self, tokens: NDArray[np.int32]) -> bytes:
        """The tokens as they come off the wire; not timed."""
        return tokens.astype("<u4").tobytes()

    def prepare(self, tokens: bytes) -> Request:
        self._count += 1
        return Request(self._count, tokens, self._page_size)

    def match(self, request: Request) -> int:
        """Admit. Returns the cached pages."""
        granted = self.ask(
            Admit(
                key=request.key, order=request.order, worker=WORKER, incarnation=INCARNATION,
                epoch=self._epoch, root=ROOT, tokens=request.tokens,
                reserve_tokens=request.token_count, deadline_ms=60_000,
            )
        )  # fmt: skip
        request.tokens = b""
        assert isinstance(granted, Granted), granted
        request.lease = granted.lease
        request.cached_tokens = granted.cached_tokens
        return granted.cached_tokens // self._page_size

    def alloc(self, request: Request) -> None:
        """Extend by a page."""
        extended = self.ask(
            Extend(
                key=request.key, worker=WORKER, incarnation=INCARNATION, lease=request.lease,
                have_pages=request.page_count, page_count=request.page_count + 1,
            )
        )  # fmt: skip
        assert isinstance(extended, Extended), extended

    def commit(self, request: Request) -> None:
        committed = self.ask(
            Commit(
                key=request.key, worker=WORKER, incarnation=INCARNATION, lease=request.lease,
                fill=Fill(
                    filled_tokens=request.token_count, first_token=request.token_count
                ),
            )
        )  # fmt: skip
        assert isinstance(committed, Committed), committed

    def release(self, request: Request) -> None:
        count = request.token_count
        self.ask(
            Release(
                key=request.key, worker=WORKER, incarnation=INCARNATION, lease=request.lease,
                fill=Fill(filled_tokens=count, first_token=count),
            )
        )  # fmt: skip

    def cached_pages(self) -> int:
        pool = self.core.books.pool
        return pool.pinned + pool.idle

    def free_pages(self) -> int:
        """Pages that are free or evictable."""
        return self.core.books.room

    # Performing commands

    def ask(self, message: Message) -> Message:
        """Have the core handle ``message``."""
        for command in self.core.handle(Asked(None, message), 1_000):
            if type(command) is Answer:
                return command.message
        raise AssertionError("no answer")


class LruPagerAdapter(PagerAdapter):
    """The core with the simplest policy, for comparison with the cost of the default one."""

    name = "pagemesh, LRU"
    policy_name = "lru"


class PublishingPagerAdapter(PagerAdapter):
    """The core, with its commands performed on a pool file of its own."""

    name = "pagemesh, headers and lease words written"

    def _open(self, page_count: int, page_size: int) -> PoolFacts:
        shared = Path("/dev/shm")
        self._folder = tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None)
        spec = PoolSpec(layout_digest=LAYOUT, page_size=page_size, page_bytes=PAGE_BYTES)
        self._store = PoolStore.create(
            Path(self._folder.name), "bench", spec, page_count * PAGE_BYTES
        )
        return self._store.facts

    def ask(self, message: Message) -> Message:
        answer: Message | None = None
        for command in self.core.handle(Asked(None, message), 1_000):
            if type(command) is Answer:
                answer = command.message
            else:
                self._store.perform(command)
        assert answer is not None
        return answer
