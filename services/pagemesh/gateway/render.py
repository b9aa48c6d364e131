"""From events of requests to OpenAI's JSON: whole responses and stream chunks. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from pagemesh.gateway.events import ChoiceEnded, Deliver
from pagemesh.gateway.openai_api import Ask
from pagemesh.gateway.spec import Usage
from pagemesh.gateway.tokens import Tokens
from pagemesh.wire.tokens import U32
from pagemesh.wire.work_messages import TopLogprobs

_LOGPROB_MIN = -9999.0
"""Stands for minus infinity, which JSON does not have."""
DONE = b"data: [DONE]\n\n"
_MARK = "text"
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Row:
    """The scores of one token."""

    token: int
    logprob: float | None
    """None: the first token of a prompt has none."""
    top: tuple[tuple[int, float], ...]


def rows(tokens: Iterable[int], scores: TopLogprobs) -> list[Row]:
    """``scores`` token by token; the first ``width`` alternatives of each."""
    width = scores.width
    chosen = np.frombuffer(scores.chosen, "<f4").tolist()
    ids = np.frombuffer(scores.top_tokens, "<u4").tolist()
    values = np.frombuffer(scores.top_values, "<f4").tolist()
    return [
        Row(
            token,
            _finite(logprob),
            tuple(
                (ids[at], _finite(values[at])) for at in range(index * width, index * width + width)
            ),
        )
        for index, (token, logprob) in enumerate(zip(tokens, chosen, strict=False))
    ]


def _finite(value: float) -> float:
    return value if value > _LOGPROB_MIN else _LOGPROB_MIN


@dataclass(slots=True)
class _Collected:
    """One choice of a whole response."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    finish: Literal["stop", "length"] = "length"
    stop_reason: str | int | None = None
    logprob_sum: float = 0.0
    scored_count: int = 0

    @property
    def mean_logprob(self) -> float:
        return self.logprob_sum / self.scored_count if self.scored_count else 0.0


class Renderer:
    """The JSON of one call. ``response_id`` and ``created`` (seconds since 1970) are made by
    the caller. Choices are numbered prompt by prompt: index = prompt x n + choice."""

    def __init__(self, ask: Ask, tokens: Tokens, *, response_id: str, created: int) -> None:
        self._ask = ask
        self._tokens = tokens
        kind = "chat.completion" if ask.chat else "text_completion"
        self._kind = kind
        self._head = {"id": response_id, "created": created, "model": ask.model}
        self._offsets: dict[int, int] = {}
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """What comes before and after the text in a chunk of each choice that has no more."""

    # One response -----------------------------------------------------------------------------

    def collect(self) -> Collector:
        return Collector(self._ask)

    def response(self, collected: Collector, prompts: list[U32], usage: Usage) -> bytes:
        """The whole answer. ``prompts`` are the token ids that were asked about."""
        ask = self._ask
        choices: list[dict[str, Any]] = []
        for index, one in enumerate(collected.given):
            prompt = prompts[index // ask.n]
            choices.append(self._choice(index, one, prompt, collected))
        body: dict[str, Any] = {**self._head, "object": self._kind, "choices": choices}
        body["usage"] = usage_json(usage)
        if ask.return_token_ids and ask.chat:
            body["prompt_token_ids"] = prompts[0].tolist()
        return msgspec.json.encode(body)

    def _choice(
        self, index: int, one: _Collected, prompt: U32, collected: Collector
    ) -> dict[str, Any]:
        ask = self._ask
        text = "".join(one.texts)
        found = one.rows
        if ask.echo:
            text = self._tokens.decode(prompt.tolist()) + text
            found = self._prompt_rows(prompt, collected.prompt_scores.get(index // ask.n)) + found
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": one.finish,
            "stop_reason": one.stop_reason,
            "logprobs": self._logprobs(index, found) if ask.logprobs is not None else None,
        }
        if ask.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        if ask.return_token_ids:
            choice["token_ids"] = one.token_ids
            if not ask.chat:
                choice["prompt_token_ids"] = prompt.tolist()
        return choice

    # Chunks -----------------------------------------------------------------------------------

    def opening(self, prompts: list[U32]) -> list[bytes]:
        """What comes before any token: the role of each chat choice, or nothing."""
        if not self._ask.chat:
            return []
        chunks = []
        for index in range(len(prompts) * self._ask.n):
            choice = self._chunk_choice(index, {"role": "assistant", "content": ""}, None)
            extra = {"prompt_token_ids": prompts[0].tolist()} if self._ask.return_token_ids else {}
            chunks.append(self._chunk([choice], **extra))
        return chunks

    def echoed(self, prompt_index: int, prompt: U32, scores: TopLogprobs | None) -> list[bytes]:
        """The prompt itself, for completions with ``echo``: a chunk for each choice."""
        text = self._tokens.decode(prompt.tolist())
        chunks = []
        for index in range(prompt_index * self._ask.n, (prompt_index + 1) * self._ask.n):
            logprobs = None
            if self._ask.logprobs is not None:
                logprobs = self._logprobs(index, self._prompt_rows(prompt, scores))
            chunks.append(self._chunk([self._chunk_choice(index, text, logprobs)]))
        return chunks

    def delivered(self, prompt_index: int, event: Deliver) -> bytes:
        """New tokens of a choice; empty when there is nothing to show yet."""
        shown = len(event.tokens) - event.hidden_count
        scored = event.logprobs is not None and shown > 0
        if not event.text and not scored and not self._ask.return_token_ids:
            return b""
        index = prompt_index * self._ask.n + event.choice
        logprobs = None
        if event.logprobs is None and not self._ask.return_token_ids:
            around = self._around.get(index) or self._text_around(index)
            return around[0] + _encode(event.text) + around[1]
        if event.logprobs is not None:
            logprobs = self._logprobs(index, rows(event.tokens[:shown].tolist(), event.logprobs))
        content: Any = {"content": event.text} if self._ask.chat else event.text
        choice = self._chunk_choice(index, content, logprobs)
        if self._ask.return_token_ids:
            choice["token_ids"] = event.tokens.tolist()
        return self._chunk([choice])

    def _text_around(self, index: int) -> tuple[bytes, bytes]:
        content: Any = {"content": _MARK} if self._ask.chat else _MARK
        whole = self._chunk([self._chunk_choice(index, content, None)])
        before, _, after = whole.rpartition(_encode(_MARK))
        self._around[index] = before, after
        return before, after

    def ended(self, prompt_index: int, event: ChoiceEnded) -> bytes:
        """The last chunk of a choice."""
        index = prompt_index * self._ask.n + event.choice
        content: Any = event.text
        if self._ask.chat:
            content = {"content": event.text} if event.text else {}
        choice = self._chunk_choice(index, content, None)
        choice |= {"finish_reason": event.finish, "stop_reason": event.stop_reason}
        return self._chunk([choice])

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._chunk([], usage=usage_json(usage))

    def _chunk_choice(self, index: int, content: Any, logprobs: Any) -> dict[str, Any]:
        name = "delta" if self._ask.chat else "text"
        return {"index": index, name: content, "logprobs": logprobs, "finish_reason": None}

    def _chunk(self, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        kind = "chat.completion.chunk" if self._ask.chat else self._kind
        body: dict[str, Any] = {**self._head, "object": kind, "choices": choices}
        if self._ask.include_usage:
            body["usage"] = None
        return msgspec.json.encode(body | extra)

    # Log-probabilities ------------------------------------------------------------------------

    def _prompt_rows(self, prompt: U32, scores: TopLogprobs | None) -> list[Row]:
        ids = prompt.tolist()
        if scores is None:
            return []
        return [Row(ids[0], None, ()), *rows(ids[1:], scores)]

    def _logprobs(self, index: int, found: list[Row]) -> dict[str, Any]:
        if self._ask.chat:
            return {"content": [self._chat_row(row) for row in found], "refusal": None}
        names = [self._tokens.token_text(row.token) for row in found]
        offset = self._offsets.get(index, 0)
        offsets = []
        for name in names:
            offsets.append(offset)
            offset += len(name)
        self._offsets[index] = offset
        return {
            "tokens": names,
            "token_logprobs": [row.logprob for row in found],
            "top_logprobs": [self._top_names(row) for row in found],
            "text_offset": offsets,
        }

    def _top_names(self, row: Row) -> dict[str, float] | None:
        """Alternatives by text, with the chosen token among them."""
        if row.logprob is None:
            return None
        top = {self._tokens.token_text(token): value for token, value in reversed(row.top)}
        top.setdefault(self._tokens.token_text(row.token), row.logprob)
        return top

    def _chat_row(self, row: Row) -> dict[str, Any]:
        one = self._chat_token(row.token, row.logprob or 0.0)
        one["top_logprobs"] = [self._chat_token(token, value) for token, value in row.top]
        return one

    def _chat_token(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokens.token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


class Collector:
    """Gathers the events of a call that is answered in one piece."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._choices = [_Collected() for _ in range(len(ask.prompts) * ask.best_of)]
        self.prompt_scores: dict[int, TopLogprobs] = {}

    @property
    def given(self) -> list[_Collected]:
        """``n`` for each prompt. When more were made, those with the highest log-probability a
        token, the best first: the whole of it would prefer answers that say nothing."""
        ask, found = self._ask, self._choices
        if not ask.selects:
            return found
        best: list[_Collected] = []
        for first in range(0, len(found), ask.best_of):
            made = found[first : first + ask.best_of]
            best += sorted(made, key=lambda one: -one.mean_logprob)[: ask.n]
        return best

    def delivered(self, prompt_index: int, event: Deliver) -> None:
        one = self._choices[prompt_index * self._ask.best_of + event.choice]
        one.texts.append(event.text)
        one.token_ids += event.tokens.tolist()
        if event.logprobs is not None:
            chosen = np.frombuffer(event.logprobs.chosen, "<f4")
            one.logprob_sum += float(chosen.sum(dtype=np.float64))
            one.scored_count += len(chosen)
            if self._ask.logprobs is not None:
                shown = len(event.tokens) - event.hidden_count
                one.rows += rows(event.tokens[:shown].tolist(), event.logprobs)

    def ended(self, prompt_index: int, event: ChoiceEnded) -> None:
        one = self._choices[prompt_index * self._ask.best_of + event.choice]
        one.texts.append(event.text)
        one.finish = event.finish
        one.stop_reason = event.stop_reason


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def sse(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"
