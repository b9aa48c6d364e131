"""From the bytes of a request to a validated ``Ask``. Pure.

Whatever is wrong raises ``ApiError`` that names the parameter.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from pagemesh.gateway.api.api_errors import bad, unsupported
from pagemesh.gateway.api.beams import beams_of
from pagemesh.gateway.api.decoding import decode
from pagemesh.gateway.api.grammars import grammar_of, param_of
from pagemesh.gateway.api.messages import chat_messages, use_tools
from pagemesh.gateway.api.openai_types import (
    LOGIT_BIASES_MAX,
    NOT_YET,
    ChatBody,
    ChatMessage,
    Common,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from pagemesh.gateway.api.sampling_defaults import OPENAI, SamplingDefaults
from pagemesh.gateway.api.tools import ToolUse, check_tools, tool_use, tool_values
from pagemesh.wire.messages import REQUEST_TOKENS_MAX
from pagemesh.wire.tokens import U32
from pagemesh.wire.work_messages import CHOICES_MAX, Beams

DEFAULT_COMPLETION_TOKENS = 16
PROMPTS_MAX = CHOICES_MAX
_MIXED = "prompt must hold only strings, only token ids, or only lists of token ids"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages for the chat template."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    template_values: Mapping[str, Any]


Prompt = str | U32 | ChatPrompt
"""Text, token ids, or messages."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One call of an endpoint: each of ``prompts`` is answered ``n`` times, with the likeliest
    of ``best_of`` choices."""

    chat: bool
    model: str
    prompts: tuple[Prompt, ...]
    n: int
    best_of: int
    beams: Beams | None
    """If set, the ``n`` best results of a beam search are returned."""
    length_penalty: float
    """For ranking ``best_of`` choices, as in ``Beams``. 0 ranks by the log-probability of the whole
    answer."""
    stream: bool
    include_usage: bool
    max_tokens: int | None
    """None: as many as fit, at most ``open_tokens``."""
    max_tokens_name: str
    """The parameter that gave ``max_tokens``, for messages."""
    open_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float]
    seed: int | None
    """None: a random one, made by the gateway."""
    stops: tuple[str, ...]
    stop_tokens: tuple[int, ...]
    ignore_eos: bool
    skip_special_tokens: bool
    show_stop: bool
    return_token_ids: bool
    add_special_tokens: bool
    logprobs: int | None
    """How many alternatives; None: no log-probabilities."""
    echo: bool
    cache_salt: str
    cache_ttl_s: int
    """0: what is cached stays for as long as there is room."""
    priority: int
    grammar: str
    """What every answer must be, as in ``Sampling``; empty: anything. Not checked yet."""
    grammar_name: str
    """The parameter that gave ``grammar``, for messages."""
    label: str
    """The client's own id for the request: recorded in its trace and otherwise unused."""
    tools: ToolUse | None = None
    """None: nothing may be called."""
    repeated: Mapping[str, msgspec.Raw] | None = None
    """What an answer of ``/v1/responses`` repeats of its request, in JSON; None: another
    endpoint's."""

    @property
    def is_packed(self) -> bool:
        """Whether all prompts were given as token ids."""
        return all(isinstance(prompt, np.ndarray) for prompt in self.prompts)

    @property
    def shown_tokens(self) -> frozenset[int]:
        """Special tokens that are needed to understand the text."""
        return frozenset() if self.tools is None else self.tools.marks

    @property
    def grammar_bytes(self) -> int:
        """What ``grammar`` takes in a message."""
        return len(self.grammar.encode())

    @property
    def selects(self) -> bool:
        """Whether more choices are generated than returned."""
        return self.best_of > self.n


def parse_chat(body: bytes, *, served: str, defaults: SamplingDefaults = OPENAI) -> Ask:
    """A body of ``/v1/chat/completions``. ``served`` is the model of a body that names none;
    ``defaults`` are the sampling parameters that it does not give."""
    return chat_ask(decode(body, ChatBody), served=served, defaults=defaults)


def chat_ask(form: ChatBody, *, served: str, defaults: SamplingDefaults) -> Ask:
    """What a body asks for, once it is decoded."""
    _refuse_unsupported_chat(form)
    if form.top_logprobs and not form.logprobs:
        raise bad("top_logprobs", "top_logprobs requires logprobs: true")
    going_on = bool(form.continue_final_message)
    adding = form.add_generation_prompt
    if going_on and adding:
        raise bad(
            "add_generation_prompt",
            "continue_final_message and add_generation_prompt cannot both be true",
        )
    if going_on and form.messages[-1].role != "assistant":
        raise bad("continue_final_message", "the final message must have the role assistant")
    if going_on and form.messages[-1].tool_calls:
        raise bad("continue_final_message", "a message with tool_calls cannot be continued")
    tools = tool_use(form)
    values = _chat_values(form)
    prompt = ChatPrompt(
        messages=chat_messages(form.messages),
        add_generation_prompt=not going_on if adding is None else adding,
        continue_final_message=going_on,
        template_values=values if tools is None else values | {"tools": tool_values(form.tools)},
    )
    if form.max_tokens == 0:
        raise bad("max_tokens", "max_tokens must be at least 1")
    ask = _ask(
        form,
        served=served,
        defaults=defaults,
        chat=True,
        prompts=(prompt,),
        logprobs=(form.top_logprobs or 0) if form.logprobs else None,
    )
    return ask if tools is None else replace(ask, tools=tools)


def parse_completion(body: bytes, *, served: str, defaults: SamplingDefaults = OPENAI) -> Ask:
    """A body of ``/v1/completions``; ``served`` and ``defaults`` as in ``parse_chat``."""
    form = decode(body, CompletionBody)
    if form.suffix:
        raise unsupported("suffix")
    if form.max_tokens == 0 and not form.echo:
        raise bad("max_tokens", "max_tokens: 0 requires echo: true")
    return _ask(
        form,
        served=served,
        defaults=defaults,
        chat=False,
        prompts=_prompts(form.prompt),
        open_tokens=DEFAULT_COMPLETION_TOKENS,
        logprobs=form.logprobs,
        echo=bool(form.echo),
    )


def parse_tokenize(body: bytes) -> TokenizeBody:
    form = decode(body, TokenizeBody)
    if (form.prompt is None) == (form.messages is None):
        raise bad("prompt", "give exactly one of prompt and messages")
    if form.tools and form.messages is None:
        raise bad("tools", "tools requires messages")
    check_tools(form.tools)
    return form


def chat_to_tokenize(form: TokenizeBody, messages: list[ChatMessage]) -> ChatPrompt:
    """The chat of a parsed body of ``/tokenize``."""
    values = template_values(form.chat_template_kwargs)
    return ChatPrompt(
        messages=chat_messages(messages),
        add_generation_prompt=form.add_generation_prompt is not False,
        continue_final_message=False,
        template_values=values | {"tools": tool_values(form.tools)} if form.tools else values,
    )


def parse_detokenize(body: bytes) -> DetokenizeBody:
    return decode(body, DetokenizeBody)


def template_values(values: dict[str, Any] | None) -> dict[str, Any]:
    """Further variables for the chat template, once their names are checked."""
    for name in values or {}:
        if not name.isidentifier() or name.startswith("_"):
            raise bad("chat_template_kwargs", f"{name[:64]!r} is not a valid variable name")
    return values or {}


def _chat_values(form: ChatBody) -> dict[str, Any]:
    effort = form.reasoning_effort
    first = {} if effort is None else {"reasoning_effort": effort}
    return first | template_values(form.chat_template_kwargs)


def _prompts(prompt: str | list[str | int | list[int]]) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise bad("prompt", "prompt is empty")
    if isinstance(prompt[0], int):
        return (_ids(prompt),)
    if len(prompt) > PROMPTS_MAX:
        raise bad("prompt", f"{len(prompt)} prompts exceed the limit of {PROMPTS_MAX}")
    if len(set(map(type, prompt))) > 1:
        raise bad("prompt", _MIXED)
    parts = (part for part in prompt if not isinstance(part, int))
    return tuple(_ids(part) if isinstance(part, list) else part for part in parts)


def _ids(prompt: list[Any]) -> U32:
    """Token ids, packed right away, so that thousands of them are not looked at one by one
    again."""
    try:
        return np.asarray(array("I", prompt), "<u4")  # numpy takes longer from a list
    except TypeError:
        raise bad("prompt", _MIXED) from None


def _ask(
    form: Common,
    *,
    served: str,
    defaults: SamplingDefaults,
    chat: bool,
    prompts: tuple[Prompt, ...],
    open_tokens: int = REQUEST_TOKENS_MAX,
    logprobs: int | None,
    echo: bool = False,
) -> Ask:
    for name in NOT_YET:
        if getattr(form, name) is not None:
            instead = "; use structured_outputs" if name.startswith("guided_") else ""
            raise unsupported(name, name + instead)
    beams = beams_of(form, scores_prompt=echo and logprobs is not None)
    own = defaults if beams is None else OPENAI  # a search draws nothing
    n, best_of = _choice_counts(form, len(prompts), searches=beams is not None)
    limit = form.max_completion_tokens
    name = "max_tokens" if limit is None else "max_completion_tokens"
    max_tokens = form.max_tokens if limit is None else limit
    min_tokens = form.min_tokens or 0
    most = open_tokens if max_tokens is None else max_tokens
    if min_tokens > most:
        raise bad("min_tokens", f"min_tokens {min_tokens} exceeds {name} {most}")
    options = form.stream_options
    if options is not None and not form.stream:
        raise bad("stream_options", "stream_options requires stream: true")
    stops = [form.stop] if isinstance(form.stop, str) else form.stop or []
    return Ask(
        chat=chat,
        model=served if form.model is None else form.model,
        prompts=prompts,
        n=n,
        best_of=best_of,
        beams=beams,
        length_penalty=form.length_penalty or 0.0,
        stream=bool(form.stream),
        include_usage=bool(options and options.include_usage),
        max_tokens=max_tokens,
        max_tokens_name=name,
        open_tokens=open_tokens,
        min_tokens=min_tokens,
        temperature=own.temperature if form.temperature is None else form.temperature,
        top_p=own.top_p if form.top_p is None else form.top_p,
        top_k=own.top_k if form.top_k is None else max(0, form.top_k),
        min_p=own.min_p if form.min_p is None else form.min_p,
        presence_penalty=form.presence_penalty or 0.0,
        frequency_penalty=form.frequency_penalty or 0.0,
        repetition_penalty=(
            own.repetition_penalty if form.repetition_penalty is None else form.repetition_penalty
        ),
        logit_bias=_logit_bias(form.logit_bias or {}),
        seed=form.seed,
        stops=tuple(dict.fromkeys(stops)),
        stop_tokens=tuple(dict.fromkeys(form.stop_token_ids or ())),
        ignore_eos=bool(form.ignore_eos),
        skip_special_tokens=form.skip_special_tokens is not False,
        show_stop=bool(form.include_stop_str_in_output),
        return_token_ids=bool(form.return_token_ids),
        add_special_tokens=not chat if form.add_special_tokens is None else form.add_special_tokens,
        logprobs=logprobs,
        echo=echo,
        cache_salt=form.cache_salt or "",
        cache_ttl_s=form.cache_ttl_s or 0,
        priority=form.priority or 0,
        grammar=_grammar(form),
        grammar_name=param_of(form),
        label=form.request_id or "",
    )


def _grammar(form: Common) -> str:
    grammar = grammar_of(form)
    for name in ("use_beam_search", "ignore_eos", "min_tokens"):  # a grammar says where it may end
        if grammar and getattr(form, name):
            raise bad(name, f"{name} cannot be combined with {param_of(form)}")
    return grammar


def _choice_counts(form: Common, prompt_count: int, *, searches: bool) -> tuple[int, int]:
    """How many choices each prompt returns, and how many are generated for it."""
    n = form.n or 1
    best_of = n if searches else form.best_of or n
    name = "best_of" if best_of > n else "n"
    if best_of * prompt_count > CHOICES_MAX:
        raise bad(
            name,
            f"{prompt_count} prompts with {name} {best_of} exceed {CHOICES_MAX} choices",
        )
    if best_of < n:
        raise bad("best_of", f"best_of {best_of} is less than n {n}: raise best_of or lower n")
    if best_of == n and not searches and form.length_penalty not in (None, 0.0, 1.0):
        raise bad(
            "length_penalty", "length_penalty requires use_beam_search: true, or best_of above n"
        )
    if best_of > n and form.stream:
        raise bad("best_of", "best_of above n cannot be streamed: leave stream out")
    return n, best_of


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    if len(biases) > LOGIT_BIASES_MAX:
        raise bad("logit_bias", f"logit_bias has more than {LOGIT_BIASES_MAX} entries")
    out: dict[int, float] = {}
    for key, value in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise bad("logit_bias", f"{key[:32]!r} is not a token id")
        out[int(key)] = value
    return out


def _refuse_unsupported_chat(form: ChatBody) -> None:
    if form.functions:
        raise use_tools("functions", "functions")
    if form.function_call not in (None, "none", "auto"):
        raise use_tools("function_call", "function_call")
    if form.modalities not in (None, ["text"]):
        raise unsupported("modalities", "modalities other than text")
    if form.verbosity not in (None, "medium"):
        raise unsupported("verbosity", "verbosity other than medium")
    for name in ("audio", "web_search_options", "moderation"):
        if getattr(form, name) is not None:
            raise unsupported(name)
