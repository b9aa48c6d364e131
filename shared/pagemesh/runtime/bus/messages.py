"""What the bus hands out: deliveries to answer and replies to read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pagemesh.wire import codec
from pagemesh.wire.errors import Fault, Malformed
from pagemesh.wire.messages import Refused
from pagemesh.wire.subjects import SUBJECT, SUBJECT_BYTES_MAX

Headers = Mapping[str, str]
"""Keys are lower case, always: NATS compares them byte by byte and proxies change them."""

Refusal = Callable[[Fault], tuple[bytes, Headers]]
"""Turns a fault into the payload and headers of a refusal."""

MESSAGE_BYTES_WANTED = 8 << 20
"""``max_payload`` of the servers that we start: sequences of 1.8 million tokens fit."""


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """A message to be sent; the recipient answers to ``reply``, if that is not empty."""

    subject: str
    data: bytes
    reply: str


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. ``data`` is opaque bytes; ``headers`` have lower-case keys."""

    data: bytes
    headers: Headers


class Answering(Protocol):
    """The part of the bus that a delivery needs."""

    def publish(self, subject: str, data: bytes, *, headers: Headers | None = None) -> None:
        """Raises a ``Fault`` when the message cannot be sent."""
        ...


class Delivery:
    """One message that came in, and the way to answer it."""

    __slots__ = ("_bus", "data", "headers", "reply", "subject")

    def __init__(
        self, bus: Answering, subject: str, reply: str, data: bytes, headers: Headers
    ) -> None:
        self._bus = bus
        self.subject = subject
        self.reply = reply
        """Where answers go; empty when none is wanted."""
        self.data = data
        self.headers = headers

    def respond(self, data: bytes, *, headers: Headers | None = None) -> bool:
        """Answer; may be called again for a stream. True when it was sent.

        An answer that is too large becomes a refusal that says so. Nothing is raised: if the bus
        is down, the peer's own request has failed already.
        """
        if not self.reply:
            return False
        try:
            self._bus.publish(self.reply, data, headers=headers)
        except Malformed as fault:
            self._refuse(fault)
            return False
        except Fault:
            return False
        return True

    def respond_error(self, fault: Fault) -> bool:
        """Answer with a ``Refused``. True when it was sent; like ``respond``, never raises."""
        return bool(self.reply) and self._refuse(fault)

    def _refuse(self, fault: Fault) -> bool:
        data, headers = refusal(fault)
        try:
            self._bus.publish(self.reply, data, headers=headers)
        except Fault:
            return False
        return True


def refusal(fault: Fault) -> tuple[bytes, Headers]:
    """``fault`` as a ``Refused``, which every service of the mesh understands."""
    return codec.encode(Refused.of(fault)), {}


def lower_keys(headers: Headers | None) -> dict[str, str]:
    return {key.lower(): value for key, value in headers.items()} if headers else {}


def check_size(subject: str, size: int, *, bytes_max: int) -> None:
    """``size`` is that of headers and payload. Raises ``Malformed``, naming the limit, for a
    message at which the server would close the connection."""
    if size > bytes_max:
        raise Malformed(
            f"a message of {size} bytes (headers included) exceeds the bus limit of "
            f"{bytes_max}; send it in parts or raise max_payload of the NATS server"
        )
    check_subject(subject)


def check_subject(subject: str) -> None:
    """Raises ``Malformed`` for text that NATS would not read as exactly one subject."""
    if len(subject) > SUBJECT_BYTES_MAX:
        raise Malformed(f"a subject of {len(subject)} characters exceeds {SUBJECT_BYTES_MAX}")
    if not SUBJECT.fullmatch(subject):
        raise Malformed(f"not a valid NATS subject: {subject[:80]!r}")
