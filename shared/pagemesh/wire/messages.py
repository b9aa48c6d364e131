"""The registry of all messages, and the value types that messages share.

A message is a frozen struct registered under a name; ``codec`` packs it as
``[version, name, body]``. Unknown names, unknown fields and values out of range are
``Malformed`` before any code of ours sees them. Message types live beside this module, among
them ``pager_messages`` (worker and pager), ``work_messages`` (gateway and workers) and
``presence`` (which services are there).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from pagemesh.wire.errors import Fault, fault

SCHEMA_VERSION = 1
REQUEST_TOKENS_MAX = 1 << 22
"""Longest token list a message may carry (16 MiB packed; the bus limit is usually lower)."""

U64 = Annotated[int, Meta(ge=0)]
"""Unsigned; msgpack itself bounds it at 2**64 - 1."""
U32 = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
Count = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
Millis = Annotated[int, Meta(ge=0, le=86_400_000)]
Packed = Annotated[bytes, Meta(max_length=4 * REQUEST_TOKENS_MAX)]
"""Little-endian uint32 words: token ids, or extents (see ``wire.tokens``)."""
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
"""A service, worker or host name: one NATS subject token (``\\Z``, since ``$`` would let a
line end through)."""
RequestId = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
"""Made by the gateway; a client's own id is a label and never becomes this."""
SHORT_TEXT_MAX = 1_024
ShortText = Annotated[str, Meta(max_length=SHORT_TEXT_MAX)]


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A frozen part of a message. It holds only plain values, so it is never part of a reference
    cycle (hence ``gc=False``)."""


class Message(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value that is sent on its own."""


M = TypeVar("M", bound=type[Message])
_TYPES: dict[str, type[Message]] = {}
_NAMES: dict[type[Message], str] = {}


def registered(name: str) -> Callable[[M], M]:
    """Give a message type its wire name. Raises ``ValueError`` when the name is taken."""

    def register(kind: M) -> M:
        if name in _TYPES:
            raise ValueError(f"wire name {name!r} is taken by {_TYPES[name].__name__}")
        _TYPES[name] = kind
        _NAMES[kind] = name
        return kind

    return register


def type_of(name: str) -> type[Message] | None:
    return _TYPES.get(name)


def name_of(kind: type[Message]) -> str:
    return _NAMES[kind]


def registered_types() -> dict[str, type[Message]]:
    return dict(_TYPES)


class SequenceKey(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, order=True):
    """One sequence of one attempt: choice ``choice`` of ``request``, submitted for the
    ``attempt``-th time."""

    request: RequestId
    attempt: Annotated[int, Meta(ge=1, le=1000)]
    choice: Annotated[int, Meta(ge=0, le=1023)]


OrderPlace = tuple[int, str, int]
LEVEL_US = 10_000_000
"""What a level of ``priority`` is worth: a request counts as arriving so much later or earlier."""


class Order(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sequence's place in the one total order of sequences: the smaller ``place`` goes first and
    is preempted last.

    ``arrival_us`` is when the gateway took the request: microseconds since 1970 by that host's
    clock, since gateways of several hosts may use one pager. ``priority`` (lower is more urgent)
    shifts it by ``LEVEL_US`` per level, so that waiting requests age: a more urgent one that comes
    later than the difference is worth goes after them. ``request`` and ``choice`` rule out ties.
    An order is made once and kept when the sequence is admitted again.
    """

    priority: Annotated[int, Meta(ge=-1000, le=1000)]
    arrival_us: U64
    request: RequestId
    choice: Annotated[int, Meta(ge=0, le=1023)]

    @property
    def due_us(self) -> int:
        """The arrival time that would give a request of priority 0 the same place."""
        return self.arrival_us + LEVEL_US * self.priority

    @property
    def place(self) -> OrderPlace:
        """The key that orders are compared by."""
        return (self.due_us, self.request, self.choice)


@registered("refused")
class Refused(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A typed refusal. ``code`` names a class of ``wire.errors``."""

    code: ShortText
    message: ShortText
    retry_after_ms: Millis = 0

    @classmethod
    def of(cls, error: Fault) -> Refused:
        return cls(
            code=error.code, message=error.message[:1024], retry_after_ms=error.retry_after_ms
        )

    def error(self) -> Fault:
        return fault(self.code, self.message, retry_after_ms=self.retry_after_ms)


@registered("ok")
class Ok(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Done; nothing else to say."""
