"""Answers to requests with tools: what their grammar lets a model write, and where it may end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ops.demo_model
import pytest
from llguidance import LLMatcher, LLTokenizer
from tests.unit.gateway.support import byte_tokenizer
from tests.unit.gateway.test_openai_api import chat
from tests.unit.gateway.test_tool_calls import (
    LISTED,
    LLAMA,
    MISTRAL_V3,
    NAMED,
    NOW,
    QWEN,
    ROME,
)
from tests.unit.gateway.test_tools import CLOCK, TOOLS, function
from tokenizers import AddedToken

from pagemesh.gateway.api.api_errors import ApiError
from pagemesh.gateway.api.tool_grammar import tool_grammar, with_tool_grammar
from pagemesh.gateway.words.tokens import Tokens

WEIGHTS = Path(ops.demo_model.__file__).parent / "weights"
DEMO = Tokens.load(WEIGHTS)
END = min(DEMO.end_tokens)
GUIDE = LLTokenizer((WEIGHTS / "tokenizer.json").read_text(), eos_token=[END])
ANSWER = json.dumps(
    {
        "grammars": [
            {
                "name": "json_schema",
                "json_schema": {
                    "type": "object",
                    "properties": {"a": {"type": "string"}},
                    "required": ["a"],
                    "additionalProperties": False,
                },
            }
        ]
    }
)
BARE = '{"name": "weather", "parameters": {"city": "Rome"}}'


def grammar(template: str = "", answer: str = "", **fields: Any) -> str:
    """Of an answer of the demo model, or of one with another ``template``."""
    tokens = DEMO if not template else with_template(template)
    ask = chat(**({"tools": TOOLS} | fields))
    if answer:
        object.__setattr__(ask, "grammar", answer)
    return tool_grammar(ask, tokens)


def with_template(template: str, *, special: Sequence[str] = (), ends: bool = True) -> Tokens:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in special])
    end_tokens = frozenset({1}) if ends else frozenset[int]()
    facts = {"chat_template": template}
    return Tokens(tokenizer, template=None, end_tokens=end_tokens, facts=facts)


def taken(grammar: str, text: str) -> str:
    """``ends``: all of ``text`` may be written, and be all; ``goes on``: it may not be all;
    ``no``: some token of it may not be written."""
    matcher = LLMatcher(GUIDE, grammar)
    assert not matcher.is_error(), matcher.get_error()
    for token in DEMO.encode(text, add_special_tokens=False).tolist():
        if not matcher.try_consume_tokens([token]):
            return "no"
    return "ends" if matcher.is_accepting() else "goes on"


HERMES_ANSWERS = {
    "": "ends",
    "Hello,\nyou": "ends",
    "a < b <tool": "ends",
    ROME: "ends",
    f"{ROME}\n{NOW}\n": "ends",
    f"I look.\n{ROME}\n{ROME}": "ends",
    f"{ROME} so": "no",
    "<tool_call> so": "no",
    ROME[:-1]: "goes on",
    ROME[:30]: "goes on",
    ROME.replace("weather", "water"): "no",
    ROME.replace('"Rome"', "7"): "no",
    ROME.replace("city", "town"): "no",
    NOW.replace("{}", '{"a": 1}'): "no",
}


@pytest.mark.parametrize(
    ("fields", "others"),
    [
        ({}, {}),
        ({"parallel_tool_calls": False}, {f"{ROME}\n{NOW}\n": "no", f"{ROME}\n{ROME}": "no",
                                          f"I look.\n{ROME}\n{ROME}": "no"}),
        ({"tool_choice": "required"}, {"": "goes on", "Hello,\nyou": "no", "a < b <tool": "no",
                                       f"I look.\n{ROME}\n{ROME}": "no"}),
        ({"tool_choice": function("clock")},
         dict.fromkeys(HERMES_ANSWERS, "no") | {"": "goes on", NOW: "ends", f"{NOW}\n{NOW}": "no",
                                                NOW[:20]: "goes on"}),
    ],
    ids=["auto", "one", "required", "named"],
)  # fmt: skip
def test_an_answer_is_text_and_calls_as_the_request_wants_them(
    fields: dict[str, Any], others: dict[str, str]
) -> None:
    made = grammar(**fields)
    expected = HERMES_ANSWERS | others
    if "tool_choice" in fields and isinstance(fields["tool_choice"], dict):
        del expected[ROME[:30]]  # so far it could be a call of either
    assert {text: taken(made, text) for text in expected} == expected


def test_a_bare_call_is_a_whole_answer() -> None:
    answers = {
        "": "ends", "Hello {}": "ends", BARE: "ends", f"{BARE}\n": "no", BARE[:-1]: "goes on",
        '{"a": 1}': "no", "{": "goes on",
    }  # fmt: skip
    made = grammar(LLAMA)
    assert {text: taken(made, text) for text in answers} == answers
    made = grammar(LLAMA, tool_choice="required")
    assert (taken(made, "H"), taken(made, BARE)) == ("no", "ends")


def test_a_format_of_text_holds_for_what_is_no_call() -> None:
    made = grammar(answer=ANSWER)
    answers = {
        '{"a": "<tool_call>"}': "ends",
        f"{ROME}\n{NOW}": "ends",
        "Hello": "no",
        "": "goes on",
    }
    assert {text: taken(made, text) for text in answers} == answers
    with pytest.raises(ApiError, match="writes calls as JSON") as caught:
        grammar(LLAMA, answer=ANSWER)
    assert caught.value.param == "tools"
    made = grammar(answer=ANSWER, tool_choice="required")
    assert (taken(made, '{"a": "b"}'), taken(made, ROME)) == ("no", "ends")


@pytest.mark.parametrize(
    "outputs", [{"choice": ["yes", "no"]}, {"grammar": 'start: "yes" | "no"'}, {"regex": "yes|no"}]
)
def test_every_kind_of_format_may_stand_beside_tools(outputs: dict[str, Any]) -> None:
    made = grammar(structured_outputs=outputs)
    answers = {"yes": "ends", "perhaps": "no", ROME: "ends", "": "goes on"}
    assert {text: taken(made, text) for text in answers} == answers


def test_who_reads_the_answer_knows_whether_text_has_a_format() -> None:
    ask = chat(tools=TOOLS)
    read = with_tool_grammar(ask, DEMO)
    assert read.grammar and read.tools == ask.tools
    object.__setattr__(ask, "grammar", ANSWER)
    read = with_tool_grammar(ask, DEMO)
    assert read.tools is not None and read.tools.leads
    plain = chat()
    assert with_tool_grammar(plain, DEMO) is plain


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"properties": {"a": {"type": "objekt"}}}, "Invalid type: objekt"),
        ({"properties": {"a": {"$ref": "#/nowhere"}}}, "'/nowhere' does not exist"),
        ({"properties": 3}, "properties must be an object"),
        ({"properties": {"a": {"const": -(1 << 63)}}}, "numbers of -2\\^63 and below"),
    ],
)
def test_the_function_whose_schema_is_wrong_is_named(parameters: Any, said: str) -> None:
    with pytest.raises(ApiError, match=said) as caught:
        grammar(tools=[CLOCK, function("odd", parameters=parameters)])
    assert (caught.value.status, caught.value.param) == (400, "tools[1].function.parameters")
    assert "'odd'" in caught.value.message and "\n" not in caught.value.message


def test_only_a_strict_schema_must_be_followed_in_every_word() -> None:
    parameters = {"properties": {"a": {"not": {"type": "string"}}}}
    assert grammar(tools=[function("f", parameters=parameters)])
    with pytest.raises(ApiError, match="not"):
        grammar(tools=[function("f", parameters=parameters, strict=True)])


def test_a_pattern_that_cannot_be_followed_is_ignored_unless_the_schema_is_strict() -> None:
    parameters = {"properties": {"a": {"type": "string", "pattern": "^(?!x)"}}}
    made = grammar(tools=[function("f", parameters=parameters)])
    begin = '<tool_call>\n{"name": "f", "arguments": {"a": '
    assert (taken(made, begin + '"x"'), taken(made, begin + "1")) == ("goes on", "no")
    with pytest.raises(ApiError, match=r"regex parse error: \^\(\?!x\) \(look-around"):
        grammar(tools=[function("f", parameters=parameters, strict=True)])


def test_what_a_client_says_of_whitespace_is_not_heeded() -> None:
    guidance = {"x-guidance": {"whitespace_flexible": True}, "properties": {"a": {}}}
    made = grammar(tools=[function("f", parameters=guidance)])
    begin = '<tool_call>\n{"name": "f", "arguments": {'
    assert (taken(made, begin + '"a": 1'), taken(made, begin + " ")) == ("goes on", "no")


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        (with_template("{{ messages }}"), "no place for tools"),
        (with_template(QWEN, ends=False), "no token that ends an answer"),
    ],
    ids=["template", "endless"],
)
def test_a_model_that_cannot_call_is_not_asked_to(tokens: Tokens, why: str) -> None:
    with pytest.raises(ApiError, match=why) as caught:
        tool_grammar(chat(tools=TOOLS), tokens)
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")


def test_tools_beyond_what_a_message_may_carry_are_refused() -> None:
    parameters = {"properties": {"a": {"description": "x" * (256 << 10)}}}
    with pytest.raises(ApiError, match="the limit is 262144"):
        grammar(tools=[function("f", parameters=parameters)])


# Marks that are special tokens ------------------------------------------------------------------

END_TOKEN = "<|end|>"
MISTRAL_NAMED = "{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}"
MARKED = {
    "hermes": (QWEN, ["<tool_call>", "</tool_call>"], f"{ROME}\n{NOW}"),
    "half": (QWEN, ["<tool_call>"], f"{ROME}\n{NOW}"),
    "mistral": (MISTRAL_V3, ["[TOOL_CALLS]"],
                f'{LISTED}, {{"name": "clock", "arguments": {{}}}}]'),
    "mistral, no special token": (MISTRAL_V3, [], f"{LISTED}]"),
    "named": (MISTRAL_NAMED, ["[TOOL_CALLS]", "[ARGS]"], f"{NAMED}[TOOL_CALLS]clock[ARGS]{{}}"),
}  # fmt: skip


def written(tokens: Tokens, made: str, text: str) -> str:
    """As ``taken``, by a model with ``tokens``."""
    [end] = tokens.special_of([END_TOKEN]).values()
    matcher = LLMatcher(LLTokenizer(tokens._tokenizer.to_str(), eos_token=end), made)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokens.encode(text, add_special_tokens=False).tolist()
    if matcher.try_consume_tokens(ids) != len(ids):
        return "no"
    return "ends" if matcher.is_accepting() else "goes on"


@pytest.mark.parametrize("name", MARKED)
def test_marks_may_be_special_tokens(name: str) -> None:
    template, special, calls = MARKED[name]
    tokens = with_template(template, special=[*special, END_TOKEN])
    auto = tool_grammar(chat(tools=TOOLS), tokens)
    required = tool_grammar(chat(tools=TOOLS, tool_choice="required"), tokens)
    one = tool_grammar(chat(tools=TOOLS, parallel_tool_calls=False), tokens)
    several = calls.count("name") + calls.count("[ARGS]") > 1
    assert written(tokens, auto, calls) == "ends" == written(tokens, required, calls)
    assert written(tokens, one, calls) == ("no" if several else "ends")
    assert written(tokens, auto, f"I look.{calls}") == "ends"
    assert written(tokens, required, f"I look.{calls}") == "no"
    assert written(tokens, auto, "Hello [TOOL <tool") == "ends"
    assert written(tokens, auto, calls.replace("weather", "water")) == "no"
    assert written(tokens, auto, calls.replace('"Rome"', "7")) == "no"
    assert written(tokens, auto, f"{calls}so") == "no"


@pytest.mark.parametrize("name", MARKED)
def test_what_tells_a_call_from_text_is_shown_and_nothing_else(name: str) -> None:
    template, special, calls = MARKED[name]
    tokens = with_template(template, special=[*special, END_TOKEN])
    ask = with_tool_grammar(chat(tools=TOOLS), tokens)
    ids = tokens.encode(f"I look.{calls}{END_TOKEN}", add_special_tokens=False)
    stream = tokens.stream(stops=[], shown=ask.shown_tokens)
    assert stream.push(ids).text + stream.close() == f"I look.{calls}"
    assert chat().shown_tokens == frozenset()
