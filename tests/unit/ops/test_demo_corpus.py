"""The demo model's corpus: the seed decides everything, and recall can always be answered."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from ops.demo_model import corpus, recall
from ops.demo_model.pieces import (
    FOCUS,
    HINT,
    IM_END,
    IM_START,
    LEARN,
    NOISE,
    Document,
    count_tokens,
    text_of,
)

KINDS = [recall.chat_document, recall.line_document]


def row_text(split: str, number: int) -> str:
    documents = itertools.islice(corpus.row(corpus.generator(split, number), 512), 3)
    return "".join(text_of(document) for document in documents)


def test_the_same_seed_gives_the_same_row() -> None:
    assert row_text(corpus.TRAIN_SEED, 7) == row_text(corpus.TRAIN_SEED, 7)


def test_training_and_held_out_rows_differ() -> None:
    train = {row_text(corpus.TRAIN_SEED, number) for number in range(20)}
    held_out = {row_text(corpus.HELD_OUT_SEED, number) for number in range(20)}
    assert len(train) == len(held_out) == 20
    assert not train & held_out


@pytest.mark.parametrize("gap", [150, 250, 500, 1000])
def test_a_probe_asks_for_a_line_as_far_back_as_it_says(gap: int) -> None:
    for number in range(20):
        asked = recall.probe(corpus.generator("test", number), gap)
        _, _, after = asked.prompt.partition(f"\n{asked.line}")
        assert count_tokens(after) == asked.gap_tokens
        assert gap <= asked.gap_tokens < gap + 150


def test_a_probe_can_be_answered_from_one_line_only() -> None:
    for number in range(50):
        asked = recall.probe(corpus.generator("test", number), 300)
        key, value = asked.line.split(": ")
        lines = [line.removesuffix(IM_END) for line in asked.prompt.splitlines()]
        assert [line for line in lines if line.startswith(f"{key}: ")] == [asked.line]
        assert asked.prompt.endswith(f"{key}?{IM_END}\n{IM_START}assistant\n")
        assert asked.answer == f"{key}: {value}"


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("tokens", [200, 500, 2000])
def test_a_recall_document_has_about_the_size_it_was_asked_for(
    make: Callable[[random.Random, int], Document], tokens: int
) -> None:
    sizes = [count_tokens(text_of(make(random.Random(n), tokens))) for n in range(10)]
    assert all(0.6 * tokens <= size <= 1.2 * tokens + 150 for size in sizes)


def test_values_at_first_sight_do_not_count_in_the_loss() -> None:
    document = recall.line_document(random.Random(3), 120)
    values = [piece for piece in document if piece.text.startswith(" ")]
    listed, asked = values[:3], values[-3:]
    assert {piece.weight for piece in listed} == {NOISE}
    assert {piece.weight for piece in asked} == {FOCUS}


def test_a_users_words_count_little() -> None:
    document = recall.chat_document(random.Random(5), 300)
    assert {piece.weight for piece in document} == {NOISE, HINT, LEARN, FOCUS}
    for piece in document:
        if piece.text.startswith(f"{IM_START}user"):
            assert piece.weight == HINT
