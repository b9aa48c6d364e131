"""Decodes JSON bodies, and turns msgspec's errors into messages for people. Pure."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from pagemesh.gateway.api.api_errors import ApiError, bad, missing
from pagemesh.gateway.api.openai_responses import ResponseBody
from pagemesh.gateway.api.openai_types import ChatBody, CompletionBody

_PATH = re.compile(r" - at `\$\.?(.*)`$")
_FIELD = re.compile(r"(?:unknown|required) field `([^`]*)`")
_KINDS = re.compile(r"`([^`]+)`")
_BRIEF_MAX = 300
_OPTIONS = frozenset({"stream_options", "text", "reasoning"})

S = TypeVar("S", bound=msgspec.Struct)

_ELSEWHERE: dict[type, dict[str, str]] = {
    CompletionBody: {"messages": "; it is a parameter of chat completions"},
    ChatBody: {
        "prompt": "; it is a parameter of completions",
        "input": "; it is a parameter of /v1/responses",
    },
    ResponseBody: {
        "messages": "; it is a parameter of chat completions: use input",
        "reasoning_effort": "; use reasoning.effort",
        "verbosity": "; use text.verbosity",
        "logprobs": '; use include: ["message.output_text.logprobs"], and top_logprobs',
    },
}
"""By type of body: parameters that belong to another endpoint, and which one takes them."""

_SAID = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
}
"""msgspec's names for JSON types, in words for people who may not know Python."""


def decode(body: bytes, kind: type[S]) -> S:
    """``body`` as ``kind``; raises ``ApiError`` that says where it is wrong."""
    if not body.strip():
        raise ApiError(400, "the body is empty; send a JSON object", code="invalid_json")
    try:
        return _decode(body, kind)
    except msgspec.ValidationError as error:
        raise _named(str(error), _ELSEWHERE.get(kind, {})) from None
    except RecursionError:
        raise nested_too_deeply() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = _not_utf8(body) or f"the body is not valid JSON: {error}"
        raise ApiError(400, text[:_BRIEF_MAX], code="invalid_json") from None


def converted(fields: dict[str, Any], kind: type[S], where: str) -> S:
    """``fields``, found at ``where`` in a body, as ``kind``; those that are null count as
    absent. Raises ``ApiError`` as ``decode`` does."""
    try:
        return msgspec.convert(_given(fields), kind)
    except msgspec.ValidationError as error:
        raise _named(str(error), {}, where) from None
    except RecursionError:
        raise nested_too_deeply() from None


def nested_too_deeply() -> ApiError:
    return ApiError(400, "the body is nested too deeply", code="invalid_json")


def _decode(body: bytes, kind: type[S]) -> S:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if "unknown field" not in str(error):
            raise
        return msgspec.convert(_without_nulls(msgspec.json.decode(body)), kind)


def _without_nulls(body: Any) -> Any:
    """``body`` without parameters that are null, its own and those of its options and messages. One
    that is null asks for nothing, so it need not be known: some SDKs send all that they have."""
    given = _given(body)
    if not isinstance(given, dict):
        return given
    for name in _OPTIONS & given.keys():
        given[name] = _given(given[name])
    if isinstance(messages := given.get("messages"), list):
        given["messages"] = [_given(message) for message in messages]
    return given


def _given(fields: Any) -> Any:
    if not isinstance(fields, dict):
        return fields
    return {name: value for name, value in fields.items() if value is not None}


def _not_utf8(body: bytes) -> str:
    """Where ``body`` is not UTF-8, which msgspec does not say for strings; empty if it is."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f"the body is not UTF-8: {error.reason} (byte {error.start})"
    return ""


def _named(text: str, elsewhere: dict[str, str], where: str = "") -> ApiError:
    """The error that says what msgspec's ``text`` does. ``where``: what its paths begin at."""
    path = _PATH.search(text)
    param = path.group(1).replace("[...]", "") if path else ""
    param = f"{where}.{param}" if where and param else where or param
    message = text[: path.start()] if path else text
    field = _FIELD.search(text)
    if field:
        param = f"{param}.{field.group(1)}" if param else field.group(1)
        if "unknown field" in text:
            name = param[:_BRIEF_MAX]
            message = f"unknown parameter: {name}{elsewhere.get(name, '')}"
            return ApiError(400, message, name, "unknown_parameter")
        return missing(param)
    message = _said(message)
    if param.endswith(".role"):
        message += "; roles are system, developer, user, assistant and tool"
    shown = f"{param}: {message}" if param else f"the body: {message}"
    return bad(param[:_BRIEF_MAX], shown[:_BRIEF_MAX])


def _said(message: str) -> str:
    """msgspec's ``message`` with type names in words; what it quotes from a body stays as it is."""
    kinds = _KINDS.sub(_kinds_said, message) if message.startswith("Expected ") else message
    return f"{kinds[:1].lower()}{kinds[1:]}"


def _kinds_said(found: re.Match[str]) -> str:
    return " or ".join(_SAID.get(name, name) for name in found.group(1).split(" | "))
