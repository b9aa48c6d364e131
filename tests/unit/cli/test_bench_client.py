"""What the client of ``pagemesh bench`` times and counts is what came, and no half answer."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.answering import Answering, chunk, event
from tests.support.certificates import Identity

from pagemesh.cli.benching import client
from pagemesh.cli.benching.client import RequestFailedError, Server, complete, read_stream

# Reading streams ---------------------------------------------------------------------------------


def test_text_counts_when_its_event_is_whole_however_the_bytes_were_cut() -> None:
    first, second = chunk("a"), chunk("b", "length")
    pieces = [(1.0, first[:9]), (2.0, first[9:] + second[:5]), (3.0, second[5:])]
    reply = read_stream(pieces, 0.5, 3.5, 2)
    assert reply.arrivals_s == (2.0, 3.0)
    assert (reply.text, reply.output_tokens, reply.cached_tokens) == ("ab", 2, None)


def test_tokens_without_text_are_counted_by_the_usage_and_bring_no_arrival() -> None:
    usage = {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}
    stream = chunk("") + chunk("a") + chunk("", "length") + event(choices=[], usage=usage)
    reply = read_stream([(1.0, stream + b"data: [DONE]\n\n")], 0.0, 1.0, 3)
    assert (len(reply.arrivals_s), reply.output_tokens, reply.cached_tokens) == (1, 3, 16)


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (chunk("a"), "the stream ended early"),
        (chunk("a") + event(error={"message": "out of pages"}), "out of pages"),
    ],
)
def test_half_an_answer_is_a_failure(stream: bytes, message: str) -> None:
    with pytest.raises(RequestFailedError, match=message):
        read_stream([(1.0, stream)], 0.0, 1.0, 1)


# Against a server --------------------------------------------------------------------------------


async def test_fewer_tokens_than_asked_for_are_a_failure() -> None:
    async with Answering(less=1).listening() as found:
        with pytest.raises(RequestFailedError, match="asked for 4 tokens, got 3"):
            await complete(found, [1, 2], 4)


@pytest.mark.parametrize("said", [b"data: {no\n\n", b'data: {"choices": [7]}\n\n'])
async def test_what_is_no_stream_of_completions_is_a_failure(said: bytes) -> None:
    async with Answering(says=said).listening() as found:
        with pytest.raises(RequestFailedError, match="other: no stream of completions"):
            await complete(found, [1, 2], 4)


async def test_a_refusal_is_told_with_its_status() -> None:
    async with Answering(status=503).listening() as found:
        with pytest.raises(RequestFailedError, match="other: status 503"):
            await complete(found, [1, 2], 4)


async def test_a_server_that_is_not_there_is_named() -> None:
    async with Answering().listening() as found:
        pass
    with pytest.raises(RequestFailedError, match="other is not at http://127"):
        await complete(found, [1, 2], 4)


async def test_a_server_that_never_answers_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "ANSWER_S_MAX", 0.05)

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while await reader.read(1_000):
                pass

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as silent:
        url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        with pytest.raises(RequestFailedError, match="other: no answer within"):
            await complete(Server("other", url, "m"), [1, 2], 4)
        await asyncio.sleep(0.05)  # for its end of the connection to close


async def test_the_key_is_shown_to_the_server_and_to_nobody_who_reads_a_log() -> None:
    server = Answering()
    async with server.listening() as found:
        await complete(found, [1, 2], 1)
        await complete(shown := replace(found, key="sesame"), [1, 2], 1)
    assert [b"\r\nauthorization: Bearer sesame\r\n" in head for head in server.heads] == [
        False,
        True,
    ]
    assert "sesame" not in repr(shown)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for certificates")
async def test_a_server_with_tls_is_asked_only_if_it_is_trusted(tmp_path: Path) -> None:
    known, stranger = (Identity(tmp_path, name) for name in ("known", "stranger"))
    trusting = ssl.create_default_context(cafile=known.certificate)
    for identity, is_trusted in ((known, True), (stranger, False)):
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(identity.certificate, identity.key)
        server = Answering()
        async with server.listening(tls=tls) as found:
            asked = complete(replace(found, tls=trusting), [1, 2], 3)
            if is_trusted:
                assert (await asked).output_tokens == 3
                continue
            with pytest.raises(RequestFailedError, match="certificate verify failed"):
                await asked
        assert not server.bodies
