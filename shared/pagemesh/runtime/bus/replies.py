"""Which request waits for which reply.

All replies to a bus come in on one wildcard subscription; the last token of their subject
names the waiter. A waiter ends with a reply, a fault or its timeout, whichever comes first, and a
late reply is dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator
from typing import Any, Protocol

from pagemesh.runtime.bus.messages import Reply
from pagemesh.wire.errors import Absent, Busy, DeadlineExceeded, Fault

_NO_RESPONDERS = "503"


class Waiter(Protocol):
    subject: str
    """Subject of the request, to tell which waiters a denied subject concerns."""

    def put(self, reply: Reply) -> None: ...

    def fail(self, fault: Fault) -> None: ...


class OneReply:
    """Waits for a single reply, for ``timeout_ms`` from now on."""

    __slots__ = ("_future", "_timer", "subject")

    def __init__(self, subject: str, timeout_ms: int) -> None:
        self.subject = subject
        loop = asyncio.get_running_loop()
        self._future: asyncio.Future[Reply] = loop.create_future()
        self._timer = loop.call_later(timeout_ms / 1_000, self._expire, timeout_ms)

    def put(self, reply: Reply) -> None:
        if not self._future.done():
            self._future.set_result(reply)

    def fail(self, fault: Fault) -> None:
        if not self._future.done():
            self._future.set_exception(fault)
            self._future.exception()  # marks it as retrieved: the caller may be gone

    async def wait(self) -> Reply:
        """The reply. Raises the fault that ended the wait, ``DeadlineExceeded`` on a timeout."""
        try:
            return await self._future
        finally:
            self.end()

    def end(self) -> None:
        """Call it when nobody waits any more."""
        self._timer.cancel()

    def _expire(self, timeout_ms: int) -> None:
        self.fail(DeadlineExceeded(f"no answer on {self.subject} within {timeout_ms} ms"))


class Inbox:
    """A stream of replies with one reader, bounded: when the reader falls behind, the stream
    ends in ``Busy`` and not in silence."""

    __slots__ = ("_fault", "_message_count_max", "_messages", "_wake", "address", "subject")

    def __init__(self, subject: str, *, message_count_max: int) -> None:
        self.subject = subject
        """Subject of the request."""
        self.address = ""
        """Subject on which the answers come in."""
        self._message_count_max = message_count_max
        self._messages: deque[Reply] = deque()
        self._wake = asyncio.Event()
        self._fault: Fault | None = None

    def put(self, reply: Reply) -> None:
        if self._fault is not None:
            return
        if len(self._messages) >= self._message_count_max:
            self.fail(Busy(f"the reader of a stream fell {len(self._messages)} messages behind"))
            return
        self._messages.append(reply)
        self._wake.set()

    def fail(self, fault: Fault) -> None:
        if self._fault is None:
            self._fault = fault
            self._wake.set()

    async def receive(self, *, timeout_ms: int) -> Reply:
        """The next message; messages that came before a fault are returned before it is raised.

        Raises ``DeadlineExceeded`` when none comes in time, ``Absent`` when nobody listens,
        ``Disconnected`` or ``Busy`` when messages may be missing.
        """
        if not self._messages and self._fault is None:
            self._wake.clear()
            try:
                async with asyncio.timeout(timeout_ms / 1_000):
                    await self._wake.wait()
            except TimeoutError:
                raise DeadlineExceeded(f"no message within {timeout_ms} ms") from None
        if self._messages:
            return self._messages.popleft()
        assert self._fault is not None, "woken without a message or a fault"
        raise self._fault


class ReplyTable:
    """Waiters by the last token of their reply subject, their *address*."""

    def __init__(self, prefix: str, *, waiter_count_max: int) -> None:
        self.prefix = prefix
        self._waiter_count_max = waiter_count_max
        self._waiters: dict[str, Waiter] = {}
        self._next = 0

    @property
    def pattern(self) -> str:
        """The subject to subscribe to in order to receive all replies."""
        return f"{self.prefix}.*"

    @property
    def waiter_count(self) -> int:
        return len(self._waiters)

    def add(self, waiter: Waiter) -> str:
        """Register a waiter; returns the subject for its replies. Raises ``Busy`` when full."""
        if len(self._waiters) >= self._waiter_count_max:
            raise Busy(f"too many requests are waiting for an answer ({len(self._waiters)})")
        self._next += 1
        token = f"{self._next:x}"
        self._waiters[token] = waiter
        return f"{self.prefix}.{token}"

    def remove(self, address: str) -> None:
        self._waiters.pop(_token(address), None)

    def put(self, address: str, reply: Reply) -> None:
        waiter = self._waiters.get(_token(address))
        if waiter is None:
            return
        if reply.headers.get("status") == _NO_RESPONDERS and not reply.data:
            waiter.fail(Absent(f"nobody listens on {waiter.subject}"))
        else:
            waiter.put(reply)

    def fail_asked(self, subject: str, fault: Fault) -> None:
        """Fail the requests to ``subject``, which is in lower case, as denials are reported."""
        for waiter in self._waiters.values():
            if waiter.subject.lower() == subject:
                waiter.fail(fault)

    def fail_all(self, fault: Fault) -> None:
        for waiter in self._waiters.values():
            waiter.fail(fault)


class Asked:
    """A request that was sent. ``await`` it once, for the answer."""

    __slots__ = ("_address", "_replies", "_waiter")

    def __init__(self, replies: ReplyTable, waiter: OneReply, address: str) -> None:
        self._replies = replies
        self._waiter = waiter
        self._address = address

    def __await__(self) -> Generator[Any, None, Reply]:
        return self._wait().__await__()

    async def _wait(self) -> Reply:
        try:
            return await self._waiter.wait()
        finally:
            self._replies.remove(self._address)


def _token(address: str) -> str:
    return address.rpartition(".")[2]
