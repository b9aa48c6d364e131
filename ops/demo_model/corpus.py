"""The training stream: which documents make up which step. Everything follows from the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator

from ops.demo_model import dialogues, recall, stories
from ops.demo_model.pieces import END_OF_TEXT, Document, Piece

TRAIN_SEED = "train"
HELD_OUT_SEED = "held-out"
RECALL_SHARE = 0.6  # of the rows of a batch


def generator(split: str, number: int) -> random.Random:
    """The random generator of one row; each split and number has its own stream."""
    return random.Random(f"pagemesh demo {split} {number}")


def prose(rng: random.Random) -> Document:
    """A plain story or a chat."""
    if rng.random() < 0.3:
        return (Piece(stories.story(rng)), Piece(END_OF_TEXT))
    return dialogues.chat(rng)


def row(rng: random.Random, tokens: int, recall_share: float = RECALL_SHARE) -> Iterator[Document]:
    """Documents for one row of `tokens` tokens: a long recall document or none, then endless prose.

    A recall document fills its row, so that two lists with the same key do not share a context.
    """
    if rng.random() < recall_share:
        size = tokens if rng.random() < 0.7 else rng.randint(tokens // 3, tokens)
        yield recall.recall_document(rng, int(size * 0.95))
    while True:
        yield prose(rng)


def sample_texts(count: int, split: str = TRAIN_SEED) -> Iterator[str]:
    """Plain texts of all kinds, for the tokenizer's training."""
    for number in range(count):
        rng = generator(f"{split} tokenizer", number)
        document = recall.recall_document(rng, 400) if number % 2 else prose(rng)
        yield "".join(piece.text for piece in document)
