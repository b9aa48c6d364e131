"""Log-probabilities as OpenAI's JSON, written as they come. Pure.

An answer may hold millions of them. As objects they took two kilobytes a token, and to write
them all at the end of the answer kept everybody else waiting for seconds.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from pagemesh.wire.work_messages import TopLogprobs

LOGPROB_MIN = -9999.0
"""Stands for minus infinity, which JSON does not have."""
_encode = msgspec.json.Encoder().encode


class Written(NamedTuple):
    """One token in JSON."""

    name: bytes
    """Its text, a string."""
    raw: bytes
    """What it stands for."""
    is_special: bool
    opening: bytes
    """Of its object in a chat: what comes before its log-probability."""

    @classmethod
    def of(cls, raw: bytes, *, is_special: bool = False) -> Written:
        """The token that stands for the bytes ``raw``; incomplete characters are replacement
        characters in its text."""
        text = raw.decode("utf-8", "replace")
        name = _encode(text)
        opening = b'{"token":%b,"bytes":%b,"logprob":' % (name, _encode(list(raw)))
        return cls(name, raw, is_special, opening)


class Offsets:
    """Where tokens begin in a text, in characters, as they come. One that ends no character takes
    no room, the one that ends it takes all of it."""

    def __init__(self) -> None:
        self._at = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, raws: Sequence[bytes]) -> list[int]:
        """Of the tokens that come next, which stand for ``raws``."""
        found: list[int] = []
        for raw in raws:
            found.append(self._at)
            self._at += len(self._utf8.decode(raw))
        return found


class Echo:
    """What a prompt's text has of each of its tokens. It may leave out special ones, and the blank
    that SentencePiece puts before a first word."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, token: Written) -> bytes:
        """Of the next one."""
        raw = token.raw
        if token.is_special and not self._text.startswith(raw.decode(errors="replace"), self._at):
            return b""
        if not self._at and raw.startswith(b" ") and not self._text.startswith(" "):
            raw = raw[1:]
        self._at += len(self._utf8.decode(raw))
        return raw


class ChatScores:
    """Those of a chat: an object for each token, its alternatives within. ``written`` looks up
    a token by its id."""

    def __init__(self, written: Callable[[int], Written]) -> None:
        self.size_bytes = 0
        """About what they take in JSON so far."""
        self._written = written
        self._rows: list[bytes] = []

    def add(self, tokens: Sequence[int], scores: TopLogprobs) -> None:
        """Those of ``tokens``, which come next; what ``scores`` has beyond them is left out."""
        written, width = self._written, scores.width
        ids = np.frombuffer(scores.top_tokens, "<u4").tolist()
        tops = [
            written(token).opening + value + b"}"
            for token, value in zip(ids, _numbers(scores.top_values), strict=True)
        ]
        for index, (token, value) in enumerate(zip(tokens, _numbers(scores.chosen), strict=False)):
            top = b",".join(tops[index * width : index * width + width])
            row = b'%b%b,"top_logprobs":[%b]}' % (written(token).opening, value, top)
            self.size_bytes += len(row)
            self._rows.append(row)

    def add_unscored(self, tokens: Sequence[int]) -> None:
        """Tokens whose scores were lost are left out: here a score is a number."""

    def json(self) -> msgspec.Raw:
        return msgspec.Raw(b'{"content":[%b],"refusal":null}' % b",".join(self._rows))


class TextScores:
    """Those of a completion: four lists, whose alternatives go by their text."""

    def __init__(
        self,
        written: Callable[[int], Written],
        *,
        shows_special: bool = False,
        echo: Echo | None = None,
    ) -> None:
        """``shows_special``: special tokens are in the text. ``echo``: these are a prompt's."""
        self.size_bytes = 0
        self._written = written
        self._shows_special = shows_special
        self._echo = echo
        self._names: list[bytes] = []
        self._values: list[bytes] = []
        self._tops: list[bytes] = []
        self._shown: list[bytes] = []
        """What the text has of each token."""

    def add_unscored(self, tokens: Sequence[int]) -> None:
        """The first token of a prompt, which has no score, or those whose scores were lost."""
        for token in tokens:
            self._add(token, b"null", b"null")

    def add(self, tokens: Sequence[int], scores: TopLogprobs) -> None:
        """As ``ChatScores.add``."""
        written, width = self._written, scores.width
        ids = np.frombuffer(scores.top_tokens, "<u4").tolist()
        values = _numbers(scores.top_values)
        for index, (token, value) in enumerate(zip(tokens, _numbers(scores.chosen), strict=False)):
            span = slice(index * width, index * width + width)
            top: dict[bytes, bytes] = {}
            for other, score in zip(ids[span], values[span], strict=True):
                top.setdefault(written(other).name, score)  # of equal texts the likelier one
            top.setdefault(written(token).name, value)
            shown = b",".join([b"%b:%b" % pair for pair in top.items()])
            self._add(token, value, b"{%b}" % shown)

    def followed_by(self, others: TextScores) -> TextScores:
        """These, and those of the tokens that come next."""
        both = copy.copy(self)
        both.size_bytes = self.size_bytes + others.size_bytes
        both._names = self._names + others._names
        both._values = self._values + others._values
        both._tops = self._tops + others._tops
        both._shown = self._shown + others._shown
        return both

    def json(self, offsets: Offsets | None = None) -> msgspec.Raw:
        """``offsets``: of the tokens before; none are before these where there is none."""
        found = (offsets or Offsets()).of(self._shown)
        return msgspec.Raw(
            b'{"tokens":[%b],"token_logprobs":[%b],"top_logprobs":[%b],"text_offset":%b}'
            % (
                b",".join(self._names),
                b",".join(self._values),
                b",".join(self._tops),
                _encode(found),
            )
        )

    def _add(self, token: int, value: bytes, top: bytes) -> None:
        found = self._written(token)
        self.size_bytes += len(found.name) + len(value) + len(top)
        self._names.append(found.name)
        self._values.append(value)
        self._tops.append(top)
        if self._echo is not None:
            self._shown.append(self._echo.of(found))
        else:
            self._shown.append(b"" if found.is_special and not self._shows_special else found.raw)


def new_scores(
    written: Callable[[int], Written], *, chat: bool, shows_special: bool
) -> ChatScores | TextScores:
    """Of a choice."""
    return ChatScores(written) if chat else TextScores(written, shows_special=shows_special)


def _numbers(packed: bytes) -> list[bytes]:
    """Each of packed float32 values in JSON."""
    if not packed:
        return []
    values = np.frombuffer(packed, "<f4").astype(np.float64)
    values[~(values > LOGPROB_MIN)] = LOGPROB_MIN
    return _encode(values.tolist())[1:-1].split(b",")
