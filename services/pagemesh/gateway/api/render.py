"""Renders the events of requests as OpenAI's JSON: whole responses and stream chunks. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from pagemesh.gateway.api.api_errors import ApiError
from pagemesh.gateway.api.openai_api import Ask
from pagemesh.gateway.api.scores import ChatScores, Echo, Offsets, TextScores, Written, new_scores
from pagemesh.gateway.api.tool_parts import ToolParts
from pagemesh.gateway.calls.events import ChoiceEnded, Deliver
from pagemesh.gateway.calls.spec import Usage
from pagemesh.gateway.words.tokens import Tokens
from pagemesh.wire.tokens import U32
from pagemesh.wire.work_messages import TopLogprobs

ANSWER_BYTES_MAX = 64 << 20
"""The largest answer in one piece; it is kept here until its end."""
SCORE_BYTES = 64
"""About what one log-probability takes in JSON, with its token."""
TOKEN_BYTES = 8
"""About what a token takes, its id or its text."""
DONE = b"data: [DONE]\n\n"
_MARK = "text"
_LINE_ENDS = tuple((one.encode(), b"\\u%04x" % ord(one)) for one in "\x85\u2028\u2029")
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _Collected:
    """One choice of a whole response."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    scores: ChatScores | TextScores | None = None
    finish: Literal["stop", "length"] = "length"
    stop_reason: str | int | None = None
    logprob_sum: float = 0.0
    scored_count: int = 0
    token_count: int = 0

    def score(self, length_penalty: float) -> float:
        """The rank among ``best_of`` choices, computed as for a beam search. Tokens whose scores
        were lost with a worker count as the average of the others; a choice that lost all of them
        ranks last."""
        if not self.token_count:
            return 0.0
        if not self.scored_count:
            return -math.inf
        whole = self.logprob_sum * (self.token_count / self.scored_count)
        weight: float = float(self.token_count) ** length_penalty
        return whole / weight


class Renderer:
    """The JSON of one call. ``response_id`` and ``created`` (seconds since 1970) are made by
    the caller. Choices are numbered prompt by prompt: index = prompt x n + choice."""

    def __init__(self, ask: Ask, tokens: Tokens, *, response_id: str, created: int) -> None:
        self._ask = ask
        self._tokens = tokens
        kind = "chat.completion" if ask.chat else "text_completion"
        self._kind = kind
        self._head = {"id": response_id, "created": created, "model": ask.model}
        self._offsets: dict[int, Offsets] = {}
        self._calls = None if ask.tools is None else ToolParts(ask, tokens, response_id)
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """By choice: what comes before and after the text in a chunk that has nothing but text."""

    # One response -----------------------------------------------------------------------------

    def collect(self, prompts: list[U32], bytes_max: int = ANSWER_BYTES_MAX) -> Collector:
        """An empty collector. Raises ``ApiError`` when ``prompts``, repeated in each choice, are
        too large."""
        made = Collector(self._ask, self._tokens.written, bytes_max)
        if self._ask.echo or self._ask.return_token_ids:
            made.told(sum(map(len, prompts)))
        return made

    def response(self, collected: Collector, prompts: list[U32], usage: Usage) -> bytes:
        """The whole answer. ``prompts`` are the token ids of the prompts."""
        ask = self._ask
        made = collected.given
        choices: list[dict[str, Any]] = []
        for prompt_index, prompt in enumerate(prompts):
            text = self._prompt_text(prompt_index, prompt) if ask.echo else ""
            before = None
            if ask.echo and ask.logprobs is not None:
                told = collected.prompt_scores.get(prompt_index)
                before = self._prompt_scores(text, prompt, told)
            ids = _ids(prompt) if ask.return_token_ids and not ask.chat else None
            first = prompt_index * ask.n
            for index, one in enumerate(made[first : first + ask.n], first):
                choice = self._choice(index, one, text, _scores_of(one, before))
                if ids is not None:
                    choice["prompt_token_ids"] = ids
                choices.append(choice)
        body: dict[str, Any] = {**self._head, "object": self._kind, "choices": choices}
        body["usage"] = usage_json(usage)
        if ask.return_token_ids and ask.chat:
            body["prompt_token_ids"] = _ids(prompts[0])
        return msgspec.json.encode(body)

    def _choice(
        self, index: int, one: _Collected, echoed: str, logprobs: msgspec.Raw | None
    ) -> dict[str, Any]:
        ask = self._ask
        text = echoed + "".join(one.texts)
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": one.finish,
            "stop_reason": one.stop_reason,
            "logprobs": logprobs,
        }
        if self._calls is not None:
            message, finish = self._calls.message(index, text, one.finish)
            choice |= {"finish_reason": finish, "message": message}
        elif ask.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        if ask.return_token_ids:
            choice["token_ids"] = one.token_ids
        return choice

    # Chunks -----------------------------------------------------------------------------------

    def opening(self, prompts: list[U32]) -> list[bytes]:
        """What comes before any token: the role of each chat choice, or nothing."""
        if not self._ask.chat:
            return []
        chunks = []
        extra = {"prompt_token_ids": _ids(prompts[0])} if self._ask.return_token_ids else {}
        # An answer that is calls alone has no content, as OpenAI has it.
        first = {"role": "assistant", "content": "" if self._ask.tools is None else None}
        for index in range(len(prompts) * self._ask.n):
            choice = self._chunk_choice(index, first, None)
            chunks.append(self._chunk([choice], **extra))
        return chunks

    def echoed(self, prompt_index: int, prompt: U32, scores: TopLogprobs | None) -> list[bytes]:
        """The prompt itself, for completions with ``echo``: a chunk for each choice."""
        text = self._prompt_text(prompt_index, prompt)
        asked = self._ask.logprobs is not None
        found = self._prompt_scores(text, prompt, scores) if asked else None
        chunks = []
        for index in range(prompt_index * self._ask.n, (prompt_index + 1) * self._ask.n):
            logprobs = None if found is None else self._next_scores(index, found)
            chunks.append(self._chunk([self._chunk_choice(index, text, logprobs)]))
        return chunks

    def delivered(self, prompt_index: int, event: Deliver) -> bytes:
        """New tokens of a choice; empty when there is nothing to show yet."""
        # Tokens whose scores were lost have null in completions; chats leave them out.
        is_scored = (event if self._ask.chat else self._ask).logprobs is not None
        shown = len(event.tokens) - event.hidden_count
        index = prompt_index * self._ask.n + event.choice
        content: Any = event.text
        if self._calls is not None:
            content = self._calls.delta(index, event.text)
        if not content and not (is_scored and shown) and not self._ask.return_token_ids:
            return b""
        if not is_scored and not self._ask.return_token_ids and self._calls is None:
            around = self._around.get(index) or self._text_around(index)
            return around[0] + _encode(event.text) + around[1]
        logprobs = None
        if is_scored:
            found = new_scores(
                self._tokens.written,
                chat=self._ask.chat,
                shows_special=not self._ask.skip_special_tokens,
            )
            _add_scores(found, event)
            logprobs = self._next_scores(index, found)
        if self._ask.chat and self._calls is None:
            content = {"content": content}
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
        finish: str = event.finish
        if self._calls is not None:
            content, finish = self._calls.last_delta(index, event.text, event.finish)
        elif self._ask.chat:
            content = {"content": event.text} if event.text else {}
        choice = self._chunk_choice(index, content, None)
        choice |= {"finish_reason": finish, "stop_reason": event.stop_reason}
        return self._chunk([choice])

    def chunks_of(self, prompt_index: int, event: Deliver | ChoiceEnded) -> list[bytes]:
        """The chunks of ``event``; none when there is nothing to show yet."""
        if isinstance(event, ChoiceEnded):
            return [self.ended(prompt_index, event)]
        chunk = self.delivered(prompt_index, event)
        return [chunk] if chunk else []

    @property
    def kept_bytes(self) -> int:
        """About what ``last`` encodes of what was shown before."""
        return 0

    def last(self, usage: Usage) -> list[bytes]:
        """The chunks after those of all choices."""
        return [self.usage_chunk(usage)] if self._ask.include_usage else []

    def failed(self, error: ApiError) -> list[bytes]:
        """The chunks that end a stream in place of the rest of the answer."""
        return [error.body()]

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

    def _prompt_text(self, prompt_index: int, prompt: U32) -> str:
        """The prompt as it was given; token ids are decoded as they would be in an answer."""
        given = self._ask.prompts[prompt_index]
        if isinstance(given, str):
            return given
        skip = self._ask.skip_special_tokens
        stream = self._tokens.stream(stops=[], skip_special_tokens=skip)
        text = stream.push(prompt).text + stream.close()
        # If the prompt ends inside a character, that belongs to the answer, which begins with it.
        again = self._tokens.stream(stops=[], skip_special_tokens=skip, after=prompt).close()
        return text.removesuffix(again)

    # Log-probabilities ------------------------------------------------------------------------

    def _prompt_scores(self, text: str, prompt: U32, scores: TopLogprobs | None) -> TextScores:
        ids, found = prompt.tolist(), TextScores(self._tokens.written, echo=Echo(text))
        if scores is not None:
            found.add_unscored(ids[:1])
            found.add(ids[1:], scores)
        return found

    def _next_scores(self, index: int, found: ChatScores | TextScores) -> msgspec.Raw:
        """The log-probabilities of a choice's next chunk; text offsets go on from the last one."""
        if isinstance(found, ChatScores):
            return found.json()
        return found.json(self._offsets.setdefault(index, Offsets()))


class Collector:
    """Gathers the events of a call that is answered in one piece."""

    def __init__(
        self, ask: Ask, written: Callable[[int], Written], bytes_max: int = ANSWER_BYTES_MAX
    ) -> None:
        self._ask = ask
        self._bytes_max = bytes_max
        self._choices = [_Collected() for _ in range(len(ask.prompts) * ask.best_of)]
        if ask.logprobs is not None:
            for one in self._choices:
                one.scores = new_scores(
                    written, chat=ask.chat, shows_special=not ask.skip_special_tokens
                )
        self.prompt_scores: dict[int, TopLogprobs] = {}
        self.size_bytes = 0
        """About what the answer takes in JSON so far."""

    @property
    def given(self) -> list[_Collected]:
        """``n`` choices for each prompt; if more were generated, those with the highest scores, the
        best first."""
        ask, found = self._ask, self._choices
        if not ask.selects:
            return found
        best: list[_Collected] = []
        for first in range(0, len(found), ask.best_of):
            made = found[first : first + ask.best_of]
            best += sorted(made, key=lambda one: -one.score(ask.length_penalty))[: ask.n]
        return best

    def delivered(self, prompt_index: int, event: Deliver) -> None:
        """Raises ``ApiError`` when the answer becomes too large to be kept."""
        one = self._choices[prompt_index * self._ask.best_of + event.choice]
        one.texts.append(event.text)
        one.token_count += len(event.tokens)
        self._grown(len(event.text))
        if self._ask.return_token_ids:
            one.token_ids += event.tokens.tolist()
            self._grown(TOKEN_BYTES * len(event.tokens))
        if event.logprobs is not None:
            chosen = np.frombuffer(event.logprobs.chosen, "<f4")
            one.logprob_sum += float(chosen.sum(dtype=np.float64))
            one.scored_count += len(chosen)
        if one.scores is not None:
            before_bytes = one.scores.size_bytes
            _add_scores(one.scores, event)
            self._grown(one.scores.size_bytes - before_bytes)

    def told(self, prompt_tokens: int) -> None:
        """Count ``prompt_tokens``, which are repeated in every choice. Raises ``ApiError`` as
        ``delivered`` does."""
        self._grown(TOKEN_BYTES * prompt_tokens * self._ask.n)

    def scored(self, prompt_index: int, scores: TopLogprobs) -> None:
        """Keep a prompt's log-probabilities. Raises ``ApiError`` as ``delivered`` does."""
        self.prompt_scores[prompt_index] = scores
        value_count = len(scores.chosen + scores.top_values) // 4
        self._grown(SCORE_BYTES * value_count * self._ask.n)

    def _grown(self, by_bytes: int) -> None:
        self.size_bytes += by_bytes
        if self.size_bytes > self._bytes_max:
            raise too_large(self._bytes_max)

    def ended(self, prompt_index: int, event: ChoiceEnded) -> None:
        one = self._choices[prompt_index * self._ask.best_of + event.choice]
        one.texts.append(event.text)
        one.finish = event.finish
        one.stop_reason = event.stop_reason


def _add_scores(scores: ChatScores | TextScores, event: Deliver) -> None:
    """Add the scores of the tokens that are shown, or note that they were lost."""
    tokens = event.tokens[: len(event.tokens) - event.hidden_count].tolist()
    if event.logprobs is None:
        scores.add_unscored(tokens)
    else:
        scores.add(tokens, event.logprobs)


def _scores_of(one: _Collected, prompt_scores: TextScores | None) -> msgspec.Raw | None:
    if prompt_scores is not None and isinstance(one.scores, TextScores):
        return prompt_scores.followed_by(one.scores).json()
    return None if one.scores is None else one.scores.json()


def too_large(bytes_max: int) -> ApiError:
    """The error for an answer of more than ``bytes_max``."""
    text = (
        f"the answer exceeds {bytes_max} bytes: ask for a stream, or for fewer choices, tokens or "
        "log-probabilities"
    )
    return ApiError(400, text, code="answer_too_large")


def _ids(tokens: U32) -> msgspec.Raw:
    return msgspec.Raw(_encode(tokens.tolist()))


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def sse(data: bytes) -> bytes:
    """One server-sent event. Characters that some clients (httpx) take for line ends are escaped;
    in JSON they can only occur inside strings."""
    for raw, escaped in _LINE_ENDS:
        if raw in data:
            data = data.replace(raw, escaped)
    return b"data: " + data + b"\n\n"
