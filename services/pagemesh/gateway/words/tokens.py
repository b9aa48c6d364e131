"""What the gateway needs to turn text into tokens and back: template, tokenizer, end tokens.

Read straight from the model folder's files, so that neither torch nor any model code is loaded
here. The folder must have a ``tokenizer.json``.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pagemesh.gateway.api.scores import Written
from pagemesh.gateway.words.detokenise import WINDOW_KEPT, Detokeniser, StreamText
from pagemesh.gateway.words.stops import StopMatcher
from pagemesh.gateway.words.template_files import template_sources
from pagemesh.gateway.words.templates import ChatTemplate, TemplateRefused
from pagemesh.gateway.words.token_bytes import (
    byte_tokens_of,
    bytes_per_token_max,
    special_tokens_of,
    steps_of,
)
from pagemesh.gateway.words.token_memory import TokenMemory, cuts_of
from pagemesh.runtime.model_folder import read_config, tokenizer_file
from pagemesh.wire.errors import ConfigError
from pagemesh.wire.tokens import U32
from pagemesh.wire.work_messages import ENDS_MAX

# Short texts, as in most requests, are tokenised before another thread would be awake.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
_WRITTEN_MAX = 1 << 15
"""Tokens whose JSON is remembered, at some 300 bytes each."""
_MARK = "THE_MESSAGE_IS_OPEN_HERE "
"""Ends in a blank, which shows whether a template trims what it is given."""
_BLANK = "\u2581"
"""How SentencePiece writes a blank."""
_BY_BYTES = ({"ByteLevel"}, {"ByteLevel", "Fuse"})
"""Steps of decoders whose text is the bytes of the tokens one after the other."""
_END_MAX = 64
"""Tokens at a prompt's end, special ones included, that are searched for the text to continue."""
_ID_MAX = (1 << 32) - 1
_SPECIAL_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip


class Tokens:
    """Tokenizer and template of one model; ``load`` makes it. Safe to use from threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: ChatTemplate | None,
        end_tokens: frozenset[int],
        facts: Mapping[str, str] | None = None,
        tool_template: tuple[ChatTemplate, str] | None = None,
    ) -> None:
        """``tool_template``: another template, and its source, for chats with tools."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self.end_tokens = end_tokens
        """The model's own: any of them ends a choice."""
        self.facts = facts or {}
        """The special tokens by their names, and the ``chat_template``, as the model's files have
        them."""
        self._tool_template = template if tool_template is None else tool_template[0]
        self.tool_source = self.facts.get("chat_template", "")
        """The source of the template for chats with tools."""
        if tool_template is not None:
            self.tool_source = tool_template[1]
        self._byte_level = "ByteLevel" in repr(tokenizer.decoder)
        self._by_bytes = {step["type"] for step in steps_of(tokenizer.decoder)} in _BY_BYTES
        self._byte_tokens = byte_tokens_of(tokenizer)
        self._special = special_tokens_of(tokenizer)
        self._marks_blanks = _BLANK in repr(tokenizer.decoder)
        self.vocab_tokens: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.bytes_per_token_max = bytes_per_token_max(tokenizer, BYTE_LETTERS)
        self._cuts = cuts_of(tokenizer)
        self._adds_tokens = tokenizer.num_special_tokens_to_add(is_pair=False) > 0
        self._memory = TokenMemory()
        self.written = lru_cache(_WRITTEN_MAX)(self._write)
        """Looks up a token as it is shown beside its log-probability (``Written``)."""

    @classmethod
    def load(cls, folder: Path) -> Tokens:
        """Raises ``ConfigError`` naming the file that is missing or broken."""
        path = tokenizer_file(folder)
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{path} cannot be read: {error}"[:500]) from None
        config = _json(folder / "tokenizer_config.json")
        special = _special_tokens(config, _json(folder / "special_tokens_map.json"))
        source, tool_source = template_sources(folder, config)
        try:
            template = ChatTemplate(source, special) if source else None
        except TemplateRefused as error:
            raise ConfigError(f"{folder}: {error}") from None
        ends = _end_tokens(folder, tokenizer, special.get("eos_token", ""))
        if len(ends) > ENDS_MAX:
            raise ConfigError(f"{folder}: names {len(ends)} end tokens; the limit is {ENDS_MAX}")
        facts = special | ({"chat_template": source} if source else {})
        for_tools = None
        with suppress(TemplateRefused):  # chats without tools do not need it
            for_tools = (ChatTemplate(tool_source, special), tool_source) if tool_source else None
        return cls(
            tokenizer, template=template, end_tokens=ends, facts=facts, tool_template=for_tools
        )

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a chat. Raises ``TemplateRefused``.

        ``continue_final_message``: the last message is left open, to be continued.
        """
        template = self._tool_template if extra and extra.get("tools") else self._template
        if template is None:
            raise TemplateRefused("this model has no chat template; use /v1/completions")
        if continue_final_message:
            return self._render_open(template, messages, add_generation_prompt, extra)
        return template.render(messages, add_generation_prompt=add_generation_prompt, extra=extra)

    def _render_open(
        self,
        template: ChatTemplate,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        extra: Mapping[str, Any] | None,
    ) -> str:
        """The prompt up to the end of the last message. A mark appended to that message finds its
        end: the message's own words may occur again in what the template puts behind them, or it
        may be empty. This is how ``transformers`` does it."""
        last = str(messages[-1]["content"])
        marked = [*messages[:-1], {**messages[-1], "content": last + _MARK}]
        text = template.render(marked, add_generation_prompt=add_generation_prompt, extra=extra)
        at = text.rfind(_MARK.strip())
        if at < 0 or last.strip() not in text:
            raise TemplateRefused(
                "the chat template alters or omits the final message, so it cannot be continued"
            )
        kept = text[:at]
        return kept if text.startswith(_MARK, at) else kept.rstrip()  # the template trims content

    def encode(self, text: str, *, add_special_tokens: bool, owner: bytes = b"") -> U32:
        """Token ids: uint32 [tokens]. Time grows with the text; other threads run meanwhile.

        What was tokenised between special tokens for the same ``owner`` is remembered; without an
        ``owner`` nothing is.
        """
        pieces = [text]
        if owner and self._cuts is not None and not (add_special_tokens and self._adds_tokens):
            pieces = self._cuts.pieces(text)
        if len(pieces) == 1:
            return self._encode([text], add_special_tokens=add_special_tokens)[0]
        known = self._known(owner, pieces)
        return np.frombuffer(b"".join([known[piece] or b"" for piece in pieces]), "<u4")

    def remember(self, text: str, *, owner: bytes, characters_max: int) -> None:
        """Tokenise the new pieces of ``text``, for when they come again; pieces of more than
        ``characters_max`` are skipped. Takes as long as ``encode``."""
        pieces = self._cuts.pieces(text) if self._cuts is not None else [text]
        if len(pieces) > 1:
            self._known(owner, [piece for piece in pieces if len(piece) <= characters_max])

    def _known(self, owner: bytes, pieces: list[str]) -> dict[str, bytes | None]:
        known = {piece: self._memory.find(owner, piece) for piece in pieces}
        fresh = [piece for piece, ids in known.items() if ids is None]
        for piece, ids in zip(fresh, self._encode(fresh, add_special_tokens=False), strict=True):
            known[piece] = ids.tobytes()
            self._memory.keep(owner, piece, ids.tobytes())
        return known

    def _encode(self, texts: list[str], *, add_special_tokens: bool) -> list[U32]:
        # ``Tokenizer.encode`` keeps the interpreter lock: megabytes of text stopped all threads.
        try:
            found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust, which no door would catch and answer
            raise RuntimeError(f"the tokenizer failed: {error}") from error
        return [np.asarray(one.ids, "<u4") for one in found]

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def byte_count(self, ids: list[int]) -> int:
        """About how many bytes the text of ``decode`` has. Cheap when ids repeat, as they do in
        long lists."""
        kinds, counts = np.unique(np.asarray(ids, "<u4"), return_counts=True)
        sizes = (len(self.token_bytes(kind)) for kind in kinds.tolist())
        return sum(size * count for size, count in zip(sizes, counts.tolist(), strict=True))

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for."""
        raw = self._tokenizer.id_to_token(token)
        if raw is None:
            return b""
        byte = self._byte_tokens.get(token)
        if byte is not None:
            return bytes([byte])
        if self._byte_level and all(letter in _BYTE_OF for letter in raw):
            return bytes(_BYTE_OF[letter] for letter in raw)
        text = str(raw)
        return (text.replace(_BLANK, " ") if self._marks_blanks else text).encode()

    def special_of(self, texts: Iterable[str]) -> dict[str, int]:
        """Those ``texts`` that are tokens which answers do not show, and which."""
        found = {text: self._tokenizer.token_to_id(text) for text in texts}
        return {text: token for text, token in found.items() if token in self._special}

    def _write(self, token: int) -> Written:
        return Written.of(self.token_bytes(token), is_special=token in self._special)

    def stream(
        self,
        *,
        stops: list[str],
        show_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        after: U32 | None = None,
        shown: frozenset[int] = frozenset(),
    ) -> StreamText:
        """The text of one new choice. ``after``: the tokens that it continues, if it is not a text
        of its own. ``shown``: special tokens that are not skipped."""
        detokeniser = Detokeniser(
            self._tokenizer,
            hidden=self._special - shown if skip_special_tokens else frozenset(),
            by_bytes=self._by_bytes,
            byte_tokens=self._byte_tokens,
            after=() if after is None else self._end_of(after, skip_special_tokens),
        )
        return StreamText(detokeniser, StopMatcher(stops, include=show_stop), min_tokens=min_tokens)

    def _end_of(self, prompt: U32, skip_special_tokens: bool) -> list[int]:
        """The last tokens of ``prompt`` that matter for the text that continues it."""
        end: list[int] = prompt[-_END_MAX:].tolist()
        if skip_special_tokens:
            end = [token for token in end if token not in self._special]
        end = end[-WINDOW_KEPT:]
        if self._by_bytes:
            utf8 = codecs.getincrementaldecoder("utf-8")("replace")
            utf8.decode(b"".join(map(self.token_bytes, end)))
            return end if utf8.getstate()[0] else []
        return end


def _byte_alphabet() -> dict[str, int]:
    """How byte-level BPE writes bytes as letters: printable ones as themselves, the others
    as the letters from 256 on (as published with GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
BYTE_LETTERS = frozenset(_BYTE_OF)


def _json(path: Path) -> dict[str, Any]:
    """The object in ``path``, empty when there is no such file. Raises ``ConfigError``."""
    return read_config(path) if path.is_file() else {}


def _special_tokens(*configs: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens as text; the first config that has one wins."""
    found: dict[str, str] = {}
    for config in configs:
        for name in _SPECIAL_NAMES:
            value = config.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                found.setdefault(name, value)
    return found


def _end_tokens(folder: Path, tokenizer: Tokenizer, eos_token: str) -> frozenset[int]:
    """Every id that the model's files call an end of sequence."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        # Others, which no token can have, would make every request malformed.
        found.update(one for one in ids if type(one) is int and 0 <= one <= _ID_MAX)
    token = tokenizer.token_to_id(eos_token) if eos_token else None
    if token is not None:
        found.add(token)
    return frozenset(found)
