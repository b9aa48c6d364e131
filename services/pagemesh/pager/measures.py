"""The pager's Prometheus metrics and trace spans.

Utilisation counts *pinned and held* pages; idle cached pages are no pressure.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pagemesh.pager.books import Books
from pagemesh.pager.tree.leaving import Why
from pagemesh.runtime import metrics, semconv, trace
from pagemesh.runtime.spans import Attribute, record_span
from pagemesh.wire.messages import Message, Refused, name_of
from pagemesh.wire.pager_messages import Granted, Queued

_pages = metrics.gauge("pager_pages", "Pages by state.", ["state"])
_leases = metrics.gauge("pager_leases", "Open leases, including draining ones.")
_tickets = metrics.gauge("pager_tickets", "Open tickets.")
_waiters = metrics.gauge("pager_waiters", "Sequences waiting for pages.")
_in_flight_waiters = metrics.gauge(
    "pager_in_flight_waiters", "Sequences waiting for others to compute their prefix."
)
_in_flight_saved = metrics.counter(
    "pager_in_flight_saved_tokens_total",
    "Prompt tokens not computed twice because sequences waited for others to compute them.",
)
_sessions = metrics.gauge("pager_sessions", "Open worker sessions.")
_held_back = metrics.gauge(
    "pager_quota_waiters", "Sequences waiting until their tenants use fewer pages."
)
_tenants = metrics.gauge(
    "pager_tenant_pages", "Pages of tenants with a quota, and their quotas.", ["tenant", "state"]
)
_wasted = metrics.gauge(
    "pager_wasted_slots", "Empty token slots in pages that sequences use, by kind.", ["kind"]
)
_used_slots = metrics.gauge("pager_used_slots", "Token slots in pages that sequences use.")
_contiguous = metrics.gauge(
    "pager_contiguous_wasted_slots",
    "Token slots that would be wasted if each sequence's maximum length were allocated "
    "contiguously.",
)
_promised = metrics.gauge(
    "pager_promised_pages", "Free or cached pages promised to prompts being computed."
)
_own_bytes = metrics.gauge(
    "pager_own_bytes",
    "Memory of the pager process, mostly its index; files that it maps are not included.",
)
_timed = metrics.gauge("pager_timed_edges", "Cached prefixes with a time to live.")
evicted_pages = metrics.counter(
    "pager_evicted_pages_total", "Pages that left a tier of the cache, by reason.",
    ["tier", "reason"],
)  # fmt: skip
"""The pool's are counted here, those of the disk in ``tier_measures``."""
damaged_headers = metrics.counter(
    "pager_damaged_headers_total",
    "Pages whose headers were damaged or half-written when the pager took over its pool.",
)
"""Counted where a pool is taken over (``storage.pool_opening``)."""
_preempted = metrics.counter("pager_preemptions_total", "Leases preempted for older sequences.")
_answers = metrics.counter("pager_answers_total", "Requests answered.", ["request", "answer"])
_tokens = metrics.counter(
    "pager_prompt_tokens_total",
    "Tokens of prompts that are or recently were cached, by fate.",
    ["fate"],
)
# Cached, since finding a counter by its labels takes longer than counting. The cache is bounded as
# the labels are, by the number of message types.
_answers_of = cache(_answers.labels)

_SAMPLE_MS = 400
"""How often the ledger is read; ticks come more often while there are page events to publish."""
_WASTE_MS = 1_000
"""How often waste is counted, which looks at every lease."""
_WORTH_A_SPAN = {
    "pager.admit", "pager.extend", "pager.commit", "pager.fork", "pager.release",
    "pager.offer", "pager.redeem", "pager.withdraw", "pager.cancel_ticket",
}  # fmt: skip


class Measures:
    """Gauges and counters of one pager life; counters continue across lives."""

    def __init__(self) -> None:
        self._left_pages = dict.fromkeys(Why, 0)
        self._fates: dict[str, int] = {}
        _tenants.clear()
        self._tenants: set[str] = set()
        """Tenants that have series of their own now."""
        self._preempted_count = 0
        self._saved_tokens = 0
        self._before = (0, 0)
        self._due_ms = self._waste_due_ms = 0

    def before(self, books: Books) -> None:
        """Before an event is handled: note what was evicted and preempted so far."""
        self._before = (books.pool.evicted, books.preempted_count)

    def look(self, books: Books) -> None:
        """``sample``, unless that was done just now."""
        if books.now_ms >= self._due_ms:
            self._due_ms = books.now_ms + _SAMPLE_MS
            self.sample(books)

    def sample(self, books: Books) -> None:
        """Read the ledger."""
        pool = books.pool
        for state in ("free", "held", "pinned", "idle", "draining"):
            _pages.labels(state).set(getattr(pool, state))
        _leases.set(len(books.leases))
        _tickets.set(len(books.tickets))
        _waiters.set(len(books.waiting))
        _in_flight_waiters.set(books.in_flight.wait_count)
        _in_flight_saved.inc(books.in_flight.saved_tokens - self._saved_tokens)
        self._saved_tokens = books.in_flight.saved_tokens
        _sessions.set(sum(1 for session in books.sessions.values() if session.is_open))
        for why, count in books.forest.left_pages.items():
            evicted_pages.labels("pool", why.value).inc(count - self._left_pages[why])
            self._left_pages[why] = count
        self._sample_fates(books)
        self._sample_waste(books)
        self._sample_tenants(books)
        _preempted.inc(books.preempted_count - self._preempted_count)
        self._preempted_count = books.preempted_count

    def _sample_fates(self, books: Books) -> None:
        """Tokens of admitted prompts, each prompt once, whether it was queued or not. Prompts
        admitted again count apart: what they find cached is their own pages."""
        fates = {"delivered": books.cached_tokens, "admitted_again": books.again_tokens}
        fates |= {f"lost_{reason}": count for reason, count in books.lost_tokens.items()}
        for fate, count in fates.items():
            _tokens.labels(fate).inc(count - self._fates.get(fate, 0))
        self._fates = fates

    def _sample_waste(self, books: Books) -> None:
        pool = books.pool
        _promised.set(books.promises.page_count)
        _timed.set(len(books.forest.lifetimes))
        if books.now_ms < self._waste_due_ms:
            return
        self._waste_due_ms = books.now_ms + _WASTE_MS
        _own_bytes.set(own_bytes())
        # Shares of the used slots are asked for, so both are read at one moment.
        _used_slots.set((pool.held + pool.pinned) * books.facts.page_size)
        waste = books.waste
        _wasted.labels("internal").set(waste.internal_slots)
        _wasted.labels("reservation").set(waste.reservation_slots)
        _wasted.labels("external").set(0)  # any free page will do
        _contiguous.set(waste.contiguous_slots)

    def _sample_tenants(self, books: Books) -> None:
        """Label values are bounded: only tenants whose limits the operator lists have accounts."""
        _held_back.set(books.waiting.count - len(books.waiting))
        accounts = books.accounts.by_tenant
        for tenant in self._tenants - accounts.keys():
            for state in ("used", "idle", "quota"):
                _tenants.remove(tenant, state)
        self._tenants = set(accounts)
        for tenant, account in accounts.items():
            _tenants.labels(tenant, "used").set(account.used_pages)
            _tenants.labels(tenant, "idle").set(account.idle_pages)
            _tenants.labels(tenant, "quota").set(account.quota_pages)

    def answered(
        self, request: Message, answer: Message, caller: trace.TraceContext | None,
        start_us: int, end_us: int, books: Books,
    ) -> None:  # fmt: skip
        """Count an answer, and record its span under the caller's, if there is one."""
        asked = name_of(type(request))
        code = answer.code if isinstance(answer, Refused) else name_of(type(answer))
        _answers_of(asked, code).inc()
        if caller is None or asked not in _WORTH_A_SPAN:
            return
        record_span(
            asked,
            caller.child(),
            start_us=start_us,
            end_us=end_us,
            attributes=self._attributes(asked, answer, books),
            kind="server",
            error=answer.code if isinstance(answer, Refused) else "",
        )

    def _attributes(self, asked: str, answer: Message, books: Books) -> dict[str, Attribute]:
        attributes: dict[str, Attribute] = {}
        if isinstance(answer, Granted) and asked == "pager.admit":
            waterfall = answer.waterfall
            attributes = {
                semconv.PAGEMESH_LEASE: f"{answer.lease:x}",
                semconv.PAGEMESH_TOKENS_AVAILABLE: waterfall.available_tokens,
                semconv.PAGEMESH_TOKENS_SELECTED: waterfall.selected_tokens,
                semconv.PAGEMESH_TOKENS_DELIVERED: waterfall.delivered_tokens,
            }
            if waterfall.awaited_tokens or waterfall.awaited_ms:
                attributes[semconv.PAGEMESH_IN_FLIGHT_TOKENS] = waterfall.awaited_tokens
                attributes[semconv.PAGEMESH_IN_FLIGHT_WAITED_MS] = waterfall.awaited_ms
            if waterfall.fetched_tokens:
                attributes[semconv.PAGEMESH_DISK_TOKENS] = waterfall.fetched_tokens
            for reason, count in waterfall.lost.items():
                attributes[f"{semconv.PAGEMESH_TOKENS_LOST}.{reason}"] = count
        elif isinstance(answer, Queued):
            attributes = {"pagemesh.queue.ahead": answer.ahead_count}
        evicted_pages = books.pool.evicted - self._before[0]
        preempted_count = books.preempted_count - self._before[1]
        if evicted_pages or preempted_count:
            attributes["pagemesh.evicted.pages"] = evicted_pages
            attributes["pagemesh.preempted.count"] = preempted_count
        return attributes


def own_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Resident memory of this process in bytes, without mapped files; 0 if it cannot be read."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return 0
    kib = next((line.split()[1] for line in lines if line.startswith("RssAnon:")), "0")
    return 1024 * int(kib)
