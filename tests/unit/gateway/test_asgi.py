"""Streams to clients: a piece that stays unread ends them."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from pagemesh.gateway import asgi
from pagemesh.gateway.asgi import ClientLeft, Pieces


async def test_a_client_that_leaves_a_piece_unread_has_left_however_many_it_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asgi, "WRITE_S_MAX", 0.05)
    sent: list[bytes] = []

    async def send(message: Message) -> None:
        sent.append(message["body"])
        if len(sent) == 4:
            await asyncio.Event().wait()

    with pytest.raises(ClientLeft):
        async with asyncio.timeout(5.0), Pieces(send) as pieces:
            while True:
                await pieces.write(b"piece", more=True)
                await asyncio.sleep(0.03)
    assert sent == [b"piece"] * 4


async def test_a_stream_may_rest_for_longer_than_a_piece_may_stay_unread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asgi, "WRITE_S_MAX", 0.02)
    sent: list[bytes] = []

    async def send(message: Message) -> None:
        sent.append(message["body"])

    async with Pieces(send) as pieces:
        await pieces.write(b"first", more=True)
        await asyncio.sleep(0.1)
        await pieces.write(b"last", more=False)
    assert sent == [b"first", b"last"]


async def test_what_fails_within_a_stream_is_not_taken_for_a_client_that_left() -> None:
    async def send(_: Message) -> None:
        raise TimeoutError("not of the watch")

    with pytest.raises(TimeoutError, match="not of the watch"):
        async with Pieces(send) as pieces:
            await pieces.write(b"piece", more=True)
