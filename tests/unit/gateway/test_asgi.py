"""Answers to clients: a piece that stays unread ends them."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from pagemesh.gateway.api.api_errors import ClientLeft
from pagemesh.gateway.doors import asgi
from pagemesh.gateway.doors.asgi import PIECE_BYTES_MAX, Pieces, send_json


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


async def sent_until_unread(body: bytes, pieces_read: int) -> tuple[list[bytes], int]:
    """The pieces of ``body`` that were sent to a client that reads so many of them, and the
    length that it was told."""
    sent: list[bytes] = []
    told = 0

    async def send(message: Message) -> None:
        nonlocal told
        if message["type"] == "http.response.start":
            told = int(dict(message["headers"])[b"content-length"])
            return
        sent.append(message["body"])
        assert message.get("more_body", False) is (len(b"".join(sent)) < len(body))
        if len(sent) > pieces_read:
            await asyncio.Event().wait()

    try:
        async with asyncio.timeout(5.0):
            await send_json(send, body)
    except ClientLeft:
        sent.append(b"<left>")
    return sent, told


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES_MAX, PIECE_BYTES_MAX + 1, 3 * PIECE_BYTES_MAX])
async def test_a_whole_answer_goes_in_pieces_when_it_is_long(size: int) -> None:
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    sent, told = await sent_until_unread(body, pieces_read=99)
    assert b"".join(sent) == body and told == size
    assert len(sent) == max(1, -(-size // PIECE_BYTES_MAX))


async def test_of_a_whole_answer_that_stays_unread_no_more_than_a_piece_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asgi, "WRITE_S_MAX", 0.05)
    sent, _ = await sent_until_unread(b"x" * (9 * PIECE_BYTES_MAX), pieces_read=3)
    assert len(sent) == 5 and sent[-1] == b"<left>"


async def test_a_large_part_of_a_stream_goes_in_pieces_too() -> None:
    sent: list[bytes] = []

    async def send(message: Message) -> None:
        sent.append(message["body"])
        assert message["more_body"] is (sum(map(len, sent)) < 3 * PIECE_BYTES_MAX + 1)

    async with Pieces(send) as pieces:
        await pieces.write(b"x" * (3 * PIECE_BYTES_MAX + 1), more=False)
    assert len(sent) == 4 and max(map(len, sent)) <= PIECE_BYTES_MAX
