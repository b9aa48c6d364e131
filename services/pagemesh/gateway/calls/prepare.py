"""From a parsed request to what workers get: token ids and sampling, within the model's limits.

Tokenising is the expensive part and safe to run on another thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagemesh.gateway.api.api_errors import ApiError, bad
from pagemesh.gateway.api.beams import fit_beams
from pagemesh.gateway.api.grammars import check_grammar
from pagemesh.gateway.api.openai_api import Ask, ChatPrompt, Prompt
from pagemesh.gateway.api.tool_grammar import with_tool_grammar
from pagemesh.gateway.words.templates import TemplateRefused
from pagemesh.gateway.words.tokens import Tokens
from pagemesh.runtime.bus.messages import MESSAGE_BYTES_WANTED
from pagemesh.wire.codec import MESSAGE_BYTES_MAX
from pagemesh.wire.messages import REQUEST_TOKENS_MAX
from pagemesh.wire.presence import ModelFacts
from pagemesh.wire.tokens import U32
from pagemesh.wire.work_messages import ENDS_MAX, Sampling

_MARGIN_BYTES = 64 << 10
"""What a message holds besides tokens and page numbers, at most."""
Limit = tuple[int, str]
"""The most tokens of a prompt and its answer together, and the words that say so."""


def carried_tokens(message_bytes_max: int) -> int:
    """The longest sequence, in tokens, that a message can carry with its page numbers (an eighth on
    top). Up to this length a sequence can always be handed over, declared and submitted again."""
    return 2 * max(message_bytes_max - _MARGIN_BYTES, 0) // 9


def too_narrow(message_bytes_max: int, page_size: int) -> str:
    """What is wrong, and what to do, if the bus cannot even carry a page of tokens; else empty."""
    if carried_tokens(message_bytes_max) >= page_size:
        return ""
    return (
        f"the NATS server's max_payload of {message_bytes_max} bytes is too small for any request: "
        f"set it to {MESSAGE_BYTES_WANTED}"
    )


@dataclass(frozen=True, slots=True)
class Work:
    """One prompt, ready to be submitted."""

    prompt: U32
    sampling: Sampling
    goes_on: bool
    """The answer continues the prompt's text; it is not a message of its own."""


def understood(
    ask: Ask, tokens: Tokens, facts: ModelFacts | None, owner: bytes
) -> tuple[Ask, list[U32]]:
    """``ask`` with its grammar checked and that of its tools added, and ``tokenise``. Raises
    ``ApiError``."""
    if ask.grammar:
        _check_grammar(ask, tokens)
    ask = with_tool_grammar(ask, tokens)
    return ask, tokenise(ask, tokens, facts, owner)


def tokenise(ask: Ask, tokens: Tokens, facts: ModelFacts | None, owner: bytes) -> list[U32]:
    """Token ids of every prompt. Raises ``ApiError``, and does so before the work if the model's
    limits (``facts``) are known and no tokenisation of the text could be within them. ``owner``:
    see ``Tokens.encode``."""
    return [_tokenise_one(prompt, ask, tokens, facts, owner) for prompt in ask.prompts]


def _check_grammar(ask: Ask, tokens: Tokens) -> None:
    check_grammar(ask.grammar, ask.grammar_name)
    if not tokens.end_tokens:
        raise bad(
            ask.grammar_name,
            f"{ask.grammar_name}: this model names no end token, so no answer of it could end",
        )


def _tokenise_one(
    prompt: Prompt, ask: Ask, tokens: Tokens, facts: ModelFacts | None, owner: bytes
) -> U32:
    if isinstance(prompt, np.ndarray):
        return prompt
    text = prompt if isinstance(prompt, str) else render(prompt, tokens)
    most_bytes = tokens.bytes_per_token_max
    if facts is not None and most_bytes is not None:
        least_tokens = -(-len(text.encode()) // most_bytes)
        _check_prompt(ask, f"at least {least_tokens}", least_tokens, limit_of(facts))
    return tokens.encode(text, add_special_tokens=ask.add_special_tokens, owner=owner)


def render(prompt: ChatPrompt, tokens: Tokens) -> str:
    """The text of a chat. Raises ``ApiError``."""
    has_tools = bool(prompt.template_values.get("tools"))
    source = tokens.tool_source if has_tools else tokens.facts.get("chat_template", "")
    if (
        source
        and "tool_calls" not in source
        and any("tool_calls" in one for one in prompt.messages)
    ):
        raise bad("messages", "this model's chat template would leave tool_calls out")
    try:
        return tokens.render_chat(
            prompt.messages,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            extra=prompt.template_values,
        )
    except TemplateRefused as error:
        raise bad("messages", str(error)) from None


def fit(
    ask: Ask, prompts: Sequence[U32], facts: ModelFacts, end_tokens: frozenset[int], seed: int,
    *, quota_tokens: int = REQUEST_TOKENS_MAX, message_bytes_max: int = MESSAGE_BYTES_MAX,
) -> list[Work]:  # fmt: skip
    """Each prompt with its sampling, checked against the model, the token slots of its tenant's
    quota and what the bus can carry. Raises ``ApiError``, with both numbers when something is too
    long, or 503 when the bus can carry nothing. ``seed`` is for the first prompt if the request has
    none, and counts up from there."""
    if why := too_narrow(message_bytes_max, facts.page_size):
        raise ApiError(503, why, code="not_ready", retry_after_ms=1_000)
    room_bytes = message_bytes_max - ask.grammar_bytes
    if too_narrow(room_bytes, facts.page_size):
        name = ask.grammar_name if ask.tools is None else "tools"
        text = f"{name}: {ask.grammar_bytes} bytes leave no room for a prompt in a message of "
        raise bad(name, f"{text}{message_bytes_max}")
    _check_tokens(ask, prompts, facts)
    most = limit_of(facts, room_bytes)
    works: list[Work] = []
    for index, (asked, prompt) in enumerate(zip(ask.prompts, prompts, strict=True)):
        limit = _max_tokens(ask, len(prompt), most, quota_tokens)
        if ask.beams is not None:
            quota_pages, size = quota_tokens // facts.page_size, facts.page_size
            limit = fit_beams(
                ask, ask.beams, len(prompt), limit,
                pool_pages=facts.pool_pages, quota_pages=quota_pages, page_size=size,
            )  # fmt: skip
        if ask.min_tokens > limit:
            raise bad("min_tokens", f"min_tokens {ask.min_tokens} exceeds the {limit} that fit")
        goes_on = not isinstance(asked, ChatPrompt) or asked.continue_final_message
        sampling = _sampling(ask, limit, end_tokens, seed + index)  # equal prompts draw differently
        if sampling.min_tokens and len(sampling.stop_tokens) >= facts.vocab_tokens:
            raise bad("min_tokens", "every token would end the answer before min_tokens")
        works.append(Work(prompt, sampling, goes_on))
    return works


def _check_tokens(ask: Ask, prompts: Sequence[U32], facts: ModelFacts) -> None:
    vocab = facts.vocab_tokens
    for prompt in prompts:
        if not len(prompt):
            raise bad("prompt", "the prompt is empty")
        check_token("prompt", int(prompt.max()), vocab)
    for token in ask.logit_bias:
        check_token("logit_bias", token, vocab)
    for token in ask.stop_tokens:
        check_token("stop_token_ids", token, vocab)


def check_token(param: str, token: int, vocab_tokens: int) -> None:
    """Raises ``ApiError`` for a token that is not in the model's vocabulary."""
    if token >= vocab_tokens:
        raise bad(
            param,
            f"token id {token} is not in the model's vocabulary of {vocab_tokens} tokens (ids "
            "start at 0)",
        )


_TOP_P_MIN = 1e-9
"""Stands for OpenAI's 0, which keeps only the likeliest token: that one's probability is higher in
any vocabulary."""


def _sampling(ask: Ask, max_tokens: int, end_tokens: frozenset[int], seed: int) -> Sampling:
    stop_tokens = set(ask.stop_tokens) | (frozenset() if ask.ignore_eos else end_tokens)
    if len(stop_tokens) > ENDS_MAX:
        raise bad(
            "stop_token_ids",
            f"with the model's own end tokens, {len(stop_tokens)} tokens would end an answer; the "
            f"limit is {ENDS_MAX}: give fewer",
        )
    return Sampling(
        temperature=ask.temperature,
        top_k=ask.top_k,
        top_p=max(ask.top_p, _TOP_P_MIN),
        min_p=ask.min_p,
        presence_penalty=ask.presence_penalty,
        frequency_penalty=ask.frequency_penalty,
        repetition_penalty=ask.repetition_penalty,
        logit_bias=ask.logit_bias,
        seed=(ask.seed if ask.seed is not None else seed) % (1 << 64),
        max_tokens=max_tokens,
        min_tokens=ask.min_tokens,
        stop_tokens=sorted(stop_tokens),
        logprobs=0 if ask.logprobs is None and ask.selects else ask.logprobs,
        grammar=ask.grammar,
        beams=ask.beams,
    )


def _max_tokens(ask: Ask, prompt_tokens: int, most: Limit, quota_tokens: int) -> int:
    """How many tokens may be generated after a prompt."""
    _check_prompt(ask, str(prompt_tokens), prompt_tokens, most)
    _check_answer(ask, prompt_tokens, most)
    slots = prompt_tokens + (1 if ask.max_tokens is None else ask.max_tokens)
    if slots > quota_tokens:
        message = (
            f"prompt and {ask.max_tokens_name} need {slots} token slots, more than your quota of "
            f"{quota_tokens} for all your requests together: shorten the prompt, lower "
            f"{ask.max_tokens_name}, or ask for a larger quota"
        )
        raise ApiError(400, message, "messages" if ask.chat else "prompt", "quota_exceeded")
    if ask.max_tokens is not None:
        return ask.max_tokens
    return min(ask.open_tokens, min(quota_tokens, most[0]) - prompt_tokens)


def limit_of(facts: ModelFacts, message_bytes_max: int = MESSAGE_BYTES_MAX) -> Limit:
    """How long a prompt and its answer may be here, together. The words follow OpenAI's own
    message, by which clients recognise that a context is too small."""
    pool_tokens = facts.pool_pages * facts.page_size
    limit, reason = min(
        (facts.context_tokens_max, ""),
        (pool_tokens, ", the capacity of the page pool"),
        (REQUEST_TOKENS_MAX, ", the limit for all models"),
        (
            carried_tokens(message_bytes_max),
            f", limited by the NATS server's max_payload of {message_bytes_max} bytes",
        ),
    )
    return limit, f"this model's maximum context length is {limit} tokens{reason}"


def _check_prompt(ask: Ask, shown: str, prompt_tokens: int, most: Limit) -> None:
    """Raises ``ApiError`` when a prompt of ``prompt_tokens`` tokens, ``shown`` in the message,
    leaves no room for an answer. LangChain recognises that by "prompt is too long"."""
    limit, said = most
    if prompt_tokens + (0 if ask.max_tokens == 0 else 1) > limit:
        so = "" if prompt_tokens > limit else ", which leaves no room for an answer"
        message = f"{said}; the prompt has {shown}{so}: this prompt is too long"
        param = "messages" if ask.chat else "prompt"
        raise ApiError(400, message, param, "context_length_exceeded")


def _check_answer(ask: Ask, prompt_tokens: int, most: Limit) -> None:
    """Raises ``ApiError`` when the prompt fits, but not together with ``max_tokens``."""
    wanted = ask.max_tokens or 0
    limit, said = most
    if prompt_tokens + wanted > limit:
        message = (
            f"{said}; the prompt has {prompt_tokens}, so that {ask.max_tokens_name} may be "
            f"{limit - prompt_tokens} at most, not {wanted}"
        )
        raise ApiError(400, message, ask.max_tokens_name, "context_length_exceeded")
