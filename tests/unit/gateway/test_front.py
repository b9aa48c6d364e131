"""Between a body and its answer: what workers are asked for, and what their tokens become."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from msgspec import structs
from tests.unit.gateway.fake_mesh import SECRET, FakeMesh
from tests.unit.gateway.support import END, MODEL, byte_tokenizer, spec
from tests.unit.gateway.test_request import Desk

from pagemesh.gateway.api.api_errors import ApiError
from pagemesh.gateway.api.openai_api import parse_completion
from pagemesh.gateway.api.render import Renderer
from pagemesh.gateway.calls import events as ev
from pagemesh.gateway.calls.call_facts import CallFacts
from pagemesh.gateway.calls.prepare import carried_tokens
from pagemesh.gateway.doors.front import Call, Caller, Front, Understood
from pagemesh.gateway.doors.next_turn import NextTurn
from pagemesh.gateway.doors.tenants import ANYBODY, Tenants
from pagemesh.gateway.life import Life
from pagemesh.gateway.outbox import Outbox
from pagemesh.gateway.words.tokens import Tokens
from pagemesh.runtime.clock import MonotonicClock
from pagemesh.runtime.trace import new_trace
from pagemesh.wire.errors import Gone, Internal

CALLER = Caller("http", ANYBODY, {})


async def understood_of(mesh: FakeMesh, body: bytes) -> Understood:
    return await mesh.front.understand(await mesh.front.parse(body, CALLER, chat=False), CALLER)


async def answer(mesh: FakeMesh, **fields: Any) -> dict[str, Any]:
    """The one choice of a completion."""
    body = json.dumps({"prompt": "abc", **fields}).encode()
    understood = await understood_of(mesh, body)
    async with mesh.front.call(understood, CALLER) as call:
        (choice,) = json.loads(await call.whole())["choices"]
    return cast(dict[str, Any], choice)


def says(mesh: FakeMesh, text: str) -> None:
    ids = mesh.front.tokens.encode(text, add_special_tokens=False).tolist()
    mesh.worker.speech = lambda _: ids


async def test_calls_without_a_seed_draw_apart_and_with_one_as_it_says(mesh: FakeMesh) -> None:
    for fields in ({}, {}, {"seed": 9}, {"seed": 9}):
        await answer(mesh, max_tokens=1, **fields)
    drawn = [submit.sampling.seed for submit in mesh.worker.submits]
    assert len(set(drawn[:2])) == 2 and drawn[2:] == [9, 9]


async def test_a_call_ends_when_the_time_is_over_that_a_request_may_take(mesh: FakeMesh) -> None:
    mesh.front._request_timeout_ms = 300
    mesh.worker.pause_s = 0.05
    with pytest.raises(ApiError) as caught:
        await answer(mesh, max_tokens=100)
    assert (caught.value.status, caught.value.code) == (504, "deadline_exceeded")
    (submit,) = mesh.worker.submits
    assert 0 < submit.deadline_ms <= 300


async def test_a_submit_carries_no_more_than_the_bus_does(mesh: FakeMesh) -> None:
    understood = await understood_of(mesh, b'{"prompt": "abc"}')
    async with mesh.front.call(understood, CALLER) as call:
        (life,) = call._lives
        assert life.core.spec.submit_tokens_max == carried_tokens(mesh.bus.message_bytes_max)


SHOWN: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("abab", {"stop": "b"}, "a", "b"),
    ("abab", {"stop": "b", "min_tokens": 2}, "aba", "b"),
    ("abab", {"stop": "b", "include_stop_str_in_output": True}, "ab", "b"),
    (f"ab{END}", {}, "ab", None),
    (f"ab{END}", {"include_stop_str_in_output": True}, "ab", None),
    (f"ab{END}", {"skip_special_tokens": False}, "ab", None),
    (f"ab{END}", {"skip_special_tokens": False, "include_stop_str_in_output": True}, f"ab{END}",
     None),
    (f"a{END}b", {"ignore_eos": True, "max_tokens": 3}, "ab", None),
    (f"a{END}b", {"ignore_eos": True, "max_tokens": 3, "skip_special_tokens": False}, f"a{END}b",
     None),
]  # fmt: skip
"""What a worker says, what a body asks for, and of the answer its text and why it stopped."""


async def test_a_text_shows_of_its_stops_and_special_tokens_what_is_asked_for(
    mesh: FakeMesh,
) -> None:
    for said, fields, text, reason in SHOWN:
        says(mesh, said)
        choice = await answer(mesh, **fields)
        assert (choice["text"], choice["stop_reason"]) == (text, reason), fields


async def test_a_stop_token_is_in_the_text_of_who_asks_for_it(mesh: FakeMesh) -> None:
    says(mesh, "abc")
    (stop,) = mesh.front.tokens.encode("c", add_special_tokens=False).tolist()
    for shown, text in ((False, "ab"), (True, "abc")):
        choice = await answer(mesh, stop_token_ids=[stop], include_stop_str_in_output=shown)
        assert (choice["text"], choice["stop_reason"]) == (text, stop)


async def refused(mesh: FakeMesh, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await answer(mesh, **fields)
    for bus in (mesh.bus, mesh.worker.bus):  # what was sent would be there by now
        await bus.barrier()
    assert mesh.worker.submits == []
    return caught.value


async def test_what_the_bus_cannot_carry_is_refused(mesh: FakeMesh) -> None:
    mesh.bus._message_bytes_max = 70_000
    most = carried_tokens(70_000)
    error = await refused(mesh, prompt=[65] * most)
    assert error.code == "context_length_exceeded" and "max_payload of 70000" in error.message
    assert await answer(mesh, prompt=[65] * (most - 1), max_tokens=1)


async def test_what_is_more_than_its_tenant_may_use_is_refused(mesh: FakeMesh) -> None:
    mesh.front.tenants = Tenants("", SECRET, "*:pages=10%")
    error = await refused(mesh, prompt=[65] * 300, max_tokens=21)
    assert error.code == "quota_exceeded" and "320" in error.message
    assert await answer(mesh, prompt=[65] * 300, max_tokens=20)


async def test_of_prompts_of_which_some_would_find_no_room_none_is_begun(mesh: FakeMesh) -> None:
    gateway = mesh.front.gateway
    gateway.request_count_max = 2
    error = await refused(mesh, prompt=["a", "b", "c"])
    assert (error.status, error.headers) == (400, {}), "there never will be"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway, "room", lambda count: count <= 1)  # another is answered now
        error = await refused(mesh, prompt=["a", "b"])
    assert (error.status, error.headers) == (429, {"retry-after": "1"})


async def test_usage_is_of_all_prompts_and_ends_the_stream_of_who_asks_for_it(
    mesh: FakeMesh,
) -> None:
    mesh.worker.cached_tokens = 1
    body = {"prompt": ["abc", "de"], "n": 2, "max_tokens": 4, "stream": True}
    usages: list[Any] = []
    for options in ({}, {"stream_options": {"include_usage": True}}):
        understood = await understood_of(mesh, json.dumps(body | options).encode())
        async with mesh.front.call(understood, CALLER) as call:
            chunks = [json.loads(one) async for some in call.chunks() for one in some]
        usages.append([chunk["usage"] for chunk in chunks if not chunk["choices"]])
    assert usages == [[], [{
        "prompt_tokens": 5, "completion_tokens": 16, "total_tokens": 21,
        "prompt_tokens_details": {"cached_tokens": 2},
    }]]  # fmt: skip


async def test_what_is_cached_is_cached_under_a_root_for_each_model_that_is_served(
    mesh: FakeMesh,
) -> None:
    await answer(mesh, max_tokens=1)
    (submit,) = mesh.worker.submits
    assert mesh.front.cache_roots(ANYBODY, "") == [submit.root.hex()]
    announce = mesh.worker.announce
    assert announce.model is not None
    other = structs.replace(announce.model, model_root=b"n" * 32)
    prefill = structs.replace(announce, role="prefill", name="p", incarnation=1, model=other)
    gateway = mesh.front.gateway
    gateway.presence.directory.hear(prefill, gateway.clock.now_ms())
    roots = mesh.front.cache_roots(ANYBODY, "")
    assert len(roots) == 2 and submit.root.hex() in roots
    assert not set(roots) & set(mesh.front.cache_roots(ANYBODY, "salt"))


async def test_an_answer_goes_on_from_a_prompt_that_ends_amid_a_character(mesh: FakeMesh) -> None:
    *first, last = mesh.front.tokens.encode("a\u20ac", add_special_tokens=False).tolist()
    mesh.worker.speech = lambda _: [last]
    assert (await answer(mesh, prompt=first, max_tokens=1))["text"] == "\u20ac"


@pytest.mark.parametrize(
    ("fields", "scored"),
    [({}, False), ({"echo": True}, False), ({"logprobs": 0}, False),
     ({"echo": True, "logprobs": 0}, True)],
)  # fmt: skip
async def test_a_prompt_whose_scores_are_shown_is_computed_as_a_whole_and_no_other(
    mesh: FakeMesh, fields: dict[str, Any], scored: bool
) -> None:
    await answer(mesh, max_tokens=1, **fields)
    (submit,) = mesh.worker.submits
    assert (submit.prompt_logprobs, submit.read_cache) == (scored, not scored)


SAID = {"role": "assistant", "content": "ab"}


@pytest.mark.parametrize(
    ("fields", "goes_on"),
    [({"prompt": "ab"}, True), ({"messages": [SAID]}, False),
     ({"messages": [SAID], "continue_final_message": True, "add_generation_prompt": False}, True)],
)  # fmt: skip
async def test_a_text_goes_on_from_its_prompt_unless_it_is_a_message_of_its_own(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], goes_on: bool
) -> None:
    after: list[Any] = []
    stream = mesh.front.tokens.stream

    def noted(**how: Any) -> Any:
        after.append(how["after"])
        return stream(**how)

    monkeypatch.setattr(mesh.front.tokens, "stream", noted)
    chat = "messages" in fields
    parsed = await mesh.front.parse(json.dumps(fields).encode(), CALLER, chat=chat)
    understood = await mesh.front.understand(parsed, CALLER)
    async with mesh.front.call(understood, CALLER):
        (prompt,) = understood.prompts
        assert [tokens is prompt for tokens in after] == [goes_on]


# A call whose events are put there by hand ----------------------------------------------------


class Made:
    """A call of a stream with as many choices as ``Desk`` prompts; nobody works on it."""

    def __init__(self, prompts: int = 1, **fields: Any) -> None:
        tokens = Tokens(byte_tokenizer(), template=None, end_tokens=frozenset())
        body = {"model": MODEL, "prompt": ["x"] * prompts, "stream": True, **fields}
        ask = parse_completion(json.dumps(body).encode(), served=MODEL)
        self.outbox = Outbox()
        lives = [SimpleNamespace(core=Desk(spec()).core) for _ in range(prompts)]
        front = SimpleNamespace(gateway=SimpleNamespace(clock=MonotonicClock()))
        self.call = Call(
            cast(Front, front), ask, [np.ones(1, "<u4")] * prompts, cast(list[Life], lives),
            self.outbox, Renderer(ask, tokens, response_id="x", created=0),
            CallFacts(ask, "http", new_trace(), 0), NextTurn(ask, 1),
        )  # fmt: skip

    def put(self, *events: Any, prompt_index: int = 0) -> None:
        for event in events:
            self.outbox.put(prompt_index, event)

    async def texts(self) -> list[str]:
        """Of the chunks; in place of the rest what the call ends in, if that is an error."""
        found: list[str] = []
        try:
            async for chunks in self.call.chunks():
                for chunk in chunks:
                    found += [choice["text"] for choice in json.loads(chunk)["choices"]]
        except ApiError as error:
            found.append(f"{error.status}")
        return found


def delivery(text: str) -> ev.Deliver:
    return ev.Deliver(0, 0, np.ones(1, "<u4"), text, None, 0)


DONE = ev.ChoiceEnded(0, "length", None, "")
COMPLETED = ev.Ended(ev.Completed())


async def test_what_came_together_with_a_failure_is_given_before_it() -> None:
    made = Made()
    made.put(delivery("a"), delivery("b"), ev.Ended(ev.Failed(Internal("a bug"))))
    assert await made.texts() == ["a", "b", "500"]


async def test_a_stream_ends_when_all_of_its_prompts_have() -> None:
    made = Made(prompts=2)
    made.put(delivery("a"), DONE, COMPLETED)
    made.put(delivery("b"), DONE, COMPLETED, prompt_index=1)
    assert await made.texts() == ["a", "", "b", ""]


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (ev.Failed(Gone("nobody has it")), 500),
        (ev.Cancelled("slow"), 503),
        (ev.Cancelled("stopped"), 503),
    ],
)
async def test_an_answer_of_which_one_prompt_failed_is_none(
    outcome: ev.Failed | ev.Cancelled, status: int
) -> None:
    made = Made(prompts=2)
    made.put(delivery("a"), DONE, COMPLETED)
    made.put(ev.Ended(outcome), prompt_index=1)
    with pytest.raises(ApiError) as caught:
        await made.call.whole()
    assert caught.value.status == status


async def test_each_prompt_is_echoed_once_before_its_own_answer() -> None:
    made = Made(prompts=2, echo=True)
    made.put(delivery("a"), delivery("b"))
    made.put(delivery("c"), DONE, COMPLETED, prompt_index=1)
    made.put(DONE, COMPLETED)
    assert await made.texts() == ["x", "a", "b", "x", "c", "", ""]


async def test_a_prompt_whose_answer_failed_before_it_began_is_not_echoed() -> None:
    made = Made(echo=True)
    made.put(ev.Ended(ev.Failed(Internal("a bug"))))
    assert await made.texts() == ["500"]
