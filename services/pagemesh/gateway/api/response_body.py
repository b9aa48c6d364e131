"""From a body of ``/v1/responses`` to the ``Ask`` of the equivalent chat. Pure.

Prompt, sampling, tools and formats are those of chats, in other words: a body becomes a
``ChatBody``, and what is wrong with that is told in the words of the body.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec

from pagemesh.gateway.api.api_errors import ApiError, bad, missing, unsupported
from pagemesh.gateway.api.decoding import converted, decode, nested_too_deeply
from pagemesh.gateway.api.openai_api import Ask, chat_ask
from pagemesh.gateway.api.openai_responses import (
    FunctionTool,
    ResponseBody,
    TextFormat,
    TextOptions,
)
from pagemesh.gateway.api.openai_types import ChatBody, Common, FunctionBody, ToolBody
from pagemesh.gateway.api.response_input import NOT_STORED, messages_of
from pagemesh.gateway.api.sampling_defaults import OPENAI, SamplingDefaults

_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = frozenset(
    {
        _LOGPROBS,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""All but the first are of items that no answer here has."""
_REFUSED = {
    "previous_response_id": f"{NOT_STORED}: send the whole conversation as input",
    "conversation": f"{NOT_STORED}: send the whole conversation as input",
    "prompt": f"{NOT_STORED}: send its text as instructions or input",
    "background": "ask again without it, and for a stream if the answer takes long",
    "max_tool_calls": "no tools are run here: leave it out",
    "context_management": "nothing is left out of a conversation here: send what shall count",
    "moderation": "leave it out",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "response_format": "use text.format",
    "n": "a response is one answer: use chat completions",
    "best_of": "use chat completions",
    "use_beam_search": "use chat completions",
    "beam_width": "use chat completions",
    "length_penalty": "use chat completions",
    "early_stopping": "use chat completions",
    "return_token_ids": "use chat completions",
}
_HARMLESS: dict[str, tuple[Any, ...]] = {"background": (False,), "n": (1,), "best_of": (1,)}
_SHARED = tuple(
    name for name in Common.__struct_fields__ if name not in ("max_completion_tokens", *_REFUSED)
)
_OTHER_NAMES = (
    (re.compile(r"(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"\bresponse_format\.json_schema\b"), "text.format"),
    (re.compile(r"\bresponse_format\b"), "text.format"),
    (re.compile(r"\bmax_completion_tokens\b"), "max_output_tokens"),
    (re.compile(r"^messages$"), "input"),
    (re.compile(r"^verbosity$"), "text.verbosity"),
)
"""What chats call it, and what it is here."""


def parse_response(body: bytes, *, served: str, defaults: SamplingDefaults = OPENAI) -> Ask:
    """A body of ``/v1/responses``; ``served`` and ``defaults`` as in ``parse_chat``."""
    form = decode(body, ResponseBody)
    _refuse(form)
    wants = _LOGPROBS in (form.include or ())
    if form.top_logprobs and not wants:
        raise bad("top_logprobs", f'top_logprobs requires include: ["{_LOGPROBS}"]')
    text = form.text or TextOptions()
    told_format = _format(text)
    tools = _tools(form)
    shared = {name: getattr(form, name) for name in _SHARED}
    chat = ChatBody(
        **shared,
        messages=messages_of(form.input, form.instructions),
        max_completion_tokens=form.max_output_tokens,
        response_format=_chat_format(told_format),
        logprobs=wants or None,
        top_logprobs=form.top_logprobs if wants else None,
        tools=[ToolBody(type="function", function=_function(tool)) for tool in tools] or None,
        tool_choice=_choice(form.tool_choice),
        parallel_tool_calls=form.parallel_tool_calls,
        verbosity=text.verbosity,
        reasoning_effort=form.reasoning.effort if form.reasoning else None,
        chat_template_kwargs=form.chat_template_kwargs,
        add_generation_prompt=form.add_generation_prompt,
        continue_final_message=form.continue_final_message,
    )
    with own_names():
        ask = chat_ask(chat, served=served, defaults=defaults)
    return replace(
        ask,
        include_usage=True,
        max_tokens_name="max_output_tokens",
        grammar_name="structured_outputs" if form.structured_outputs else "text.format",
        repeated=_encoded(_repeated(form, told_format, tools)),
    )


@contextlib.contextmanager
def own_names() -> Iterator[None]:
    """Errors within the context name parameters as ``/v1/responses`` does."""
    try:
        yield
    except ApiError as error:
        for pattern, name in _OTHER_NAMES:
            error.param = pattern.sub(name, error.param)
            error.message = pattern.sub(name, error.message)
        raise


def _refuse(form: ResponseBody) -> None:
    for name, instead in _REFUSED.items():
        value = getattr(form, name)
        if value is not None and value not in _HARMLESS.get(name, ()):
            text = f"{name} is not supported: {instead}"
            raise ApiError(400, text, name, "unsupported_parameter")
    if form.truncation not in (None, "disabled"):
        text = "truncation other than disabled; shorten the input if it is too long"
        raise unsupported("truncation", text)
    for index, value in enumerate(form.include or ()):
        if value not in _INCLUDED:
            raise unsupported(f"include[{index}]", f"include of {value[:64]!r}")


def _format(text: TextOptions) -> TextFormat:
    """``text.format`` with what its type asks for."""
    where = "text.format"
    if text.format is None:
        return TextFormat(type="text")
    told = converted(text.format, TextFormat, where)
    if told.type not in ("text", "json_object", "json_schema"):
        shown = f"{where}.type {told.type[:64]!r} is not one of text, json_object and json_schema"
        raise bad(f"{where}.type", shown)
    if told.type == "json_schema":
        for name in ("name", "schema"):
            if getattr(told, name) is None:
                raise missing(f"{where}.{name}")
    return told


def _chat_format(told: TextFormat) -> dict[str, Any] | None:
    if told.type != "json_schema":
        return None if told.type == "text" else {"type": told.type}
    members = {"name": told.name, "schema": told.schema, "strict": told.strict}
    return {"type": told.type, "json_schema": members}


def _tools(form: ResponseBody) -> list[FunctionTool]:
    out: list[FunctionTool] = []
    for index, tool in enumerate(form.tools or ()):
        where = f"tools[{index}]"
        kind = tool.get("type")
        if kind is None:
            raise missing(f"{where}.type")
        if kind != "function":
            text = f"tools of type {str(kind)[:64]!r}; only functions, which you run, can be called"
            raise unsupported(f"{where}.type", text)
        if tool.get("function") is not None:
            text = f"{where}.function: here name and parameters stand beside type, not in function"
            raise ApiError(400, text, f"{where}.function", "unknown_parameter")
        out.append(converted(tool, FunctionTool, where))
    return out


def _function(tool: FunctionTool) -> FunctionBody:
    return FunctionBody(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    name: str


class _Allowed(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    mode: str
    tools: list[dict[str, Any]]


def _choice(choice: str | dict[str, Any] | None) -> Any:
    """``tool_choice`` as chats have it."""
    if not isinstance(choice, dict):
        return choice
    where = "tool_choice"
    kind = choice.get("type")
    if kind == "function":
        return _chosen(choice, where)
    if kind == "allowed_tools":
        allowed = converted(choice, _Allowed, where)
        tools = [_chosen(tool, f"{where}.tools[{i}]") for i, tool in enumerate(allowed.tools)]
        return {"type": kind, kind: {"mode": allowed.mode, "tools": tools}}
    if kind is None:
        raise missing(f"{where}.type")
    raise unsupported(f"{where}.type", f"tool_choice of type {str(kind)[:64]!r}")


def _chosen(choice: dict[str, Any], where: str) -> dict[str, Any]:
    one = converted(choice, _Named, where)
    if one.type != "function":
        raise unsupported(f"{where}.type", f"tools of type {one.type[:64]!r}")
    return {"type": "function", "function": {"name": one.name}}


def _encoded(told: dict[str, Any]) -> dict[str, msgspec.Raw]:
    """In JSON, since a stream says it three times."""
    try:
        return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in told.items()}
    except RecursionError:
        raise nested_too_deeply() from None


def _repeated(
    form: ResponseBody, told_format: TextFormat, tools: list[FunctionTool]
) -> dict[str, Any]:
    shown = {name: value for name, value in msgspec.structs.asdict(told_format).items() if value}
    if told_format.type == "json_schema":
        shown |= {"schema": told_format.schema, "strict": bool(told_format.strict)}
    effort = form.reasoning.effort if form.reasoning else None
    return {
        "instructions": form.instructions,
        "max_output_tokens": form.max_output_tokens,
        "metadata": form.metadata or {},
        "parallel_tool_calls": form.parallel_tool_calls is not False,
        "prompt_cache_key": form.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": form.safety_identifier,
        "text": {"format": shown, "verbosity": "medium"},
        "tool_choice": "auto" if form.tool_choice is None else form.tool_choice,
        "tools": [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": bool(tool.strict),
            }
            for tool in tools
        ],
        "top_logprobs": form.top_logprobs or 0,
        "user": form.user,
    }
