"""Runs the production pager core on one request after another; nothing is computed.

A block of the trace is a page of one token, so the production code decides what matches, what is
evicted and what is counted. While a request is served, its whole prompt is pinned, and a page for
the next token: a real pager needs that room too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagemesh.cli.replaying.trace import Trace
from pagemesh.pager.events import Answer, Asked, Tick
from pagemesh.pager.eviction import make_policy
from pagemesh.pager.limits import PagerLimits, PoolFacts
from pagemesh.pager.state import PagerCore
from pagemesh.wire.messages import Message, Order, Refused, SequenceKey
from pagemesh.wire.pager_messages import Admit, Fill, Granted, OpenSession, PoolSpec, Release
from pagemesh.wire.tokens import pack

_WORKER, _EPOCH, _INCARNATION = "replay", 1, 1
_ROOT = bytes(32)
_NEXT_TOKEN = 2**32 - 1
_REPORT_EVERY = _TICK_EVERY = 256


class ReplayPager:
    """A pager of ``page_count`` pages with the eviction policy named ``policy``."""

    def __init__(self, page_count: int, policy: str) -> None:
        facts = PoolFacts("replay", _EPOCH, 1, page_count, 1, 64, _ROOT, "")
        self.core = PagerCore(PagerLimits(), facts, make_policy(policy, page_count))
        self._count = 0
        self._ask(
            OpenSession(
                worker=_WORKER, incarnation=_INCARNATION, role="prefill", lock_name="replay",
                pool=PoolSpec(layout_digest=_ROOT, page_size=1, page_bytes=64),
            )
        )  # fmt: skip

    def serve(self, prompt: Sequence[int]) -> int:
        """How many blocks of ``prompt`` were cached; afterwards all of them are. A prompt larger
        than the pool is refused, as in production, and hits nothing."""
        self._count += 1
        if self._count % _TICK_EVERY == 0:  # lets policy and pool do deferred work
            self.core.handle(Tick(), 0)
        name, size = f"{self._count:032x}", len(prompt)
        key = SequenceKey(request=name, attempt=1, choice=0)
        granted = self._ask(
            Admit(
                key=key, order=Order(priority=0, arrival_us=self._count, request=name, choice=0),
                worker=_WORKER, incarnation=_INCARNATION, epoch=_EPOCH, root=_ROOT,
                tokens=pack([*prompt, _NEXT_TOKEN]), reserve_tokens=size + 1, deadline_ms=60_000,
            )
        )  # fmt: skip
        if isinstance(granted, Refused):
            return 0
        assert isinstance(granted, Granted), granted
        self._ask(
            Release(
                key=key, worker=_WORKER, incarnation=_INCARNATION, lease=granted.lease,
                fill=Fill(filled_tokens=size, first_token=size + 1),
            )
        )  # fmt: skip
        return granted.cached_tokens

    def _ask(self, message: Message) -> Message:
        commands = self.core.handle(Asked(None, message), 0)
        return next(command.message for command in commands if isinstance(command, Answer))


def hit_rate(
    trace: Trace, page_count: int, policy: str, on_requests: Callable[[int], None]
) -> float:
    """The share of the scored blocks that were cached when they were requested. ``on_requests`` is
    called now and then with the number of requests served since the last call."""
    pager = ReplayPager(page_count, policy)
    hits = 0
    for number, prompt in enumerate(trace.prompts):
        found = pager.serve(prompt)
        if number >= trace.scored_from:
            hits += found
        if number % _REPORT_EVERY == 0:
            on_requests(min(_REPORT_EVERY, len(trace.prompts) - number))
    return hits / trace.scored_blocks
