"""nats-py's client without its tasks between the socket and the callbacks.

    nats-py    socket -> [ a task that reads ] -> parse -> [ a task of its own ] -> callback
               publish -> pending -> [ a task that flushes ] -> write
    here       socket -> parse -> callback
               put -> pending -> ``hand_over``, one write of all that is pending

Callbacks of the bus only admit, so there is nothing to wait for. Each task costs a turn of the
event loop, and on the longest path through the mesh a message would pass nine of them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import msgspec
import nats.errors
from nats.aio.client import Client

from pagemesh.runtime.bus.messages import Headers, Outgoing
from pagemesh.runtime.bus.straight import Spawn, StraightReader
from pagemesh.runtime.logs import get_logger

_HEADER_LINE, _END = "NATS/1.0\r\n", b"\r\n"
_JOINED_BYTES_MAX = 64 << 10
"""A longer payload is not copied into one piece with its command line and headers."""
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_LINE_BREAKS = str.maketrans("\r\n", "  ")
_log = get_logger(__name__)


class Incoming(msgspec.Struct, frozen=True, gc=False):
    """A message as it came in; ``headers`` as the peer wrote them."""

    subject: str
    reply: str
    data: bytes
    headers: Headers | None


OnMessage = Callable[[Incoming], None]
"""Called as soon as a message is read, outside any task. It must be quick and must not raise."""


class DirectClient(Client):  # type: ignore[misc]  # nats-py has no types for mypy
    """nats-py's client, not for use with its ``request`` or JetStream. ``listen`` and ``put``
    replace its ``subscribe`` and ``publish``."""

    _pending: list[bytes]
    _pending_data_size: int

    def __init__(self) -> None:
        super().__init__()
        self._listeners: dict[int, OnMessage] = {}
        self._lost_count = 0

    def read_straight(self, spawn: Spawn) -> None:
        """Call it once connected; see ``straight``."""
        StraightReader(self._transport._io_reader, self._ps, self._process_op_err, spawn)

    async def listen(self, subject: str, queue: str, on_message: OnMessage) -> Any:
        """nats-py's subscription, whose messages go to ``on_message``. Raises like nats-py."""
        number = self._sid + 1
        self._listeners[number] = on_message
        try:
            made = await self.subscribe(subject, queue=queue)
        except BaseException:
            del self._listeners[number]
            raise
        assert made._id == number, "nats-py numbers subscriptions in another way"
        return made

    async def unlisten(self, made: Any) -> None:
        """Pass no more messages to the ``on_message`` of ``made``."""
        self._listeners.pop(made._id, None)
        await made.unsubscribe()

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None
    ) -> None:
        on_message = self._listeners.get(sid)
        if on_message is None:
            return
        try:
            found = await self._process_headers(headers) if headers else None
            on_message(Incoming(subject.decode(), reply.decode(), data, found))
        except Exception as error:  # raised further, it would stop nats-py from reading at all
            self._lost_count += 1
            if self._lost_count & (self._lost_count - 1) == 0:
                _log.warning("bus.message_not_taken", count=self._lost_count, error=error)

    def put(self, outgoing: Outgoing, headers: bytes) -> None:
        """Queue a message for the next ``hand_over``. ``headers``: from ``header_block``, or
        empty."""
        data, size = outgoing.data, len(outgoing.data)
        line = f"{outgoing.subject} {outgoing.reply} "
        if headers:
            head = f"HPUB {line}{len(headers)} {len(headers) + size}\r\n".encode() + headers
        else:
            head = f"PUB {line}{size}\r\n".encode()
        made = [head + data + _END] if size < _JOINED_BYTES_MAX else [head, data, _END]
        self._pending += made
        self._pending_data_size += len(head) + size + len(_END)

    def hand_over(self) -> None:
        """Hand what is pending to the transport, which writes it at once. A later turn of the event
        loop might have to wait for the GIL, behind a step that has begun to compute by then."""
        if self.is_connected and self._pending:
            pending, self._pending, self._pending_data_size = self._pending, [], 0
            # The reader notices a lost connection.
            with contextlib.suppress(OSError, RuntimeError, AttributeError):
                self._transport.writelines(pending)

    @property
    def asks_for_certificate(self) -> bool:
        """Whether the server's greeting, if it came, says that it verifies clients."""
        return bool(self._server_info.get("tls_verify"))

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the kernel has not taken yet."""
        writer = getattr(self._transport, "_io_writer", None)
        behind = writer.transport.get_write_buffer_size() if writer is not None else 0
        return int(self._pending_data_size) + int(behind)


def header_block(headers: Headers | None) -> bytes:
    """``headers`` as NATS carries them; empty if there are none. Raises ``BadHeaderError`` for an
    invalid name. Line breaks in values become blanks."""
    if not headers:
        return b""
    lines = [_HEADER_LINE]
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise nats.errors.BadHeaderError(name)
        lines.append(f"{name}: {value.strip().translate(_LINE_BREAKS)}\r\n")
    lines.append("\r\n")
    return "".join(lines).encode()
