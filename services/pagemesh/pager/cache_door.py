"""The operators' door on the bus: JSON in and out, discoverable by the NATS services protocol.

    pagemesh.v1.pages.VERB          every pager answers
    pagemesh.v1.pages.VERB.HOST     only the pager of that host does

The body is a message of ``wire.cache_messages`` without its name (an empty one: all defaults). An
error is ``{"error": {"code", "message"}}``, with the service protocol's headers. A change that was
made but could not be saved for the next pager is such an error, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import msgspec

from pagemesh.runtime.bus import Bus, Delivery, Headers
from pagemesh.runtime.discovery import (
    ERROR_CODE_HEADER,
    ERROR_HEADER,
    Discovery,
    Endpoint,
    ServiceFacts,
    discoverable,
    semantic,
)
from pagemesh.runtime.version import VERSION
from pagemesh.wire import subjects
from pagemesh.wire.cache_messages import (
    AskCacheStats,
    AskCacheTop,
    AskCacheTree,
    CacheInvalidated,
    InvalidateCache,
    PinPrefix,
    PrefixPinned,
    PrefixUnpinned,
    UnpinPrefix,
)
from pagemesh.wire.errors import Fault, Malformed
from pagemesh.wire.messages import Message, Refused
from pagemesh.wire.pager_reports import InspectPager

if TYPE_CHECKING:
    from pagemesh.pager.storage.pool_store import PoolStore
    from pagemesh.pager.storage.retired_notes import RetiredNotes

_KINDS: dict[str, type[Message]] = {
    "stats": AskCacheStats,
    "tree": AskCacheTree,
    "top": AskCacheTop,
    "pin": PinPrefix,
    "unpin": UnpinPrefix,
    "invalidate": InvalidateCache,
}
_MESSAGES = frozenset(_KINDS.values())
_STATUS = {"Malformed": "400", "Gone": "404", "NoCapacity": "409", "Busy": "503", "Stale": "503"}
_SERVICE = "pagemesh-pages"


class CacheDoor:
    """Within ``async with CacheDoor(bus, host, admit).open():`` calls are passed to ``admit``."""

    def __init__(self, bus: Bus, host: str, admit: Callable[[Delivery], None]) -> None:
        self._bus = bus
        self._host = host
        self._admit_call = admit
        self._discovery: Discovery | None = None

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Take calls for as long as the context lasts. Raises ``Denied``."""
        endpoints = tuple(
            Endpoint(verb, subjects.cache_door(verb, self._host), "") for verb in _KINDS
        )
        facts = ServiceFacts(
            _SERVICE,
            semantic(VERSION),
            "the page cache of a host: inspect, pin, invalidate",
            endpoints,
        )
        async with discoverable(self._bus, facts, metadata={"host": self._host}) as discovery:
            self._discovery = discovery
            made = [
                await self._bus.subscribe(subject, self._admit, refusal=_refusal)
                for verb in _KINDS
                for subject in (subjects.cache_door(verb), subjects.cache_door(verb, self._host))
            ]
            try:
                yield
            finally:
                self._discovery = None
                for subscription in made:
                    await self._bus.unsubscribe(subscription)

    def record(self, subject: str, *, duration_us: int, error: str) -> None:
        """Count a call that was answered, with an ``error`` code or none."""
        if self._discovery is not None:
            self._discovery.record(verb_of(subject), duration_us=duration_us, error=error)

    def _admit(self, delivery: Delivery) -> None:
        """Ignore a call that wants no answer, or wants it sent to a service."""
        if subjects.may_be_answered(delivery.reply, operators=True):
            self._admit_call(delivery)


def is_cache_call(subject: str) -> bool:
    """Whether ``subject`` is one of the door's."""
    return subject.startswith(f"{subjects.CACHE_PREFIX}.")


def check_place(message: Message, subject: str, host: str) -> None:
    """Check a message that did not come by this door. Those who may only read reports ask on a
    subject of its own. Raises ``Malformed`` for a message on the wrong subject."""
    if type(message) in _MESSAGES:
        raise Malformed("this request must be sent as JSON on pagemesh.v1.pages")
    if isinstance(message, InspectPager) != (subject == subjects.pager_report(host)):
        raise Malformed(
            "only InspectPager may be sent to the pager's report subject, and only there"
        )


def verb_of(subject: str) -> str:
    """The verb in ``subject``."""
    return subject[len(subjects.CACHE_PREFIX) + 1 :].partition(".")[0]


def decode(subject: str, body: bytes) -> Message:
    """The message in ``body``. Raises ``Malformed``, naming the field."""
    kind = _KINDS[verb_of(subject)]
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"{verb_of(subject)}: {error}") from None


def confirmed(answer: Message, store: PoolStore, retired: RetiredNotes) -> Message:
    """``answer``, unless it confirms a change that could not be saved for the next pager. Then an
    error: the change was made, but the caller must not rely on it."""
    kind = type(answer)
    if kind is PrefixPinned or kind is PrefixUnpinned:
        unkept = store.unkept_pins
    elif kind is CacheInvalidated:
        unkept = retired.unkept
    else:
        return answer
    return answer if unkept is None else Refused.of(unkept)


def respond(delivery: Delivery, message: Message) -> None:
    """Answer in JSON."""
    if isinstance(message, Refused):
        body, headers = _refusal(message.error())
        delivery.respond(body, headers=headers)
    else:
        delivery.respond(msgspec.json.encode(message))


def _refusal(fault: Fault) -> tuple[bytes, Headers]:
    body = {"error": {"code": fault.code, "message": fault.message}}
    headers = {ERROR_HEADER: fault.code, ERROR_CODE_HEADER: _STATUS.get(fault.code, "500")}
    return msgspec.json.encode(body), headers
