"""Token ids to text, as they come, in time linear in the output.

Decoding is not additive: a character may be spread over tokens, and a decoder may treat the first
token of its input specially. So a short window of recent tokens is decoded again together with the
new ones, and only the text that these added is returned. A trailing replacement character may still
become a real one and is held back.

With byte fallback, as SentencePiece has it, bytes are tokens of their own. If one of a run of them
belongs to no complete character yet, the decoder turns the whole run into replacement characters.
So such bytes go through a UTF-8 decoder instead, which returns each character once.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Protocol

from pagemesh.gateway.calls.choice import TextPiece
from pagemesh.gateway.words.stops import StopMatcher
from pagemesh.wire.tokens import U32

_REPLACEMENT = "\ufffd"
_UNSTABLE_MAX = 3
"""Trailing replacement characters that may still change: a character has at most four bytes."""
WINDOW_KEPT = 6
_WINDOW_TRIMMED = 16
_WINDOW_MAX = 64
_RUN_MAX = 32
"""Tokens that are decoded at once when it does not matter which of them a text came with."""
NO_BYTES: Mapping[int, int] = MappingProxyType({})


class Decodes(Protocol):
    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str: ...


class Detokeniser:
    """The text of one growing list of tokens. ``close`` gives what is held back."""

    def __init__(
        self,
        tokenizer: Decodes,
        *,
        hidden: frozenset[int] = frozenset(),
        by_bytes: bool = False,
        byte_tokens: Mapping[int, int] = NO_BYTES,
        after: Sequence[int] = (),
    ) -> None:
        """``hidden``: tokens that the text does not show. ``by_bytes``: a text is the bytes of its
        tokens one after the other, so that after a whole character nothing before it has to be
        decoded again. ``byte_tokens``: from token to byte, for tokenizers with byte fallback.
        ``after``: the last tokens of the text to continue, without hidden ones; with ``by_bytes``
        only if they end inside a character."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._by_bytes = by_bytes
        self._byte_tokens = byte_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []
        self._shown = 0
        """Characters of the window's text that were returned."""
        if after:
            self._go_on(list(after))

    def _go_on(self, window: list[int]) -> None:
        """Continue after ``window``, whose text was shown but for an incomplete last character."""
        self._window, self._shown = window, len(self._text(window)) - self._by_bytes
        for one in window:
            if one in self._byte_tokens:
                self._utf8.decode(bytes([self._byte_tokens[one]]))
            else:
                self._utf8.reset()

    def push(self, *tokens: int) -> str:
        """The text that became final with ``tokens``, of which there should be few."""
        if self._hidden:
            tokens = tuple([one for one in tokens if one not in self._hidden])
        if not self._byte_tokens:
            return self._grow(tokens)
        out: list[str] = []
        for are_bytes, group in groupby(tokens, self._byte_tokens.__contains__):
            run = tuple(group)
            if are_bytes:
                out.append(self._utf8.decode(bytes([self._byte_tokens[one] for one in run])))
                if not self._window:  # the next token does not begin the text
                    self._window = [run[-1]]
                    self._shown = len(self._text(self._window))
            elif text := self._grow(run):
                out += [self._utf8.decode(b"", final=True), text]
        return "".join(out)

    def _grow(self, tokens: tuple[int, ...]) -> str:
        self._window += tokens
        text = self._text(self._window)
        if self._by_bytes and not text.endswith(_REPLACEMENT):
            out, self._window, self._shown = text[self._shown :], [], 0
            return out
        stable = self._stable(text)
        out = text[self._shown : stable]
        self._shown = max(self._shown, stable)
        if len(self._window) > _WINDOW_TRIMMED:
            self._trim(text)
        return out

    def _stable(self, text: str) -> int:
        """How many characters of the window's text stay as they are, whatever comes."""
        if self._byte_tokens:
            return len(text)  # incomplete characters are in ``_utf8``
        tail = len(text) - len(text.rstrip(_REPLACEMENT))
        return len(text) - min(tail, _UNSTABLE_MAX)

    def close(self) -> str:
        """The rest, with replacement characters for incomplete ones."""
        text = self._text(self._window)
        out = text[self._shown :] + self._utf8.decode(b"", final=True)
        self._shown = len(text)
        return out

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _trim(self, text: str) -> None:
        """Drop old tokens, at a point from which the rest decodes to the same text."""
        for kept in range(WINDOW_KEPT, WINDOW_KEPT + 4):
            window = self._window[-kept:]
            tail = self._text(window)
            shown = self._shown - (len(text) - len(tail))
            if text.endswith(tail) and shown >= 0:
                self._window, self._shown = window, shown
                return
        if len(self._window) > _WINDOW_MAX:  # only broken characters: some may look different
            self._window = self._window[-WINDOW_KEPT:]
            self._shown = len(self._text(self._window))


class StreamText:
    """The text of one choice: detokenised, searched for stop strings.

    The first ``min_tokens`` tokens are not searched.
    """

    def __init__(self, detokeniser: Detokeniser, stops: StopMatcher, *, min_tokens: int) -> None:
        self._detokeniser = detokeniser
        self._stops = stops
        self._unsearched = min_tokens
        self._stopped = False

    def push(self, tokens: U32) -> TextPiece:
        """Goes token by token if there are stop strings, so that ``used_count`` says which token
        completed one."""
        parts: list[str] = []
        if not self._stops.wanted and len(tokens) <= _RUN_MAX:
            return TextPiece(self._detokeniser.push(*tokens.tolist()), len(tokens))
        ids, used, run_max = tokens.tolist(), 0, 1 if self._stops.wanted else _RUN_MAX
        while used < len(ids):
            run = ids[used : used + run_max]
            used += len(run)
            text = self._detokeniser.push(*run)
            if self._unsearched > 0:
                self._unsearched -= len(run)
                parts.append(text)
                continue
            released = self._stops.push(text)
            parts.append(released.text)
            if released.stop is not None:
                self._stopped = True
                return TextPiece("".join(parts), used, released.stop)
        return TextPiece("".join(parts), used)

    def close(self) -> str:
        if self._stopped:
            return ""
        last = self._stops.push(self._detokeniser.close())
        return last.text if last.stop is not None else last.text + self._stops.close()
