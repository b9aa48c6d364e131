"""The JSON of ``POST /v1/responses``: its body, and what its lists hold.

What chats have too comes from ``Common``, under the same names; that which has another name here
is refused, with that name. Items are decoded one by one, by their types.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pagemesh.gateway.api.openai_types import TOOLS_MAX, Common, FunctionBody, FunctionName
from pagemesh.wire.work_messages import TOP_LOGPROBS_MAX

ITEMS_MAX = 16_384
_Label = Annotated[str, Meta(max_length=512)]
_Text = Annotated[str, Meta(max_length=64)]
_Inert = Any


class TextOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``text``: what the text of an answer must be."""

    format: dict[str, Any] | None = None
    verbosity: _Inert = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``text.format``; chats have the members of a schema one level deeper."""

    type: str
    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Only ``effort`` means something here; no answer has a summary of its reasoning."""

    effort: _Text | None = None
    summary: _Inert = None
    generate_summary: _Inert = None


class ResponseBody(Common, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/responses``."""

    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=ITEMS_MAX)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    include: Annotated[list[str], Meta(max_length=64)] | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    # Accepted without effect; those that an answer repeats have a type.
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    client_metadata: _Inert = None

    # Refused.
    background: bool | None = None
    context_management: _Inert = None
    conversation: _Inert = None
    max_tool_calls: _Inert = None
    moderation: _Inert = None
    previous_response_id: _Inert = None
    prompt: _Inert = None


class MessageItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message, written by a client or sent back as it came from us."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]]
    type: Literal["message"] = "message"
    id: _Label | None = None
    status: _Inert = None
    phase: _Inert = None


class CallItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: _Label
    name: FunctionName
    arguments: str
    id: _Label | None = None
    status: _Inert = None


class CallOutputItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: _Label
    output: str | list[dict[str, Any]]
    id: _Label | None = None
    status: _Inert = None


class ReasoningItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a model thought. Its text is in ``content``; what is encrypted, nobody here can read."""

    type: Literal["reasoning"]
    content: list[dict[str, Any]] | None = None
    id: _Label | None = None
    summary: _Inert = None
    encrypted_content: _Inert = None
    status: _Inert = None


class FunctionTool(FunctionBody, kw_only=True, forbid_unknown_fields=True):
    """One of ``tools``; chats have the members of a function one level deeper."""

    type: Literal["function"]
