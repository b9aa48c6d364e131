"""One connection to the NATS server, from connect to loss. It is never revived: the bus makes a
new one. This module, ``nats_client`` and ``straight`` know nats-py, and its surprising habits are
dealt with here:

- Its own reconnect may hang on a frozen server and may give up for good; it is off.
- A PING overtakes messages published before it: ``barrier`` sends two.
- A PONG whose waiter was cancelled ends the connection: pings run in tasks of their own, which
  are not cancelled while the connection lives.
- It sometimes swallows the cancellation of a task that awaits it: ``open`` raises it after all
  (``_cancellable``), and tasks that have to end also check a state.
- A frozen server is noticed by our own heartbeat, which no full buffer can hold up.
- All errors come through one callback: they are told apart here.
- It sends its password in clear text to a server that offers no TLS: where TLS is required, it is
  kept from that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Protocol

import nats.errors

from pagemesh.runtime.bus.messages import Headers, Outgoing, check_size, check_subject
from pagemesh.runtime.bus.nats_client import DirectClient, OnMessage, header_block
from pagemesh.runtime.bus.tls import distrust, tls_context
from pagemesh.runtime.ports import shown_urls
from pagemesh.runtime.settings import BusConfig
from pagemesh.runtime.supervise import to_next_s
from pagemesh.wire.errors import Busy, ConfigError, Disconnected, Malformed

_VIOLATION = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"')
_ERRNO = re.compile(r"\[Errno (\d+)\]")
_HANDLE = re.compile(r"unable to perform operation on <.*; the handler is closed")
"""uvloop's words for a connection that is closed already, with an address in memory between."""
_CLOSE_TIMEOUT_S = 1.0
_UNSUBSCRIBE_TIMEOUT_MS = 2_000
_PING_TIMEOUT_S = 600
"""Only so that no ping waits for ever; the heartbeat gives up long before that."""


class LinkEvents(Protocol):
    """What a link reports while it lives."""

    async def on_denied(self, action: str, subject: str) -> None:
        """The server refused a ``publish`` or ``subscription``; ``subject`` in lower case."""


class Link:
    """Use ``open``. ``lost`` is set once the connection is no longer usable; ``reason`` says
    why."""

    def __init__(self, client: DirectClient, config: BusConfig, *, gathers: bool = False) -> None:
        self._client = client
        self._config = config
        self._gathers = gathers
        self._together = self._wrote = False
        self._subscriptions: list[Any] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self.lost = asyncio.Event()
        self.reason = ""
        self.url = ""
        """The server's, one of those configured."""

    @classmethod
    async def open(
        cls,
        config: BusConfig,
        *,
        name: str,
        inbox_prefix: str,
        events: LinkEvents,
        gathers: bool = False,
    ) -> Link:
        """Connect once; for ``gathers`` see ``Bus.connect``. Raises ``Disconnected`` with the
        reason within ``connect_timeout_ms``, or ``ConfigError`` for credentials, certificates and
        files, where a retry cannot help."""
        client = DirectClient()
        context = tls_context(config)
        if context is not None:
            _refuse_plaintext(client)
        link = cls(client, config, gathers=gathers)
        errors: list[BaseException] = []

        async def on_error(error: Exception) -> None:
            errors[:] = [error]
            await link._on_error(error, events)

        async def on_close() -> None:
            link._lose(_text(client.last_error) or "the server closed the connection")

        try:
            async with _cancellable(), asyncio.timeout(config.connect_timeout_ms / 1_000):
                await client.connect(
                    servers=config.servers,
                    error_cb=on_error, closed_cb=on_close, name=name, inbox_prefix=inbox_prefix,
                    user=config.user or None, password=config.password.reveal() or None,
                    tls=context, allow_reconnect=False,
                    connect_timeout=config.connect_timeout_ms / 1_000,
                    reconnect_time_wait=0.01, max_reconnect_attempts=1,
                    ping_interval=60, max_outstanding_pings=2,
                    pending_size=2 * config.output_bytes_max, flush_timeout=1.0,
                    drain_timeout=1, flusher_queue_size=1_024,
                )  # fmt: skip
        except (OSError, TimeoutError, nats.errors.Error) as error:
            await link.close()
            vague = isinstance(error, nats.errors.NoServersError) or not _text(error)
            cause = errors[0] if errors and vague else error
            if "authorization" in _text(cause).lower():
                raise ConfigError(
                    f"the NATS server at {config.shown_url} refused user and password; set "
                    "PAGEMESH_NATS_USER (--nats-user) and PAGEMESH_NATS_PASSWORD"
                ) from None
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise distrust(cause, config) from None
            if client.asks_for_certificate and not config.cert_file:
                raise Disconnected(
                    "the server requires a client certificate: set PAGEMESH_NATS_TLS_CERT "
                    "(--nats-tls-cert)"
                ) from None
            raise Disconnected(_reason(cause)) from None
        except asyncio.CancelledError:
            await link.close()
            raise
        link.url = shown_urls(client.connected_url.geturl())
        client.read_straight(link._spawn)
        link._spawn(link._watch())
        return link

    @property
    def message_bytes_max(self) -> int:
        """The server's limit for headers and payload together."""
        return int(self._client.max_payload)

    def publish(self, outgoing: Sequence[Outgoing], headers: Headers | None) -> None:
        """Hand messages to the socket, in one write. Raises ``Disconnected``, ``Busy`` when there
        is too much unsent output, ``Malformed`` when NATS cannot carry one of them."""
        client = self._client
        try:
            block = header_block(headers)
        except nats.errors.BadHeaderError as error:
            raise Malformed(f"not a valid NATS header: {str(error)[:80]!r}") from error
        for one in outgoing:
            check_size(one.subject, len(block) + len(one.data), bytes_max=self.message_bytes_max)
            if one.reply:
                check_subject(one.reply)
        if not client.is_connected:
            raise Disconnected(f"not sent: {self.reason or 'the connection is closed'}")
        if client.unsent_bytes > self._config.output_bytes_max:
            raise Busy("messages are sent faster than the bus accepts them", retry_after_ms=100)
        for one in outgoing:
            client.put(one, block)
        self._write()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """See ``Bus.together``."""
        self._together = True
        try:
            yield
        finally:
            self._together = False
            if not self._gathers:
                self._write_rest()

    def _write(self) -> None:
        """Write what was published: at once if it is the first of a group, otherwise with the rest
        of the group, which is a turn of the event loop (``gathers``) or a ``together``."""
        if self._wrote:
            return
        if self._gathers:
            asyncio.get_running_loop().call_soon(self._write_rest)
        self._wrote = self._gathers or self._together
        self._client.hand_over()

    def _write_rest(self) -> None:
        self._wrote = False
        self._client.hand_over()

    async def subscribe(self, subject: str, queue: str, on_message: OnMessage) -> int:
        """Returns the subscription's id."""
        try:
            made = await self._client.listen(subject, queue, on_message)
        except nats.errors.BadSubjectError as error:
            raise Malformed(f"not a valid NATS subject: {subject[:80]!r}") from error
        except (nats.errors.Error, OSError) as error:
            raise Disconnected(f"not subscribed: {_text(error)}") from error
        self._subscriptions.append(made)
        return int(made._id)

    async def unsubscribe(self, subscription_id: int) -> None:
        """Stop listening. What the server sent before it knew is still delivered, since the
        senders take it for delivered."""
        for made in tuple(self._subscriptions):
            if made._id == subscription_id:
                with contextlib.suppress(nats.errors.Error, OSError, Disconnected):
                    await self._client._send_unsubscribe(subscription_id)
                    await self.barrier(timeout_ms=_UNSUBSCRIBE_TIMEOUT_MS)
                with contextlib.suppress(nats.errors.Error, OSError):
                    await self._client.unlisten(made)
                with contextlib.suppress(ValueError):  # the link was closed meanwhile
                    self._subscriptions.remove(made)

    async def barrier(self, *, timeout_ms: int) -> None:
        """Return when the server has processed everything sent before. Raises
        ``Disconnected`` when that cannot be known in time."""
        try:
            async with asyncio.timeout(timeout_ms / 1_000):
                await self._pong()
                await self._pong()
        except TimeoutError:
            raise Disconnected(f"the bus did not answer within {timeout_ms} ms") from None

    async def close(self) -> None:
        """Close the connection, whatever state it is in, within a second or so. A cancellation
        meanwhile takes effect when that is done."""
        closing = asyncio.create_task(self._let_go())
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing
            raise

    async def _let_go(self) -> None:
        self._lose("closed here")
        for made in self._subscriptions:
            with contextlib.suppress(Exception):
                await self._client.unlisten(made)
        self._abort()
        await asyncio.wait({self._spawn(self._end_client())}, timeout=_CLOSE_TIMEOUT_S)
        # Last: a pong for a ping that was cancelled would end the connection noisily.
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_TIMEOUT_S)

    async def _end_client(self) -> None:
        # On an aborted transport closing fails in ways that depend on the event loop; what
        # matters is that its tasks end, and that is the first thing it does.
        with contextlib.suppress(Exception):
            await self._client.close()

    def _abort(self) -> None:
        # A graceful close waits for a full send buffer, which a frozen server never empties.
        stream = getattr(self._client, "_transport", None)
        writer = getattr(stream, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()

    def _lose(self, reason: str) -> None:
        if not self.lost.is_set():
            self.reason = reason
            self.lost.set()

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _pong(self) -> None:
        ping, lost = self._spawn(self._ping()), self._spawn(self.lost.wait())
        try:
            await asyncio.wait({ping, lost}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
        if self.lost.is_set():
            raise Disconnected(self.reason)

    async def _ping(self) -> None:
        try:
            await self._client.rtt(timeout=_PING_TIMEOUT_S)
        except (nats.errors.Error, OSError, RuntimeError) as error:  # uvloop raises the last
            self._lose(_text(error) or "a ping failed")

    async def _watch(self) -> None:
        """Ping the server periodically, until it does not answer in time."""
        loop = asyncio.get_running_loop()
        limit_s = self._config.heartbeat_timeout_ms / 1_000
        while not self.lost.is_set():
            await asyncio.sleep(to_next_s(self._config.heartbeat_ms))
            ping = self._spawn(self._ping())
            started = loop.time()
            await asyncio.wait({ping}, timeout=limit_s)
            if not ping.done() and loop.time() - started > limit_s + 0.25:
                # This process stood still, not the server: read what came in meanwhile.
                await asyncio.wait({ping}, timeout=limit_s / 2)
            if not ping.done():
                self._lose(f"no sign of life for {self._config.heartbeat_timeout_ms} ms")

    async def _on_error(self, error: Exception, events: LinkEvents) -> None:
        if violation := _VIOLATION.search(str(error)):
            await events.on_denied(violation[1], violation[2])


@contextlib.asynccontextmanager
async def _cancellable() -> AsyncIterator[None]:
    """Raise a cancellation at the end of this context if the code within it has swallowed it,
    whether by succeeding or by failing at that moment."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > before:  # timeouts within it have withdrawn their own
            raise asyncio.CancelledError


def _reason(error: BaseException) -> str:
    """Why there is no connection, in words for people: no class names, no error numbers."""
    text = _text(error)
    # If a name has several addresses, their errors are merged into the text of one.
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (found := _ERRNO.search(text)):
        number = int(found[1])
    if isinstance(error, socket.gaierror | UnicodeError):
        return "no host of that name is known"
    if isinstance(error, TimeoutError):
        return "nothing answers"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({(error.reason or text).lower().replace('_', ' ')})"
    if number is not None and number > 0:
        return os.strerror(number).lower()
    return text or "the connection failed"


def _text(error: BaseException | None) -> str:
    text = str(error) if error is not None else ""
    if _HANDLE.match(text):
        return "the connection was closed"
    return text.removeprefix("nats: ")


def _refuse_plaintext(client: DirectClient) -> None:
    """Keep ``client`` from sending CONNECT, which carries the password, without TLS."""
    connect_command = client._connect_command

    def guarded() -> Any:
        if client._transport._io_writer.get_extra_info("ssl_object") is None:
            raise nats.errors.Error("the server offers no TLS, but the settings require it")
        return connect_command()

    client._connect_command = guarded
