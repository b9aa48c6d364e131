"""Messages as chat templates expect them: text content, known roles, calls with parsed arguments.
Pure.

Whatever is wrong raises ``ApiError`` that names the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pagemesh.gateway.api.api_errors import ApiError, bad, missing, unsupported
from pagemesh.gateway.api.openai_types import CallBody, ChatMessage


def chat_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages for the template."""
    return [_message(one, f"messages[{index}]") for index, one in enumerate(messages)]


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.role == "function":
        raise use_tools(f"{where}.role", "role function")
    if message.function_call is not None:
        raise use_tools(f"{where}.function_call", "function_call")
    if message.audio is not None:
        raise unsupported(f"{where}.audio", "audio")
    role = "system" if message.role == "developer" else message.role
    one: dict[str, Any] = {"role": role, "content": _content(message, where)}
    if message.name is not None:
        one["name"] = message.name
    thought = message.reasoning_content or message.reasoning
    if thought is not None:
        one["reasoning_content"] = thought
    if role == "tool":
        if message.tool_call_id is None:
            raise missing(f"{where}.tool_call_id")
        one["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        if role != "assistant":
            raise bad(f"{where}.tool_calls", "only a message of the assistant has tool_calls")
        one["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{index}]")
            for index, call in enumerate(message.tool_calls)
        ]
    return one


def use_tools(param: str, what: str) -> ApiError:
    """The error for what OpenAI had before ``tools``."""
    text = f"{what} is not supported: use tools, tool_calls and the role tool"
    return ApiError(400, text, param, "unsupported_parameter")


def _call(call: CallBody, where: str) -> dict[str, Any]:
    if call.type != "function":
        raise unsupported(f"{where}.type", f"tool calls of type {call.type!r}")
    if call.custom is not None:
        raise unsupported(f"{where}.custom")
    if call.function is None:
        raise missing(f"{where}.function")
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments, where)}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(text: str, where: str) -> dict[str, Any] | str:
    """The object that templates write as they like. Some servers leave the text of a call without
    arguments empty. Clients send back calls that were cut off: these stay the text that they
    are, or no later turn of the chat could be asked."""
    try:
        value = msgspec.json.decode(text) if text.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        return text
    if not isinstance(value, dict):
        raise bad(f"{where}.function.arguments", "arguments must be a JSON object, as a string")
    return value


def _content(message: ChatMessage, where: str) -> str:
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise missing(f"{where}.content")
        return message.refusal or ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type")
        text = part.get("text", part.get("refusal"))
        if kind is None:
            raise bad(f"{where}.content[{index}].type", "type is missing")
        if kind not in ("text", "input_text", "refusal"):
            raise unsupported(f"{where}.content[{index}].type", f"content type {str(kind)[:64]!r}")
        if not isinstance(text, str):
            raise bad(f"{where}.content[{index}].text", "text is missing")
        texts.append(text)
    return "\n".join(texts)
