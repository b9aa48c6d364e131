"""An answer in JSON: a stream says in chunks what an answer in one piece says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from tests.unit.gateway.fake_mesh import scores
from tests.unit.gateway.support import END, MODEL, byte_tokenizer
from tests.unit.gateway.test_text import as_bytes, piece_tokenizer
from tokenizers import Tokenizer

from pagemesh.gateway.api.api_errors import ApiError
from pagemesh.gateway.api.openai_api import parse_chat, parse_completion
from pagemesh.gateway.api.render import Renderer
from pagemesh.gateway.calls import events as ev
from pagemesh.gateway.calls.spec import Usage
from pagemesh.gateway.words.tokens import Tokens

TOKENS = Tokens(byte_tokenizer(), template=None, end_tokens=frozenset())
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
TEXT: dict[str, Any] = {"prompt": "x"}
USAGE = Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=3)


def ids_of(text: str) -> Any:
    return TOKENS.encode(text, add_special_tokens=False)


@dataclass
class Said:
    """What a choice said: its pieces, of which a trailing end token is hidden, and its end."""

    prompt: int
    choice: int
    pieces: Sequence[str]
    finish: Any = "length"
    reason: ev.StopReason = None
    held: str = ""
    """What had been held back until the end."""
    shows_end: bool = False

    def events(self, logprobs: int | None) -> list[ev.Deliver | ev.ChoiceEnded]:
        out: list[ev.Deliver | ev.ChoiceEnded] = []
        first = 0
        for piece in self.pieces:
            ids = ids_of(piece)
            hidden = 1 if piece.endswith(END) and not self.shows_end else 0
            text = piece if self.shows_end else piece.replace(END, "")
            found = None if logprobs is None else scores(ids.tolist(), logprobs)
            out.append(ev.Deliver(self.choice, first, ids, text, found, hidden))
            first += len(ids)
        return [*out, ev.ChoiceEnded(self.choice, self.finish, self.reason, self.held)]


@dataclass
class Told:
    """An answer both ways."""

    whole: dict[str, Any]
    opening: list[dict[str, Any]]
    chunks: list[dict[str, Any]]
    texts: dict[int, str] = field(default_factory=dict)
    """Of the chunks, by the choice's number."""
    ends: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    tokens: dict[int, list[str]] = field(default_factory=dict)
    """Those that have scores; ``offsets`` are theirs."""
    offsets: dict[int, list[int]] = field(default_factory=dict)


def told(body: dict[str, Any], *said: Said, bytes_max: int = 1 << 20) -> Told:
    """What clients get of ``said``."""
    parse = parse_chat if "messages" in body else parse_completion
    ask = parse(json.dumps(body | {"stream": True}).encode(), served=MODEL)
    renderer = Renderer(ask, TOKENS, response_id="id-1", created=9)
    prompts = [ids_of("x" * (index + 1)) for index in range(len(ask.prompts))]
    collected = renderer.collect(prompts, bytes_max)
    chunks: list[bytes] = []
    for one in said:
        for event in one.events(ask.logprobs):
            if isinstance(event, ev.Deliver):
                collected.delivered(one.prompt, event)
                chunks += [chunk for chunk in [renderer.delivered(one.prompt, event)] if chunk]
            else:
                collected.ended(one.prompt, event)
                chunks.append(renderer.ended(one.prompt, event))
    whole = json.loads(renderer.response(collected, prompts, USAGE))
    opening = [json.loads(chunk) for chunk in renderer.opening(prompts)]
    made = Told(whole, opening, [json.loads(chunk) for chunk in chunks])
    for chunk in made.chunks:
        gather(made, chunk["choices"][0])
    return made


def gather(made: Told, choice: dict[str, Any]) -> None:
    index = choice["index"]
    text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
    made.texts[index] = made.texts.get(index, "") + text
    made.ids.setdefault(index, []).extend(choice.get("token_ids", []))
    if choice["finish_reason"] is not None:
        made.ends[index] = choice["finish_reason"], choice["stop_reason"]
    scored = choice["logprobs"] or {}
    made.tokens.setdefault(index, []).extend(scored.get("tokens", []))
    made.offsets.setdefault(index, []).extend(scored.get("text_offset", []))


FOUR = [
    Said(0, 0, ["a", "bc"], "stop", "STOP"),
    Said(0, 1, ["de" + END], "stop"),
    Said(1, 0, ["f"], "stop", 42, held="!"),
    Said(1, 1, ["g", "h"]),
]


def test_choices_are_numbered_prompt_by_prompt_and_end_as_they_did() -> None:
    made = told({"prompt": ["x", "xx"], "n": 2, "return_token_ids": True}, *FOUR)
    choices = made.whole["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["text"] for choice in choices] == ["abc", "de", "f!", "gh"]
    ends = [(choice["finish_reason"], choice["stop_reason"]) for choice in choices]
    assert ends == [("stop", "STOP"), ("stop", None), ("stop", 42), ("length", None)]
    assert [len(choice["token_ids"]) for choice in choices] == [3, 3, 1, 2]
    assert [len(choice["prompt_token_ids"]) for choice in choices] == [1, 1, 2, 2]
    assert made.texts == {choice["index"]: choice["text"] for choice in choices}
    assert made.ids == {choice["index"]: choice["token_ids"] for choice in choices}
    assert made.ends == dict(enumerate(ends))
    assert made.opening == []


def test_a_chat_has_messages_and_a_role_for_each_of_them_first() -> None:
    made = told(CHAT | {"n": 2, "return_token_ids": True}, *FOUR[:2])
    messages = [choice["message"] for choice in made.whole["choices"]]
    assert [(one["role"], one["content"]) for one in messages] == [
        ("assistant", "abc"),
        ("assistant", "de"),
    ]
    assert made.texts == {0: "abc", 1: "de"}
    first = [chunk["choices"][0] for chunk in made.opening]
    assert [one["index"] for one in first] == [0, 1]
    assert {one["delta"]["role"] for one in first} == {"assistant"}
    told_ids = [one["prompt_token_ids"] for one in [made.whole, *made.opening]]
    assert told_ids == [ids_of("x").tolist()] * 3


@pytest.mark.parametrize("body", [CHAT, TEXT])
def test_what_was_held_back_until_the_end_is_in_the_last_chunk(body: dict[str, Any]) -> None:
    made = told(body, Said(0, 0, ["a"], held="b"))
    assert made.texts == {0: "ab"}
    assert told(body, Said(0, 0, ["a"])).texts == {0: "a"}


@pytest.mark.parametrize("body", [CHAT, TEXT])
@pytest.mark.parametrize("asked", [False, True])
def test_every_chunk_has_a_place_for_usage_where_that_is_asked_for(
    body: dict[str, Any], asked: bool
) -> None:
    made = told(body | {"stream_options": {"include_usage": asked}}, *FOUR[:1])
    assert all(("usage" in chunk) is asked for chunk in made.opening + made.chunks)
    assert made.whole["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    heads = {(one["id"], one["created"], one["model"]) for one in [made.whole, *made.chunks]}
    assert heads == {("id-1", 9, MODEL)}
    objects = {one["object"] for one in made.opening + made.chunks}
    kind = "chat.completion" if body is CHAT else "text_completion"
    assert made.whole["object"] == kind
    assert objects == {"chat.completion.chunk" if body is CHAT else kind}


def test_scores_are_of_the_tokens_that_are_shown_and_say_where_in_the_text_they_stand() -> None:
    both = [Said(0, 0, ["ab", "c" + END]), Said(0, 1, ["d", "ef"])]
    made = told(TEXT | {"n": 2, "logprobs": 0}, *both)
    for choice, letters in zip(made.whole["choices"], ("abc", "def"), strict=True):
        assert choice["logprobs"]["tokens"] == list(letters) == made.tokens[choice["index"]]
        assert choice["logprobs"]["text_offset"] == [0, 1, 2] == made.offsets[choice["index"]]


def test_special_tokens_that_are_shown_take_room_in_the_text() -> None:
    body = TEXT | {"logprobs": 0, "skip_special_tokens": False}
    made = told(body, Said(0, 0, ["a" + END + "b", "c"], shows_end=True))
    (choice,) = made.whole["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 8, 9] == made.offsets[0]
    assert choice["text"][8:] == "bc"


def test_a_prompt_that_is_echoed_in_a_stream_has_its_scores_in_it() -> None:
    body = json.dumps(TEXT | {"echo": True, "logprobs": 1, "n": 2, "stream": True}).encode()
    renderer = Renderer(parse_completion(body, served=MODEL), TOKENS, response_id="id-1", created=9)
    prompt = ids_of("xyz")
    chunks = [json.loads(one) for one in renderer.echoed(0, prompt, scores(prompt.tolist()[1:], 1))]
    for index, chunk in enumerate(chunks):
        (choice,) = chunk["choices"]
        assert (choice["index"], choice["text"]) == (index, "x"), "as it was given"
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert len(chunks) == 2


def test_tokens_whose_text_is_not_there_yet_are_told_to_who_wants_their_ids() -> None:
    first, *rest = ids_of("\u20ac").tolist()
    body = json.dumps(TEXT | {"return_token_ids": True, "stream": True}).encode()
    for parsed, is_told in ((body, True), (json.dumps(TEXT | {"stream": True}).encode(), False)):
        ask = parse_completion(parsed, served=MODEL)
        renderer = Renderer(ask, TOKENS, response_id="id-1", created=9)
        chunk = renderer.delivered(0, ev.Deliver(0, 0, ids_of("\u20ac")[:1], "", None, 0))
        assert bool(chunk) is is_told
        if is_told:
            assert json.loads(chunk)["choices"][0]["token_ids"] == [first] and rest


def test_an_answer_may_be_as_large_as_it_may_be() -> None:
    assert told(TEXT, Said(0, 0, ["abc", "de"]), bytes_max=5)
    with pytest.raises(ApiError, match="exceeds 4 bytes"):
        told(TEXT, Said(0, 0, ["abc", "de"]), bytes_max=4)


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), piece_tokenizer()])
def test_a_character_between_a_prompt_of_tokens_and_its_answer_is_the_answers(
    tokenizer: Tokenizer,
) -> None:
    tokens = Tokens(tokenizer, template=None, end_tokens=frozenset())
    ids = tokens.encode("is\u65e5\u672c", add_special_tokens=False)
    if tokenizer.token_to_id("<0x00>") is not None:
        ids = np.asarray([4, *as_bytes("\u65e5\u672c")], "<u4")
    for cut_at in range(1, len(ids)):
        body = {"prompt": ids[:cut_at].tolist(), "echo": True, "stream": True}
        ask = parse_completion(json.dumps(body).encode(), served=MODEL)
        renderer = Renderer(ask, tokens, response_id="id-1", created=9)
        (chunk,) = renderer.echoed(0, ids[:cut_at], None)
        answer = tokens.stream(stops=[], after=ids[:cut_at])
        said = answer.push(ids[cut_at:]).text + answer.close()
        assert json.loads(chunk)["choices"][0]["text"] + said == "is\u65e5\u672c"
