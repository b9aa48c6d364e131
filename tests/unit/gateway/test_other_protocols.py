"""Clients that would rather speak another protocol than HTTP/1.1 are served in HTTP/1.1."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from tests.unit.gateway.fake_mesh import FakeMesh
from tests.unit.gateway.support import MODEL

TEXT = "/v1/completions"
BODY = json.dumps({"model": MODEL, "prompt": "abc", "max_tokens": 3}).encode()
LIVE = b"GET /health/live HTTP/1.1\r\nhost: x\r\n"
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"
WEBSOCKET = b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
CLOSE = b"connection: close\r\n"
END = b"\r\n\r\n"


def post(*fields: bytes, body: bytes = BODY) -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: x\r\n%s\r\n%s" % (TEXT.encode(), b"".join(fields), body)


SIZED = post(H2C, b"content-length: %d\r\n" % len(BODY))
CHUNKED = post(
    H2C, b"transfer-encoding: chunked\r\n", body=b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
)


@pytest.mark.parametrize("sent", [SIZED, CHUNKED], ids=("sized", "chunked"))
@pytest.mark.parametrize("piece_bytes", [1, 7, 1_000])
async def test_a_body_that_comes_with_an_offer_of_http_2_is_read(
    mesh: FakeMesh, sent: bytes, piece_bytes: int
) -> None:
    pieces = [sent[at : at + piece_bytes] for at in range(0, len(sent), piece_bytes)]
    answer = await answered(mesh, *pieces, LIVE + CLOSE + b"\r\n")
    assert answer.count(b"HTTP/1.1 200") == 2
    assert b'"text":"cba"' in answer


@pytest.mark.parametrize("fields", [H2C + CLOSE, H2C.replace(b": Upgrade", b": close, Upgrade")])
async def test_an_offer_on_a_connection_that_is_to_be_closed_is_declined_by_an_answer(
    mesh: FakeMesh, fields: bytes
) -> None:
    answer = await answered(mesh, post(fields, b"content-length: %d\r\n" % len(BODY)))
    assert answer.startswith(b"HTTP/1.1 200") and b'"text":"cba"' in answer
    assert (await answered(mesh, LIVE + fields + b"\r\n")).startswith(b"HTTP/1.1 200")


async def test_an_offer_without_a_body_is_declined_by_an_answer(mesh: FakeMesh) -> None:
    answer = await answered(mesh, LIVE + WEBSOCKET + b"\r\n", LIVE + CLOSE + b"\r\n")
    assert answer.count(b"HTTP/1.1 200") == 2


async def test_a_client_of_http_1_0_with_an_offer_is_answered_as_one(mesh: FakeMesh) -> None:
    old = LIVE.replace(b"HTTP/1.1", b"HTTP/1.0") + WEBSOCKET
    answer = await answered(mesh, old + b"\r\n")  # the connection ends with the answer
    assert answer.count(b"200 OK") == 1


@pytest.mark.parametrize("is_stream", [False, True], ids=("whole", "stream"))
async def test_a_client_of_http_1_0_gets_an_answer_without_the_marks_of_chunks(
    mesh: FakeMesh, is_stream: bool
) -> None:
    body = BODY[:-1] + (b', "stream": true}' if is_stream else b"}")
    sent = post(b"content-length: %d\r\n" % len(body), body=body)
    head, _, text = (await answered(mesh, sent.replace(b"HTTP/1.1", b"HTTP/1.0"))).partition(END)
    assert b" 200 OK" in head and b"chunked" not in head.lower()
    if not is_stream:
        assert json.loads(text)["choices"][0]["text"] == "cba"
        return
    events = text.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "cba"


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01\x02\x00\x01\x00\r\n", b"GET\r\n\r\n", LIVE + b"x: aaaaaaaa\r\n" * 8_000],
    ids=("TLS", "no path", "too long"),
)
async def test_what_is_no_http_is_told_so_in_the_form_of_all_errors(
    mesh: FakeMesh, sent: bytes
) -> None:
    head, _, text = (await answered(mesh, sent)).partition(END)
    assert head.startswith(b"HTTP/1.1 400") and b"application/json" in head
    assert json.loads(text)["error"]["code"] == "malformed_http"


async def test_no_error_is_written_into_the_middle_of_an_answer(mesh: FakeMesh) -> None:
    body = {"model": MODEL, "prompt": "abc" * 20, "max_tokens": 50, "stream": True}
    sent = json.dumps(body).encode()
    mesh.worker.pause_s = 0.02
    url = httpx.URL(mesh.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(post(b"content-length: %d\r\n" % len(sent), body=sent))
    async with asyncio.timeout(20):
        answer = await reader.readuntil(b"data: ")
        writer.write(b"no HTTP\r\n\r\n")
        answer += await reader.read()
    writer.close()
    assert answer.count(b"HTTP/1.1 ") == 1


async def test_many_offers_that_come_at_once_are_each_declined(mesh: FakeMesh) -> None:
    count = 2_000
    answer = await answered(mesh, (LIVE + H2C + b"\r\n") * count, LIVE + CLOSE + b"\r\n")
    assert answer.count(b"HTTP/1.1 200") == count + 1


async def test_a_tunnel_through_the_gateway_is_refused(mesh: FakeMesh) -> None:
    answer = await answered(mesh, b"CONNECT /x HTTP/1.1\r\nhost: x\r\n%s\r\n" % CLOSE)
    assert answer.startswith(b"HTTP/1.1 4")


async def test_the_limit_of_a_head_holds_for_one_with_an_offer(mesh: FakeMesh) -> None:
    answer = await answered(mesh, LIVE + H2C + b"x: aaaaaaaa\r\n" * 8_000)
    assert answer.startswith(b"HTTP/1.1 4")


async def answered(mesh: FakeMesh, *pieces: bytes) -> bytes:
    """All that comes back until the connection is closed."""
    url = httpx.URL(mesh.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    async with asyncio.timeout(20):
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        answer = await reader.read()
    writer.close()
    return answer


async def test_a_trailer_is_no_header_however_soon_it_comes(mesh: FakeMesh) -> None:
    body = b"%x\r\n%s\r\n0\r\nx-request-id: from-a-trailer\r\n\r\n" % (len(BODY), BODY)
    answer = await answered(mesh, post(CLOSE, b"transfer-encoding: chunked\r\n", body=body))
    assert b'"text":"cba"' in answer and b"from-a-trailer" not in answer
