"""Tools as the real OpenAI SDK uses them, with fake workers behind the gateway."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from tests.unit.gateway.fake_mesh import FakeMesh, fake_mesh
from tests.unit.gateway.support import END, MODEL, TEMPLATE, write_model
from tests.unit.gateway.test_openai_sdk import says
from tests.unit.gateway.test_tool_calls import HOW, NOW, ROME
from tests.unit.gateway.test_tools import SCHEMA, TOOLS, called, function

from pagemesh.gateway.api.tool_grammar import with_tool_grammar
from pagemesh.gateway.calls import prepare
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.wire.tokens import unpack

TALK: list[Any] = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"model": MODEL, "messages": TALK, "tools": TOOLS, "max_tokens": 200}
CALLING = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}{% for call in message.tool_calls or [] %}"
    "{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    f"{TEMPLATE}{{% if false %}}{HOW}{{% endif %}}"
)
"""Shows tools and arguments to the model, and to its reader how calls are written."""


@pytest.fixture
async def calling(shared_nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[FakeMesh]:
    """A model that calls functions."""
    folder = write_model(tmp_path / "calling")
    config = {"eos_token": END, "chat_template": CALLING}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    async with fake_mesh(shared_nats_server.url, folder) as made:
        yield made


@pytest.fixture
async def client(calling: FakeMesh) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=calling.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


async def test_calls_come_whole_and_workers_know_what_may_be_written(
    calling: FakeMesh, client: AsyncOpenAI
) -> None:
    says(calling, f"I look.\n{ROME}\n{NOW}")
    answer = await client.chat.completions.create(**ASKED)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    names = [call.function.name for call in choice.message.tool_calls or []]
    assert names == ["weather", "clock"]
    assert "lark_grammar" in calling.worker.submits[-1].sampling.grammar


async def test_calls_come_in_a_stream(calling: FakeMesh, client: AsyncOpenAI) -> None:
    says(calling, f"I look.\n{ROME}\n{NOW}")
    async with client.chat.completions.stream(**ASKED) as stream:
        async for _ in stream:
            pass
        answer = await stream.get_final_completion()
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    calls = [call.function for call in choice.message.tool_calls or []]
    assert [(one.name, one.arguments) for one in calls] == [
        ("weather", '{"city": "Rome"}'),
        ("clock", "{}"),
    ]


async def test_an_answer_goes_back_as_it_came_and_its_result_with_it(
    calling: FakeMesh, client: AsyncOpenAI
) -> None:
    says(calling, ROME)
    first = await client.chat.completions.create(**ASKED)
    message = first.choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"}
    says(calling, "It is sunny.")
    second = await client.chat.completions.create(
        **ASKED | {"messages": [*TALK, message.model_dump(), result]}
    )
    assert second.choices[0].message.content == "It is sunny."
    prompt = calling.front.tokens.decode(unpack(calling.worker.submits[-1].prompt).tolist())
    assert '{"city": "Rome"}' in prompt and "[tool]sun" in prompt and json.dumps(SCHEMA) in prompt


async def test_what_is_counted_are_the_tokens_of_a_request_with_tools(
    calling: FakeMesh, client: AsyncOpenAI
) -> None:
    says(calling, "no")
    answer = await client.chat.completions.create(**ASKED | {"messages": [*TALK, called("{}")]})
    async with httpx.AsyncClient(base_url=calling.url) as http:
        body = {"messages": [*TALK, called("{}")], "tools": TOOLS}
        counted = (await http.post("/tokenize", json=body)).json()["count"]
        without = (await http.post("/tokenize", json=body | {"tools": None})).json()["count"]
    assert answer.usage is not None and answer.usage.prompt_tokens == counted > without


async def test_a_model_without_tools_refuses_them(mesh: FakeMesh) -> None:
    body = {"messages": TALK, "tools": TOOLS}
    async with httpx.AsyncClient(base_url=mesh.url) as http:
        for path in ("/v1/chat/completions", "/tokenize"):
            answer = await http.post(path, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "tools")
            assert "no place for tools" in error["message"]
        answer = await http.post(
            "/v1/chat/completions", json=body | {"tool_choice": "none", "max_tokens": 1}
        )
        assert answer.status_code == 200, "they are of no use to this answer"
        answer = await http.post(
            "/v1/chat/completions", json={"messages": [*TALK, called("{}")], "max_tokens": 1}
        )
        assert "would leave tool_calls out" in answer.json()["error"]["message"]


async def test_a_schema_that_is_none_is_refused(calling: FakeMesh, client: AsyncOpenAI) -> None:
    odd: Any = function("odd", parameters={"properties": {"a": {"type": "objekt"}}})
    with pytest.raises(openai.BadRequestError, match="objekt") as caught:
        await client.chat.completions.create(**ASKED | {"tools": [odd]})
    assert caught.value.param == "tools[0].function.parameters"


async def test_a_grammar_is_made_beside_the_loop(
    calling: FakeMesh, client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def seen(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return with_tool_grammar(*given)

    monkeypatch.setattr(prepare, "with_tool_grammar", seen)
    says(calling, "no")
    for tools in (TOOLS, []):
        await client.chat.completions.create(**ASKED | {"tools": tools})
    main = threading.main_thread()
    assert [thread is main for thread in threads] == [False, True]
