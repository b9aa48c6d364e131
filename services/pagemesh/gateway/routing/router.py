"""Chooses the workers for a request: predicted prefix overlap, queued work, free pages.

All information here is a hint that is a little old. A wrong choice costs time; whether pages are
there is the pager's business. Pure: fed with announcements and page events, asked for a ``Route``.

Both workers of a route run on one host, where a handover moves no page. A prompt with a short
uncached suffix goes straight to a decode worker. So does one whose decode worker shares its cores
with the prefill workers, if that already has other sequences or the suffix is of medium length (ADR
0025). When one role is missing, or is to be avoided, the other does all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from pagemesh.gateway.calls.events import ChooseRoute, PagesFrom, Route, Worker
from pagemesh.gateway.routing.key_memory import KeyMemory
from pagemesh.gateway.routing.page_index import KEY_BYTES, PageIndex
from pagemesh.gateway.routing.recent_prompts import RecentPrompts
from pagemesh.wire.errors import Fault, NoCapacity, NotReady, Superseded
from pagemesh.wire.identity import tenant_root
from pagemesh.wire.pager_reports import PagesChanged, PagesSnapshot
from pagemesh.wire.presence import Announce, Load, ModelFacts, PageNeeds

_KEYED_PAGES_MAX = 4_096
"""Pages of a prompt that are looked up; more would block the event loop for milliseconds."""
_AVOIDED = 1e12
_NO_PAGER_TOKENS = 10**9
"""What waiting for a pager that is gone may cost: more than any queue where there is one."""
_RUNNING_COST_TOKENS = 32
"""How much a running sequence slows a new one down, in prompt tokens: a rough exchange rate."""


@dataclass(frozen=True, slots=True)
class RouterLimits:
    short_suffix_tokens: int = 64
    """A prompt with at most this many uncached tokens goes straight to decode."""
    short_shared_tokens: int = 256
    """The same, where prefill and decode workers share their cores."""
    always_prefill: bool = False
    """Prompts above ``short_suffix_tokens`` always go to a prefill worker, even if it shares its
    cores with the decode worker."""
    index_bytes_max: int = 64 << 20
    """Of each host's page index."""
    workers_max: int = 4_096
    retry_after_ms: int = 1_000


@dataclass(slots=True)
class _Known:
    """A worker as last announced, the work sent to it since, and our sequences open there."""

    worker: Worker
    role: str
    host: str
    facts: ModelFacts
    load: Load
    ready: bool
    drains: bool
    """It takes no new work, and will leave."""
    cores: int
    """One bit for each core on which its steps take turns with other workers'."""
    needs: PageNeeds | None
    open_count: int
    """Our open sequences that it decodes, or will decode."""
    foreign_count: int
    """Sequences of other gateways, as of its last announcement."""
    sent_tokens: int = 0
    sent_count: int = 0
    absent: bool = False
    """A call since that announcement found nobody listening."""

    @property
    def has_company(self) -> bool:
        return self.open_count + self.foreign_count > 0

    @property
    def is_full(self) -> bool:
        """Whether it will most likely refuse more: no pages should be taken from others for
        that."""
        load = self.load
        count = load.running_count + load.waiting_count + self.sent_count
        return count > load.sequence_count_max > 0

    @property
    def queue_tokens(self) -> int:
        running = self.load.running_count + self.load.waiting_count + self.sent_count
        return self.load.waiting_tokens + self.sent_tokens + _RUNNING_COST_TOKENS * running


@dataclass(slots=True)
class _Host:
    index: PageIndex
    pager: Worker | None = None
    epoch: int = 0
    """Of the pager; 0: it has no pool yet."""
    free_pages: int = 0


@dataclass(slots=True)
class Router:
    """Raises nothing on any announcement; those that it cannot use are ignored."""

    secret: bytes = field(repr=False)
    limits: RouterLimits = RouterLimits()
    _workers: dict[str, _Known] = field(default_factory=dict)
    _hosts: dict[str, _Host] = field(default_factory=dict)
    _keys: KeyMemory = field(init=False, repr=False)
    _recent: RecentPrompts = field(default_factory=RecentPrompts, repr=False)

    def __post_init__(self) -> None:
        self._keys = KeyMemory(self.secret)

    # What is known ----------------------------------------------------------------------------

    def announced(self, message: Announce) -> bool:
        """Take note of a service. True when a snapshot of its pages must be asked for."""
        who = Worker(message.name, message.incarnation)
        if message.state == "leaving":
            self.lost(who)
            return False
        if message.role == "pager":
            host = self._host(message.host)
            host.pager, host.epoch = who, message.epoch
            host.free_pages = message.free_pages
            return host.index.announced(message.epoch, message.event_sequence)
        if message.role not in ("prefill", "decode") or message.model is None:
            return False
        had = self._workers.get(message.name)
        if had is not None or len(self._workers) < self.limits.workers_max:
            open_count = had.open_count if had is not None and had.worker == who else 0
            count = message.load.running_count + message.load.waiting_count
            self._workers[message.name] = _Known(
                worker=who,
                role=message.role,
                host=message.host,
                facts=message.model,
                load=message.load,
                ready=message.state == "ready",
                drains=message.state == "draining",
                cores=int.from_bytes(message.cores, "little"),
                needs=message.needs,
                open_count=open_count,
                foreign_count=max(0, count - open_count),
            )
        return False

    def lost(self, who: Worker) -> None:
        """A service is gone."""
        known = self._workers.get(who.name)
        if known is not None and known.worker == who:
            del self._workers[who.name]
        for name, host in list(self._hosts.items()):
            if host.pager == who:
                del self._hosts[name]

    def absent(self, who: Worker) -> bool:
        """Nobody listens on its subject: not ready until it announces itself. True if that is
        news."""
        known = self._workers.get(who.name)
        if known is None or known.worker != who or known.absent:
            return False
        known.ready, known.absent = False, True
        return True

    def pages_changed(self, message: PagesChanged) -> bool:
        """Apply a pager's event. True when a snapshot must be asked for."""
        self._recent.told(message.host)
        return self._host(message.host).index.changed(message)

    def pages_snapshot(self, message: PagesSnapshot) -> int:
        """Apply a part of a snapshot; returns where the next part starts, 0 if there is none."""
        return self._host(message.host).index.snapshot(message)

    def snapshot_failed(self, host: str) -> None:
        self._host(host).index.unload()

    def models(self) -> dict[str, ModelFacts]:
        """What ready workers serve, by name; where they differ, the facts with the smallest
        pool. May be asked on any thread."""
        found: dict[str, ModelFacts] = {}
        for known in tuple(self._workers.values()):
            have = found.get(known.facts.model)
            if known.ready and (have is None or known.facts.pool_pages < have.pool_pages):
                found[known.facts.model] = known.facts
        return found

    # Choosing ---------------------------------------------------------------------------------

    def choose(
        self, model: str, salt: bytes, want: ChooseRoute, *, read_cache: bool = True
    ) -> Route | Fault:
        """The cheapest route, or the fault that says why there is none. The caller must ``count``
        the sequences that use the route, and again when they end."""
        usable = [
            known
            for known in self._workers.values()
            if known.ready
            and known.facts.model == model
            and want.model_root in (None, known.facts.model_root)
        ]
        if not usable:
            return self._nobody(model, want)
        need_tokens = len(want.tokens) + want.growth_tokens
        fitting = [k for k in usable if need_tokens <= k.facts.pool_pages * k.facts.page_size]
        if not fitting:
            return NoCapacity(
                f"{need_tokens} tokens exceed the page pool of every worker: shorten the prompt "
                "or lower max_tokens"
            )
        priced = [
            (cost, order, route)
            for order, (cost, route) in enumerate(self._routes(fitting, salt, want, read_cache))
        ]
        _, _, route = min(priced, key=lambda entry: entry[:2])
        self._note_sent(route, want)
        most_tokens = max(other.predicted_tokens for _, _, other in priced)
        return replace(
            route, elsewhere_tokens=most_tokens - route.predicted_tokens,
            pages=self._pages_from(route), tokens=want.tokens,
        )  # fmt: skip

    def _nobody(self, model: str, want: ChooseRoute) -> Fault:
        """Why no worker can take the request. A worker with its weights may come back, unless other
        weights are now served under the model's name and no worker with the old ones is left."""
        same = [k for k in self._workers.values() if k.facts.model == model and not k.drains]
        is_served = any(known.ready for known in same)
        if is_served and all(known.facts.model_root != want.model_root for known in same):
            return Superseded(f"{model!r} has been replaced by another version")
        after_ms = self.limits.retry_after_ms
        return NotReady(f"no worker for {model!r} is ready", retry_after_ms=after_ms)

    def _pages_from(self, route: Route) -> PagesFrom | None:
        known = self._workers[route.worker.name]
        host = self._hosts.get(known.host)
        if known.needs is None or host is None or not host.epoch or known.is_full:
            return None
        return PagesFrom(known.host, host.epoch, known.needs)

    def count(self, route: Route, change: int, *, answered: bool = False) -> None:
        """``change`` more sequences go by ``route``, or fewer if negative: those ended, and if
        ``answered``, their prompt was computed."""
        taker = self._workers.get(route.worker.name)
        if change < 0 and answered and taker is not None and route.tokens is not None:
            self._recent.answered(route.root, route.tokens, taker.host, route.worker)
        known = self._end_of(route)
        if known is not None:
            known.open_count = max(0, known.open_count + change)

    def _end_of(self, route: Route) -> _Known | None:
        """The worker that decodes the sequences of ``route``, if it still lives."""
        last = route.decode or route.worker
        known = self._workers.get(last.name)
        return known if known is not None and known.worker == last else None

    def _routes(
        self, usable: list[_Known], salt: bytes, want: ChooseRoute, read_cache: bool
    ) -> Iterator[tuple[float, Route]]:
        """Every sensible route and its cost in tokens."""
        models = {known.facts.model_root: known.facts for known in usable}
        for model_root, facts in models.items():
            root = tenant_root(model_root, salt)
            same = [known for known in usable if known.facts.model_root == model_root]
            names = dict.fromkeys(known.host for known in same)
            found = self._cached_pages(names, root, facts, want) if read_cache else {}
            for name in names:
                cached = min(found.get(name, 0) * facts.page_size, len(want.tokens) - 1)
                here = [known for known in same if known.host == name]
                short = self._shortage_tokens(self._hosts.get(name), facts, want, cached)
                for known, decode in self._pairs(here, want, cached):
                    cost = float(known.queue_tokens + len(want.tokens) - cached + short)
                    cost += _busy_cost(known, decode, want)
                    other = decode.worker if decode else None
                    yield cost, Route(known.worker, other, model_root, root, cached)

    def _cached_pages(
        self, names: Collection[str], root: bytes, facts: ModelFacts, want: ChooseRoute
    ) -> dict[str, int]:
        """By host: how many pages of the prompt, in a row from its start, are known to be cached,
        or soon will be, since a prompt that was answered there had them."""
        found = {
            name: count // facts.page_size
            for name, count in self._recent.shared_tokens(root, want.tokens, want.avoid).items()
            if name in names
        }
        uncached = len(want.tokens) - facts.page_size * max(found.values(), default=0)
        if len(names) == 1 and uncached <= self.limits.short_suffix_tokens:
            return found  # straight to decode, whatever else is cached
        indexes = {name: self._hosts[name].index for name in names if name in self._hosts}
        head = want.tokens[: _KEYED_PAGES_MAX * facts.page_size]
        for name, count in self._keys.cached_pages(root, head, facts.page_size, indexes).items():
            found[name] = max(count, found.get(name, 0))
        return found

    def _pairs(
        self, here: list[_Known], want: ChooseRoute, cached: int
    ) -> Iterator[tuple[_Known, _Known | None]]:
        """On one host: who takes the ``Submit``, and who the handover (None: there is none)."""
        prefills = [known for known in here if known.role == "prefill"]
        decodes = [known for known in here if known.role == "decode"]
        uncached = len(want.tokens) - cached
        straight = uncached <= self.limits.short_suffix_tokens and not all(
            known.worker in want.avoid for known in decodes
        )
        if decodes and (straight or not prefills):
            yield from ((known, None) for known in decodes)
            return
        best = min(
            decodes,
            key=lambda known: (known.worker in want.avoid, known.queue_tokens),
            default=None,
        )
        short = uncached <= self.limits.short_shared_tokens
        apart = [
            known for known in prefills
            if not self._gives_way(known, best, decodes, want, short=short)
        ]  # fmt: skip
        if best is not None and all(known.worker in want.avoid for known in apart):
            yield best, None
        yield from ((known, best) for known in apart)

    def _gives_way(
        self, prefill: _Known, best: _Known | None, decodes: list[_Known], want: ChooseRoute,
        *, short: bool,
    ) -> bool:  # fmt: skip
        """Whether the prompt should go to ``best`` because that shares its cores with ``prefill``:
        either the prompt's steps would take the cores from answers that are being decoded, or the
        prompt is so ``short`` that a handover would cost more than it brings (ADR 0025)."""
        if self.limits.always_prefill or best is None or best.worker in want.avoid:
            return False
        company = any(prefill.cores & known.cores and known.has_company for known in decodes)
        return bool(prefill.cores & best.cores) and (company or short)

    def _shortage_tokens(
        self, host: _Host | None, facts: ModelFacts, want: ChooseRoute, cached: int
    ) -> int:
        """What waiting for pages may cost: the tokens that do not fit right now."""
        if host is None or host.pager is None:
            return _NO_PAGER_TOKENS
        grown = want.choice_count * want.growth_tokens + len(want.tokens) - cached
        return max(0, grown - host.free_pages * facts.page_size)

    def _note_sent(self, route: Route, want: ChooseRoute) -> None:
        known = self._workers[route.worker.name]
        known.sent_tokens += len(want.tokens) - route.predicted_tokens
        known.sent_count += want.choice_count
        if route.decode is not None:
            self._workers[route.decode.name].sent_count += want.choice_count

    def _host(self, name: str) -> _Host:
        host = self._hosts.get(name)
        if host is None:
            if len(self._hosts) >= self.limits.workers_max:
                self._hosts.pop(next(iter(self._hosts)))
            host = _Host(PageIndex(keys_max=self.limits.index_bytes_max // KEY_BYTES))
            self._hosts[name] = host
        return host

    def check(self) -> None:
        """Raises ``AssertionError`` when an invariant is broken."""
        assert len(self._workers) <= self.limits.workers_max
        self._keys.check()
        self._recent.check()
        for host in self._hosts.values():
            host.index.check()


def _busy_cost(known: _Known, decode: _Known | None, want: ChooseRoute) -> float:
    """What the decode worker's running sequences cost, and a penalty for each worker to avoid."""
    cost = 0.0 if decode is None else _RUNNING_COST_TOKENS * decode.load.running_count
    shunned = [one for one in (known, decode) if one is not None and one.worker in want.avoid]
    return cost + _AVOIDED * len(shunned)
