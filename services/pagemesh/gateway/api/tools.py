"""``tools`` and ``tool_choice``: which functions an answer may call, and how. Pure.

Whatever is wrong raises ``ApiError`` that names the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from pagemesh.gateway.api.api_errors import bad, missing, unsupported
from pagemesh.gateway.api.openai_types import ChatBody, FunctionBody, ToolBody

_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}
_CHOICES = "none, auto, required, or an object that names a function"


@dataclass(frozen=True, slots=True)
class Function:
    """What may be called. ``parameters`` is the JSON schema of its arguments: always of an object,
    and None if there are none. ``index``: where it stands in ``tools``."""

    name: str
    parameters: Mapping[str, Any] | None
    strict: bool
    index: int


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How an answer uses tools. ``named``: exactly one call, of the one function there is;
    ``required``: calls and nothing else; ``auto``: text, then calls, or either alone."""

    functions: tuple[Function, ...]
    choice: Literal["auto", "required", "named"]
    parallel: bool
    """Whether there may be several calls."""
    leads: bool = False
    """Text that does not begin with a call has none, whatever it holds: it follows a format of its
    own, whose strings may hold anything."""
    marks: frozenset[int] = frozenset()
    """Special tokens by which calls are known: the text shows them, for whoever reads it."""


def tool_use(form: ChatBody) -> ToolUse | None:
    """What ``form`` says of tools; None if none may be called."""
    functions = _functions(form.tools or [])
    choice = form.tool_choice
    if not functions:
        if choice not in (None, "none", "auto"):
            raise bad("tool_choice", "tool_choice requires tools")
        return None
    if choice == "none":
        return None
    parallel = form.parallel_tool_calls is not False
    if choice is None or choice == "auto":
        made = ToolUse(functions, "auto", parallel)
    elif choice == "required":
        made = ToolUse(functions, "required", parallel)
    elif isinstance(choice, dict):
        made = _chosen(choice, functions, parallel)
    else:
        raise bad("tool_choice", f"tool_choice must be {_CHOICES}")
    _refuse_beside(form)
    return made


def tool_values(tools: Sequence[ToolBody] | None) -> list[dict[str, Any]]:
    """``tools`` for the chat template. ``strict`` is for us, not for the model. Some templates
    expect ``parameters``."""
    out: list[dict[str, Any]] = []
    for tool in tools or ():
        told = tool.function
        if told is None:
            continue
        function: dict[str, Any] = {"name": told.name}
        if told.description is not None:
            function["description"] = told.description
        function["parameters"] = _NO_ARGUMENTS if told.parameters is None else told.parameters
        out.append({"type": "function", "function": function})
    return out


def check_tools(tools: Sequence[ToolBody] | None) -> None:
    """Raises ``ApiError`` for what is no function, or has the name of another."""
    _functions(tools or ())


def _functions(tools: Sequence[ToolBody]) -> tuple[Function, ...]:
    found: dict[str, Function] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type != "function":
            raise unsupported(f"{where}.type", f"tools of type {tool.type!r}")
        if tool.custom is not None:
            raise unsupported(f"{where}.custom")
        if tool.function is None:
            raise missing(f"{where}.function")
        name = tool.function.name
        if name in found:
            raise bad(f"{where}.function.name", f"two functions have the name {name!r}")
        parameters = _parameters(tool.function, f"{where}.function.parameters")
        found[name] = Function(name, parameters, bool(tool.function.strict), index)
    return tuple(found.values())


def _parameters(function: FunctionBody, where: str) -> Mapping[str, Any] | None:
    """Arguments are an object, whether or not the schema says so."""
    schema = function.parameters
    if schema is None:
        return None
    if schema.get("type", "object") != "object":
        raise bad(where, f"the parameters of {function.name!r} must have the type object")
    return {"type": "object", **schema}


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class _NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _Named


class _Allowed(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[_NamedTool]


class _AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["allowed_tools"]
    allowed_tools: _Allowed


def _chosen(choice: dict[str, Any], functions: tuple[Function, ...], parallel: bool) -> ToolUse:
    """An object: one function, or those of several that are allowed."""
    try:
        if choice.get("type") != "allowed_tools":
            one = msgspec.convert(choice, _NamedTool)
            return ToolUse(_only([one], functions), "named", parallel=False)
        allowed = msgspec.convert(choice, _AllowedTools).allowed_tools
    except msgspec.ValidationError as error:
        text = str(error).replace("`", "")
        raise bad("tool_choice", f"tool_choice must be {_CHOICES}: {text}"[:300]) from None
    return ToolUse(_only(allowed.tools, functions), allowed.mode, parallel)


def _only(named: Sequence[_NamedTool], functions: tuple[Function, ...]) -> tuple[Function, ...]:
    names = {one.function.name for one in named}
    if unknown := names - {function.name for function in functions}:
        raise bad("tool_choice", f"tools has no function {min(unknown)[:64]!r}")
    if not names:
        raise bad("tool_choice", "tool_choice allows no function: use none")
    return tuple(function for function in functions if function.name in names)


def _refuse_beside(form: ChatBody) -> None:
    """A grammar decides where an answer with tools may end, and workers search no beams with
    one."""
    if form.use_beam_search:
        raise bad("tools", "a beam search cannot use tools: leave tools or use_beam_search out")
    for name in ("min_tokens", "ignore_eos"):
        if getattr(form, name):
            raise bad(name, f"{name} cannot be combined with tools: leave it out")
