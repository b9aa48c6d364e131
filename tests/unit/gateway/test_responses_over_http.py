"""Responses as the real OpenAI SDK uses them, with fake workers behind the gateway."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel
from tests.unit.gateway.fake_mesh import FakeMesh, fake_mesh
from tests.unit.gateway.support import END, MODEL, eventually, write_model
from tests.unit.gateway.test_openai_sdk import says
from tests.unit.gateway.test_response_body import FLAT
from tests.unit.gateway.test_tool_calls import NOW, ROME
from tests.unit.gateway.test_tools import TOOLS
from tests.unit.gateway.test_tools_over_http import CALLING

from pagemesh.gateway import measures
from pagemesh.gateway.calls.spec import RequestLimits
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.wire.errors import NoCapacity

PATH = "/v1/responses"
KEY = {"idempotency-key": "mine"}
ASKED: dict[str, Any] = {
    "model": MODEL,
    "input": [{"role": "user", "content": "hi"}],
    "tools": [FLAT, {"type": "function", "name": "clock"}],
    "max_output_tokens": 200,
}


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


@pytest.fixture
async def http(calling: FakeMesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=calling.url, timeout=10) as made:
        yield made


async def test_a_response_is_answered_whole_with_true_usage(
    calling: FakeMesh, client: AsyncOpenAI
) -> None:
    says(calling, "hello there")
    calling.worker.cached_tokens = 3
    response = await client.responses.create(model=MODEL, input="hi", instructions="Be brief.")
    assert (response.status, response.output_text) == ("completed", "hello there")
    assert response.id.startswith("resp_") and response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 3
    talk: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    chat = await client.chat.completions.create(model=MODEL, messages=talk)
    first, second = calling.worker.submits[-2:]
    assert bytes(first.prompt) == bytes(second.prompt)
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == response.usage.input_tokens
    assert chat.usage.completion_tokens == response.usage.output_tokens


async def test_a_stream_puts_the_response_together(calling: FakeMesh, client: AsyncOpenAI) -> None:
    says(calling, f"I löok.\n{ROME}\n{NOW}")
    async with client.responses.stream(**ASKED) as stream:
        kinds = [event.type async for event in stream]
        response = await stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert response.output_text == "I löok."
    calls = [one for one in response.output if one.type == "function_call"]
    assert [(one.name, one.arguments) for one in calls] == [
        ("weather", '{"city": "Rome"}'),
        ("clock", "{}"),
    ]
    whole = await client.responses.create(**ASKED)
    assert [one.type for one in whole.output] == [one.type for one in response.output]
    assert "lark_grammar" in calling.worker.submits[-1].sampling.grammar


async def test_items_go_back_as_they_came_and_the_prompt_is_that_of_the_chat(
    calling: FakeMesh, client: AsyncOpenAI
) -> None:
    says(calling, f"I look.\n{ROME}")
    first = await client.responses.create(**ASKED)
    items = [one.model_dump() for one in first.output]
    result = {"type": "function_call_output", "call_id": items[1]["call_id"], "output": "sun"}
    says(calling, "It is sunny.")
    talk = [*ASKED["input"], *items, result]
    second = await client.responses.create(**ASKED | {"input": talk})
    assert second.output_text == "It is sunny."
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    call = {"id": items[1]["call_id"], "type": "function", "function": function}
    same: list[Any] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "sun"},
    ]
    tools: Any = TOOLS
    await client.chat.completions.create(model=MODEL, messages=same, tools=tools, max_tokens=200)
    one, other = calling.worker.submits[-2:]
    assert bytes(one.prompt) == bytes(other.prompt) and one.sampling.grammar
    assert one.sampling.grammar == other.sampling.grammar


class Place(BaseModel):
    city: str


async def test_a_format_is_followed_and_parsed(calling: FakeMesh, client: AsyncOpenAI) -> None:
    says(calling, '{"city": "Rome"}')
    response = await client.responses.parse(model=MODEL, input="x", text_format=Place)
    assert response.output_parsed == Place(city="Rome")
    assert "json_schema" in calling.worker.submits[-1].sampling.grammar


async def test_too_few_tokens_make_an_incomplete_response(
    calling: FakeMesh, client: AsyncOpenAI
) -> None:
    says(calling, "one two three", ends=False)
    asked: dict[str, Any] = {"model": MODEL, "input": "x", "max_output_tokens": 4}
    response = await client.responses.create(**asked)
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    stream = await client.responses.create(**asked, stream=True)
    events = [event async for event in stream]
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == response.output_text == "one "


async def test_a_stream_is_named_events_and_has_no_end_mark(
    calling: FakeMesh, http: httpx.AsyncClient
) -> None:
    says(calling, "hi")
    answer = await http.post(PATH, json={"input": "x", "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, rest = answer.text.split("\n\n")
    assert rest == ""
    for event in events:
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


async def test_log_probabilities_come_with_the_text(calling: FakeMesh, client: AsyncOpenAI) -> None:
    says(calling, "hi")
    response = await client.responses.create(
        model=MODEL, input="x", include=["message.output_text.logprobs"], top_logprobs=2
    )
    message = response.output[0]
    assert message.type == "message" and message.content[0].type == "output_text"
    rows = message.content[0].logprobs or []
    assert [(row.token, row.bytes) for row in rows] == [("h", [104]), ("i", [105])]


@pytest.mark.parametrize(
    ("fields", "param", "status", "told"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", 400, "whole conversation"),
        ({"extra_body": {"response_format": {}}}, "response_format", 400, "use text.format"),
        ({"input": "x" * 9_000}, "input", 400, "too long"),
        ({"max_output_tokens": 90_000}, "max_output_tokens", 400, "max_output_tokens may be"),
        (
            {
                "tools": [FLAT | {"parameters": {"properties": {"a": {"type": "objekt"}}}}],
            },
            "tools[0].parameters",
            400,
            "objekt",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "odd"}}}},
            "text.format",
            400,
            "odd",
        ),
        ({"model": "other"}, "model", 404, "does not exist"),
    ],
)
async def test_errors_name_what_the_client_wrote(
    client: AsyncOpenAI, fields: dict[str, Any], param: str, status: int, told: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError, match=told) as caught:
            await client.responses.create(
                **{"model": MODEL, "input": "x", "stream": stream} | fields
            )
        assert (caught.value.param, caught.value.status_code) == (param, status)


async def test_what_fails_before_the_first_token_is_a_plain_error(
    calling: FakeMesh, client: AsyncOpenAI
) -> None:
    calling.front._limits = RequestLimits(failures_max=0)
    for worker in calling.workers:
        worker.refusal = NoCapacity("never")
    with pytest.raises(openai.APIStatusError) as caught:
        await client.responses.create(model=MODEL, input="x", stream=True)
    assert caught.value.status_code >= 400


async def test_what_fails_later_raises_in_the_sdk_and_ends_in_a_failed_response(
    calling: FakeMesh, client: AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    for worker in calling.workers:
        worker.pause_s = 0.02
    asked = {"model": MODEL, "input": "x", "max_output_tokens": 200, "ignore_eos": True}
    stream: Any = await client.responses.create(
        model=MODEL, input="x", max_output_tokens=200, stream=True
    )
    await anext(aiter(stream))
    calling.front.gateway.cut_off()
    with pytest.raises(openai.APIError, match="stopped"):
        async for _ in stream:
            pass
    async with http.stream("POST", PATH, json=asked | {"stream": True}) as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        calling.front.gateway.cut_off()
        *_, last = [json.loads(line[6:]) async for line in lines if line.startswith("data: ")]
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == "server_error"


async def test_nothing_is_kept(client: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    for asked in (
        client.responses.retrieve("resp_1"),
        client.responses.delete("resp_1"),
        client.responses.cancel("resp_1"),
    ):
        with pytest.raises(openai.NotFoundError, match="no response is kept here"):
            await asked
    assert (await http.get(f"{PATH}/resp_1/input_items")).status_code == 404
    assert (await http.get(PATH)).status_code == 405


async def test_a_repeated_body_with_a_key_gets_the_same_response(
    calling: FakeMesh, http: httpx.AsyncClient
) -> None:
    says(calling, "hi")
    first = await http.post(PATH, json={"input": "x"}, headers=KEY)
    again = await http.post(PATH, json={"input": "x"}, headers=KEY)
    assert first.json() == again.json() and "idempotent-replayed" in again.headers
    assert len(calling.worker.submits) == 1
    other = await http.post("/v1/chat/completions", json={"input": "x"}, headers=KEY)
    assert other.status_code == 400, "the key is another path's"


async def test_a_client_that_leaves_a_stream_ends_its_request(
    calling: FakeMesh, http: httpx.AsyncClient
) -> None:
    for worker in calling.workers:
        worker.pause_s = 0.02
    body = {"input": "x", "stream": True, "max_output_tokens": 200}
    async with http.stream("POST", PATH, json=body) as answer:
        await anext(answer.aiter_lines())
    await eventually(lambda: not calling.front._call_count)
    assert calling.front.gateway.in_flight_count == 0


async def test_responses_are_counted_as_chats(calling: FakeMesh, http: httpx.AsyncClient) -> None:
    says(calling, "hi")
    counts = [measures.requests.labels("http", "chat", one) for one in ("completed", "refused")]
    before = [count._value.get() for count in counts]
    for body in (
        {"input": "x"},
        {"input": "x", "stream": True},
        {"input": "x", "background": True},
    ):
        await http.post(PATH, json=body)
    await eventually(lambda: not calling.front._call_count)
    assert [count._value.get() for count in counts] == [before[0] + 2, before[1] + 1]
