"""Tokens that are counted for a client are those that its request would have."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.unit.gateway.fake_mesh import fake_mesh
from tests.unit.gateway.support import END, TEMPLATE, byte_tokenizer, write_model
from tokenizers import processors

from pagemesh.gateway.doors import http as door
from pagemesh.gateway.doors.off_loop import LARGE_BYTES_MIN
from pagemesh.gateway.words.tokens import Tokens
from pagemesh.runtime.nats_server import NatsServer

TALK = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def http(shared_nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Of a model whose tokenizer puts a token before what it is given, and whose template shows
    a variable of the client's."""
    folder = write_model(tmp_path / "tiny")
    tokenizer = byte_tokenizer()
    first = (END, tokenizer.token_to_id(END))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[first]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": END}, "chat_template": "{{ mood }}" + TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    async with (
        fake_mesh(shared_nats_server.url, folder) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=10) as made,
    ):
        yield made


async def test_a_prompt_has_as_many_tokens_as_its_request(http: httpx.AsyncClient) -> None:
    plain: list[dict[str, Any]] = [{}, {"add_special_tokens": False}, {"add_special_tokens": True}]
    asked = [("/v1/completions", {"prompt": "the end", **more}) for more in plain]
    of_chats = [
        *plain,
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"mood": "a calm one"}},
    ]
    asked += [("/v1/chat/completions", {"messages": TALK, **more}) for more in of_chats]
    for path, body in asked:
        answer = await http.post(path, json={**body, "max_tokens": 1})
        counted = (await http.post("/tokenize", json=body)).json()["count"]
        assert counted == answer.json()["usage"]["prompt_tokens"], body


async def test_what_cannot_be_told_in_tokens_or_text_is_refused(http: httpx.AsyncClient) -> None:
    for path, body, status, param in (
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": TALK}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/detokenize", {"tokens": [65], "model": "other"}, 404, "model"),
        ("/detokenize", {"tokens": [65, 261]}, 400, "tokens"),
        ("/detokenize", {"tokens": [65, -1]}, 400, "tokens[1]"),
    ):
        answer = await http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), body
    assert (await http.post("/detokenize", json={"tokens": [260]})).json() == {"prompt": END}


async def test_tokens_whose_text_would_be_too_large_are_refused_before_it_is_made(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few digits may stand for a hundred blanks: a body of 8 MiB for hundreds of megabytes."""
    asked = {"tokens": [65, 66] + [260] * 20}
    size = len((await http.post("/detokenize", json=asked)).json()["prompt"])
    assert size == 2 + 20 * len(END)
    monkeypatch.setattr(door, "ANSWER_BYTES_MAX", size)
    assert (await http.post("/detokenize", json=asked)).status_code == 200
    monkeypatch.setattr(door, "ANSWER_BYTES_MAX", size - 1)
    monkeypatch.setattr(Tokens, "decode", lambda *_: pytest.fail("the text was made"))
    answer = await http.post("/detokenize", json=asked)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "answer_too_large",
        "tokens",
    )
    assert "fewer tokens" in error["message"]


async def test_who_tokenises_from_afar_learns_the_special_tokens_and_the_template(
    http: httpx.AsyncClient,
) -> None:
    """lm-eval's remote tokenizer asks for them."""
    answer = await http.get("/tokenizer_info")
    assert answer.json() == {"eos_token": END, "chat_template": "{{ mood }}" + TEMPLATE}


async def test_who_leaves_is_not_tokenised_for_and_makes_room(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gate, worked = threading.Event(), threading.Event(), list[int]()

    def tokens_of(_door: object, body: bytes) -> tuple[bytes, str]:
        worked.append(len(body))
        begun.set()
        gate.wait(10)
        return b'{"count":0,"tokens":[]', ""

    monkeypatch.setattr(door.HttpDoor, "_tokens_of", tokens_of)
    body = {"prompt": "x" * LARGE_BYTES_MIN}
    calls = [asyncio.create_task(http.post("/tokenize", json=body)) for _ in range(4)]
    try:
        assert await asyncio.to_thread(begun.wait, 10)
        await asyncio.sleep(0.3)  # the others wait for their turns
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        await asyncio.sleep(0.3)  # until the gateway knows
    finally:
        gate.set()
    assert (await http.post("/tokenize", json=body)).json()["count"] == 0
    assert len(worked) == 2, "the one that was under way, and the last"
