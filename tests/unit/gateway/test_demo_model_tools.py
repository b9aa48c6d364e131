"""The demo model's chat template: tools have a place, and without them it says what it said."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ops.demo_model.tokenizer import CHAT_TEMPLATE
from tests.unit.gateway.test_tool_calls import NOW, ROME
from tests.unit.gateway.test_tool_grammar import WEIGHTS
from tests.unit.gateway.test_tools import TOOLS, function

from pagemesh.gateway.words.tokens import Tokens
from pagemesh.gateway.words.tool_formats import HERMES, format_of

SYSTEM = {"role": "system", "content": " Be brief. "}
USER = {"role": "user", "content": "\nhi "}
SAID = {"role": "assistant", "content": ""}
CALLS = [
    {"id": "1", **function("weather", arguments={"city": "Rome"})},
    {"id": "2", **function("clock", arguments={})},
]
CALLED = {"role": "assistant", "content": "", "tool_calls": CALLS}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "sun"}


def rendered(*messages: dict[str, Any], tools: Any = None) -> str:
    return Tokens.load(WEIGHTS).render_chat(list(messages), extra={"tools": tools})


def test_the_weights_come_with_the_template_of_the_code() -> None:
    config = json.loads((WEIGHTS / "tokenizer_config.json").read_text())
    assert config["chat_template"] == CHAT_TEMPLATE
    assert format_of(CHAT_TEMPLATE) == HERMES


@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER, SAID, USER], [USER, SYSTEM]])
@pytest.mark.parametrize("tools", [None, []])
def test_without_tools_messages_are_all_there_is(messages: Any, tools: Any) -> None:
    marked = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)
    assert rendered(*messages, tools=tools) == marked + "<|im_start|>assistant\n"


@pytest.mark.parametrize("first", [[], [SYSTEM]])
def test_tools_are_listed_before_the_conversation(first: list[dict[str, Any]]) -> None:
    text = rendered(*first, USER, tools=TOOLS)
    system, rest = text.split("<|im_end|>\n", 1)
    begin = "<|im_start|>system\n" + "".join(f"{one['content']}\n\n" for one in first)
    assert system.startswith(f"{begin}# Tools\n")
    assert all(json.dumps(tool) in system.splitlines() for tool in TOOLS)
    assert rest == rendered(USER)


def test_calls_are_written_as_they_are_read_and_results_follow() -> None:
    text = rendered(USER, CALLED, RESULT)
    assert f"<|im_start|>assistant\n{ROME}\n{NOW}<|im_end|>\n" in text
    assert "<|im_start|>user\n<tool_response>\nsun\n</tool_response><|im_end|>\n" in text
    written = {"role": "assistant", "content": f"{ROME}\n{NOW}"}
    assert rendered(USER, written, RESULT) == text, "so its tokens are known when it comes back"
    spoken = rendered(USER, CALLED | {"content": "I look."})
    assert f"<|im_start|>assistant\nI look.\n{ROME}\n{NOW}<|im_end|>\n" in spoken
