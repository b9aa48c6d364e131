"""The pager core under any sequence of events, beside workers that are plain dictionaries.

After every step: the ledger balances and all tables agree (``core.check``), the pool file says
what the core believes, and every slot that any holder of a standing lease counts as filled
holds just the context it was computed from. A step that was running when its lease was revoked
writes late; its pages must still be its own. Operators pin, unpin and invalidate meanwhile
(``operators``), what makes no sense is refused and changes nothing (``liars``), and the pager may
be stopped for a while (``absences``) or die amid what it does (``deaths``). Each example has
another eviction policy (``policies``) and another few of the pager's limits and constants small
(``cramped``); who may use how much changes with what gateways say (``tenancy``).

``PAGEMESH_LONG=1`` runs 10,000 examples of 50 steps.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.machine.absences import Absences
from tests.machine.cramped import Cramped, cramps
from tests.machine.deaths import Deaths
from tests.machine.declarers import Declarers
from tests.machine.examples import EXAMPLES
from tests.machine.liars import Liars
from tests.machine.losers import Losers
from tests.machine.mesh import RESTARTS_MAX
from tests.machine.operators import Operators
from tests.machine.peers import MODELS, Peer, View, Wish
from tests.machine.policies import Evicting, evictions
from tests.machine.prompts import ROOTS, TENANCIES, USUAL, masks, pages, picks, prompts
from tests.machine.tickets import Tickets
from tests.unit.pager.rig import LIMITS, PAGE_SIZE, key_of, order_of
from tests.unit.pager.steps import in_use, lives

from pagemesh.pager.leases.states import LeaseState
from pagemesh.pager.retention.roots import has_root_place
from pagemesh.wire.cache_messages import InvalidateCache
from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.messages import Refused
from pagemesh.wire.pager_messages import (
    Admit,
    Commit,
    Extend,
    Extended,
    Fork,
    Heartbeat,
    Release,
    Withdraw,
)
from pagemesh.wire.tokens import pack

PAGES = 12
lifetimes_s = st.sampled_from([0, 0, 0, 1, 3])


class PagerMachine(
    Absences, Deaths, Declarers, Losers, Operators, Liars, Tickets, RuleBasedStateMachine
):  # fmt: skip
    rig: Evicting

    def __init__(self) -> None:
        RuleBasedStateMachine.__init__(self)
        Operators.__init__(self, self.make_rig())
        self.number = self.incarnations = 0
        self.tenancy: tuple[CacheTerms, ...] = USUAL
        self.cramped = Cramped(())

    @staticmethod
    def make_rig() -> Evicting:
        return Evicting(PAGES, limits=LIMITS)

    # Workers come and go

    @initialize(eviction=evictions, little=cramps)
    def start(self, eviction: str = "lru", little: Collection[str] = ()) -> None:
        self.cramped = Cramped(little)
        self.rig.limits = self.cramped.limits(self.rig.limits)
        self.rig.evict_by(eviction)
        for name in MODELS:
            self.join(name)

    @rule(tenancy=st.sampled_from(TENANCIES))
    def gateways_say_that_roots_are_others(self, tenancy: tuple[CacheTerms, ...]) -> None:
        """Of those who are admitted from now on. What was admitted before goes on."""
        self.tenancy, self.rig.is_constant = tenancy, False
        for root, terms in zip(ROOTS, tenancy, strict=True):
            self.tenants[root].add(terms.tenant)

    def terms(self, root: bytes, ttl_s: int) -> CacheTerms:
        return msgspec.structs.replace(self.tenancy[ROOTS.index(root)], ttl_s=ttl_s)

    def join(self, name: str) -> None:
        self.incarnations += 1
        peer = Peer(self.rig, self.memory, name, self.incarnations)
        self.peers.append(peer)
        peer.open()
        self.pass_on()

    @rule(pick=picks)
    def dies_and_is_replaced(self, pick: int) -> None:
        peer = self.peer(pick)
        self.peers.remove(peer)
        if pick % 2:
            self.rig.die(peer.incarnation)
            self.pass_on()
            self.join(peer.name)
        else:  # noticed only when the new one has come
            self.join(peer.name)
            self.rig.die(peer.incarnation)
            self.pass_on()

    @rule(pick=picks)
    def heartbeats(self, pick: int) -> None:
        peer = self.peer(pick)
        digest = 0
        for view in peer.held():
            digest ^= view.id
        self.ask(
            peer,
            Heartbeat(
                worker=peer.name, incarnation=peer.incarnation, epoch=peer.epoch,
                lease_count=len(peer.held()), lease_digest=digest,
            ),
        )  # fmt: skip

    @rule(after_ms=st.sampled_from([0, 50, 600, 1_100, 2_500]), silent=masks)
    def time_passes(self, after_ms: int, silent: int) -> None:
        """Those who are not ``silent`` say something in time, and open again if need be."""
        self.rig.tick(after_ms)
        self.pass_on()
        for peer in self.awake(silent):
            peer.open()
        self.rig.tick(LIMITS.session_ttl_ms - 1 if silent else 0)
        self.pass_on()
        self.rig.tick()
        books = self.rig.core.books
        if len(books.waiting):
            wanted = books.waiting.first.message
            if isinstance(wanted, Admit):
                need = books.facts.pages_for(wanted.reserve_tokens)
                has_place = bool(books.slots) and has_root_place(books, wanted.root)
            else:
                need = wanted.page_count - books.leases[wanted.lease].page_count
                has_place = True
            unpromised = books.pool.free - books.promises.page_count
            assert need > unpromised or not has_place, "the first waiter could be served"
        self.pass_on()

    @precondition(lambda self: self.rig.epoch < RESTARTS_MAX)
    @rule(silent=masks, after_ms=st.sampled_from([0, 0, 700, 1_500]))
    def pager_is_killed_and_restarts(self, silent: int, after_ms: int = 0) -> None:
        before, used = lives(self.rig), in_use(self.rig)
        known = [peer.holder for peer in self.peers if peer.incarnation in self.rig.known]
        self.rig.restart(known, after_ms)
        self.require_as_warm(before, used)
        self.pass_on()
        for peer in self.awake(silent):
            if silent & 4:
                peer.open()
                peer.begin_declaring(2)
            else:
                self.opens_and_declares(peer, 1)

    def awake(self, silent: int) -> list[Peer]:
        return [peer for index, peer in enumerate(self.peers) if not silent >> index & 1]

    # Sequences

    @rule(
        pick=picks, prompt=prompts, root=st.sampled_from(ROOTS), more=st.integers(0, 12),
        read_cache=st.booleans(), priority=st.integers(-1, 1),
        ttl_s=lifetimes_s, first=st.sampled_from([0, 0, 1, 4, 9]),
    )  # fmt: skip
    def admits(
        self, pick: int, prompt: list[int], root: bytes, more: int, read_cache: bool,
        priority: int, ttl_s: int = 0, first: int = 0,
    ) -> None:  # fmt: skip
        peer = self.peer(pick)
        self.number += 1
        order, terms = order_of(self.number, priority=priority), self.terms(root, ttl_s)
        reserved_pages = self.rig.core.books.facts.pages_for(len(prompt) + more)
        tokens_max = len(prompt) + 4 * more if more % 2 else 0
        message = Admit(
            key=key_of(self.number), order=order, worker=peer.name, incarnation=peer.incarnation,
            epoch=peer.epoch, root=root, tokens=pack(prompt),
            reserve_tokens=len(prompt) + more, read_cache=read_cache,
            terms=terms, tokens_max=tokens_max, first_tokens=first, deadline_ms=60_000,
        )  # fmt: skip
        wish = Wish(order, root, prompt, terms, reserved_pages, message=message)
        peer.wishes[message.key] = wish
        self.heard(peer, message, self.ask(peer, message))

    @rule(pick=picks, prompt=prompts, more=st.lists(st.integers(0, 1), max_size=3))
    def crowd_asks_the_same(self, pick: int, prompt: list[int], more: list[int]) -> None:
        """Or almost the same: most of them wait for what one of them computes."""
        for index, last in enumerate([*more, 0]):
            self.admits(pick + index, [*prompt, last], ROOTS[0], 0, True, 0)

    @rule(pick=picks, prompt=prompts, root=st.sampled_from(ROOTS), ttl_s=lifetimes_s)
    def runs_from_start_to_end(
        self, pick: int, prompt: list[int], root: bytes, ttl_s: int = 0
    ) -> None:
        """What fills the cache: admit, compute, release."""
        self.admits(pick, prompt, root, 0, True, 0, ttl_s)
        peer = self.peer(pick)
        for view in [v for v in peer.held() if v.key == key_of(self.number)]:
            peer.begin_step(view, len(prompt))
            peer.end_step(view, 0)
            if view.state == "held":
                self.release(peer, view, cache=True)

    @rule(pick=picks, prompt=prompts, page_count=st.integers(8, PAGES), priority=st.integers(-1, 1))
    def most_of_the_pool_is_wanted(
        self, pick: int, prompt: list[int], page_count: int, priority: int
    ) -> None:
        """What takes pins, and all that is younger, out of the way."""
        more = page_count * PAGE_SIZE - len(prompt)
        self.admits(pick, prompt, ROOTS[0], more, True, priority)

    @rule(pick=picks, prompt=prompts, root=st.sampled_from(ROOTS), cache=st.booleans())
    def is_invalidated_while_it_is_computed(
        self, pick: int, prompt: list[int], root: bytes, cache: bool
    ) -> None:
        """Who computes it goes on, and keeps it for nobody."""
        self.admits(pick, prompt, root, 0, True, 0)
        if root not in self.rig.core.books.forest.trees:
            return
        self.invalidate(InvalidateCache(what="root", name=root.hex()), {root})
        peer = self.peer(pick)
        for view in [v for v in peer.held() if v.key == key_of(self.number)]:
            peer.begin_step(view, len(prompt))
            peer.end_step(view, 0)
            if view.state == "held":
                self.commit(peer, view)
                self.release(peer, view, cache=cache)

    @rule(pick=picks, asked=st.lists(prompts, min_size=2, max_size=5))
    def more_is_asked_than_is_room_for(self, pick: int, asked: list[list[int]]) -> None:
        """What has something evicted: some of it comes again, under one root or the other."""
        for index, prompt in enumerate(asked):
            self.runs_from_start_to_end(pick, prompt, ROOTS[(pick >> index) % 2])

    @rule(pick=picks, prompt=prompts, root=st.sampled_from(ROOTS), more=pages)
    def chat_goes_on(self, pick: int, prompt: list[int], root: bytes, more: list[int]) -> None:
        """What hits the cache: another worker is asked for more of the same."""
        self.runs_from_start_to_end(pick, prompt, root)
        self.admits(pick // 2, [*prompt, *more][:14], root, 0, True, 0)

    @precondition(lambda self: self.has("held"))
    @rule(pick=picks, count=st.integers(1, 9))
    def step_begins(self, pick: int, count: int) -> None:
        peer, view = self.view(pick)
        peer.begin_step(view, count)

    @precondition(lambda self: self.stepping())
    @rule(pick=picks, token=st.integers(0, 1))
    def step_ends(self, pick: int, token: int) -> None:
        steps = self.stepping()
        peer, view = steps[pick % len(steps)]
        peer.end_step(view, token)

    def stepping(self) -> list[tuple[Peer, View]]:
        return [(p, v) for p in self.peers for v in p.views.values() if v.in_step]

    @precondition(lambda self: self.has("held"))
    @rule(pick=picks)
    def commits(self, pick: int) -> None:
        peer, view = self.view(pick)
        self.commit(peer, view)

    def commit(self, peer: Peer, view: View) -> None:
        self.ask(peer, Commit(**self.own(peer, view), fill=view.fill()))

    @precondition(lambda self: self.has("held"))
    @rule(pick=picks, more=st.integers(1, 4))
    def extends(self, pick: int, more: int) -> None:
        peer, view = self.view(pick)
        message = Extend(
            key=view.key, worker=peer.name, incarnation=peer.incarnation, lease=view.id,
            have_pages=len(view.table), page_count=len(view.table) + more,
        )  # fmt: skip
        self.heard(peer, message, self.ask(peer, message))

    @precondition(lambda self: self.promised())
    @rule(pick=picks, share=st.integers(1, 4))
    def takes_what_is_promised(self, pick: int, share: int) -> None:
        """At once, whoever waits, if it is there."""
        views = self.promised()
        peer, view = views[pick % len(views)]
        books = self.rig.core.books
        more = -(-books.leases[view.id].promised_pages // share)
        is_there = more <= books.at_hand
        message = Extend(
            key=view.key, worker=peer.name, incarnation=peer.incarnation, lease=view.id,
            have_pages=len(view.table), page_count=len(view.table) + more,
        )  # fmt: skip
        answer = self.ask(peer, message)
        self.heard(peer, message, answer)
        assert not is_there or isinstance(answer, Extended | Refused), "it is promised"

    def promised(self) -> list[tuple[Peer, View]]:
        books, held = self.rig.core.books, [(p, v) for p in self.peers for v in p.held()]
        return [(p, v) for p, v in held if v.id in books.leases and self.is_promised(p, v)]

    def is_promised(self, peer: Peer, view: View) -> bool:
        lease = self.rig.core.books.leases[view.id]
        same = lease.incarnation == peer.incarnation and lease.page_count == len(view.table)
        return same and lease.promised_pages > 0

    @precondition(lambda self: self.has("held"))
    @rule(pick=picks, count=st.integers(1, 2), more=st.integers(0, 6))
    def forks(self, pick: int, count: int, more: int) -> None:
        peer, view = self.view(pick)
        if view.in_step:
            return
        children = [
            msgspec.structs.replace(view.key, choice=view.key.choice * 3 + index)
            for index in range(1, count + 1)
        ]
        message = Fork(
            key=view.key, worker=peer.name, incarnation=peer.incarnation, lease=view.id,
            fill=view.fill(), children=children, reserve_tokens=view.filled + more,
        )  # fmt: skip
        self.heard(peer, message, self.ask(peer, message))

    @precondition(lambda self: self.has("held"))
    @rule(pick=picks, cache=st.booleans())
    def releases(self, pick: int, cache: bool) -> None:
        peer, view = self.view(pick)
        if not view.in_step:
            self.release(peer, view, cache=cache)

    def release(self, peer: Peer, view: View, *, cache: bool) -> None:
        del peer.views[view.id]
        peer.dead_leases.add(view.id)
        self.ask(
            peer,
            Release(
                key=view.key, worker=peer.name, incarnation=peer.incarnation,
                lease=view.id, fill=view.fill(), cache=cache,
            ),
        )  # fmt: skip

    # What was sent comes again

    @precondition(lambda self: self.sent)
    @rule(pick=picks)
    def message_is_delivered_again(self, pick: int) -> None:
        peer, message = self.sent[pick % len(self.sent)]
        if peer in self.peers:
            answer = self.ask(peer, message)
            if isinstance(message, Withdraw) and not isinstance(answer, Refused):
                self.withdrawn(peer, message.ticket)
            self.heard(peer, message, answer)

    # What always holds

    @invariant()
    def every_filled_slot_holds_its_context(self) -> None:
        for peer in self.peers:
            for view in peer.held():
                lease = self.rig.core.books.leases.get(view.id)
                stands = lease is not None and lease.life.state is LeaseState.HELD
                if stands and lease is not None and lease.incarnation == peer.incarnation:
                    peer.check_view(view)

    def teardown(self) -> None:
        """When everybody is dead and gone, nothing is pinned, held or draining."""
        try:
            self.everybody_dies()
        finally:
            self.cramped.over()

    def everybody_dies(self) -> None:
        self.unpins_all()
        for peer in self.peers:
            self.rig.die(peer.incarnation)
        self.rig.tick(LIMITS.ticket_ttl_ms_max)
        self.end_what_is_under_way()
        report = self.rig.core.report()
        assert report.free_pages + report.idle_pages == PAGES, report
        assert not report.leases and not report.waiter_count and not report.ticket_count

    def end_what_is_under_way(self) -> None:
        """For machines with parts that act when nobody asks any more."""


PagerMachine.TestCase.settings = EXAMPLES


class TestPagerMachine(PagerMachine.TestCase):  # type: ignore[misc,valid-type]
    """Any order of events keeps ledger, pool and contents in step."""
