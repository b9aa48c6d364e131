"""One HTTP connection: uvicorn's, which bounds bodies' buffers and idle time, with bounds on
what is neither: heads and trailers, which it gathers whole before anybody is asked for a key.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES_MAX = 64 << 10
HEAD_S_MAX = 30.0


class Connection(HttpToolsProtocol):
    """Hangs up on a head that is too long, or too long in coming."""

    _gathered_bytes = 0
    """Received since the last thing that was understood, but for what came together with it."""
    _in_body = False
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def data_received(self, data: bytes) -> None:
        if self._head_timer is None and not self._in_body:
            self._expect_head()
        self._gathered_bytes += len(data)
        super().data_received(data)
        if self._gathered_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self.send_400_response("The head of the request is too long.")

    def on_headers_complete(self) -> None:
        self._gathered_bytes = 0
        self._in_body = True
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._gathered_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._gathered_bytes = 0
        self._in_body = False
        super().on_message_complete()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S_MAX, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
