"""``pagemesh chat`` and ``bench`` end in one line whatever a server answers, and take nulls."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest
from tests.support.answering import Answering, chunk, event

from pagemesh.cli.bench import sample_tokens
from pagemesh.cli.benching.client import RequestFailedError, complete, find_server, read_stream
from pagemesh.cli.chat_stream import Answer, ChatError, ask, client, served_model
from pagemesh.cli.client_config import ClientConfig

DEEP = b'{"data":' + b"[" * 100_000
STRANGE = "which is no answer of a gateway; name it with --url"


def mesh(content: bytes, status: int = 200) -> httpx.Client:
    answer = httpx.Response(status, content=content)
    return client(ClientConfig(url="http://u:secret@h:1"), httpx.MockTransport(lambda _: answer))


def streamed(data: bytes, shown: Callable[[str], None] = lambda _piece: None) -> Answer:
    with mesh(b"data: " + data + b"\n\ndata: [DONE]\n\n") as http:
        return ask(http, {}, shown)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b'{"data":[5]}', "other JSON"),
        (b'{"data":"x"}', "other JSON"),
        (b'{"data":[{}]}', "other JSON"),
        (b'{"data":{"a":1}}', "other JSON"),
        (b"[]", "no JSON object"),
        (DEEP, "no JSON object"),
    ],
)
def test_models_of_another_kind_are_one_line(content: bytes, what: str) -> None:
    with mesh(content) as http, pytest.raises(ChatError) as caught:
        served_model(http)
    assert str(caught.value) == f"http://h:1/v1/models answers {what}, {STRANGE}"


def test_no_list_of_models_is_a_server_that_is_not_ready() -> None:
    with mesh(b'{"data":null}') as http, pytest.raises(ChatError) as caught:
        served_model(http)
    assert str(caught.value).startswith("http://h:1 serves no model yet")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[]", "no JSON object"),
        (b"5", "no JSON object"),
        (DEEP, "no JSON object"),
        (b'{"error":"boom"}', "^boom$"),
        (b'{"error":{"message":"boom","code":[]}}', "^boom$"),
        (b'{"error":{}}', "unknown error"),
        (b'{"error":5}', "http://h:1/v1/chat/completions streams other JSON"),
        (b'{"choices":[{"delta":{"content":5}}]}', "streams other JSON"),
        (b'{"usage":5}', "streams other JSON"),
        (b'{"usage":{"prompt_tokens":"x"}}', "streams other JSON"),
    ],
)
def test_events_of_another_kind_are_one_line(data: bytes, message: str) -> None:
    with pytest.raises(ChatError, match=message):
        streamed(data)


@pytest.mark.parametrize(
    "data",
    [
        b'{"choices":null,"usage":null,"error":null}',
        b'{"choices":[{"delta":null,"finish_reason":null}]}',
        b'{"choices":[{"delta":{"content":null}}],"usage":{"prompt_tokens_details":null}}',
    ],
)
def test_nulls_in_events_are_nothing(data: bytes) -> None:
    answer = streamed(data)
    assert (answer.text, answer.prompt_tokens, answer.cached_tokens) == ("", 0, 0)


def test_a_piece_may_hold_line_separators_of_unicode() -> None:
    pieces: list[str] = []
    text = "a\u2028b\x85c\x1cd"
    data = {"choices": [{"delta": {"content": text}}]}
    streamed(json.dumps(data, ensure_ascii=False).encode(), pieces.append)
    assert pieces == [text]


@pytest.mark.parametrize("content", [DEEP, b'{"error":"boom"}', b'{"error":{"message":5}}', b"[]"])
def test_refusals_of_another_kind_are_told_by_their_status(content: bytes) -> None:
    with mesh(content, 500) as http, pytest.raises(ChatError) as caught:
        ask(http, {}, lambda _piece: None)
    assert str(caught.value) == f"http://h:1/v1/chat/completions answers status 500, {STRANGE}"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'{"tokens":[]}', "http://h:1/tokenize returned no tokens to make prompts of"),
        (b'{"tokens":["x"]}', f"http://h:1/tokenize answers other JSON, {STRANGE}"),
        (b"{}", f"http://h:1/tokenize answers other JSON, {STRANGE}"),
    ],
)
def test_a_benchmark_without_tokens_is_one_line(content: bytes, told: str) -> None:
    with mesh(content) as http, pytest.raises(ChatError) as caught:
        sample_tokens(http)
    assert str(caught.value) == told


@pytest.mark.parametrize("content", [DEEP, b'{"data":[5]}', b'{"data":null}', b"5"])
def test_a_server_to_compare_with_that_names_no_model_is_one_line(
    monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    request = httpx.Request("GET", "http://u:secret@h:1")
    for status in (200, 500):
        answer = httpx.Response(status, content=content, request=request)
        monkeypatch.setattr(httpx, "get", lambda _url, answer=answer, **_: answer)
        with pytest.raises(RequestFailedError) as caught:
            find_server("other", "http://u:secret@h:1")
        assert str(caught.value).startswith("other at http://h:1 names no model: ")
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "said", [b"data: " + DEEP, b'data: {"usage": 5}', b'data: {"choices": [{"text": 5}]}']
)
async def test_what_a_benchmark_is_streamed_of_another_kind_is_a_failure(said: bytes) -> None:
    async with Answering(says=said + b"\n\n").listening() as found:
        with pytest.raises(RequestFailedError, match="other: no stream of completions"):
            await complete(found, [1, 2], 4)


async def test_what_refuses_a_benchmark_with_nested_json_is_told_by_its_status() -> None:
    async with Answering(status=500, says=DEEP).listening() as found:
        with pytest.raises(RequestFailedError, match="other: status 500"):
            await complete(found, [1, 2], 4)


def test_an_error_that_is_a_text_fails_a_benchmark_and_a_null_does_not() -> None:
    with pytest.raises(RequestFailedError, match=r"^boom$"):
        read_stream([(1.0, event(error="boom"))], 0.0, 1.0, 1)
    usage = {"prompt_tokens": None, "completion_tokens": None, "prompt_tokens_details": None}
    stream = chunk("a", "length") + event(error=None, choices=None, usage=usage)
    reply = read_stream([(1.0, stream)], 0.0, 1.0, 3)
    assert (reply.prompt_tokens, reply.output_tokens, reply.cached_tokens) == (0, 3, None)
