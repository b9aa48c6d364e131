"""Calls are found in what a model writes, whatever pieces it comes in."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemesh.gateway.words.tool_calls import (
    CallBegun,
    CallEnded,
    CallWrote,
    Said,
    ToolCallParser,
    ToolEvent,
)
from pagemesh.gateway.words.tool_formats import (
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    NoToolFormat,
    ToolFormat,
    format_of,
)

ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
BARE = '{"name": "weather", "parameters": {"city": "Rome"}}'
CALLED = [CallBegun(0, "weather"), CallWrote(0, '{"city": "Rome"}'), CallEnded(0)]


def joined(events: list[ToolEvent]) -> list[ToolEvent]:
    """Neighbouring pieces of the same as one."""
    out: list[ToolEvent] = []
    for event in events:
        match (out[-1] if out else None), event:
            case Said(before), Said(text):
                out[-1] = Said(before + text)
            case CallWrote(index, before), CallWrote(other, text) if index == other:
                out[-1] = CallWrote(index, before + text)
            case _:
                out.append(event)
    return out


def read(*pieces: str, form: ToolFormat = HERMES, leads: bool = False) -> list[ToolEvent]:
    parser = ToolCallParser(form, leads=leads)
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined(events + parser.close())


SECOND = [CallBegun(1, "clock"), CallWrote(1, "{}"), CallEnded(1)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("Hello\n", [Said("Hello\n")]),
        ("a < b <tool", [Said("a < b <tool")]),
        (ROME, CALLED),
        (f"\n{ROME}\n", CALLED),
        (f"I look.\n\n{ROME}\n{NOW}", [Said("I look.\n"), *CALLED, *SECOND]),
        (f"{ROME}{NOW} \n", [*CALLED, *SECOND]),
        (f"{ROME}\nso", [*CALLED, Said("so")]),
        (ROME.replace("\n", "").replace(": ", ":"), [CALLED[0], CallWrote(0, '{"city":"Rome"}'),
                                                     CALLED[2]]),
        (f"<tool_call> no {ROME}", [Said("<tool_call> no "), *CALLED]),
        ("<tool_call>", [Said("<tool_call>")]),
        ('<tool_call>\n{"name": "we', [Said('<tool_call>\n{"name": "we')]),
        (ROME[: ROME.index("Rome")], [CALLED[0], CallWrote(0, '{"city": "')]),
        (ROME[: ROME.index("\n</tool")], CALLED),
        (ROME.replace("Rome", '}\\"}{'), [CALLED[0], CallWrote(0, '{"city": "}\\"}{"}'),
                                          CALLED[2]]),
        (ROME.replace('{"city": "Rome"}', "null"), [CALLED[0], CallWrote(0, "null"), CALLED[2]]),
    ],
)  # fmt: skip
def test_text_and_calls_are_told_apart(text: str, expected: list[ToolEvent]) -> None:
    assert read(text) == expected
    assert read(*text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BARE, CALLED),
        ("Hello", [Said("Hello")]),
        (f"Hello {BARE}", [Said(f"Hello {BARE}")]),
        ('{"a": 1}', [Said('{"a": 1}')]),
        ("{", [Said("{")]),
    ],
)
def test_a_call_that_is_the_whole_answer_is_known_by_its_beginning(
    text: str, expected: list[ToolEvent]
) -> None:
    assert read(text, form=LLAMA3) == expected
    assert read(*text, form=LLAMA3) == expected


LISTED = '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}'
NAMED = '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{LISTED}]", CALLED),
        (f'I look.{LISTED}, {{"name": "clock", "arguments": {{}}}}]',
         [Said("I look."), *CALLED, *SECOND]),
        (f'{LISTED},{{"name":"clock","arguments":{{}}}}] \n', [*CALLED, *SECOND]),
        (LISTED, CALLED),
        (f"{LISTED}]so", [*CALLED, Said("so")]),
        (f"{LISTED} so", [*CALLED, Said("so")]),
        (f'{LISTED}, {{"nam', [*CALLED, Said(', {"nam')]),
        (LISTED[: LISTED.index("Rome")], [CALLED[0], CallWrote(0, '{"city": "')]),
        ('[TOOL_CALLS] [{"na', [Said('[TOOL_CALLS] [{"na')]),
        ("[TOOL_CALLS] are marks", [Said("[TOOL_CALLS] are marks")]),
        ("a [TOOL] b", [Said("a [TOOL] b")]),
    ],
)  # fmt: skip
def test_one_mark_may_stand_before_a_list_of_calls(text: str, expected: list[ToolEvent]) -> None:
    assert read(text, form=MISTRAL) == expected
    assert read(*text, form=MISTRAL) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (NAMED, CALLED),
        (f"I look.{NAMED}[TOOL_CALLS]clock[ARGS]{{}}", [Said("I look."), *CALLED, *SECOND]),
        (f"{NAMED} \n", CALLED),
        (f"{NAMED}so", [*CALLED, Said("so")]),
        (NAMED[: NAMED.index("Rome")], [CALLED[0], CallWrote(0, '{"city": "')]),
        ("[TOOL_CALLS]weather", [Said("[TOOL_CALLS]weather")]),
        ("[TOOL_CALLS]two words", [Said("[TOOL_CALLS]two words")]),
    ],
)
def test_a_call_may_be_a_name_and_its_arguments(text: str, expected: list[ToolEvent]) -> None:
    assert read(text, form=MISTRAL_ARGS) == expected
    assert read(*text, form=MISTRAL_ARGS) == expected


def test_a_mark_inside_an_answer_of_another_format_is_text() -> None:
    text = f'{{"a": "{ROME}"}}'
    assert read(*text, leads=True) == [Said(text)]
    assert read(*f"{ROME}\n{NOW}", leads=True) == [*CALLED, *SECOND]
    assert read("<tool_", leads=True) == [Said("<tool_")]


PARTS = st.sampled_from(
    [ROME, NOW, BARE, "<tool_call>", "</tool_call>", "\n", " ", "{", "}", '"', "\\", "<", "word",
     '{"name": "', 'f", "arguments": ', "\u00a0", "n" * 65, LISTED, NAMED, "[TOOL_CALLS]", "[ARGS]",
     ", ", "]"]
)  # fmt: skip


@given(parts=st.lists(PARTS, max_size=8), data=st.data())
def test_the_pieces_of_an_answer_change_nothing(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    pieces = [text[first:last] for first, last in pairwise([0, *sorted(cuts), len(text)])]
    forms = (HERMES, MISTRAL, MISTRAL_ARGS)
    for form, leads in (
        (LLAMA3, False),
        *((one, leads) for one in forms for leads in (False, True)),
    ):
        assert read(*pieces, form=form, leads=leads) == read(text, form=form, leads=leads)


@given(parts=st.lists(PARTS, max_size=8))
def test_calls_come_in_order_and_each_ends_before_the_next(parts: list[str]) -> None:
    parser = ToolCallParser(HERMES)
    events = parser.push("".join(parts)) + parser.close()
    begun = [event.index for event in events if isinstance(event, CallBegun)]
    ended = [event.index for event in events if isinstance(event, CallEnded)]
    assert begun == list(range(parser.call_count))
    assert ended == begun[: len(begun) - parser.is_open]


def test_only_what_may_begin_a_call_is_held_back() -> None:
    parser = ToolCallParser(HERMES)
    assert parser.push("so <") == [Said("so ")]
    assert parser.push("b\n<tool") == [Said("<b")]
    assert parser.push("s>") == [Said("\n<tools>")]


# How a model writes calls ---------------------------------------------------------------------

TOOLS = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
HOW = r"""{{ "<tool_call>\n{\"name\": <name>, \"arguments\": <args>}\n</tool_call>" }}"""
QWEN = TOOLS + HOW
LLAMA = TOOLS + """{{ '{"name": "' + call.name + '", ' }}{{ '"parameters": ' }}"""


MISTRAL_V3 = TOOLS + '[TOOL_CALLS] [{"name": "f", "arguments": {}}]'


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (QWEN, HERMES), (LLAMA, LLAMA3), (MISTRAL_V3, MISTRAL),
        (TOOLS + "[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", MISTRAL_ARGS),
    ],
)  # fmt: skip
def test_a_chat_template_shows_how_calls_are_written(template: str, form: ToolFormat) -> None:
    assert format_of(template) == form


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("", "has no place for tools"),
        ("{{ messages }}<tool_call>", "has no place for tools"),
        (QWEN + "<function=f>", "<function="),
        (QWEN + "<arg_key>", "<arg_key>"),
        (TOOLS + "[TOOL_CALLS]{{ name }}[CALL_ID]{{ id }}[ARGS]", r"\[CALL_ID\]"),
        (TOOLS, "is not known"),
        (TOOLS + "<tool_call>", "is not known"),
    ],
)
def test_a_model_whose_calls_would_not_be_understood_is_told_why(template: str, why: str) -> None:
    with pytest.raises(NoToolFormat, match=why):
        format_of(template)
