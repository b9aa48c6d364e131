"""Log-probabilities as OpenAI's JSON, encoded as they come. Pure.

An answer may hold millions of them. As objects they took two kilobytes a token, and encoding them
all at the end of the answer blocked every other request for seconds.
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
    """The bytes that it stands for."""
    is_special: bool
    opening: bytes
    """Its object in a chat, up to its log-probability."""

    @classmethod
    def of(cls, raw: bytes, *, is_special: bool = False) -> Written:
        """The token that stands for the bytes ``raw``; incomplete characters are replacement
        characters in its text."""
        text = raw.decode("utf-8", "replace")
        name = _encode(text)
        opening = b'{"token":%b,"bytes":%b,"logprob":' % (name, _encode(list(raw)))
        return cls(name, raw, is_special, opening)


class Offsets:
    """The character offsets at which successive tokens begin in a text. A token that completes no
    character takes no room; the one that completes it takes all of it."""

    def __init__(self) -> None:
        self._at = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, raws: Sequence[bytes]) -> list[int]:
        """The offsets of the next tokens, which stand for ``raws``."""
        found: list[int] = []
        for raw in raws:
            found.append(self._at)
            self._at += len(self._utf8.decode(raw))
        return found


class Echo:
    """Which part of an echoed prompt's text each of its tokens stands for. The text may lack
    special tokens, and the blank that SentencePiece puts before the first word of a stretch: of the
    text, or of what follows a special token."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_open = True
        """Only blanks of this stretch have come so far."""

    def of(self, token: Written) -> bytes:
        """The bytes of the next token that are in the text."""
        raw = token.raw
        if token.is_special:
            self._is_open = True
            if not self._text.startswith(raw.decode(errors="replace"), self._at):
                return b""
        elif self._is_open:
            if _blanks(raw) > _blanks(self._text[self._at : self._at + len(raw)].encode()):
                raw = raw[1:]
            self._is_open = not raw.strip(b" ")
        self._at += len(self._utf8.decode(raw))
        return raw


def _blanks(text: bytes) -> int:
    return len(text) - len(text.lstrip(b" "))


class ChatScores:
    """Log-probabilities of a chat: an object for each token, with its alternatives inside.
    ``written`` looks up a token by its id."""

    def __init__(self, written: Callable[[int], Written]) -> None:
        self.size_bytes = 0
        """About what they take in JSON so far."""
        self._written = written
        self._rows: list[bytes] = []

    def add(self, tokens: Sequence[int], scores: TopLogprobs) -> None:
        """Add the next ``tokens``; what ``scores`` has beyond them is left out."""
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
        """Leave out tokens whose scores were lost: in a chat a score has to be a number."""

    @property
    def rows(self) -> list[bytes]:
        """The objects in JSON."""
        return self._rows

    def json(self) -> msgspec.Raw:
        return msgspec.Raw(b'{"content":[%b],"refusal":null}' % b",".join(self._rows))


class TextScores:
    """Log-probabilities of a completion: four parallel lists; alternatives go by their text."""

    def __init__(
        self,
        written: Callable[[int], Written],
        *,
        shows_special: bool = False,
        echo: Echo | None = None,
    ) -> None:
        """``shows_special``: special tokens are in the text. ``echo``: for the tokens of a
        prompt."""
        self.size_bytes = 0
        self._written = written
        self._shows_special = shows_special
        self._echo = echo
        self._names: list[bytes] = []
        self._values: list[bytes] = []
        self._tops: list[bytes] = []
        self._shown: list[bytes] = []
        """The bytes of each token that are in the text."""

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
                top.setdefault(written(other).name, score)  # the likelier one of equal texts
            top.setdefault(written(token).name, value)
            shown = b",".join([b"%b:%b" % pair for pair in top.items()])
            self._add(token, value, b"{%b}" % shown)

    def followed_by(self, others: TextScores) -> TextScores:
        """A copy of these, followed by ``others``: those of the next tokens."""
        both = copy.copy(self)
        both.size_bytes = self.size_bytes + others.size_bytes
        both._names = self._names + others._names
        both._values = self._values + others._values
        both._tops = self._tops + others._tops
        both._shown = self._shown + others._shown
        return both

    def json(self, offsets: Offsets | None = None) -> msgspec.Raw:
        """``offsets`` goes on from the tokens before these; None: these are the first."""
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
    """The collection for one choice, empty."""
    return ChatScores(written) if chat else TextScores(written, shows_special=shows_special)


def _numbers(packed: bytes) -> list[bytes]:
    """Packed float32 values, each as JSON."""
    if not packed:
        return []
    values = np.frombuffer(packed, "<f4").astype(np.float64)
    values[~(values > LOGPROB_MIN)] = LOGPROB_MIN
    return _encode(values.tolist())[1:-1].split(b",")
