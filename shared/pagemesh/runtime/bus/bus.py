"""The bus: one self-healing connection to NATS, with typed faults.

    CONNECTING -> CONNECTED <-> RECONNECTING -> CLOSED

While the bus is not connected nothing is buffered: sending fails at once with ``Disconnected``,
and so do waiting requests, so that every caller knows where it stands. Subscriptions are kept
and renewed. The bus never gives up by itself; a caller that must not wait checks ``state``.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable

from pagemesh.runtime.bus.link import Link
from pagemesh.runtime.bus.messages import (
    MESSAGE_BYTES_WANTED,
    Delivery,
    Headers,
    Outgoing,
    Refusal,
    Reply,
    check_subject,
    lower_keys,
    refusal,
)
from pagemesh.runtime.bus.nats_client import Incoming, OnMessage
from pagemesh.runtime.bus.replies import Asked, Inbox, OneReply, ReplyTable
from pagemesh.runtime.bus.state import BusCounters, BusState, BusStatistics, Subscription
from pagemesh.runtime.logs import get_logger
from pagemesh.runtime.settings import BusConfig
from pagemesh.wire import subjects
from pagemesh.wire.errors import (
    ConfigError,
    DeadlineExceeded,
    Denied,
    Disconnected,
    Fault,
    Internal,
)

BARRIER_TIMEOUT_MS = 5_000
_log = get_logger(__name__)


class Bus:
    """Use ``async with Bus.connect(...) as bus``."""

    def __init__(self, config: BusConfig, *, role: str, name: str, gathers: bool = False) -> None:
        self.config = config
        self._gathers = gathers
        self.role = role
        self.name = name
        self.counters = BusCounters()
        self._state = BusState.CONNECTING
        self._connected = asyncio.Event()
        self._on_state: list[Callable[[BusState], None]] = []
        self._inbox_prefix = subjects.inbox_prefix(role, name)
        self._replies = ReplyTable(
            f"{self._inbox_prefix}.{secrets.token_hex(8)}",
            waiter_count_max=config.request_count_max,
        )
        self._subscriptions: list[Subscription] = []
        self._link: Link | None = None
        self._next_link: Link | None = None
        self._last_problem = ""
        self._message_bytes_max = 0
        self._is_service = self._deaf = False

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(
        cls, config: BusConfig, *, role: str, name: str, patient: bool = False,
        gathers: bool = False,
    ) -> AsyncIterator[Bus]:  # fmt: skip
        """A connected bus, for as long as the context lasts.

        Without a server, keeps trying for ``start_wait_ms`` and then raises ``ConfigError``
        that names the URL. A ``patient`` bus tries once, is returned whatever the outcome, and
        connects when it can (``state``, ``wait_connected``): for services, which may start in
        any order. A bus that ``gathers`` sends all messages of a turn of the event loop
        ``together``: for services that answer many requests and do nothing else. Raises
        ``ConfigError`` at once for credentials, certificates and files that cannot work.
        """
        bus = cls(config, role=role, name=name, gathers=gathers)
        bus._is_service = patient
        _ = config.servers
        await bus._first_link(patient=patient)
        keeper = asyncio.create_task(bus._keep(), name=f"bus-{name}")
        try:
            if not patient:
                await bus.wait_connected(timeout_ms=BARRIER_TIMEOUT_MS)
            yield bus
            if bus._link is not None and bus.state is BusState.CONNECTED:
                with contextlib.suppress(Fault):
                    await bus._link.barrier(timeout_ms=1_000)
        finally:
            bus._set_state(BusState.CLOSED)
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            bus._replies.fail_all(Disconnected("the bus was closed"))
            if bus._link is not None:
                await bus._link.close()

    # --- state

    @property
    def state(self) -> BusState:
        return self._state

    @property
    def message_bytes_max(self) -> int:
        """Limit of headers plus payload, as last known. Raises ``Disconnected`` if unknown."""
        return self._message_bytes_max or self._require_link().message_bytes_max

    def on_state(self, callback: Callable[[BusState], None]) -> None:
        """Call ``callback`` with each new state; it must neither block nor raise."""
        self._on_state.append(callback)

    async def wait_connected(self, *, timeout_ms: int) -> None:
        """Raises ``Disconnected`` when there is no connection in time."""
        try:
            async with asyncio.timeout(timeout_ms / 1_000):
                await self._connected.wait()
        except TimeoutError:
            raise Disconnected(f"no NATS server: {self._last_problem}") from None

    def statistics(self) -> BusStatistics:
        return BusStatistics(self._state, self._replies.waiter_count, self.counters)

    # --- sending

    def publish(
        self, subject: str, data: bytes, *, headers: Headers | None = None, reply: str = "",
        then: Outgoing | None = None,
    ) -> None:  # fmt: skip
        """Send, and ``then`` after it. Raises ``Disconnected``, ``Busy`` (too much unsent output)
        or ``Malformed`` (too large, or no NATS subject); nothing was sent if it raises."""
        outgoing = [Outgoing(subject, data, reply), *((then,) if then is not None else ())]
        try:
            self._require_link().publish(outgoing, lower_keys(headers))
        except Fault:
            self.counters.refused_here += 1
            raise
        self.counters.sent += len(outgoing)

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Within it, which must not await, the first message is written at once and the others in
        one write at its end, since each write wakes the server and the recipients."""
        return self._link.together() if self._link else contextlib.nullcontext()

    async def request(
        self, subject: str, data: bytes, *, timeout_ms: int, headers: Headers | None = None,
        then: Outgoing | None = None,
    ) -> Reply:  # fmt: skip
        """Send, and ``then`` after it, and wait for one answer.

        Raises ``Absent`` (nobody listens), ``DeadlineExceeded``, ``Denied`` (no permission),
        ``Disconnected`` (before or while waiting), ``Busy`` (too many requests wait) or
        ``Malformed`` (too large). A ``Refused`` is returned like any answer.
        """
        return await self.ask(subject, data, timeout_ms=timeout_ms, headers=headers, then=then)

    def ask(
        self, subject: str, data: bytes, *, timeout_ms: int, headers: Headers | None = None,
        then: Outgoing | None = None,
    ) -> Asked:  # fmt: skip
        """Like ``request``, but sends at once, and raises errors of sending before the await."""
        if timeout_ms <= 0:
            raise DeadlineExceeded(f"no time is left for a request on {subject}")
        waiter = OneReply(subject, timeout_ms)
        address = self._replies.add(waiter)
        try:
            self.publish(subject, data, headers=headers, reply=address, then=then)
        except BaseException:
            self._replies.remove(address)
            waiter.end()
            raise
        return Asked(self._replies, waiter, address)

    @contextlib.asynccontextmanager
    async def request_many(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Headers | None = None,
        message_count_max: int = 1_024,
    ) -> AsyncIterator[Inbox]:
        """Send and read a stream of answers from the ``Inbox``; how the last one is marked is up
        to the answering service. Raises like ``publish``."""
        inbox = Inbox(subject, message_count_max=message_count_max)
        inbox.address = self._replies.add(inbox)
        try:
            self.publish(subject, data, headers=headers, reply=inbox.address)
            yield inbox
        finally:
            self._replies.remove(inbox.address)

    async def barrier(self, *, timeout_ms: int = BARRIER_TIMEOUT_MS) -> None:
        """Return when the server has seen all that was sent and subscribed. Raises
        ``Disconnected``."""
        await self._require_link().barrier(timeout_ms=timeout_ms)

    # --- receiving

    async def subscribe(
        self,
        subject: str,
        on_delivery: Callable[[Delivery], None],
        *,
        queue: str = "",
        refusal: Refusal = refusal,
    ) -> Subscription:
        """Listen. When this returns on a connected bus, the server delivers.

        ``on_delivery`` runs on the event loop and **only admits**: it puts the message into a
        bounded inbox or raises a ``Fault``, which is sent back as ``refusal`` words it. Raises
        ``Denied`` or ``Malformed``.
        """
        check_subject(subject)
        made = Subscription(subject, queue, on_delivery, refusal)
        self._subscriptions.append(made)
        link = self._link or self._next_link
        if link is None:
            return made
        try:
            await self._subscribe_on(link, made)
            await link.barrier(timeout_ms=BARRIER_TIMEOUT_MS)
        except Disconnected:
            return made  # the keeper subscribes again on the next link
        except Fault:
            self._subscriptions.remove(made)
            raise
        if made.denied:
            self._subscriptions.remove(made)
            raise Denied(f"the NATS server does not let {self.role} listen on {subject}")
        return made

    async def unsubscribe(self, subscription: Subscription) -> None:
        """Stop listening. Doing so twice is harmless."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            if self._link is not None:
                await self._link.unsubscribe(subscription.link_id)

    # --- the link's events

    async def on_denied(self, action: str, subject: str) -> None:
        """The server refused a subject (given in lower case)."""
        self.counters.denied += 1
        fault = Denied(f"the NATS server does not let {self.role} {action} on {subject}")
        if action == "publish":
            self._replies.fail_asked(subject, fault)
        else:
            self._deaf = self._deaf or subject == self._replies.pattern.lower()
            for made in self._subscriptions:
                if made.subject.lower() == subject:
                    made.denied = True

    def _on_reply(self, incoming: Incoming) -> None:
        self.counters.received += 1
        self._replies.put(incoming.subject, Reply(incoming.data, lower_keys(incoming.headers)))

    def _receiver(self, made: Subscription) -> OnMessage:
        def receive(incoming: Incoming) -> None:
            self.counters.received += 1
            delivery = Delivery(
                self, incoming.subject, incoming.reply, incoming.data, lower_keys(incoming.headers)
            )
            try:
                made.on_delivery(delivery)
            except Fault as fault:
                self._refuse(made, delivery.reply, fault)
            except Exception as error:
                self.counters.crashed += 1
                _log.error("bus.callback_crashed", subject=made.subject, error=error)
                crash = Internal("the service failed to handle the message")
                self._refuse(made, delivery.reply, crash)

        return receive

    def _refuse(self, made: Subscription, reply: str, fault: Fault) -> None:
        if not reply:
            return
        try:
            data, headers = made.refusal(fault)
            self.publish(reply, data, headers=headers)
        except Fault:
            return
        except Exception as error:
            self.counters.crashed += 1
            _log.error("bus.refusal_crashed", subject=made.subject, error=error)

    # --- keeping the link

    def _require_link(self) -> Link:
        if self._link is None:
            raise Disconnected(f"no connection to NATS ({self._state.value})")
        return self._link

    async def _first_link(self, *, patient: bool) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.config.start_wait_ms / 1_000
        pause_ms = self.config.reconnect_wait_ms
        while True:
            try:
                return await self._adopt(await self._open())
            except Disconnected as fault:
                if patient:
                    return
                if loop.time() + pause_ms / 1_000 >= deadline:
                    waited_s = self.config.start_wait_ms / 1_000
                    raise ConfigError(
                        f"no NATS server at {self.config.shown_url} in {waited_s:g} s: "
                        f"{fault.message}; start one there or name another with PAGEMESH_NATS "
                        "(--nats); `pagemesh up` without it starts its own"
                    ) from None
            await asyncio.sleep(pause_ms / 1_000)
            pause_ms = min(2 * pause_ms, self.config.reconnect_wait_ms_max)

    async def _open(self) -> Link:
        return await Link.open(
            self.config, name=f"pagemesh-{self.role}-{self.name}", inbox_prefix=self._inbox_prefix,
            events=self, gathers=self._gathers,
        )  # fmt: skip

    async def _keep(self) -> None:
        """Until closed, open a new link whenever one is lost (on cancellation see ``link``)."""
        pause_ms, tries = self.config.reconnect_wait_ms, 0
        while self._state is not BusState.CLOSED:
            try:
                if self._link is not None:
                    await self._link.lost.wait()
                    await self._release(self._link)
                    pause_ms, tries = self.config.reconnect_wait_ms, 0
                await self._adopt(link := await self._open())
                self.counters.connects += 1
                _log.info("bus.connected", url=link.url)
            except Exception as error:
                # Unforeseen errors too: if this task ended, the bus would never recover.
                self._last_problem = str(error) or type(error).__name__
                tries += 1
                if tries & (tries - 1) == 0:  # 1, 2, 4, 8, ...: an outage may last for days
                    url = self.config.shown_url
                    _log.warning("bus.unreachable", url=url, tries=tries, error=error)
                await asyncio.sleep(pause_ms * (1 + secrets.randbelow(256) / 1_024) / 1_000)
                pause_ms = min(2 * pause_ms, self.config.reconnect_wait_ms_max)

    async def _adopt(self, link: Link) -> None:
        self._deaf = False
        try:
            await link.subscribe(self._replies.pattern, "", self._on_reply)
            self._next_link = link  # new subscriptions are made there from here on
            for made in tuple(self._subscriptions):
                await self._subscribe_on(link, made)
            await link.barrier(timeout_ms=BARRIER_TIMEOUT_MS)
            if self._deaf:
                raise ConfigError(
                    f"the NATS user may not listen on {self._inbox_prefix}.>, where answers come "
                    f"in; connect as the role {self.role} (--nats), or give it those permissions"
                )
        except BaseException:
            self._next_link = None
            await link.close()
            raise
        self._link, self._next_link = link, None
        self._learn_size(link.message_bytes_max)
        self._set_state(BusState.CONNECTED)
        self._connected.set()

    def _learn_size(self, bytes_max: int) -> None:
        news, self._message_bytes_max = bytes_max != self._message_bytes_max, bytes_max
        if news and self._is_service and bytes_max < MESSAGE_BYTES_WANTED:
            advice = f"set max_payload of the NATS server to {MESSAGE_BYTES_WANTED}"
            _log.warning("bus.small_messages", bytes_max=bytes_max, advice=advice)

    async def _release(self, link: Link) -> None:
        self._link = None
        self._connected.clear()
        self._last_problem = link.reason
        _log.warning("bus.lost", url=link.url, reason=link.reason)
        self._set_state(BusState.RECONNECTING)
        self._replies.fail_all(
            Disconnected(f"the connection to NATS was lost: {link.reason}", retry_after_ms=100)
        )
        await link.close()

    async def _subscribe_on(self, link: Link, made: Subscription) -> None:
        made.denied = False
        made.link_id = await link.subscribe(made.subject, made.queue, self._receiver(made))

    def _set_state(self, state: BusState) -> None:
        if self._state in (state, BusState.CLOSED):  # closed is closed
            return
        self._state = state
        for callback in self._on_state:
            callback(state)
