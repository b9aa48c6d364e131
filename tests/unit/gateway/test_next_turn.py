"""What was answered is tokenised when it has been given, and not by the next turn."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.unit.gateway.fake_mesh import FakeMesh
from tests.unit.gateway.support import END, MODEL, eventually
from tests.unit.gateway.test_token_memory import Counted

from pagemesh.gateway.calls import next_turn

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
    said = await ask(mesh)
    assert said
    counted = Counted(mesh.front.tokens, monkeypatch)
    await ask(mesh, stream=stream, cache_salt="another")
    answered = f"{END}[assistant]{said}"
    await eventually(lambda: answered in counted.read)
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


async def test_nothing_is_kept_of_an_answer_that_is_very_long(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(next_turn, "ANSWER_CHARACTERS_MAX", 2)
    counted = Counted(mesh.front.tokens, monkeypatch)
    said = await ask(mesh)
    await ask(mesh)
    assert all(not piece.endswith(said) for piece in counted.read)
