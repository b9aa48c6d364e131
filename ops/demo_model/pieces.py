"""Text in weighted pieces: what a document is made of before it becomes tokens."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

FOCUS = 3.0  # a recalled value: the point of the exercise
LEARN = 1.0  # text the model should be able to write
HINT = 0.1  # text that users write: the model should follow it
NOISE = 0.0  # the first occurrence of random values, which cannot be predicted

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"

# The tokenizer splits text by the same expression, and nearly every piece is one token, so counting
# pieces estimates tokens without a tokenizer. Digits go in pairs: a four-digit value is two.
SPLIT_PATTERN = r"'(?:s|t|re|ve|ll|d|m)\b| ?[^\W\d_]+| ?\d{1,2}| ?[^\s\w]| ?_|\s"
_SPLIT = re.compile(rf"{re.escape(IM_START)}|{re.escape(IM_END)}|{SPLIT_PATTERN}")


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text and how much its tokens count in the loss."""

    text: str
    weight: float = LEARN


Document = tuple[Piece, ...]


def count_tokens(text: str) -> int:
    """About how many tokens `text` takes: the number of units that the tokenizer splits it into."""
    return sum(1 for _ in _SPLIT.finditer(text))


def text_of(document: Document) -> str:
    """The document as plain text."""
    return "".join(piece.text for piece in document)


def turn(role: str, content: str) -> Document:
    """One chat turn as the chat template renders it; only the assistant's words have full
    weight."""
    if role == "assistant":
        return (Piece(f"{IM_START}{role}\n", HINT), Piece(f"{content}{IM_END}"), Piece("\n", HINT))
    return (Piece(f"{IM_START}{role}\n{content}{IM_END}\n", HINT),)


def pick(rng: random.Random, options: tuple[str, ...] | list[str]) -> str:
    """One of the options."""
    return options[rng.randrange(len(options))]


def article(word: str) -> str:
    """The word with "a" or "an" before it."""
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"
