"""Answers that are given before all of a request's body has come."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from tests.unit.gateway.fake_mesh import FakeMesh
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pagemesh.gateway.doors import connection

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    b"content-length: 16777216\r\n\r\n"
)


async def answer_to(mesh: FakeMesh, sent: bytes) -> bytes:
    """All that comes back, until the connection is closed, to a client that first sends all."""
    url = httpx.URL(mesh.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    async with asyncio.timeout(20):
        writer.write(sent)
        await writer.drain()
        answer = await reader.read()
    writer.close()
    return answer


async def test_a_client_that_sends_all_of_its_body_first_sees_why_it_was_refused(
    mesh: FakeMesh,
) -> None:
    """Even one that wants the connection closed, as Python's urllib does."""
    answer = await answer_to(mesh, HEAD + b" " * 16_777_216)
    assert answer.startswith(b"HTTP/1.1 413") and b"body_too_large" in answer


async def test_a_client_that_reads_until_the_end_need_not_wait_for_its_own_body(
    mesh: FakeMesh,
) -> None:
    async with asyncio.timeout(10):  # the connection itself is held for 30 s
        assert (await answer_to(mesh, HEAD)).endswith(b"}}")


async def test_a_request_behind_the_last_one_of_a_connection_is_not_taken_up(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[str] = []
    begin = connection.Connection._start_asgi_task

    def count(self: connection.Connection, cycle: RequestResponseCycle, app: Any) -> None:
        began.append(cycle.scope["path"])
        begin(self, cycle, app)

    monkeypatch.setattr(connection.Connection, "_start_asgi_task", count)
    head = (
        b"POST /v1/completions HTTP/1.0\r\nhost: x\r\nconnection: keep-alive\r\n"
        b"content-encoding: gzip\r\ncontent-length: 4\r\n\r\n"
    )
    url = httpx.URL(mesh.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    async with asyncio.timeout(10):
        writer.write(head)
        answer = await reader.readuntil(b"}}")
        writer.write(b"body" + head)
        assert await reader.read() == b""
    writer.close()
    assert answer.startswith(b"HTTP/1.1 415")
    assert len(began) == 1


async def test_a_body_that_breaks_off_behind_its_answer_gets_no_second_one(mesh: FakeMesh) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: %s\r\n"
        b"content-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    url = httpx.URL(mesh.url)
    for kind in (b"close", b"keep-alive"):
        reader, writer = await asyncio.open_connection(url.host, url.port)
        async with asyncio.timeout(10):
            writer.write(head % kind)
            answer = await reader.readuntil(b"}}")
            writer.write(b"no chunk\r\n")
            assert await reader.read() == b""
        writer.close()
        assert answer.startswith(b"HTTP/1.1 415")


async def test_a_body_that_never_comes_holds_no_connection_for_long(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_S_MAX", 0.1)
    assert (await answer_to(mesh, HEAD)).startswith(b"HTTP/1.1 413")
