"""What was answered is tokenised when it has been given, and not by the next turn."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from tests.unit.gateway.fake_mesh import FakeMesh
from tests.unit.gateway.support import END, MODEL, TEMPLATE, byte_tokenizer, eventually
from tests.unit.gateway.test_token_memory import Counted

from pagemesh.gateway.api.openai_api import parse_chat
from pagemesh.gateway.doors import next_turn
from pagemesh.gateway.doors.next_turn import NextTurn, NextTurns
from pagemesh.gateway.doors.off_loop import THREAD_BYTES_MIN
from pagemesh.gateway.words.templates import ChatTemplate
from pagemesh.gateway.words.tokens import Tokens

TALK = [{"role": "user", "content": "the first"}]


async def ask(mesh: FakeMesh, **more: Any) -> str:
    """The answer's text."""
    await eventually(lambda: mesh.front.gateway.known_facts is not None)
    body = {"model": MODEL, "messages": TALK, "max_tokens": 4} | more
    async with httpx.AsyncClient(base_url=mesh.url, timeout=30) as http:
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
    return "" if more.get("stream") else str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_tokenised_once_it_was_given(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    remembered: list[str] = []
    remember = mesh.front.tokens.remember

    def noted(text: str, **how: Any) -> None:
        remember(text, **how)
        remembered.append(text)

    monkeypatch.setattr(mesh.front.tokens, "remember", noted)
    said = await ask(mesh)
    assert said
    await eventually(lambda: len(remembered) == 1)  # or what is read for it counts below
    counted = Counted(mesh.front.tokens, monkeypatch)
    await ask(mesh, stream=stream, cache_salt="another")
    await eventually(lambda: len(remembered) == 2)
    assert f"{END}[assistant]{said}" in counted.read
    counted.read.clear()
    talk = [*TALK, {"role": "assistant", "content": said}, {"role": "user", "content": "next"}]
    await ask(mesh, messages=talk, cache_salt="another")
    assert counted.read[:1] == [f"{END}[user]next"]


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"messages": [*TALK, {"role": "assistant", "content": "well"}],
         "continue_final_message": True, "add_generation_prompt": False},
    ],
    ids=["several answers", "an answer that went on"],
)  # fmt: skip
async def test_what_comes_back_in_another_form_is_not_tokenised_ahead(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    counted = Counted(mesh.front.tokens, monkeypatch)
    await ask(mesh, **more)
    asked = len(counted.read)
    await ask(mesh, **more)
    assert len(counted.read) == asked, "the second has nothing new"


@pytest.mark.parametrize("limit", ["ANSWER_CHARACTERS_MAX", "BODY_BYTES_MAX", "WAITING_MAX"])
async def test_what_is_too_long_or_too_much_is_left_to_the_next_turn(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(next_turn, limit, 2 if limit != "WAITING_MAX" else 0)
    monkeypatch.setattr(mesh.front, "next_turns", next_turn.NextTurns(mesh.front.tokens))
    counted = Counted(mesh.front.tokens, monkeypatch)
    said = await ask(mesh)
    mesh.front.next_turns.close()
    await asyncio.sleep(0.05)
    assert said and all(not piece.endswith(said) for piece in counted.read)


def said(text: str, body_bytes: int = 100, **fields: Any) -> NextTurn:
    """What a talk is once it was answered with ``text``."""
    body = json.dumps({"model": MODEL, "messages": TALK} | fields).encode()
    turn = NextTurn(parse_chat(body, served=MODEL), body_bytes)
    turn.said(text)
    return turn


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 2},
        {"add_special_tokens": True},
        {"body_bytes": next_turn.BODY_BYTES_MAX + 1},
        {"text": "x" * (next_turn.ANSWER_CHARACTERS_MAX + 1)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_of_what_comes_back_in_another_form_or_is_long_there_is_no_talk(
    fields: dict[str, Any],
) -> None:
    assert said(**{"text": "well"} | fields).talk() is None


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 1, "n": 1},
        {"add_special_tokens": False},
        {"body_bytes": next_turn.BODY_BYTES_MAX},
        {"text": "x" * next_turn.ANSWER_CHARACTERS_MAX},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_talk_is_what_was_asked_and_answered(fields: dict[str, Any]) -> None:
    told = said(**{"text": "well"} | fields).talk()
    assert told is not None
    assert (told[0].messages, told[1]) == (TALK, fields.get("text", "well"))


async def test_the_talk_is_rendered_as_its_next_turn_will_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = "{{ tone }}" + TEMPLATE
    tokens = Tokens(byte_tokenizer(), template=ChatTemplate(source, {}), end_tokens=frozenset())
    read: list[tuple[str, bytes]] = []
    monkeypatch.setattr(tokens, "remember", lambda text, *, owner, **_: read.append((text, owner)))
    turns = NextTurns(tokens)
    turns.expect(said("well", chat_template_kwargs={"tone": "calm"}), b"owner")
    await eventually(lambda: bool(read))
    turns.close()
    assert read == [(f"calm[user]the first{END}[assistant]well{END}", b"owner")]


async def test_each_answer_that_was_tokenised_makes_room_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(next_turn, "WAITING_MAX", 1)
    tokens = Tokens(byte_tokenizer(), template=ChatTemplate(TEMPLATE, {}), end_tokens=frozenset())
    read: list[str] = []
    monkeypatch.setattr(tokens, "remember", lambda text, **_: read.append(text))
    turns = NextTurns(tokens)
    turns.expect(said("well"), b"owner")
    await eventually(lambda: len(read) == 1)
    turns.expect(said("well"), b"owner")
    await eventually(lambda: len(read) == 2)
    turns.close()


def test_of_an_answer_without_text_nothing_is_tokenised() -> None:
    assert said("").talk() is None
    assert said("well").talk() is not None


async def test_a_template_that_fails_on_the_answer_costs_nobody_anything(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, render = await ask(mesh), mesh.front.tokens.render_chat

    def failing(messages: list[dict[str, Any]], **more: Any) -> str:
        if messages[-1]["role"] == "assistant":
            raise ValueError("a bug")
        return render(messages, **more)

    monkeypatch.setattr(mesh.front.tokens, "render_chat", failing)
    assert await ask(mesh) == said
    mesh.front.next_turns.close()
    assert await ask(mesh) == said, "nor does one that comes too late"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_talk_with_a_key_is_answered_once(mesh: FakeMesh, stream: bool) -> None:
    await eventually(lambda: mesh.front.gateway.known_facts is not None)
    body = {"model": MODEL, "messages": TALK, "max_tokens": 2, "stream": stream}
    body["chat_template_kwargs"] = {"unused": "x" * 2 * THREAD_BYTES_MIN}
    async with httpx.AsyncClient(base_url=mesh.url, timeout=30) as http:
        answers = [
            await http.post("/v1/chat/completions", json=body, headers={"Idempotency-Key": "k"})
            for _ in range(2)
        ]
    if stream:
        assert [answer.status_code for answer in answers] == [200, 400]
    else:
        assert answers[0].content == answers[1].content
        assert answers[1].headers["idempotent-replayed"] == "true"
