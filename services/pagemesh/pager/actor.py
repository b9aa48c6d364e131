"""The pager's actor: one task that feeds the core and performs its commands, in order.

    bus --> [ inbox ] --> decode -> core -> pool file, answers, notices, locks, disk
    tick -----^                              later: keyed page events
    disk -----'

There is no core until there is a pool: at the start the actor adopts the one that an earlier pager
left; otherwise the first session says what its pages look like. A crash ends this life of the
pager, and the next life recovers from the pool file just as a new process would.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from pagemesh.pager import cache_door, last_writers
from pagemesh.pager import events as ev
from pagemesh.pager.board import PagerBoard, PagerSettings
from pagemesh.pager.due import Due, LookDue, PutAwayDue, SweepDue, TickDue
from pagemesh.pager.eviction import make_policy, tenants_budget
from pagemesh.pager.leases import patience
from pagemesh.pager.measures import Measures
from pagemesh.pager.page_events import PageEvents
from pagemesh.pager.state import PagerCore
from pagemesh.pager.storage.device_pages import page_bytes_of
from pagemesh.pager.storage.disk import Disk, log_event
from pagemesh.pager.storage.holders import Holders
from pagemesh.pager.storage.pool_memory import PoolMemory
from pagemesh.pager.storage.pool_opening import adopt_pool, is_over, make_pool, take_over
from pagemesh.pager.storage.pool_store import PoolStore
from pagemesh.pager.storage.retired_notes import RetiredNotes
from pagemesh.pager.tier_measures import TierMeasures
from pagemesh.pager.tiers.tier_events import (
    DiskFailed,
    DiskOpening,
    PutAway,
    RememberRetired,
    TierEvent,
)
from pagemesh.runtime import trace
from pagemesh.runtime.actor import Behaviour
from pagemesh.runtime.bus import Bus, BusState, Delivery
from pagemesh.runtime.clock import Clock
from pagemesh.runtime.logs import get_logger
from pagemesh.runtime.rpc import send
from pagemesh.wire import codec, subjects
from pagemesh.wire.errors import Disconnected, Fault, Stale
from pagemesh.wire.messages import Message, Ok, Refused
from pagemesh.wire.pager_messages import Declare, OpenSession, SessionOpened
from pagemesh.wire.pager_reports import PagesSnapshot, SnapshotWanted
from pagemesh.wire.pool_format import IN_FILE
from pagemesh.wire.pool_memory import Leave

_log = get_logger(__name__)
_FOLLOW_UPS_MAX = 1_024
_PUT_AWAY_MS_MAX, _PUT_AWAY_LOOK_S = 5_000, 0.002
"""How long a pager that is told to stop writes cached pages to disk, and how often it checks
whether they are written."""
_KEYED_PAGES_MAX = 2_048
"""Pages keyed in one turn: about five milliseconds of work."""
PagerEvent = Delivery | Due


@dataclass(slots=True)
class _Life:
    """A core and what belongs to its pool."""

    store: PoolStore
    core: PagerCore
    pages: PageEvents
    measures: Measures
    disk: Disk | None = None
    tier_measures: TierMeasures = field(default_factory=TierMeasures)


class PagerActor(Behaviour[PagerEvent]):
    """One life of the pager: from adopting the pool to a crash or a regular end."""

    def __init__(
        self,
        settings: PagerSettings,
        bus: Bus,
        clock: Clock,
        board: PagerBoard,
        wake: Callable[[Due], bool],
        memory: PoolMemory,
    ) -> None:
        """``wake`` queues something for the actor to handle soon; False if it cannot."""
        self._settings = settings
        self._memory = memory
        self._bus = bus
        self._clock = clock
        self._board = board
        self._holders = Holders(settings.folder, settings.host, memory.has_exited)
        self._life: _Life | None = None
        self._absence = patience.Absence(unnoticed_ms=bus.config.unnoticed_ms)
        self._died: deque[int] = deque()
        self._from_disk: deque[TierEvent | BaseException] = deque()
        self._wake = wake
        self._leaving: set[int] = set()
        self._will_sweep = False  # at most one sweep is queued: each queues the next
        self._retired = RetiredNotes.beside(settings.folder, settings.host, settings.disk)

    # A life

    async def begin(self) -> None:
        if (store := await adopt_pool(self._settings, self._memory, self._holders)) is not None:
            await self._start(store, adopted=True)

    async def end(self) -> None:
        await self._end_life()
        await self._retired.close()
        self._holders.close()

    async def _end_life(self) -> None:
        life, self._life = self._life, None
        if life is not None:
            if life.disk is not None and not await life.disk.close():
                life.store.file.remove()  # a read that hangs may still write into it
            self._from_disk.clear()
            life.store.close()

    async def handle(self, event: PagerEvent) -> None:
        match event:
            case Delivery():
                await self._request(event)
            case TickDue():
                await self._tick()
            case LookDue():
                pass
            case SweepDue():
                self._will_sweep = False
                if self._life is not None and self._life.core.is_sweeping:
                    await self._feed(self._life, ev.Sweep())
                    await asyncio.sleep(0)  # requests that came meanwhile go before the next turn
            case PutAwayDue():
                await self._put_away()
        while self._from_disk and self._life is not None:
            await self._hear_disk(self._life, self._from_disk.popleft())
        if self._life is not None and self._life.core.is_sweeping and not self._will_sweep:
            self._will_sweep = self._wake(SweepDue())

    def rest(self) -> None:
        if self._life is not None:
            self._board.waits(self._patience_ms(self._life))

    def _patience_ms(self, life: _Life) -> int:
        wanted_ms = patience.patience_ms(life.core.books)
        if life.pages.is_behind:
            return patience.TICK_MS
        return min(wanted_ms, patience.CALM_TICK_MS) if life.pages.has_news else wanted_ms

    async def _start(self, store: PoolStore, *, adopted: bool) -> None:
        settings, facts = self._settings, store.facts
        make = partial(make_policy, settings.eviction)
        new_policy = partial(make, budget=tenants_budget(facts.page_count))
        core = PagerCore(settings.limits, facts, make(facts.page_count), new_policy=new_policy)
        self._life = _Life(store, core, PageEvents(facts, settings.secret), Measures())
        if adopted:
            commands = await take_over(core, store, self._holders, self._clock.now_ms())
            await self._perform(self._life, commands)
        if settings.disk is not None:
            pages = page_bytes_of(store, self._memory, self._holders)
            disk = self._life.disk = Disk(
                settings.disk, facts, settings.limits, pages, self._disk_says, retired=self._retired
            )
            disk.open()
            await self._feed(self._life, DiskOpening())
        self._sample(self._life)
        self._board.began(facts.epoch)
        _log.info(
            "pager.pool_adopted" if adopted else "pager.pool_made",
            path=facts.path, pages=facts.page_count, epoch=facts.epoch,
            idle=core.books.pool.idle, draining=core.books.pool.draining,
        )  # fmt: skip

    # Requests

    async def _request(self, delivery: Delivery) -> None:
        start_us = self._clock.now_us()
        if cache_door.is_cache_call(delivery.subject):
            await self._cache_call(delivery, start_us)
            return
        try:
            message = codec.decode(delivery.data)
            cache_door.check_place(message, delivery.subject, self._settings.host)
            if isinstance(message, OpenSession):
                await self._prepare(message)
            if isinstance(message, Leave):
                await self._leave(message)
                delivery.respond(codec.encode(Ok()))
                return
            life = self._life
            if isinstance(message, SnapshotWanted):
                delivery.respond(codec.encode(self._snapshot(message)))
                return
            if life is None:
                raise Stale("this pager has no pool yet: open a session first")
        except Fault as fault:
            delivery.respond_error(fault)
            return
        caller = trace.parse(delivery.headers.get(trace.TRACEPARENT, ""))
        trace_id = f"{caller.trace_id:032x}" if caller is not None else ""
        call = _Call(delivery, message, start_us, caller)
        await self._feed(life, ev.Asked(call, message, trace_id))
        if isinstance(message, Declare):
            await asyncio.sleep(0)  # all workers may have much to declare at once

    async def _cache_call(self, delivery: Delivery, start_us: int) -> None:
        """Handle an operator's request, in JSON."""
        try:
            message = cache_door.decode(delivery.subject, delivery.data)
            if self._life is None:
                raise Stale("this pager has no pool yet: start a worker first")
        except Fault as fault:
            self._answer(_Call(delivery, None, start_us), Refused.of(fault))
            return
        await self._feed(self._life, ev.Asked(_Call(delivery, message, start_us), message))

    async def _prepare(self, message: OpenSession) -> None:
        """Make sure that the worker holds its lock and that there is a pool for its session."""
        self._holders.check_lock(message.worker, message.lock_name)
        if self._life is not None and not await self._keeps(self._life, message):
            await self._end_life()  # this also unmaps the old pool
        if self._life is None:
            store = await make_pool(self._settings, self._memory, self._holders, message)
            await self._start(store, adopted=False)

    async def _keeps(self, life: _Life, message: OpenSession) -> bool:
        """Whether the session can use the current pool."""
        # A lock has one holder, so any other incarnation known under it is dead.
        for incarnation in self._holders.replaced_by(message.lock_name, message.incarnation):
            await self._feed(life, ev.HolderDied(incarnation))
        if is_over(self._settings, life.store, message.pool, life.core.books.sessions):
            return False
        facts = life.store.facts
        if facts.place == message.pool.place != IN_FILE:
            await asyncio.to_thread(self._memory.hand_over, facts, message.lock_name)
        return True

    def _snapshot(self, message: SnapshotWanted) -> PagesSnapshot:
        life = self._life
        if life is None:
            return PagesSnapshot(
                host=self._settings.host, epoch=0, sequence=0, first=0, keys=b"", more=False
            )
        self._publish_pages(life)
        return life.pages.snapshot(message.first)

    # Performing

    async def _feed(self, life: _Life, event: ev.Event) -> None:
        life.measures.before(life.core.books)
        await self._perform(life, life.core.handle(event, self._clock.now_ms()))
        for _ in range(_FOLLOW_UPS_MAX):
            if not self._died:
                return
            dead = ev.HolderDied(self._died.popleft())
            await self._perform(life, life.core.handle(dead, self._clock.now_ms()))

    async def _perform(self, life: _Life, commands: list[ev.Command]) -> None:
        refused: Fault | None = None
        for command in commands:
            if type(command) is ev.Answer:
                call, answer = command.call, command.message
                if refused is not None and isinstance(answer, SessionOpened):
                    answer = Refused.of(refused)
                assert isinstance(call, _Call) and call.message is not None
                answer = cache_door.confirmed(answer, life.store, self._retired)
                self._answer(call, last_writers.named(answer, life.store, life.core.books))
                asked, now_us, books = call.message, self._clock.now_us(), life.core.books
                life.measures.answered(asked, answer, call.caller, call.start_us, now_us, books)
                continue
            if life.store.perform(command):
                continue
            if life.disk is not None and await life.disk.perform(command):
                continue
            match command:
                case ev.Notify(worker, message):
                    self._say(subjects.worker(worker), message)
                case ev.PagesStored() | ev.PagesDropped():
                    life.pages.note(command)
                case ev.ProbeHolder(incarnation):
                    if self._holders.is_dead(incarnation):
                        self._died.append(incarnation)
                case ev.KillHolder(incarnation):
                    if self._settings.kill_holders:
                        self._holders.kill(incarnation)
                case ev.RememberHolder(holder):
                    refused = self._holders.remember(holder)
                case ev.ForgetHolder(incarnation):
                    self._holders.forget(incarnation)
                case RememberRetired():
                    await self._retired.keep(command)
                case _:
                    raise AssertionError(f"nobody performs {command}")
        life.pages.work(_KEYED_PAGES_MAX)
        if life.pages.is_full:
            self._publish_pages(life)

    def _answer(self, call: _Call, message: Message) -> None:
        delivery = call.delivery
        if cache_door.is_cache_call(delivery.subject):
            cache_door.respond(delivery, message)
            took_us = self._clock.now_us() - call.start_us
            error = message.code if isinstance(message, Refused) else ""
            self._board.answered_operator(delivery.subject, took_us, error)
        elif isinstance(message, Refused):
            delivery.respond_error(message.error())
        else:
            delivery.respond(codec.encode(message))

    def _say(self, subject: str, message: Message) -> None:
        """Send a message that nobody asked for. A lost one does no harm: revocations are repeated,
        waiters and offerers ask again, and routers see a gap in the sequence. That the bus is
        disconnected is logged by the bus itself."""
        try:
            send(self._bus, subject, message)
        except Fault as fault:
            if not isinstance(fault, Disconnected):
                _log.warning("pager.notice_not_sent", subject=subject, error=fault)

    # The disk tier

    def _disk_says(self, event: TierEvent | BaseException) -> None:
        self._from_disk.append(event)
        self._wake(LookDue())

    async def _hear_disk(self, life: _Life, event: TierEvent | BaseException) -> None:
        if isinstance(event, BaseException):
            raise event
        log_event(event)
        if isinstance(event, DiskFailed):
            life.tier_measures.failed()
        await self._feed(life, event)

    async def _leave(self, message: Leave) -> None:
        """A worker that can move pages of a device is leaving. Once all are, store what is cached:
        without a worker the pages cannot be reached."""
        living = {holder.incarnation for holder in self._holders.living()}
        self._leaving = {*(self._leaving & living), message.incarnation}
        if living <= self._leaving:
            await self._put_away()

    async def _put_away(self) -> None:
        life = self._life
        if life is None or life.disk is None or not life.disk.can_take:
            return
        started_ms, anew = self._clock.now_ms(), True
        with life.disk.patient():
            while self._clock.now_ms() - started_ms < _PUT_AWAY_MS_MAX:
                await self._feed(life, PutAway(anew))
                while self._from_disk:
                    await self._hear_disk(life, self._from_disk.popleft())
                disk, anew = life.core.books.disk, False
                if disk is None or not disk.staged:
                    return
                await asyncio.sleep(_PUT_AWAY_LOOK_S)

    # Periodic work

    async def _tick(self) -> None:
        on_bus = self._bus.state is BusState.CONNECTED
        life, away_ms = self._life, self._absence.at_tick(self._clock.now_ms(), on_bus=on_bus)
        if life is not None:
            life.store.mend()
            await self._retired.mend()
            await self._feed(life, ev.Tick(away_ms))
            self._publish_pages(life)
            self._sample(life)

    def _publish_pages(self, life: _Life) -> None:
        changed = life.pages.take()
        if changed is not None:
            self._board.event_sequence = changed.sequence
            self._say(subjects.pages(self._settings.host), changed)

    def _sample(self, life: _Life) -> None:
        life.measures.look(life.core.books)
        life.tier_measures.sample(life.core.books.disk)
        self._board.free_pages = max(life.core.books.room, 0)
        self._board.event_sequence = life.pages.sequence


class _Call(msgspec.Struct, frozen=True, gc=False):
    """The request behind an answer. ``message`` is None if it was refused before it reached the
    core, ``caller`` if it belongs to no trace."""

    delivery: Delivery
    message: Message | None
    start_us: int
    caller: trace.TraceContext | None = None
