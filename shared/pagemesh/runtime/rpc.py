"""Typed messages over the bus: encode, pass the trace on, decode, raise refusals as faults."""

from __future__ import annotations

from typing import TypeVar

from pagemesh.runtime import trace
from pagemesh.runtime.bus import Asked, Bus, Delivery, Headers, Outgoing
from pagemesh.wire import codec
from pagemesh.wire.messages import Message

T = TypeVar("T", bound=Message)


async def call(
    bus: Bus,
    subject: str,
    message: Message,
    *reply_types: type[T],
    timeout_ms: int,
) -> T:
    """Ask and get one of ``reply_types``.

    Raises the fault of a ``Refused`` answer, ``Malformed`` for an answer of another type, and
    everything that ``Bus.request`` raises. All of them are ``wire.errors.Fault``.
    """
    return await answer_of(ask(bus, subject, message, timeout_ms=timeout_ms), *reply_types)


def ask(
    bus: Bus, subject: str, message: Message, *, timeout_ms: int, then: Outgoing | None = None
) -> Asked:
    """Ask at once; pass the result to ``answer_of``. For ``then`` and the errors raised see
    ``Bus.ask``."""
    return bus.ask(
        subject, codec.encode(message), timeout_ms=timeout_ms, headers=trace.inject(), then=then
    )


async def answer_of(asked: Asked, *reply_types: type[T]) -> T:
    """Wait for one of ``reply_types``. Raises like ``call``."""
    return codec.decode_as((await asked).data, *reply_types)


def send(bus: Bus, subject: str, message: Message, *, headers: Headers | None = None) -> None:
    """Publish and expect nothing. Raises like ``Bus.publish``."""
    bus.publish(subject, codec.encode(message), headers=trace.inject(headers))


def answer(delivery: Delivery, message: Message) -> bool:
    """Answer a delivery; True when it was sent. Never raises (see ``Delivery.respond``)."""
    return delivery.respond(codec.encode(message))
