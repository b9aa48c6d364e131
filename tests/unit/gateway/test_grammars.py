"""What a body says an answer must be, as a grammar, and which bodies are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tests.unit.gateway.test_openai_api import FACTS, chat, completion

from pagemesh.engine.grammars import Grammars
from pagemesh.gateway.api.api_errors import ApiError, from_fault
from pagemesh.gateway.api.openai_api import Ask
from pagemesh.gateway.calls.prepare import carried_tokens, fit, understood
from pagemesh.gateway.words.tokens import Tokens
from pagemesh.runtime.model_folder import find_model
from pagemesh.wire.errors import GrammarRefused
from pagemesh.wire.work_messages import GRAMMAR_CHARACTERS_MAX

AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


def schema(value: object = AGE, **more: object) -> dict[str, Any]:
    about = {"name": "answer", "schema": value, **more}
    return {"response_format": {"type": "json_schema", "json_schema": about}}


def outputs(**fields: object) -> dict[str, Any]:
    return {"structured_outputs": fields}


@cache
def vocabulary() -> LLTokenizer:
    return LLTokenizer((find_model("").path / "tokenizer.json").read_text())


@cache
def tokens() -> Tokens:
    return Tokens.load(find_model("").path)


def takes(grammar: str, text: str) -> bool:
    """Whether ``text`` is a whole answer under ``grammar``."""
    matcher = LLMatcher(vocabulary(), grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = vocabulary().tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("ask", [chat, completion])
@pytest.mark.parametrize(
    ("fields", "good", "wrong"),
    [
        (
            {"response_format": {"type": "json_object"}},
            ["{}", '{"a": [1, 2]}', '{\n  "a": {\n    "b": null\n  }\n}', '{"a":1}'],
            ["[]", "{", "text", '{"a":\n\n\n1}', '{"a"    :1}', '{"a":1}\n'],
        ),
        (schema(), ['{"age": 3}', '{"age":3,"more":"x"}'], ['{"age":"x"}', "{}", '{"age":3.5}']),
        (schema({**AGE, "additionalProperties": False}), ['{"age": 3}'], ['{"age":3,"a":1}']),
        (outputs(json=AGE), ['{"age": 3}'], ["{}"]),
        (outputs(json=json.dumps(AGE)), ['{"age": 3}'], ["{}"]),
        (outputs(regex="[0-9]{2}"), ["12"], ["1", "123", "ab"]),
        (outputs(choice=["yes", 'say "no"', "ünder\n/way"]), ["yes", 'say "no"', "ünder\n/way"],
         ["no", "yesyes", ""]),
        (outputs(grammar='start: "a" B*\nB: /b/'), ["a", "abb"], ["b"]),
    ],
)  # fmt: skip
def test_an_answer_must_be_what_was_asked_for(
    ask: Callable[..., Ask], fields: dict[str, Any], good: list[str], wrong: list[str]
) -> None:
    grammar = ask(**fields).grammar
    assert all(takes(grammar, text) for text in good)
    assert not any(takes(grammar, text) for text in wrong)


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": None}, {"response_format": {"type": "text"}},
     {"structured_outputs": None}],
)  # fmt: skip
def test_without_a_format_an_answer_may_be_anything(fields: dict[str, Any]) -> None:
    assert chat(**fields).grammar == "" == completion(**fields).grammar


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "'xml' is not one of"),
        ({"response_format": {}}, "response_format.type", "missing"),
        ({"response_format": {"type": ["text"]}}, "response_format.type", "is not one of"),
        ({"response_format": "json"}, "response_format", "expected an object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": 1}},
            "response_format.json_schema", "must be an object",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema", "missing",
        ),
        (schema([1]), "response_format.json_schema.schema", "must be an object"),
        (outputs(), "structured_outputs", "one of json, regex, choice and grammar"),
        (outputs(regex="a", choice=["b"]), "structured_outputs", "one of json, regex"),
        (outputs(json="{"), "structured_outputs.json", "must be a JSON schema"),
        (outputs(choice=[]), "structured_outputs.choice", "length >= 1"),
        (outputs(choice=["a", ""]), "structured_outputs.choice", "one is empty"),
        (outputs(structural_tag="x"), "structured_outputs.structural_tag", "unknown parameter"),
        ({**schema(), **outputs(regex="a")}, "structured_outputs", "either"),
        ({**schema(), "use_beam_search": True}, "use_beam_search", "with response_format"),
        ({**schema(), "ignore_eos": True}, "ignore_eos", "with response_format"),
        ({**outputs(regex="a"), "min_tokens": 2}, "min_tokens", "with structured_outputs"),
        (outputs(regex="a" * GRAMMAR_CHARACTERS_MAX), "structured_outputs", "the limit is"),
        (schema({"enum": ["a" * GRAMMAR_CHARACTERS_MAX]}), "response_format", "the limit is"),
        ({"guided_json": AGE}, "guided_json", "structured_outputs"),
    ],
)  # fmt: skip
def test_a_body_that_asks_wrongly_is_told_where(
    fields: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.status == 400 and caught.value.param == param
    assert said in caught.value.message and "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        (schema({"type": "objekt"}), "response_format", "objekt"),
        (schema({"$ref": "#/nowhere"}), "response_format", "nowhere"),
        (schema({"type": "string", "format": "odd"}, strict=True), "response_format", "odd"),
        (schema({"type": "integer", "minimum": 2, "maximum": 1}), "response_format", "minimum"),
        (outputs(regex="("), "structured_outputs", "invalid regex"),
        (outputs(grammar="start: missing"), "structured_outputs", "missing"),
    ],
)
def test_a_grammar_that_is_wrong_is_refused_before_any_worker_gets_it(
    fields: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(ApiError) as caught:
        understood(chat(**fields), tokens(), FACTS, b"")
    assert caught.value.status == 400 and caught.value.param == param
    assert caught.value.code == "invalid_grammar"
    assert said in caught.value.message and "\n" not in caught.value.message


LOWEST = -(1 << 63)


@pytest.mark.parametrize(
    "fields",
    [
        schema({"const": LOWEST}),
        schema({"properties": {"a": {"enum": ["b", LOWEST + 1]}}}),
        schema({"type": "integer", "minimum": -1e308, "maximum": -9.3e18}),
        outputs(json={"type": "integer", "allOf": [{"maximum": -1e20}, {"minimum": -1e20}]}),
        outputs(grammar=f'start: %json {{"const":\n{LOWEST}}}'),
    ],
)
def test_a_number_at_which_the_library_would_not_return_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="numbers of -2\\^63 and below"):
        understood(chat(**fields), tokens(), FACTS, b"")


def test_other_numbers_and_words_about_them_are_none_of_these() -> None:
    fields = schema({"const": -9223372036854774784, "description": f"above {LOWEST}, -1e99"})
    understood(chat(**fields), tokens(), FACTS, b"")


def test_a_chain_of_definitions_ends_no_process() -> None:
    links = {f"a{index}": {"$ref": f"#/$defs/a{index + 1}"} for index in range(6_000)}
    fields = schema({"$ref": "#/$defs/a0", "$defs": links | {"a6000": {"type": "null"}}})
    ask, _ = understood(chat(**fields), tokens(), FACTS, b"")
    assert Grammars(find_model("").path, tokens().vocab_tokens).begun(ask.grammar)


def test_a_grammar_is_read_as_lark_whatever_it_looks_like() -> None:
    inner = json.dumps({"grammars": [{"lark_grammar": f'start: %json {{"const": {LOWEST + 1}}}'}]})
    with pytest.raises(ApiError, match="invalid_grammar"):
        understood(chat(**outputs(grammar=inner)), tokens(), FACTS, b"")


def test_what_a_schema_says_beyond_what_can_be_enforced_is_refused_only_if_it_is_strict() -> None:
    value = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    understood(chat(**schema(value)), tokens(), FACTS, b"")
    with pytest.raises(ApiError, match="uniqueItems"):
        understood(chat(**schema(value, strict=True)), tokens(), FACTS, b"")


DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"


@pytest.mark.parametrize("pattern", [DECIMAL, "a(?<=b)", r"(a)\1", r"[(?=]|\[(?=a)", "[[](?!a)"])
def test_a_pattern_that_looks_around_is_refused_only_if_it_is_strict(pattern: str) -> None:
    text = {"type": "string", "pattern": pattern, "maxLength": 2}
    value = {"$defs": {"T": text}, "anyOf": [{"$ref": "#/$defs/T"}, {"const": text}]}
    ask, _ = understood(chat(**schema(value)), tokens(), FACTS, b"")
    assert takes(ask.grammar, '"xy"') and not takes(ask.grammar, '"xyz"')
    with pytest.raises(ApiError, match=r"regex parse error: .+ \(.*(not supported|unclosed)"):
        understood(chat(**schema(value, strict=True)), tokens(), FACTS, b"")


@pytest.mark.parametrize("pattern", [r"[(?=]", r"\(\?=", r"[\](?=]", r"(?:\\|1)", "(?<n>a)"])
def test_a_pattern_that_only_seems_to_look_around_is_followed(pattern: str) -> None:
    ask = chat(**schema({"properties": {"pattern": {"type": "string", "pattern": pattern}}}))
    ask, _ = understood(ask, tokens(), FACTS, b"")
    assert not takes(ask.grammar, '{"pattern": "xy"}')


@pytest.mark.parametrize("strict", [False, True])
def test_names_that_must_be_texts_say_nothing(strict: bool) -> None:
    value = {
        "type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"const": 1}
    }  # fmt: skip
    ask, _ = understood(chat(**schema(value, strict=strict)), tokens(), FACTS, b"")
    assert takes(ask.grammar, '{"a": 1}') and not takes(ask.grammar, '{"a": 2}')


def test_a_model_without_an_end_token_could_never_end_such_an_answer() -> None:
    endless = Tokens.load(find_model("").path)
    endless.end_tokens = frozenset()
    with pytest.raises(ApiError, match="names no end token"):
        understood(chat(**schema()), endless, FACTS, b"")


def test_workers_get_the_grammar_and_messages_have_room_for_it() -> None:
    ask = chat(**schema())
    (work,) = fit(ask, [np.ones(10, "<u4")], FACTS, frozenset({3}), seed=1)
    assert work.sampling.grammar == ask.grammar
    assert ask.grammar_bytes == len(ask.grammar.encode())
    assert carried_tokens((1 << 20) - ask.grammar_bytes) < carried_tokens(1 << 20)


def test_a_grammar_that_fills_a_message_is_named() -> None:
    ask, prompt = chat(**outputs(choice=["a" * 1_000] * 200)), np.ones(10, "<u4")
    with pytest.raises(ApiError, match="leave no room for a prompt") as caught:
        fit(ask, [prompt], FACTS, frozenset({3}), seed=1, message_bytes_max=256 << 10)
    assert (caught.value.status, caught.value.param) == (400, "structured_outputs")


def test_what_no_worker_can_follow_is_the_requests_fault() -> None:
    error = from_fault(GrammarRefused("it is too complex"))
    assert (error.status, error.code, error.message) == (
        400,
        "invalid_grammar",
        "it is too complex",
    )
