"""What the commands read of a server's answers in OpenAI's format.

Unknown fields are ignored. Most known ones may be null or missing, as some servers leave them.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)
UNDECODABLE = (msgspec.MsgspecError, RecursionError, UnicodeError)
"""What decoding an answer or converting a part of it raises."""


class Model(msgspec.Struct):
    id: str


class Models(msgspec.Struct):
    data: list[Model] | None = None


class Tokenized(msgspec.Struct):
    tokens: list[int]
    cache_roots: list[str] | None = None


class Refusal(msgspec.Struct):
    message: str | None = None
    code: object = None


class Refused(msgspec.Struct):
    error: Refusal


class Delta(msgspec.Struct):
    content: str | None = None


class Choice(msgspec.Struct):
    """Of a chat (``delta``) or of a completion (``text``)."""

    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens


class Timings(msgspec.Struct):
    """Of llama.cpp."""

    cache_n: int | None = None


class Event(msgspec.Struct):
    """One of a stream."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    error: Refusal | str | None = None


def refusal_of(body: bytes) -> Refusal | None:
    """The error that ``body`` tells; None if it tells none."""
    try:
        refusal = msgspec.json.decode(body, type=Refused).error
    except UNDECODABLE:
        return None
    return None if refusal.message is None else refusal
