"""Answers of megabytes: bounded, and made where they hold nobody else up."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from tests.unit.gateway.fake_mesh import FakeMesh
from tests.unit.gateway.support import eventually

from pagemesh.gateway.api.render import Renderer
from pagemesh.gateway.api.scores import Echo
from pagemesh.gateway.doors import connection as door
from pagemesh.gateway.doors.asgi import PIECE_BYTES_MAX
from pagemesh.gateway.doors.connection import Connection
from pagemesh.gateway.doors.front import Call

TEXT = "/v1/completions"
SCORED = {"prompt": "abcdef", "max_tokens": 200, "logprobs": 20}
PLAIN = {"prompt": "abcdef", "max_tokens": 20}


@pytest.fixture
async def http(mesh: FakeMesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=30) as made:
        yield made


def keep_at_most(monkeypatch: pytest.MonkeyPatch, bytes_max: int) -> None:
    monkeypatch.setattr(Call.whole, "__defaults__", (bytes_max,))


@pytest.mark.parametrize(
    "more",
    [{"logprobs": 20}, {"return_token_ids": True}, {"n": 4}, {"logprobs": 9, "echo": True}],
    ids=["scores", "token ids", "choices", "the prompt's scores"],
)
async def test_an_answer_too_large_for_one_piece_is_ended_and_says_what_to_do(
    mesh: FakeMesh, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    body = {"prompt": "abcdef", "max_tokens": 1_000}
    keep_at_most(monkeypatch, 2_000)
    assert (await http.post(TEXT, json=body)).status_code == 200
    mesh.worker.pause_s = 0.001
    answer = await http.post(TEXT, json=body | more)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "answer_too_large")
    assert "ask for a stream" in error["message"]
    await eventually(lambda: not mesh.worker.running_count)
    streamed = await http.post(TEXT, json=body | more | {"stream": True})
    assert streamed.status_code == 200 and streamed.text.endswith("data: [DONE]\n\n")


async def test_a_long_prompt_told_with_every_choice_counts_before_anything_is_made(
    mesh: FakeMesh, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_at_most(monkeypatch, 20_000)
    mesh.worker.pause_s = 0.01
    body = {"prompt": [5] * 1_000, "max_tokens": 1_000, "n": 3}
    for more in ({"echo": True}, {"return_token_ids": True}):
        answer = await http.post(TEXT, json=body | more)
        assert answer.json()["error"]["code"] == "answer_too_large"
        await eventually(lambda: not mesh.worker.running_count)
        assert mesh.worker.counter < 100
        mesh.worker.counter = 0


async def test_each_choice_tells_its_own_prompt(http: httpx.AsyncClient) -> None:
    body = {"prompt": ["abc", "xy"], "n": 2, "echo": True, "max_tokens": 1}
    answer = await http.post(TEXT, json=body | {"return_token_ids": True, "logprobs": 1})
    choices = answer.json()["choices"]
    assert [choice["text"] for choice in choices] == ["abcc", "abcc", "xyy", "xyy"]
    assert [len(choice["prompt_token_ids"]) for choice in choices] == [3, 3, 2, 2]
    assert [choice["logprobs"]["tokens"][:-1] for choice in choices] == [
        ["a", "b", "c"], ["a", "b", "c"], ["x", "y"], ["x", "y"],
    ]  # fmt: skip


@pytest.mark.parametrize("is_stream", [False, True], ids=("whole", "stream"))
async def test_a_prompts_scores_are_looked_up_once_for_all_choices(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    looked_up: list[int] = []
    monkeypatch.setattr(Echo, "of", noting(Echo.of, looked_up))
    body = {"prompt": "abcdef", "n": 5, "max_tokens": 1, "echo": True, "logprobs": 1}
    assert (await http.post(TEXT, json=body | {"stream": is_stream})).status_code == 200
    assert len(looked_up) == len("abcdef")


def noting(method: Callable[..., Any], threads: list[int]) -> Callable[..., Any]:
    def noted(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return method(*arguments)

    return noted


@pytest.mark.parametrize(
    ("method", "more"),
    [("response", {}), ("response", {"echo": True}), ("echoed", {"echo": True, "stream": True})],
)
async def test_what_takes_long_to_write_is_written_beside_the_event_loop(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, method: str, more: dict[str, Any]
) -> None:
    threads: list[int] = []
    monkeypatch.setattr(Renderer, method, noting(getattr(Renderer, method), threads))
    long = {**SCORED, "prompt": "abcdef" * 50} | more
    assert (await http.post(TEXT, json=PLAIN | more)).status_code == 200
    assert (await http.post(TEXT, json=long)).status_code == 200
    loop = threading.get_ident()
    assert [thread == loop for thread in threads] == [True, False]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x " * 800_000}),
        ("/detokenize", {"tokens": [257] * 1_600_000}),
    ],
)
async def test_of_tokens_and_texts_that_nobody_reads_no_more_than_a_piece_is_kept(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """All of it was, and counted in nobody's requests."""
    monkeypatch.setattr(door, "WRITE_S_MAX", 0.5)
    made: list[Connection] = []
    connect = Connection.connection_made

    def noted(connection: Connection, transport: asyncio.Transport) -> None:
        made.append(connection)
        connect(connection, transport)

    monkeypatch.setattr(Connection, "connection_made", noted)
    url, sent = httpx.URL(mesh.url), json.dumps(body, separators=(",", ":")).encode()
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, (url.host, url.port))
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(sent)}\r\n\r\n"
        await loop.sock_sendall(client, head.encode() + sent)
        await eventually(lambda: bool(made) and made[0].flow.write_paused, within_s=30)
        assert 0 < made[0].transport.get_write_buffer_size() <= PIECE_BYTES_MAX
        assert mesh.front._call_count == 1
        await eventually(lambda: mesh.front._call_count == 0)
        assert not made[0].connections


async def test_a_long_list_of_tokens_comes_whole_to_who_reads_it(http: httpx.AsyncClient) -> None:
    text = "x " * 200_000
    ids = (await http.post("/tokenize", json={"prompt": text})).json()["tokens"]
    assert len(ids) == len(text)
    assert (await http.post("/detokenize", json={"tokens": ids})).json() == {"prompt": text}
