"""The JSON bodies of the endpoints, field by field.

A parameter that could change the answer is either implemented or refused by name, and so is every
unknown one that is not null: to ignore it would look like support. Parameters that only describe
the request, as SDKs and frameworks add them, are accepted and have no effect.

Most fields may be null, as OpenAI's clients send them; null means the default.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pagemesh.wire.cache_terms import CACHE_TTL_S_MAX
from pagemesh.wire.work_messages import (
    BEAMS_MAX,
    CHOICES_MAX,
    REPETITION_PENALTY_MIN,
    TOP_LOGPROBS_MAX,
)

STOPS_MAX = 16
STOP_CHARACTERS_MAX = 256
STOP_TOKENS_MAX = 48
LOGIT_BIASES_MAX = 1_024
CHOICE_TEXTS_MAX = 1_024
TOKEN_MAX = 0xFFFF_FFFF
TOOLS_MAX = 128
CALLS_MAX = 128
"""Tool calls in one message."""

Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]
TopP = Annotated[float, Meta(ge=0.0, le=1.0)]
TopK = Annotated[int, Meta(ge=-1, le=1 << 31)]
MinP = Annotated[float, Meta(ge=0.0, le=1.0)]
RepetitionPenalty = Annotated[float, Meta(ge=REPETITION_PENALTY_MIN, le=10.0)]
_Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
_Tokens = Annotated[int, Meta(ge=0, le=1 << 31)]
_Token = Annotated[int, Meta(ge=0, le=TOKEN_MAX)]
_Stop = Annotated[str, Meta(min_length=1, max_length=STOP_CHARACTERS_MAX)]
_Stops = _Stop | Annotated[list[_Stop], Meta(max_length=STOPS_MAX)]
_Label = Annotated[str, Meta(max_length=512)]
_Salt = Annotated[str, Meta(min_length=1, max_length=512)]
FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]
_Inert = Any


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: _Inert = None
    continuous_usage_stats: _Inert = None
    """Usage comes once, in the last chunk."""


class _NotYet(msgspec.Struct, kw_only=True):
    """Other servers' parameters that change the answer: refused by name."""

    allowed_token_ids: _Inert = None
    bad_words: _Inert = None
    guided_choice: _Inert = None
    guided_grammar: _Inert = None
    guided_json: _Inert = None
    guided_regex: _Inert = None
    prompt_logprobs: _Inert = None
    return_tokens_as_token_ids: _Inert = None
    truncate_prompt_tokens: _Inert = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's way to say what an answer must be: one of these."""

    json: dict[str, Any] | str | None = None
    """A JSON schema."""
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=CHOICE_TEXTS_MAX)] | None = None
    grammar: str | None = None
    """In llguidance's dialect of Lark."""


NOT_YET = _NotYet.__struct_fields__


class Common(_NotYet, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints take."""

    model: Annotated[str, Meta(max_length=1024)] | None = None
    """If omitted, the model that is served."""
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: _Tokens | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None
    """Goes before ``max_tokens``."""
    temperature: Temperature | None = None
    top_p: TopP | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: _Stops | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None

    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: _Tokens | None = None
    stop_token_ids: Annotated[list[_Token], Meta(max_length=STOP_TOKENS_MAX)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    beam_width: Annotated[int, Meta(ge=1, le=BEAMS_MAX)] | None = None
    length_penalty: Annotated[float, Meta(ge=-8.0, le=8.0)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    cache_salt: _Salt | None = None
    cache_ttl_s: Annotated[int, Meta(ge=1, le=CACHE_TTL_S_MAX)] | None = None
    """Pages that the request caches are dropped this many seconds after their last use."""
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    """Lower goes first."""
    request_id: _Label | None = None

    # Accepted, without effect here.
    user: _Inert = None
    metadata: _Inert = None
    safety_identifier: _Inert = None
    cache_prompt: _Inert = None
    prompt_cache_key: _Inert = None
    prompt_cache_options: _Inert = None
    prompt_cache_retention: _Inert = None
    service_tier: _Inert = None
    store: _Inert = None


class CompletionBody(Common, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/completions``."""

    prompt: str | list[str | _Token | list[_Token]]
    logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    echo: bool | None = None
    suffix: str | None = None


class FunctionBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A function that the model may call; ``parameters`` is a JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One of ``tools``."""

    type: Annotated[str, Meta(max_length=64)]
    function: FunctionBody | None = None
    custom: _Inert = None
    """Refused, by its type."""


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``arguments`` is a JSON object, as text."""

    name: FunctionName
    arguments: str


class CallBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One of a message's ``tool_calls``."""

    id: _Label
    type: Annotated[str, Meta(max_length=64)] = "function"
    function: CalledFunction | None = None
    custom: _Inert = None
    index: _Inert = None
    """Left over in calls that were put together from a stream."""


Tools = Annotated[list[ToolBody], Meta(max_length=TOOLS_MAX)]


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One message, written by a client or sent back as it came from us."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: _Label | None = None
    refusal: str | None = None
    tool_call_id: _Label | None = None
    tool_calls: Annotated[list[CallBody], Meta(max_length=CALLS_MAX)] | None = None
    function_call: _Inert = None
    audio: _Inert = None
    annotations: _Inert = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Newer servers' name of ``reasoning_content``."""


class ChatBody(Common, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=16_384)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    tool_choice: _Inert = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: _Inert = None
    modalities: list[str] | None = None
    audio: _Inert = None
    prediction: _Inert = None
    """A hint that may save time and changes no token: accepted, without effect."""
    reasoning_effort: Annotated[str, Meta(max_length=64)] | None = None
    """Passed to the chat template as a variable of this name."""
    verbosity: _Inert = None
    web_search_options: _Inert = None
    moderation: _Inert = None


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /tokenize``: either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: _Salt | None = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[_Token]
