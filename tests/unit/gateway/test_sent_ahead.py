"""Requests that are sent ahead of the answers to others: all are answered, few are taken up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import cast

import httpx
import pytest
from starlette.types import Receive, Scope, Send
from tests.unit.gateway.fake_mesh import FakeMesh
from tests.unit.gateway.support import MODEL, eventually
from uvicorn import Config
from uvicorn.server import ServerState

from pagemesh.gateway.doors import connection as door
from pagemesh.gateway.doors.asgi import read_body, send_json
from pagemesh.gateway.doors.connection import AHEAD_COUNT_MAX, Connection

GET = b"GET / HTTP/1.1\r\n\r\n"
POST = b"POST / HTTP/1.1\r\ncontent-length: 5\r\n\r\nabcde"
COUNT = 3_000
TAKEN_MAX = AHEAD_COUNT_MAX + 4_096 // len(GET) + 1


class Wire(asyncio.Transport):
    """What a client that reads as fast as it can gets to see."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_read = True
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is ever left in one."""

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
async def connection(wire: Wire) -> AsyncIterator[Connection]:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, bytes_max=100)
        await asyncio.sleep(0)
        await send_json(send, body)

    config = Config(app, log_config=None, ws="none", lifespan="off")
    config.load()
    made = Connection(config=config, server_state=ServerState(), app_state={})
    made.connection_made(wire)
    yield made
    wire.close()
    made.connection_lost(None)


@pytest.mark.parametrize("request_", [GET, POST], ids=("without a body", "with a body"))
@pytest.mark.parametrize("read_bytes", [4_096, 16_384])
async def test_a_client_that_never_waits_has_few_requests_taken_up_and_all_answered(
    connection: Connection, wire: Wire, request_: bytes, read_bytes: int
) -> None:
    """Whoever reached the port filled the gateway's memory: at 100 MB in it had taken 1.8 GB."""
    left = request_ * COUNT
    async with asyncio.timeout(20):
        while wire.written.count(b"HTTP/1.1 200") < COUNT:
            if wire.is_read and left:
                connection.data_received(left[:read_bytes])
                left = left[read_bytes:]
            assert len(connection.pipeline) <= TAKEN_MAX
            assert len(connection._unread) <= read_bytes
            await asyncio.sleep(0)
    assert not left and wire.is_read


async def test_what_comes_after_something_that_is_no_http_is_not_looked_at(
    connection: Connection, wire: Wire
) -> None:
    connection.data_received(b"no HTTP\r\n\r\n" + GET * COUNT)
    assert wire.is_closed and wire.written.count(b"HTTP/1.1 ") == 1


def long_request() -> bytes:
    """For more tokens than a test waits for."""
    body = json.dumps({"model": MODEL, "prompt": "abc", "max_tokens": 2_000}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def connected(mesh: FakeMesh) -> asyncio.StreamWriter:
    url = httpx.URL(mesh.url)
    return (await asyncio.open_connection(url.host, url.port))[1]


async def test_who_leaves_with_more_requests_sent_ahead_is_noticed(mesh: FakeMesh) -> None:
    """The one that ran went on to its end."""
    mesh.worker.pause_s = 0.05
    writer = await connected(mesh)
    writer.write(long_request() * 3)
    await eventually(lambda: mesh.worker.running_count == 1)
    cast(asyncio.Transport, writer.transport).abort()
    await eventually(lambda: any(one.reason == "client" for one in mesh.worker.aborts))


async def test_half_a_head_behind_requests_that_wait_has_no_time_limit(
    connection: Connection, wire: Wire
) -> None:
    """The connection is not read until they are answered, however long that takes."""
    padded = b"GET / HTTP/1.1\r\nx-pad: " + b"a" * 4_096 + b"\r\n\r\n"
    connection.data_received(GET + padded + padded[:-2])
    assert connection.pipeline and connection._head_timer is None
    await eventually(lambda: not connection.pipeline)
    connection.data_received(padded[-2:])
    await eventually(lambda: wire.written.count(b"HTTP/1.1 200") == 3)


@pytest.mark.parametrize("sent", [b"\r\n", GET[:6]], ids=("the end of a line", "half a head"))
async def test_what_comes_during_an_answer_is_timed_from_its_end_on(
    connection: Connection, wire: Wire, sent: bytes
) -> None:
    """A client's stray line end cut off every answer that took longer than a head may."""
    connection.data_received(POST)
    connection.data_received(sent)
    assert connection._head_timer is None
    await eventually(lambda: wire.written.count(b"HTTP/1.1 200") == 1)
    assert connection._head_timer is not None
    connection.data_received(GET.removeprefix(sent))
    assert connection._head_timer is None
    await eventually(lambda: wire.written.count(b"HTTP/1.1 200") == 2)


async def test_who_leaves_after_it_sent_one_more_request_later_is_noticed(mesh: FakeMesh) -> None:
    mesh.worker.pause_s = 0.05
    writer = await connected(mesh)
    writer.write(long_request())
    await eventually(lambda: mesh.worker.running_count == 1)
    writer.write(long_request())
    await asyncio.sleep(0.2)
    cast(asyncio.Transport, writer.transport).abort()
    await eventually(lambda: any(one.reason == "client" for one in mesh.worker.aborts))


@pytest.mark.parametrize("late_bytes", [1, 1_000], ids=("in part", "whole"))
async def test_who_sends_a_body_after_its_answer_is_hung_up_on_in_time(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch, late_bytes: int
) -> None:
    monkeypatch.setattr(door, "HEAD_S_MAX", 0.3)
    url = httpx.URL(mesh.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n")
    async with asyncio.timeout(5.0):
        assert (await reader.readline()).startswith(b"HTTP/1.1 404")
        writer.write(b"x" * late_bytes)
        await reader.read()
    writer.close()
