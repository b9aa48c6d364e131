"""Streamed text wraps at words, loses nothing, and leaves long words whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some
from rich.cells import cell_len

from pagemesh.cli.word_wrap import WordWrap


def wrapped(text: str, width: int, *cuts: int) -> str:
    """``text`` fed in pieces that end at ``cuts``."""
    wrap = WordWrap(width)
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    starts = [0, *ends[:-1]]
    pieces = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    return "".join(wrap.feed(piece) for piece in pieces) + wrap.end()


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("the quick brown fox", 10, "the quick\nbrown fox"),
        ("the quick brown fox", 9, "the quick\nbrown fox"),
        ("the quick brown fox", 100, "the quick brown fox"),
        ("one\n\ntwo three", 7, "one\n\ntwo\nthree"),
        ("  - item of a list", 10, "  - item\nof a list"),
        ("see https://example.org/a/b/c now", 12, "see\nhttps://example.org/a/b/c\nnow"),
        ("你好世界你好", 5, "你好\n世界\n你好"),
        ("ends in spaces  ", 40, "ends in spaces  "),
        ("", 10, ""),
    ],
)
def test_lines_break_between_words(text: str, width: int, shown: str) -> None:
    assert wrapped(text, width) == shown


@given(some.text("ab \n好", max_size=60), some.integers(1, 12), some.lists(some.integers(0, 60)))
def test_pieces_make_no_difference_and_no_letter_is_lost(
    text: str, width: int, cuts: list[int]
) -> None:
    shown = wrapped(text, width, *cuts)
    assert shown == wrapped(text, width)
    assert shown.split() == text.split() or "好" in text
    assert "".join(shown.split()) == "".join(text.split())


@given(some.lists(some.text("abc", min_size=1, max_size=6), max_size=20), some.integers(7, 30))
def test_no_line_is_wider_than_the_terminal(words: list[str], width: int) -> None:
    assert all(cell_len(line) <= width for line in wrapped(" ".join(words), width).splitlines())


def test_a_word_is_shown_as_soon_as_it_is_known_to_be_whole() -> None:
    wrap = WordWrap(80)
    assert [wrap.feed(piece) for piece in ("Hel", "lo", " wor", "ld", ".\n")] == [
        "", "", "Hello", "", " world.\n",
    ]  # fmt: skip


def test_a_word_longer_than_a_line_comes_as_it_is_made() -> None:
    wrap = WordWrap(4)
    assert [wrap.feed(piece) for piece in ("abcd", "ef", " g ")] == ["abcd", "ef", "\ng"]
