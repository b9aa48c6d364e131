"""Answers to clients: they go in pieces, and a client that leaves one unread is cut off."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

import pytest
import uvloop
from starlette.types import Message, Receive, Scope, Send
from tests.unit.gateway.support import eventually
from uvicorn import Config
from uvicorn.server import ServerState

from pagemesh.gateway.api.api_errors import ApiError
from pagemesh.gateway.doors import connection as door
from pagemesh.gateway.doors.asgi import (
    PIECE_BYTES_MAX,
    read_body,
    send_json,
    start,
    while_connected,
    write,
)
from pagemesh.gateway.doors.connection import Connection

GET = b"GET / HTTP/1.1\r\n\r\n"
Handler = Callable[[Send], Awaitable[None]]


class Served:
    """A handler behind the door's connections, and a client that reads only when it is told to."""

    def __init__(self, handler: Handler) -> None:
        self.state = ServerState()
        self.open_count = 0
        self._handler = handler
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(scope, receive, bytes_max=0)
        self.open_count += 1
        try:
            await while_connected(receive, lambda: self._handler(send))
        finally:
            self.open_count -= 1

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        config = Config(self, log_config=None, ws="none", lifespan="off")
        config.load()

        def connected() -> Connection:
            return Connection(config=config, server_state=self.state, app_state={})

        loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        async with await loop.create_server(connected, "127.0.0.1", 0) as server:
            with self._socket:
                await loop.sock_connect(self._socket, server.sockets[0].getsockname())
                await eventually(lambda: bool(self.state.connections))
                yield
            await eventually(lambda: not self.state.connections)

    @property
    def connection(self) -> Connection:
        [made] = self.state.connections
        assert isinstance(made, Connection)
        return made

    @property
    def unread_bytes(self) -> int:
        """What is kept of answers, but for what the system has taken."""
        return self.connection.transport.get_write_buffer_size()

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def read(self, bytes_max: int = 1 << 20) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self._socket, bytes_max)

    async def ask(self) -> None:
        """Once more, and be answered."""
        answered = self.state.total_requests
        await self.send(GET)
        await eventually(lambda: self.state.total_requests > answered)
        await asyncio.sleep(0.01)

    async def cut_off(self) -> None:
        """Nothing is left here of the client, which is there and reads nothing."""
        await eventually(lambda: not self.state.connections and not self.state.tasks)
        assert self.open_count == 0


Client = Callable[[Served], Awaitable[None]]
Meet = Callable[[Handler, Client], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=("asyncio", "uvloop"))
def meet(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Meet:
    """Has a client, which gets little time to read, meet a handler on either event loop."""
    monkeypatch.setattr(door, "WRITE_S_MAX", 0.3)

    async def met(handler: Handler, client: Client) -> None:
        served = Served(handler)
        async with asyncio.timeout(20.0), served.running():
            await client(served)

    def meeting(handler: Handler, client: Client) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(met(handler, client))

    return meeting


async def endless(send: Send) -> None:
    await start(send, 200, {})
    while True:
        await write(send, b"x" * PIECE_BYTES_MAX, more=True)
        await asyncio.sleep(0)


def test_a_client_that_leaves_a_piece_unread_is_cut_off_however_many_it_read(meet: Meet) -> None:
    """Its connection stayed, with what waited in it, until the client closed it."""

    async def client(served: Served) -> None:
        await served.send(GET)
        for _ in range(60):  # longer than one piece may take
            assert await served.read()
            await asyncio.sleep(0.01)
        assert served.open_count == 1
        await served.cut_off()

    meet(endless, client)


def test_who_sends_ahead_and_reads_none_of_the_short_answers_is_cut_off(meet: Meet) -> None:
    """What its request held was held for as long as it liked."""

    async def short(send: Send) -> None:
        await send_json(send, b"x" * (PIECE_BYTES_MAX // 2))

    async def client(served: Served) -> None:
        await served.send(GET * 100)
        # The one before may be about to end.
        await eventually(lambda: served.connection.flow.write_paused and served.open_count == 1)
        await served.cut_off()

    meet(short, client)


def test_the_little_that_is_unread_when_a_connection_ends_does_not_keep_it(meet: Meet) -> None:
    async def short(send: Send) -> None:
        await send_json(send, b"x" * 50_000)

    async def client(served: Served) -> None:
        while not served.unread_bytes:
            await served.ask()
        served.connection.shutdown()
        assert served.unread_bytes < 64 << 10
        await served.cut_off()

    meet(short, client)


def test_a_stream_may_rest_for_longer_than_a_piece_may_stay_unread(meet: Meet) -> None:
    async def resting(send: Send) -> None:
        await start(send, 200, {})
        await write(send, b"first", more=True)
        await asyncio.sleep(2 * door.WRITE_S_MAX)
        await write(send, b"last", more=False)

    async def client(served: Served) -> None:
        await served.send(GET)
        read = b""
        while not read.endswith(b"0\r\n\r\n"):
            read += await served.read()
        assert b"first" in read and b"last" in read

    meet(resting, client)


def test_of_a_whole_answer_that_stays_unread_no_more_than_a_piece_is_kept(meet: Meet) -> None:
    async def long(send: Send) -> None:
        await send_json(send, b"x" * (64 * PIECE_BYTES_MAX))

    async def client(served: Served) -> None:
        await served.send(GET)
        await eventually(lambda: served.connection.flow.write_paused)
        assert 0 < served.unread_bytes <= PIECE_BYTES_MAX
        await served.cut_off()

    meet(long, client)


async def test_what_fails_within_an_answer_is_not_taken_for_a_client_that_left() -> None:
    async def silent() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("nobody came")

    async def failing() -> None:
        raise TimeoutError("not of the client")

    with pytest.raises(TimeoutError, match="not of the client"):
        await while_connected(silent, failing)


@pytest.mark.parametrize("length", [100, 101])
async def test_of_a_body_that_says_it_is_too_long_nothing_is_read(length: int) -> None:
    read = 0

    async def receive() -> Message:
        nonlocal read
        read += 1
        return {"type": "http.request", "body": b"x" * length}

    scope = {"headers": [(b"Content-Length", b"%d" % length)]}
    if length == 100:
        assert await read_body(scope, receive, bytes_max=100) == b"x" * 100
        return
    with pytest.raises(ApiError) as caught:
        await read_body(scope, receive, bytes_max=100)
    assert (caught.value.status, read) == (413, 0)


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES_MAX, PIECE_BYTES_MAX + 1, 3 * PIECE_BYTES_MAX])
async def test_a_whole_answer_goes_in_pieces_when_it_is_long(size: int) -> None:
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    sent: list[bytes] = []
    told = 0

    async def send(message: Message) -> None:
        nonlocal told
        if message["type"] == "http.response.start":
            told = int(dict(message["headers"])[b"content-length"])
            return
        sent.append(message["body"])
        assert message.get("more_body", False) is (len(b"".join(sent)) < len(body))

    await send_json(send, body)
    assert b"".join(sent) == body and told == size
    assert len(sent) == max(1, -(-size // PIECE_BYTES_MAX))


async def test_a_large_part_of_a_stream_goes_in_pieces_too() -> None:
    sent: list[bytes] = []

    async def send(message: Message) -> None:
        sent.append(message["body"])
        assert message["more_body"] is (sum(map(len, sent)) < 3 * PIECE_BYTES_MAX + 1)

    await write(send, b"x" * (3 * PIECE_BYTES_MAX + 1), more=False)
    assert len(sent) == 4 and max(map(len, sent)) <= PIECE_BYTES_MAX


class Writes:
    """A transport that notes what is written together."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.pieces.append(data)

    def writelines(self, parts: Iterable[bytes]) -> None:
        self.pieces.append(b"".join(parts))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def test_the_head_of_an_answer_goes_out_with_what_comes_first_behind_it(meet: Meet) -> None:
    async def handler(send: Send) -> None:
        written = Writes()
        served[0].connection._answering.transport._transport = written  # type: ignore[union-attr]
        await start(send, 200, {})
        assert not written.pieces
        await write(send, b"one", more=True)
        [first] = written.pieces
        assert first.startswith(b"HTTP/1.1 200 OK\r\n") and first.endswith(b"\r\n\r\n3\r\none\r\n")
        await write(send, b"two", more=False)
        assert written.pieces[1:] == [b"3\r\ntwo\r\n0\r\n\r\n"]
        seen.append(True)

    async def client(found: Served) -> None:
        served.append(found)
        await found.ask()
        assert seen == [True]
        found.connection.transport.close()

    seen: list[bool] = []
    served: list[Served] = []
    meet(handler, client)


@pytest.mark.parametrize("close", [False, True])
def test_a_head_that_nothing_follows_goes_out_with_the_answers_end(meet: Meet, close: bool) -> None:
    """Answers to HEAD have no body: the next one on the connection came instead of their head."""

    async def handler(send: Send) -> None:
        await start(send, 200, {"connection": "close"} if close else {}, 5)
        await write(send, b"" if close else b"12345", more=False)

    async def client(served: Served) -> None:
        await served.send(GET.replace(b"GET", b"HEAD"))
        head = await served.read()
        assert head.startswith(b"HTTP/1.1 200 OK\r\n") and head.endswith(b"\r\n\r\n")
        assert b"content-length: 5" in head
        if not close:
            await served.send(GET)
            assert (await served.read()).endswith(b"\r\n\r\n12345")
            served.connection.transport.close()
        else:
            assert await served.read() == b""

    meet(handler, client)


def test_what_was_asked_before_is_forgotten_without_the_garbage_collector(meet: Meet) -> None:
    async def handler(send: Send) -> None:
        await send_json(send, b"{}")

    async def client(served: Served) -> None:
        await served.ask()
        first = weakref.ref(served.connection.cycle)
        await served.ask()
        assert first() is None
        served.connection.transport.close()

    gc.disable()
    try:
        meet(handler, client)
    finally:
        gc.enable()


def test_what_is_no_request_does_not_overtake_a_head_that_waits(meet: Meet) -> None:
    async def handler(send: Send) -> None:
        await start(send, 200, {}, 5)
        await asyncio.sleep(0.05)
        await write(send, b"12345", more=False)

    async def client(served: Served) -> None:
        await served.send(GET)
        await eventually(lambda: served.open_count == 1)
        await served.send(b"no request at all\r\n\r\n")
        assert (await served.read()).startswith(b"HTTP/1.1 200 OK\r\n")

    meet(handler, client)


def test_a_head_that_waits_for_a_client_that_left_is_dropped() -> None:
    """uvloop's transports raise when they are closed, where nobody heard of it."""
    written = Writes()
    answer = door._Answer(written)  # type: ignore[arg-type]
    answer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    written.close()
    answer.close()
    assert not written.pieces
