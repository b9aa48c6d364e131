"""One HTTP connection: uvicorn's, which bounds the buffers of bodies and idle time, with bounds on
what uvicorn does not limit:

- heads and trailers, which it gathers whole before any key is checked;
- pipelined requests, of which it takes any number;
- answers that the client does not read, which it keeps.

Offers to switch to another protocol are ignored. What is not HTTP is refused in the same form as
any other error.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Callable
from typing import Any

import httptools
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pagemesh.gateway.api.api_errors import ApiError

HEAD_BYTES_MAX = 64 << 10
HEAD_S_MAX = 30.0
WRITE_S_MAX = 30.0
"""How long a client may leave one piece of an answer (``asgi.PIECE_BYTES_MAX``) unread."""
AHEAD_COUNT_MAX = 16
"""Pipelined requests that wait on a connection; what comes after them stays unread."""
_BITE_BYTES = 4 << 10
"""Input is parsed in pieces of this size; the requests of one may exceed ``AHEAD_COUNT_MAX``."""
_GO_ON = b"HTTP/1.1 100 "
"""How an interim response begins: the client is to send its body."""
_REFUSAL = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"connection: close\r\n\r\n"
)


class Connection(HttpToolsProtocol):
    """Closes when a head is too long or too slow, or the client does not read. Takes up a few
    pipelined requests, and reads on as these are answered."""

    _gathered_bytes = 0
    """Bytes received since the parser last completed something, without those that came with it."""
    _in_body = False
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    """Runs while the client leaves output unread that the system's buffers have no room for."""
    _unread = b""
    """Received and not parsed: enough requests are waiting."""
    _answering: RequestResponseCycle | None = None
    """The request being answered, or the last that was; ``cycle`` is the last that came."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.parser = _Parser(self)
        super().connection_made(transport)
        self.flow = _Flow(self)
        transport.set_write_buffer_limits(high=0)  # so pause_writing runs when anything is left
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()
        self._stop_write_timer()
        if (running := self._answering) is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def pause_writing(self) -> None:
        """Sending now waits, and so would a close: for as long as the client likes, unless the
        connection is cut."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_S_MAX, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def data_received(self, data: bytes) -> None:
        data, at = self._unread + data, 0
        while at < len(data) and len(self.pipeline) < AHEAD_COUNT_MAX:
            if self.transport.is_closing():
                return
            self._take(data[at : at + _BITE_BYTES])
            at += _BITE_BYTES
        self._unread = data[at:]
        if self.is_behind:
            self.flow.pause_reading()

    @property
    def is_behind(self) -> bool:
        return bool(self._unread)

    def on_response_complete(self) -> None:
        self._flush_head()  # still pending if there was no body
        super().on_response_complete()
        if self.is_behind:
            self.data_received(b"")
        if self._gathered_bytes:  # received during the answer, with no time limit
            self._expect_head()
        if self.is_answered_early:
            self._start_timer()

    def _take(self, data: bytes) -> None:
        self._expect_head()
        self._gathered_bytes += len(data)
        super().data_received(data)
        if self._gathered_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self.send_400_response("The request's headers are too long.")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # those of a trailer are no headers: nobody has checked them
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        # The parser may hold more than the request after which the connection was closed.
        if self.is_offered or self.transport.is_closing():
            return
        self._gathered_bytes = 0
        self._in_body = True
        self._stop_timer()
        super().on_headers_complete()
        answer = _Answer(self.transport, is_early=lambda: self.is_answered_early)
        self.cycle.transport = answer  # type: ignore[assignment]
        if len(self.pipeline) < AHEAD_COUNT_MAX:  # or a disconnect would go unnoticed
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._gathered_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.is_offered:
            return
        self._gathered_bytes = 0
        self._in_body = False
        self._stop_timer()
        super().on_message_complete()
        if self.cycle.response_complete:  # uvicorn counts idle time only from the answer's end
            if self.cycle.keep_alive:
                self._expect_head()
            else:
                self.transport.close()

    @property
    def is_answered_early(self) -> bool:
        """Whether the last request has its answer and part of its body is still to come. That is
        read and dropped: if the connection were closed, the system would tell the client so while
        it sends, and it would not see the answer."""
        return self._in_body and self.cycle.response_complete

    @property
    def head_without_offer(self) -> bytes:
        """The last head, as a client that knows only HTTP/1.1 would send it."""
        lines = [b"%s %s HTTP/1.1" % (self.parser.get_method(), self.url)]
        lines += [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    @property
    def is_offered(self) -> bool:
        """Whether the head being parsed offers another protocol, which HTTP/1.0 does not know. It
        is parsed again without the offer (``_Parser``)."""
        parser = self.parser
        is_known = parser.get_http_version() != "1.0" and parser.get_method() != b"CONNECT"
        return is_known and parser.should_upgrade()

    def send_400_response(self, msg: str) -> None:
        """Say what is wrong, and close; in the middle of an answer, or of a body that has its
        answer, only close."""
        self._flush_head()
        cycle = self.cycle
        is_silent = cycle is None or cycle.response_complete or not cycle.response_started
        if is_silent and not self.is_answered_early:
            body = ApiError(400, msg, code="malformed_http").body()
            self.transport.write(_REFUSAL % len(body) + body)
        self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        is_old = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, _without_chunks(cycle, app) if is_old else app)

    def _flush_head(self) -> None:
        """Send the running answer's head, before anything is written that bypasses it."""
        if self._answering is not None:
            self._answering.transport.flush()  # type: ignore[attr-defined]

    def _expect_head(self) -> None:
        """Start the time limit for a head, unless a body or an answer is under way: those have
        their own."""
        running = self._answering
        is_idle = running is None or running.response_complete
        if is_idle and not self._in_body:
            self._start_timer()

    def _start_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S_MAX, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


class _Flow(FlowControl):
    """Resumes reading only when everything read so far was parsed."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection.transport)
        self._connection = connection

    def resume_reading(self) -> None:
        if not self._connection.is_behind:
            super().resume_reading()


class _Answer:
    """A request's transport for its answer: sends the head together with the first of the body. Two
    writes would be two system calls, and wake the client twice."""

    def __init__(
        self, transport: asyncio.Transport, *, is_early: Callable[[], bool] = lambda: False
    ) -> None:
        """While ``is_early`` only this side is closed: see ``Connection.is_answered_early``."""
        self._transport = transport
        self._is_early = is_early
        self._has_begun = False
        self._head = b""
        """Not written yet."""

    def write(self, data: bytes) -> None:
        if self._head:
            self._transport.writelines((self._head, data))
            self._head = b""
        elif self._has_begun or data.startswith(_GO_ON):
            self._transport.write(data)
        else:
            self._has_begun, self._head = True, data

    def flush(self) -> None:
        if self._head and not self._transport.is_closing():
            self._transport.write(self._head)
        self._head = b""

    def close(self) -> None:
        self.flush()
        if not self._is_early():
            self._transport.close()
        elif self._transport.can_write_eof():
            self._transport.write_eof()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


def _without_chunks(cycle: RequestResponseCycle, app: Any) -> Any:
    """``app`` for clients of HTTP/1.0, which do not know chunked encoding: an answer whose length
    is not known beforehand ends with the connection."""

    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        is_stream = False

        async def plain(message: Message) -> None:
            nonlocal is_stream
            if message["type"] == "http.response.start":
                is_stream = all(name.lower() != b"content-length" for name, _ in message["headers"])
                if is_stream:
                    cycle.chunked_encoding = False
            elif is_stream:
                cycle.expected_content_length = len(message["body"])
            await send(message)

        await app(scope, receive, plain)

    return answering


class _Parser(httptools.HttpRequestParser):
    """Has a head that offers another protocol parsed once more without the offer. httptools takes
    all that follows the offer, with the request's body, for the other protocol: bodies from Java's
    client, which offers HTTP/2, were empty. A parser of its own goes on from there, since one that
    was offered a protocol together with ``connection: close`` parses nothing any more."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._connection = connection
        with contextlib.suppress(AttributeError):  # as uvicorn does: httptools before 0.6.3
            self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: bytes | bytearray | memoryview[int] | array[int]) -> None:
        connection, left = self._connection, memoryview(data)
        while len(left):
            try:
                httptools.HttpRequestParser.feed_data(connection.parser, left)
            except httptools.HttpParserUpgrade as offer:
                if not connection.is_offered:
                    raise
                left, head = left[offer.args[0] :], connection.head_without_offer
                connection.parser = _Parser(connection)
                connection.parser.feed_data(head)
            else:
                return
