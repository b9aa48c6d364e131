"""The gateway's actor: passes what arrives on the bus to the requests and the router.

    Frames, PagesChanged, presence --> [ inbox ] --> lives of requests, router

Bus callbacks only put messages into the inbox; they are decoded and dispatched in the actor's own
task. A message that a full inbox refuses shows as a gap in its worker's counter, and its frames are
requested again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from pagemesh.gateway import measures
from pagemesh.gateway.calls import events as ev
from pagemesh.gateway.calls.events import Worker
from pagemesh.gateway.calls.frames import FrameTracker
from pagemesh.gateway.calls.orphans import Orphans
from pagemesh.gateway.calls.prepare import too_narrow
from pagemesh.gateway.calls.spec import RequestLimits
from pagemesh.gateway.life import ABORT_TIMEOUT_MS, Life, Surroundings
from pagemesh.gateway.namesakes import warn_of_namesakes
from pagemesh.gateway.routing.returning import Returning
from pagemesh.gateway.routing.router import Router, RouterLimits
from pagemesh.gateway.two_pagers import TwoPagers
from pagemesh.runtime import rpc
from pagemesh.runtime.actor import Actor, Behaviour
from pagemesh.runtime.bus import Bus, BusState, Delivery
from pagemesh.runtime.clock import MonotonicClock
from pagemesh.runtime.directory import Change, Doubled, Joined, Lost
from pagemesh.runtime.logs import get_logger
from pagemesh.runtime.presence import Presence
from pagemesh.wire import codec, subjects
from pagemesh.wire.errors import Absent, Busy, Fault, Malformed, NotReady, NotServed
from pagemesh.wire.identity import secret_tag
from pagemesh.wire.messages import Ok, SequenceKey
from pagemesh.wire.pager_reports import PagesChanged, PagesSnapshot, SnapshotWanted
from pagemesh.wire.presence import Announce, ModelFacts, State
from pagemesh.wire.work_messages import Abort, Frames

INBOX_COUNT_MAX = 16_384
SNAPSHOT_PARTS_MAX = 10_000
SNAPSHOT_TIMEOUT_MS = 2_000
_CHANGE_RETRY_S = 0.1
_SECRETS_PERIOD_MS = 60_000
"""People are told of pagers with another secret no more often."""
_log = get_logger(__name__)

_Input = Delivery | Change


class _Dispatch(Behaviour[_Input]):
    """Hands each input to the gateway, whose state outlives a crash of this behaviour."""

    def __init__(self, gateway: GatewayActor) -> None:
        self._gateway = gateway

    async def handle(self, event: _Input) -> None:
        if not isinstance(event, Delivery):
            self._gateway.presence_changed(event)
            return
        try:
            self._gateway.received(codec.decode(event.data))
        except Fault as fault:
            event.respond_error(fault)


class GatewayActor:
    """Use ``async with GatewayActor.running(...) as gateway``."""

    def __init__(
        self,
        bus: Bus,
        *,
        name: str,
        incarnation: int,
        host: str,
        model: str,
        secret: bytes,
        request_count_max: int,
        limits: RouterLimits | None = None,
    ) -> None:
        self.bus = bus
        self.name = name
        self.incarnation = incarnation
        self.clock = MonotonicClock()
        self.router = Router(secret, limits or RouterLimits())
        self._secret_tag, self._secrets_due_ms = secret_tag(secret), 0
        self.state: State = "starting"
        self._host = host
        self._model = model
        self.request_count_max = request_count_max
        self._tracker = FrameTracker()
        self._orphans = Orphans()
        self._returning = Returning(window_ms=RequestLimits().recovery_wait_ms_max)
        self._lives: dict[str, Life] = {}
        self._facts: ModelFacts | None = None
        self._router_changed = asyncio.Event()
        self._snapshots: set[str] = set()
        self._group: asyncio.TaskGroup | None = None
        self._inbox: Actor[_Input] = Actor(
            f"gateway {name}", lambda: _Dispatch(self), inbox_count_max=INBOX_COUNT_MAX
        )
        self.presence = Presence(bus, self.clock, self._describe, self._admit_change)
        self._two_pagers = TwoPagers(self.presence.directory)
        self.surroundings = Surroundings(
            bus, self.clock, self.router, self._spawn, self._forget, self._absent, self._expected,
            self._given,
        )  # fmt: skip

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[GatewayActor]:
        """Subscribed and announced for as long as the context lasts. Raises ``Denied``."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            inbox = group.create_task(self._inbox.run(), name="gateway-inbox")
            await self.bus.subscribe(subjects.gateway(self.name), self._inbox.admit)
            await self.bus.subscribe(subjects.pages("*"), self._inbox.admit)
            presence = group.create_task(self.presence.run(), name="gateway-presence")
            measures.ready.set_function(lambda: self.is_ready)
            try:
                yield self
            finally:
                measures.ready.set_function(lambda: False)
                self._two_pagers.close()
                self.cut_off()
                presence.cancel()
                self._inbox.stop()
                await asyncio.wait([presence, inbox])

    def cut_off(self) -> None:
        """End what still runs; its clients hear that the gateway was stopped."""
        for life in tuple(self._lives.values()):
            life.feed(ev.ClientGone("stopped"))

    def announce(self, state: State) -> None:
        """Be known as ``state`` from now on."""
        self.state = state
        self.presence.announce_soon()

    @property
    def unready_why(self) -> str:
        """Why a request may not be served now, in words for people; empty if it will be."""
        if why := self._hindrance:
            return why
        if self._model in self.router.models():
            return ""
        # Without the model's name: health checks need no key.
        others = "no worker serves this gateway's model, only other models are served"
        return others if self._serves_others else "no worker is ready"

    @property
    def is_ready(self) -> bool:
        """Whether a request would be served now. May be asked on any thread: metrics are served on
        one of their own."""
        return not self._hindrance and self._model in self.router.models()

    @property
    def _hindrance(self) -> str:
        """Why no worker could serve anything; empty if one could."""
        if self.bus.state is not BusState.CONNECTED:
            return "the bus is away"
        if self.state != "ready":
            return f"the gateway is {self.state}"
        facts = self.router.models().get(self._model)
        return too_narrow(self.bus.message_bytes_max, facts.page_size if facts is not None else 1)

    @property
    def _serves_others(self) -> bool:
        """Whether all ready workers serve other models, and none of ours was ever there or is
        starting: this gateway was most likely given the wrong model."""
        return self._facts is None and bool(self.router.models()) and not self._expected()

    @property
    def _unserved(self) -> NotReady:
        """What is wrong while no ready worker serves our model."""
        if not self._serves_others:
            return NotReady("no worker is ready", retry_after_ms=1_000)
        return NotServed(
            f"no worker serves {self._model!r}, only other models are served: start one, or give "
            "the gateway the --model and --model-name of its workers",
            retry_after_ms=1_000,
        )

    @property
    def in_flight_count(self) -> int:
        return len(self._lives)

    # Requests ---------------------------------------------------------------------------------

    async def facts(self, limits: RequestLimits) -> ModelFacts:
        """What workers announce about the model. Waits if none was ever seen, then raises
        ``NotReady``. Once known, the facts stay known while all workers restart."""
        since_ms = self.clock.now_ms()
        while True:
            found = self.known_facts
            if found is not None:
                return found
            nobody = self._unserved
            wait_ms_max = limits.wait_ms_max(nobody, patient=self._expected())
            left_ms = since_ms + wait_ms_max - self.clock.now_ms()
            if left_ms <= 0:
                raise nobody
            self._router_changed.clear()
            with contextlib.suppress(TimeoutError):  # no event says when a worker is given up
                async with asyncio.timeout(min(left_ms, limits.worker_wait_ms_max) / 1_000):
                    await self._router_changed.wait()

    @property
    def known_facts(self) -> ModelFacts | None:
        """What was last announced about the model, if anything ever was."""
        self._facts = self.router.models().get(self._model) or self._facts
        return self._facts

    def room(self, count: int) -> bool:
        """Whether ``count`` more prompts may be answered."""
        return len(self._lives) + count <= self.request_count_max

    def begin(self, life: Life) -> None:
        """Let ``life`` begin. Raises ``Busy`` when there is no room."""
        if not self.room(1):
            raise Busy("too many requests at once", retry_after_ms=1_000)
        self._lives[life.core.spec.request] = life
        measures.in_flight.set(len(self._lives))
        life.feed(ev.Begin())

    def _forget(self, request: str) -> None:
        self._lives.pop(request, None)
        self._orphans.ended(request, self.clock.now_ms())
        measures.in_flight.set(len(self._lives))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        assert self._group is not None, "the gateway is not running"
        try:
            self._group.create_task(work, name=f"gateway-{name}")
        except RuntimeError:  # the task group has ended: nobody waits for answers any more
            work.close()

    # What comes in ----------------------------------------------------------------------------

    def received(self, message: object) -> None:
        """Raises ``Malformed`` for a message that is not for a gateway."""
        if isinstance(message, Frames):
            self._frames(message)
        elif isinstance(message, PagesChanged):
            if self.router.pages_changed(message):
                self._want_snapshot(message.host)
        else:
            raise Malformed("a gateway accepts only Frames and PagesChanged messages")

    def presence_changed(self, change: Change) -> None:
        """Take note of a service that came, changed or left."""
        if isinstance(change, Doubled):
            return warn_of_namesakes(change)
        announce = change.announce
        who = Worker(announce.name, announce.incarnation)
        is_worker = announce.role in ("prefill", "decode")
        is_ours = announce.model is None or announce.model.model == self._model
        if is_worker and is_ours:
            self._returning.changed(change, self.clock.now_ms())
        elif is_worker:
            self._returning.of_others(announce.name)
        if isinstance(change, Lost):
            self.router.lost(who)
            if announce.role == "pager":  # its workers stay, but accept nothing without it
                self._two_pagers.lost(announce)
                why = change.reason
                _log.info("gateway.pager_lost", pager=who.name, host=announce.host, reason=why)
                measures.pagers_lost.labels(why).inc()
            if is_worker:
                _log.info("gateway.worker_lost", worker=who.name, reason=change.reason)
                if is_ours:
                    measures.workers_lost.labels(change.reason).inc()
                for life in tuple(self._lives.values()):
                    life.feed(ev.WorkerLost(who))
        else:
            if isinstance(change, Joined) and is_worker:
                _log.info("gateway.worker_joined", worker=who.name, role=announce.role)
            if isinstance(change, Joined) and announce.role == "pager":
                _log.info("gateway.pager_joined", pager=who.name, host=announce.host)
                self._compare_secrets(announce)
                self._two_pagers.joined(announce)
            if self.router.announced(announce):
                self._want_snapshot(announce.host)
        self._router_changed.set()

    def _compare_secrets(self, pager: Announce) -> None:
        now_ms = self.clock.now_ms()
        if pager.secret_tag not in (0, self._secret_tag) and now_ms >= self._secrets_due_ms:
            self._secrets_due_ms = now_ms + _SECRETS_PERIOD_MS
            _log.warning(
                "gateway.other_secret", pager=pager.name, host=pager.host,
                next="this gateway cannot match that host's cached pages: set the same "
                "PAGEMESH_SECRET on both and restart them",
            )  # fmt: skip

    def _absent(self, who: Worker) -> None:
        """A call found nobody listening before presence noticed: move every request away from
        ``who`` now. Many calls find out at about the same time; only the first one tells the
        requests, or the loop would stall."""
        self.presence.directory.doubt(who.name, who.incarnation)
        self._returning.vanished(who.name, self.clock.now_ms())
        if self.router.absent(who):
            for life in tuple(self._lives.values()):
                life.feed(ev.WorkerLost(who))

    def _given(self, route: ev.Route) -> None:
        """Work was sent along ``route``. The router adds it to the announced load until these
        workers announce themselves again, so that must count as a change even if nothing
        changed."""
        for who in (route.worker, route.decode):
            if who is not None:
                self.presence.directory.doubt(who.name, who.incarnation)

    def _expected(self) -> bool:
        """Whether a worker is probably on its way back. Without the bus none can be seen, so none
        is known to be gone."""
        is_away = self.bus.state is not BusState.CONNECTED
        return is_away or self._returning.expected(self.clock.now_ms())

    def _frames(self, message: Frames) -> None:
        worker = Worker(message.worker, message.incarnation)
        # Frames for an earlier incarnation of this gateway have their own counter, and no request
        # here waits for them.
        ours = message.gateway_incarnation == self.incarnation
        lost_count = self._tracker.arrived(worker, message) if ours else 0
        if lost_count:
            measures.frames_lost.inc(lost_count)
            for life in tuple(self._lives.values()):
                life.feed(ev.FramesMissed(worker))
        for frame in message.frames:
            life_found = self._lives.get(frame.key.request)
            if life_found is not None:
                life_found.feed(ev.FrameArrived(worker, frame))
            elif frame.finish is None and frame.error is None:
                self._disown(worker, frame.key)

    def _disown(self, worker: Worker, key: SequenceKey) -> None:
        """Have ``worker`` stop a sequence that no request here waits for."""
        if self._orphans.heard(key.request, self.clock.now_ms()):
            measures.orphans.inc()
            self._spawn(self._abort_orphan(worker, key), "disown")

    async def _abort_orphan(self, worker: Worker, key: SequenceKey) -> None:
        subject = subjects.worker(worker.name)
        message = Abort(request=key.request, attempt=key.attempt, reason="client")
        with contextlib.suppress(Fault):  # its next frame makes us try again
            await rpc.call(self.bus, subject, message, Ok, timeout_ms=ABORT_TIMEOUT_MS)

    def _admit_change(self, change: Change) -> None:
        """Presence reports a change only once, so if the inbox is full, try again later."""
        try:
            self._inbox.admit(change)
        except Busy:
            loop = asyncio.get_running_loop()
            loop.call_later(_CHANGE_RETRY_S, self._admit_change, change)
        except Absent:
            return  # we are going down

    def _describe(self) -> Announce:
        return Announce(
            role="gateway",
            name=self.name,
            incarnation=self.incarnation,
            host=self._host,
            state=self.state,
        )

    # The page index ---------------------------------------------------------------------------

    def _want_snapshot(self, host: str) -> None:
        if host not in self._snapshots:
            self._snapshots.add(host)
            self._spawn(self._load_snapshot(host), "snapshot")

    async def _load_snapshot(self, host: str) -> None:
        """Fetch a pager's listing part by part; after a failure, its next announcement starts
        another try."""
        first = 0
        try:
            for _ in range(SNAPSHOT_PARTS_MAX):
                part = await rpc.call(
                    self.bus,
                    subjects.pager(host),
                    SnapshotWanted(first=first),
                    PagesSnapshot,
                    timeout_ms=SNAPSHOT_TIMEOUT_MS,
                )
                first = self.router.pages_snapshot(part)
                if not first:
                    return
        except Fault:
            self.router.snapshot_failed(host)
        finally:
            self._snapshots.discard(host)
