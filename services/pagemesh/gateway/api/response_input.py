"""The items of ``input`` as the messages of the equivalent chat. Pure.

    message               a message of the same role
    reasoning             the reasoning of the assistant's next message
    function_call         one of the calls of the assistant's message before it, or of a new one
    function_call_output  a message of the role tool

Whatever is wrong raises ``ApiError`` that names the item.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pagemesh.gateway.api.api_errors import ApiError, bad, missing, unsupported
from pagemesh.gateway.api.decoding import converted
from pagemesh.gateway.api.openai_responses import (
    CallItem,
    CallOutputItem,
    MessageItem,
    ReasoningItem,
)
from pagemesh.gateway.api.openai_types import CALLS_MAX, CallBody, CalledFunction, ChatMessage

NOT_STORED = "nothing is stored here"
_TEXTS = ("input_text", "output_text", "text")


def messages_of(asked: str | list[dict[str, Any]], instructions: str | None) -> list[ChatMessage]:
    """The chat that ``input`` and ``instructions`` stand for."""
    talk = _Talk()
    if instructions is not None:
        talk.messages.append(ChatMessage(role="system", content=instructions))
    if isinstance(asked, str):
        talk.messages.append(ChatMessage(role="user", content=asked))
    else:
        for index, item in enumerate(asked):
            talk.add(item, f"input[{index}]")
    return talk.messages


class _Talk:
    """The messages so far."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._thought: str | None = None
        """What was thought before the assistant's next message."""

    def add(self, item: dict[str, Any], where: str) -> None:
        kind = item.get("type")
        if kind is None and "role" in item:
            kind = "message"
        match kind:
            case "message":
                self._message(converted(item, MessageItem, where), where)
            case "function_call":
                self._call(converted(item, CallItem, where), where)
            case "function_call_output":
                self._output(converted(item, CallOutputItem, where), where)
            case "reasoning":
                self._reasoning(converted(item, ReasoningItem, where), where)
            case "item_reference":
                raise _no_reference(where)
            case None:
                raise _no_reference(where) if set(item) == {"id"} else missing(f"{where}.type")
            case _:
                raise unsupported(f"{where}.type", f"items of type {str(kind)[:64]!r}")

    def _message(self, item: MessageItem, where: str) -> None:
        content = _parts(item.content, f"{where}.content")
        message = ChatMessage(role=item.role, content=content)
        if item.role == "assistant":
            message.reasoning_content, self._thought = self._thought, None
        self.messages.append(message)

    def _call(self, item: CallItem, where: str) -> None:
        _check_arguments(item.arguments, f"{where}.arguments")
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant":
            last = ChatMessage(role="assistant")
            self.messages.append(last)
        if self._thought is not None:
            thoughts = (last.reasoning_content, self._thought)
            last.reasoning_content = "\n".join(one for one in thoughts if one is not None)
            self._thought = None
        calls = last.tool_calls = last.tool_calls or []
        if len(calls) == CALLS_MAX:
            raise bad(where, f"{where}: there are more than {CALLS_MAX} calls in a row")
        function = CalledFunction(name=item.name, arguments=item.arguments)
        calls.append(CallBody(id=item.call_id, function=function))

    def _output(self, item: CallOutputItem, where: str) -> None:
        content = _parts(item.output, f"{where}.output")
        one = ChatMessage(role="tool", tool_call_id=item.call_id, content=content)
        self.messages.append(one)

    def _reasoning(self, item: ReasoningItem, where: str) -> None:
        texts = [] if self._thought is None else [self._thought]
        for index, part in enumerate(item.content or ()):
            at = f"{where}.content[{index}]"
            if part.get("type") != "reasoning_text":
                raise unsupported(f"{at}.type", f"content type {str(part.get('type'))[:64]!r}")
            texts.append(_text(part, "text", at))
        self._thought = "\n".join(texts) if texts else None


def _no_reference(where: str) -> ApiError:
    text = (
        f"item_reference is not supported, since {NOT_STORED}: send the item itself, as SDKs do "
        "when they are told store: false"
    )
    return ApiError(400, text, where, "unsupported_parameter")


def _parts(content: str | list[dict[str, Any]], where: str) -> str | list[dict[str, Any]]:
    """Parts as chats have them."""
    if isinstance(content, str):
        return content
    out: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        at = f"{where}[{index}]"
        kind = part.get("type")
        if kind is None:
            raise missing(f"{at}.type")
        if kind == "refusal":
            out.append({"type": "refusal", "refusal": _text(part, "refusal", at)})
        elif kind in _TEXTS:
            out.append({"type": "text", "text": _text(part, "text", at)})
        else:
            raise unsupported(f"{at}.type", f"content type {str(kind)[:64]!r}")
    return out


def _text(part: dict[str, Any], name: str, where: str) -> str:
    text = part.get(name)
    if text is None:
        raise missing(f"{where}.{name}")
    if not isinstance(text, str):
        raise bad(f"{where}.{name}", f"{where}.{name} must be a string")
    return text


def _check_arguments(text: str, where: str) -> None:
    try:
        fits = not text.strip() or isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return  # it was cut off, and is sent back as it is
    if not fits:
        raise bad(where, f"{where} must be a JSON object, as a string")
