"""Tokens as bytes: which stand for a single byte, and how many bytes one can stand for at most.

With that maximum, a text that cannot fit is refused before it is tokenised, which takes seconds for
megabytes. It is given only where it is certain: for byte-pair encoding with a token for every byte,
after steps that drop no text. Other tokenizers may put any amount of text into one token, such as
"unknown".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

_NFC_SHRINK = 4
"""Composing makes at most 7 bytes into 2 (a Greek iota with two marks), and 3 into 1 (the
Kelvin sign)."""


def bytes_per_token_max(tokenizer: Tokenizer, byte_letters: frozenset[str]) -> int | None:
    """UTF-8 bytes of text per token, at most; None when no bound is known.

    ``byte_letters``: how byte-level encoding writes the 256 bytes.
    """
    steps = [*steps_of(tokenizer.normalizer), *steps_of(tokenizer.pre_tokenizer)]
    if not isinstance(tokenizer.model, BPE) or not all(_keeps_text(step) for step in steps):
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None  # it takes in any amount of blanks around it
    vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=False)
    if any(step["type"] == "ByteLevel" for step in steps):
        complete = byte_letters <= vocab.keys()
        sizes = [len(text) if byte_letters.issuperset(text) else _size(text) for text in vocab]
    else:
        fallback = bool(tokenizer.model.byte_fallback)
        complete = fallback and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
        sizes = [_size(text) for text in vocab]
    if not complete:
        return None
    longest = max([*sizes, *(_size(token.content) for token in added)])
    return longest * (_NFC_SHRINK if any(step["type"] == "NFC" for step in steps) else 1)


def special_tokens_of(tokenizer: Tokenizer) -> frozenset[int]:
    """The special tokens, which a text may leave out."""
    added = tokenizer.get_added_tokens_decoder().items()
    return frozenset(number for number, token in added if token.special)


def byte_tokens_of(tokenizer: Tokenizer) -> dict[int, int]:
    """From token to byte, for decoders that turn tokens named ``<0x00>`` to ``<0xFF>`` into bytes
    (``ByteFallback``); empty for others."""
    if "ByteFallback" not in repr(tokenizer.decoder):
        return {}
    names = {f"<0x{byte:{case}}>": byte for byte in range(256) for case in ("02X", "02x")}
    found = {tokenizer.token_to_id(name): byte for name, byte in names.items()}
    return {token: byte for token, byte in found.items() if token is not None}


def steps_of(part: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder, as their configuration."""
    if part is not None:
        yield from _flat(json.loads(part.__getstate__()))


def _flat(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if step["type"] != "Sequence":
        yield step
        return
    for name in ("normalizers", "pretokenizers", "decoders"):
        for inner in step.get(name, ()):
            yield from _flat(inner)


def _keeps_text(step: dict[str, Any]) -> bool:
    """Whether a step's output stands for all of its input, and is not shorter (but for NFC)."""
    match step["type"]:
        case "ByteLevel" | "Digits" | "Metaspace" | "NFC" | "Prepend":
            return True
        case "Split" | "Punctuation":
            return str(step["behavior"]) != "Removed"
        case "Replace":
            pattern = step["pattern"].get("String")
            return pattern is not None and _size(step["content"]) >= _size(pattern)
        case _:
            return False


def _size(text: str) -> int:
    return len(text.encode())
