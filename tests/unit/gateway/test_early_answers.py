"""Answers that are given before all of a request's body has come."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from tests.unit.gateway.fake_mesh import FakeMesh

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


async def test_a_body_that_never_comes_holds_no_connection_for_long(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_S_MAX", 0.1)
    assert (await answer_to(mesh, HEAD)).startswith(b"HTTP/1.1 413")
