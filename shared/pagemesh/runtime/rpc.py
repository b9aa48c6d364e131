"""Typed messages over the bus: encode, pass the trace on, decode, raise what was refused."""

from __future__ import annotations

from typing import TypeVar

from pagemesh.runtime import trace
from pagemesh.runtime.bus import Bus, Delivery, Headers, Outgoing
from pagemesh.wire import codec
from pagemesh.wire.messages import Message

T = TypeVar("T", bound=Message)


async def call(
    bus: Bus,
    subject: str,
    message: Message,
    *reply_types: type[T],
    timeout_ms: int,
    headers: Headers | None = None,
    then: Outgoing | None = None,
) -> T:
    """Ask and get one of ``reply_types``; ``then`` see ``Bus.request``.

    Raises the fault of a ``Refused`` answer, ``Malformed`` for an answer of another type, and
    everything that ``Bus.request`` raises. All of them are ``wire.errors.Fault``.
    """
    reply = await bus.request(
        subject, codec.encode(message), timeout_ms=timeout_ms, headers=trace.inject(headers),
        then=then,
    )  # fmt: skip
    return codec.decode_as(reply.data, *reply_types)


async def send(bus: Bus, subject: str, message: Message, *, headers: Headers | None = None) -> None:
    """Publish and expect nothing. Raises like ``Bus.publish``."""
    bus.publish(subject, codec.encode(message), headers=trace.inject(headers))


async def answer(delivery: Delivery, message: Message) -> bool:
    """Answer a delivery; True when it was sent. Never raises (see ``Delivery.respond``)."""
    return await delivery.respond(codec.encode(message))
