"""The grammar of answers that may call functions, for llguidance. Pure.

    auto       text, which holds no begin mark, and calls behind it; either may be missing
    required   calls        named   one call

The arguments of a call follow its function's schema. A JSON schema is written as a rule of its own,
and its text is compact, so that a parser knows where a call begins and what it calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from pagemesh.gateway.api.api_errors import ApiError, bad, unsupported
from pagemesh.gateway.api.grammar_check import fault_of_checked, fault_of_numbers
from pagemesh.gateway.api.openai_api import Ask
from pagemesh.gateway.api.schemas import followed_schema, in_one_line
from pagemesh.gateway.api.tools import Function, ToolUse
from pagemesh.gateway.words.tokens import Tokens
from pagemesh.gateway.words.tool_formats import NoToolFormat, ToolFormat, format_of
from pagemesh.wire.work_messages import GRAMMAR_CHARACTERS_MAX

_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As chat templates write the calls of earlier turns."""
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANSWER = "answer"


def tool_format(tokens: Tokens) -> ToolFormat:
    """How this model writes calls. Raises ``ApiError`` if it cannot be asked for any."""
    try:
        found = format_of(tokens.tool_source)
    except NoToolFormat as why:
        raise unsupported("tools", f"tools ({why})") from None
    if not tokens.end_tokens:
        raise unsupported("tools", "tools (this model has no token that ends an answer)")
    return found


def with_tool_grammar(ask: Ask, tokens: Tokens) -> Ask:
    """``ask`` with the grammar that its tools ask for. Takes milliseconds. Raises ``ApiError``."""
    if ask.tools is None:
        return ask
    marks = tokens.special_of(tool_format(tokens).marks)
    use = replace(ask.tools, leads=bool(ask.grammar), marks=frozenset(marks.values()))
    return replace(ask, grammar=tool_grammar(ask, tokens), tools=use)


def tool_grammar(ask: Ask, tokens: Tokens) -> str:
    """What answers must follow: ``ask.grammar``, unless there are tools. Raises ``ApiError``."""
    use = ask.tools
    if use is None:
        return ask.grammar
    form = tool_format(tokens)
    made = _grammar(use, form, ask.grammar, tokens.special_of(form.marks))
    if len(made) > GRAMMAR_CHARACTERS_MAX:
        text = f"tools are too long: as a grammar they have {len(made)} characters; the limit is "
        raise bad("tools", f"{text}{GRAMMAR_CHARACTERS_MAX}")
    if why := _fault_of_numbers(use) or fault_of_checked(made):
        raise _at_fault(use, why)
    return made


def _fault_of_numbers(use: ToolUse) -> str:
    schemas = (function.parameters for function in use.functions)
    return next(filter(None, (fault_of_numbers(schema) for schema in schemas if schema)), "")


def _at_fault(use: ToolUse, whole: str) -> ApiError:
    """The error that names the function whose schema is wrong."""
    for function in use.functions:
        alone = _document(f"start: {_schema(function)}")
        if why := fault_of_numbers(function.parameters or {}) or fault_of_checked(alone):
            text = f"the parameters of {function.name!r} are no schema that can be followed: "
            param = f"tools[{function.index}].function.parameters"
            return bad(param, (text + _brief(why))[:500])
    return bad("tools", f"no grammar can be made of tools: {_brief(whole)}"[:500])


def _brief(why: str) -> str:
    """What llguidance said, without where in our grammar it was."""
    return in_one_line(why.split("failed to compile JSON schema: ")[-1])


Marks = Mapping[str, int]
"""Those marks that are special tokens, and which."""


def _grammar(use: ToolUse, form: ToolFormat, answer: str, marks: Marks) -> str:
    """``answer``: the grammar of text; empty if any will do."""
    lines = ["%llguidance {}"]
    more: list[dict[str, Any]] = []
    limits: dict[str, Any] = {}
    text = "TEXT"
    first = _mark(form.mark, marks)
    if use.choice == "auto" and answer:
        if not form.follows_text:
            raise bad(
                "tools",
                "this model writes calls as JSON: leave tools or the answer's own format out",
            )
        limits = json.loads(answer)
        more = limits.pop("grammars")
        name = more[0].setdefault("name", _ANSWER)
        text = f"@{name}"
    elif use.choice == "auto":
        lines += _free_text(form, marks)
        first = "open" if form.mark else ""
    lines.append("start: calls" + (f" | {text}" if use.choice == "auto" else ""))
    lines.append(f"calls: {first} {_calls(form, marks, several=use.parallel)}")
    lines.append("function: " + " | ".join(f"f{one.index}" for one in use.functions))
    lines += [_call(one, form, marks) for one in use.functions]
    return _document("\n".join(lines), more, limits)


def _mark(mark: str, marks: Marks) -> str:
    """How a grammar writes ``mark``."""
    if mark in marks:
        return f"<[{marks[mark]}]>"
    return json.dumps(mark) if mark else ""


def _calls(form: ToolFormat, marks: Marks, *, several: bool) -> str:
    """What may come behind the first mark."""
    if form.style == "list":
        return '" [" function ' + ('(", " function)* ' if several else "") + '"]"'
    gap = json.dumps(form.gap) if form.gap else ""
    again = f" ({gap} {_mark(form.mark, marks)} function)*"
    # A line end may follow: whoever writes one there does not have to go on with a call.
    return f"function{again if several and form.follows_text else ''}" + (f" {gap}?" if gap else "")


def _free_text(form: ToolFormat, marks: Marks) -> list[str]:
    """Text that a call cannot be taken for, and where text gives way to a call."""
    if not form.mark:
        return [r"TEXT: /([^{](?s:.)*)?/"]
    mark = json.dumps(form.mark)
    lines = [f"TEXT: ANY & ~(ANY {mark} ANY)", "ANY: /(?s:.*)/"]
    special = _mark(form.mark, marks) if form.mark in marks else ""
    return [*lines, f"open: TEXT {special}" if special else f"open[lazy]: ANY {mark}"]


def _call(function: Function, form: ToolFormat, marks: Marks) -> str:
    name, schema = f"f{function.index}", _schema(function)
    if form.style == "named":
        called = json.dumps(function.name)
        return f"{name}: {called} {_mark(form.second_mark, marks)} {schema}"
    before = f'{{"name": {json.dumps(function.name)}, "{form.key}": '
    if form.style == "list":
        return f'{name}: {json.dumps(before)} {schema} "}}"'
    end = _mark(form.end_mark, marks)
    closing = f"{json.dumps('}' + form.gap)} {end}" if end else '"}"'
    return f"{name}: {json.dumps(form.gap + before)} {schema} {closing}"


def _schema(function: Function) -> str:
    schema = _NO_ARGUMENTS if function.parameters is None else function.parameters
    schema = followed_schema(schema, strict=function.strict)
    options = {**_WRITTEN, "lenient": not function.strict}
    return "%json " + json.dumps({**schema, "x-guidance": options})


def _document(
    lark: str, more: list[dict[str, Any]] | None = None, limits: Mapping[str, Any] | None = None
) -> str:
    first = {"name": "tools", "lark_grammar": lark}
    return msgspec.json.encode({"grammars": [first, *(more or [])], **(limits or {})}).decode()
