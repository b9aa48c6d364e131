"""Remembers the tokens of pieces of chats, so that a next turn tokenises only its new text.

    <|start|>user\\nHello   <|end|>\\n   <|start|>assistant\\n   Each piece begins with a token that
    '------ piece ------' '- piece -' '----- piece -------'   tokenizers cut out of the text first.

Tokenizers find such tokens before anything else sees the text, and each stretch between two of them
is normalised, split and encoded by itself, so the ids of a text are those of its pieces in order. A
piece keeps the token it begins with, since some tokenizers treat the first stretch of a text
differently. ``cuts_of`` knows for which tokenizers and which tokens this holds.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece

from pagemesh.gateway.words.token_bytes import steps_of

MEMORY_BYTES_MAX = 32 << 20
PIECE_COUNT_MAX = 512
"""Texts of more pieces are tokenised whole: looking up each would take longer."""
_CUT_CHARACTERS_MAX = 200
_PIECE_SHARE = 16
"""No piece takes more than ``1 / _PIECE_SHARE`` of the memory."""
_ENTRY_BYTES = 300
"""What Python takes for an entry, besides its text and its ids."""
_STEPS = frozenset({
    "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt",
    "Precompiled", "Prepend", "Replace", "Strip", "StripAccents",
    "BertPreTokenizer", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts",
    "Whitespace", "WhitespaceSplit",
})  # fmt: skip
_MODELS = (BPE, Unigram, WordLevel, WordPiece)


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where a text may be cut: ``found`` matches the tokens that the tokenizer takes out of it
    first, just as it does; ``before`` are those of them that begin a piece."""

    found: re.Pattern[str]
    before: frozenset[str]

    def pieces(self, text: str) -> list[str]:
        """``text`` in pieces; as one if it has no cuts, or too many."""
        starts = [0]
        for match in self.found.finditer(text):
            if match.start() and match[0] in self.before:
                if len(starts) == PIECE_COUNT_MAX:
                    return [text]
                starts.append(match.start())
        starts.append(len(text))
        return [text[start:end] for start, end in pairwise(starts)]


def cuts_of(tokenizer: Tokenizer) -> Cuts | None:
    """Where texts may be cut. None: the tokenizer is not of a kind known to encode the pieces of a
    text as it encodes the whole."""
    model, parts = tokenizer.model, (tokenizer.normalizer, tokenizer.pre_tokenizer)
    steps = {step["type"] for part in parts for step in steps_of(part)}
    if not isinstance(model, _MODELS) or not steps <= _STEPS:
        return None
    if isinstance(model, BPE) and model.dropout:
        return None  # the same text gets other tokens each time
    # Tokens that are matched in normalised text are found within one piece.
    first = [
        token for token in tokenizer.get_added_tokens_decoder().values() if not token.normalized
    ]
    if any(token.single_word for token in first):
        return None  # whether it matches depends on the text around it
    if any(len(token.content) > _CUT_CHARACTERS_MAX for token in first):
        return None
    before = frozenset(
        token.content
        for token in first
        # The others take blanks from the piece before them.
        if not token.lstrip and not token.content[:1].isspace()
    )
    if not before:
        return None
    return Cuts(re.compile(_longest_of(token.content for token in first)), before)


def _longest_of(words: Iterable[str]) -> str:
    """A pattern that matches the longest of ``words`` at a position. Common prefixes are written
    once, so its time does not grow with the number of words."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _pattern(tree)


def _pattern(tree: dict[str, Any]) -> str:
    ways = [re.escape(letter) + _pattern(rest) for letter, rest in tree.items() if letter]
    if not ways:
        return ""
    whole = ways[0] if len(ways) == 1 and "" not in tree else f"(?:{'|'.join(ways)})"
    return f"{whole}?" if "" in tree else whole


class TokenMemory:
    """The ids of the pieces that were used last. Safe to use from threads."""

    def __init__(self, *, bytes_max: int = MEMORY_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._ids: OrderedDict[tuple[bytes, str], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, owner: bytes, piece: str) -> bytes | None:
        """The ids of ``piece``, packed as uint32, if ``owner`` has had it tokenised. Owners share
        nothing: how long an answer takes must not tell one tenant what another has sent."""
        key = (owner, piece)
        with self._lock:
            ids = self._ids.get(key)
            if ids is not None:
                self._ids.move_to_end(key)
            return ids

    def keep(self, owner: bytes, piece: str, ids: bytes) -> None:
        key, size = (owner, piece), _size(piece, ids)
        if size > self._bytes_max // _PIECE_SHARE:
            return
        with self._lock:
            if key in self._ids:
                return  # another thread was faster
            self._ids[key] = ids
            self._bytes += size
            while self._bytes > self._bytes_max:
                (_, oldest), known = self._ids.popitem(last=False)
                self._bytes -= _size(oldest, known)

    def check(self) -> None:
        """Raises ``AssertionError`` when an invariant is broken."""
        with self._lock:
            assert self._bytes == sum(_size(key[1], ids) for key, ids in self._ids.items())
            assert self._bytes <= self._bytes_max


def _size(piece: str, ids: bytes) -> int:
    return sys.getsizeof(piece) + len(ids) + _ENTRY_BYTES
