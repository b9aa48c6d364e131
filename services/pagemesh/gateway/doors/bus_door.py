"""The bus door: the same JSON bodies on NATS subjects, answers to the reply inbox.

A call is answered by one message, or, when it asks for a stream, by one for each chunk and an empty
last one. Headers say which is which:

    pagemesh-last: true       nothing comes after this message
    pagemesh-sequence: N      messages of this answer, counted from 1
    pagemesh-error: CODE      the body is OpenAI's error object; with it come nats-service-error
                              and nats-service-error-code (HTTP status) of NATS's service protocol

``authorization: Bearer KEY`` is required when the gateway has API keys; ``traceparent`` is
honoured. A caller whose inbox is gone is noticed within about a second of its next chunk.

Gateways of several models on one NATS server share the clients' subjects. One that gets a call for
another's model forwards it, and a gateway of that model answers the client itself:

    client --call--> gateway of A --the call, and whom to answer--> gateway of B --answer--> client
                                  <------------------------ taken--
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec

from pagemesh.gateway.api.api_errors import ApiError, ClientLeft, cancelled, from_fault
from pagemesh.gateway.api.render import too_large
from pagemesh.gateway.calls.call_facts import ends_counted
from pagemesh.gateway.doors.finishing import finished
from pagemesh.gateway.doors.front import Caller, Front
from pagemesh.gateway.doors.http import models_json
from pagemesh.gateway.doors.tenants import bearer
from pagemesh.runtime.bus import Bus, Delivery, Headers, Inbox, Subscription
from pagemesh.runtime.clock import Clock
from pagemesh.runtime.discovery import (
    ERROR_CODE_HEADER,
    ERROR_HEADER,
    Discovery,
    Endpoint,
    ServiceFacts,
    discoverable,
    semantic,
)
from pagemesh.runtime.logs import get_logger
from pagemesh.runtime.version import VERSION
from pagemesh.wire import codec, subjects
from pagemesh.wire.errors import (
    Absent,
    Busy,
    DeadlineExceeded,
    Disconnected,
    Fault,
    Malformed,
)
from pagemesh.wire.messages import Refused

LAST = "pagemesh-last"
SEQUENCE = "pagemesh-sequence"
ERROR = "pagemesh-error"
ASKED_AT, ANSWER_TO = "pagemesh-asked-at", "pagemesh-answer-to"
"""Headers of a forwarded call: the subject that it came on, and its reply inbox."""
_CARRIED = ("authorization", "traceparent", "tracestate")
"""Headers of a call that a gateway reads."""
CALLS_MAX = 4_096
_DOOR = "bus"
_PROBE_MS = 1_000
_HAND_ON_MS = 2_000
_HEADER_BYTES_MAX = 1 << 10
_SERVICE = "pagemesh"
_ENDPOINTS = (
    Endpoint("chat", subjects.CHAT_COMPLETIONS, subjects.CLIENT_QUEUE),
    Endpoint("completions", subjects.COMPLETIONS, subjects.CLIENT_QUEUE),
    Endpoint("models", subjects.MODELS, subjects.CLIENT_QUEUE),
)
_COMPLETIONS = (subjects.CHAT_COMPLETIONS, subjects.COMPLETIONS)
_log = get_logger(__name__)


class _Answer:
    """Messages to one reply inbox, numbered.

    About once a second a message asks for a reply. Nobody sends one, but once nobody listens any
    more the NATS server says so, and the next such message raises ``ClientLeft``.
    """

    def __init__(self, bus: Bus, clock: Clock, delivery: Delivery) -> None:
        self._bus = bus
        self._clock = clock
        self._delivery = delivery
        self._sequence = 0
        self._probed_ms = 0
        self._stack = contextlib.AsyncExitStack()
        self._probe: Inbox | None = None

    @property
    def bytes_max(self) -> int:
        """The most that one message can carry."""
        return self._bus.message_bytes_max - _HEADER_BYTES_MAX

    async def send(self, data: bytes, *, last: bool = False, error: ApiError | None = None) -> None:
        """Raises ``ClientLeft``, or ``ApiError`` if the bus cannot carry ``data``, or not now."""
        headers = {SEQUENCE: str(self._sequence + 1)}
        if last:
            headers[LAST] = "true"
        if error is not None:
            headers |= _error_headers(error)
        try:
            if len(data) > self.bytes_max:
                raise too_large(self.bytes_max)
            now_ms = self._clock.now_ms()
            if last or now_ms - self._probed_ms < _PROBE_MS:
                self._bus.publish(self._delivery.reply, data, headers=headers)
            else:
                self._probed_ms = now_ms
                await self._send_probing(data, headers)
        except Absent:
            raise ClientLeft from None
        except Fault as fault:  # the bus is away, or takes no more
            raise from_fault(fault) from None
        self._sequence += 1

    async def close(self) -> None:
        self._probe = None
        await self._stack.aclose()

    async def _send_probing(self, data: bytes, headers: dict[str, str]) -> None:
        """Raises ``Absent`` when the last probe found nobody."""
        if self._probe is not None:
            # No reply so far, or the link was lost since: if it still is, sending will tell.
            with contextlib.suppress(DeadlineExceeded, Disconnected):
                await self._probe.receive(timeout_ms=0)
        await self.close()
        asking = self._bus.request_many(
            self._delivery.reply, data, headers=headers, message_count_max=1
        )
        self._probe = await self._stack.enter_async_context(asking)


class BusDoor:
    """``async with BusDoor(front, bus).open():``"""

    def __init__(self, front: Front, bus: Bus) -> None:
        self._front = front
        self._bus = bus
        self._calls: set[asyncio.Task[None]] = set()
        self._subscriptions: list[Subscription] = []
        self._discovery: Discovery | None = None

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[BusDoor]:
        """Take calls for as long as the context lasts; then let running ones finish. Raises
        ``Denied``."""
        facts = ServiceFacts(
            _SERVICE, semantic(VERSION), "OpenAI-compatible model serving", _ENDPOINTS
        )
        metadata = {"model": self._front.model, "gateway": self._front.gateway.name}
        async with discoverable(self._bus, facts, metadata=metadata) as discovery:
            self._discovery = discovery
            queue = subjects.CLIENT_QUEUE
            self._subscriptions = [
                await self._bus.subscribe(
                    endpoint.subject, self._admit, queue=queue, refusal=_refusal
                )
                for endpoint in _ENDPOINTS
            ]
            ours = subjects.gateways_of(self._front.model)
            self._subscriptions.append(
                await self._bus.subscribe(ours, self._admit_handed_on, queue=queue)
            )
            async with finished(self._front.gateway, self._calls):
                try:
                    yield self
                finally:
                    await self.close()

    async def close(self) -> None:
        """Take no new calls; other gateways get them. Doing so twice is harmless."""
        for subscription in self._subscriptions:
            await self._bus.unsubscribe(subscription)

    def _admit(self, delivery: Delivery) -> None:
        """Start a call in a task of its own. Messages without a reply inbox are ignored, and so are
        those with one of the mesh's own subjects: no client may speak to a service through us."""
        if not subjects.may_be_answered(delivery.reply):
            return
        if len(self._calls) >= CALLS_MAX:
            self._refuse(delivery)
        task = asyncio.create_task(self._serve(delivery), name="bus-call")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    def _admit_handed_on(self, delivery: Delivery) -> None:
        """Start a call that a gateway of another model forwarded. Raises ``Busy`` or
        ``Malformed``."""
        headers = dict(delivery.headers)
        asked_at, answer_to = headers.pop(ASKED_AT, ""), headers.pop(ANSWER_TO, "")
        if asked_at not in _COMPLETIONS:
            raise Malformed(f"not a subject of completions: {asked_at[:80]!r}")
        self._admit(Delivery(self._bus, asked_at, answer_to, delivery.data, headers))
        delivery.respond(b"")

    def _refuse(self, delivery: Delivery) -> None:
        """Raises ``Busy``, and counts the request if it is a completion."""
        busy = Busy("too many calls at once", retry_after_ms=1_000)
        if delivery.subject == subjects.MODELS:
            raise busy
        with ends_counted(_DOOR, chat=_is_chat(delivery)):
            raise busy

    async def _serve(self, delivery: Delivery) -> None:
        clock = self._front.gateway.clock
        start_us = clock.now_us()
        answer = _Answer(self._bus, clock, delivery)
        failed = ""
        try:
            await self._answer(delivery, answer)
        except ClientLeft:
            failed = "cancelled"
        except asyncio.CancelledError:
            await _send_error(answer, cancelled("stopped"))
            raise
        except ApiError as error:
            failed = error.code or error.type
            await _send_error(answer, error)
        except Exception as error:
            failed = "internal"
            _log.error("gateway.bus_call_crashed", error=error)
            await _send_error(answer, ApiError(500, "internal error in the gateway"))
        finally:
            await answer.close()
        name = next(e.name for e in _ENDPOINTS if e.subject == delivery.subject)
        if self._discovery is not None:
            self._discovery.record(name, duration_us=clock.now_us() - start_us, error=failed)

    async def _answer(self, delivery: Delivery, answer: _Answer) -> None:
        key = bearer(delivery.headers.get("authorization", ""))
        tenant = self._front.tenants.tenant_of(key)
        if tenant is None:
            message = "a valid API key is required: send the header authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key")
        if delivery.subject == subjects.MODELS:
            await answer.send(msgspec.json.encode(models_json(self._front)), last=True)
            return
        with self._front.asked(tenant, _DOOR, chat=_is_chat(delivery)):
            await self._complete(delivery, tenant, answer)

    async def _complete(self, delivery: Delivery, tenant: str, answer: _Answer) -> None:
        caller = Caller(door=_DOOR, tenant=tenant, headers=delivery.headers)
        parsed = await self._front.parse(delivery.data, caller, chat=_is_chat(delivery))
        model = parsed.ask.model
        if model != self._front.model and await self._handed_on(delivery, model):
            return
        understood = await self._front.understand(parsed, caller)
        async with self._front.call(understood, caller) as call:
            if not understood.ask.stream:
                await answer.send(await call.whole(answer.bytes_max), last=True)
                return
            async for chunks in call.chunks():
                for chunk in chunks:
                    await answer.send(chunk)
            await answer.send(b"", last=True)

    async def _handed_on(self, delivery: Delivery, model: str) -> bool:
        """Forward the call to a gateway of ``model``, which is not ours; returns whether one
        answers it. Raises ``ApiError`` if it cannot take it now. If it says nothing it may have
        taken it: True."""
        data = delivery.data
        headers = {name: text for name, text in delivery.headers.items() if name in _CARRIED}
        headers |= {ASKED_AT: delivery.subject, ANSWER_TO: delivery.reply}
        subject = subjects.gateways_of(model)
        try:
            taken = await self._bus.request(subject, data, timeout_ms=_HAND_ON_MS, headers=headers)
        except Absent:
            return False
        except DeadlineExceeded:
            return True
        except Malformed:
            text = "the body is too large to be handed on to a gateway of another model"
            raise ApiError(413, text, code="body_too_large") from None
        except Fault as fault:
            raise from_fault(fault) from None
        try:
            if taken.data and isinstance(answer := codec.decode(taken.data), Refused):
                raise answer.error()
        except Fault as fault:
            raise from_fault(fault) from None
        return True


def _is_chat(delivery: Delivery) -> bool:
    return delivery.subject == subjects.CHAT_COMPLETIONS


def _error_headers(error: ApiError) -> dict[str, str]:
    return {
        ERROR: error.code or error.type,
        ERROR_CODE_HEADER: str(error.status),
        ERROR_HEADER: error.type,
    }


def _refusal(fault: Fault) -> tuple[bytes, Headers]:
    """The whole answer to a call that was refused on arrival."""
    error = from_fault(fault)
    return error.body(), {SEQUENCE: "1", LAST: "true", **_error_headers(error)}


async def _send_error(answer: _Answer, error: ApiError) -> None:
    with contextlib.suppress(ClientLeft, ApiError):
        await answer.send(error.body(), last=True, error=error)
