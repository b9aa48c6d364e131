"""Text from tokens: stop strings and detokenising, whatever pieces they come in."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.gateway.support import END, byte_tokenizer
from tokenizers import Tokenizer, decoders, models

from pagemesh.gateway.words.detokenise import Detokeniser, StreamText
from pagemesh.gateway.words.stops import StopMatcher
from pagemesh.gateway.words.token_bytes import byte_tokens_of, special_tokens_of
from pagemesh.gateway.words.tokens import Tokens

TOKENIZER = byte_tokenizer()
SPECIAL, NOTHING = special_tokens_of(TOKENIZER), frozenset[int]()
SIZE = TOKENIZER.get_vocab_size(with_added_tokens=True)
letters = st.text("ab", max_size=40)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


def _id(token: str) -> int:
    found = TOKENIZER.token_to_id(token)
    assert found is not None
    return found


def cut(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """What is shown of ``text``, looked at as a whole, and the stop that ended it."""
    ends = [(start + len(stop), start, stop) for stop in stops if (start := text.find(stop)) >= 0]
    if not ends:
        return text, None
    end, start, stop = min(ends)
    return text[: end if include else start], stop


@settings(max_examples=500, deadline=None)
@given(letters, stop_lists, st.lists(st.integers(0, 40), max_size=6), st.booleans())
def test_stop_strings_end_the_text_in_the_same_place_however_it_is_split(
    text: str, stops: list[str], borders: list[int], include: bool
) -> None:
    matcher = StopMatcher(stops, include=include)
    at = sorted({min(border, len(text)) for border in borders} | {0, len(text)})
    shown, found = "", None
    for first, last in itertools.pairwise(at):
        released = matcher.push(text[first:last])
        shown += released.text
        found = released.stop
        if found is not None:
            break
    if found is None:
        shown += matcher.close()
    assert (shown, found) == cut(text, stops, include=include)


def test_nothing_is_held_back_that_no_stop_string_begins_with() -> None:
    matcher = StopMatcher(["xyz"])
    assert matcher.push("abcx").text == "abc"
    assert matcher.held == "x"
    assert matcher.push("y").text == ""
    assert matcher.push("!").text == "xy!"


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.integers(0, SIZE - 1), max_size=120), st.booleans(), st.integers(1, 40),
    st.booleans(),
)  # fmt: skip
def test_streamed_text_equals_the_text_of_all_tokens_however_many_come_at_once(
    ids: list[int], skip: bool, run: int, by_bytes: bool
) -> None:
    detokeniser = Detokeniser(TOKENIZER, hidden=SPECIAL if skip else NOTHING, by_bytes=by_bytes)
    runs = [ids[first : first + run] for first in range(0, len(ids), run)]
    streamed = "".join([detokeniser.push(*one) for one in runs]) + detokeniser.close()
    assert streamed == TOKENIZER.decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=60))
def test_streamed_text_of_real_text_comes_as_soon_as_its_characters_are_whole(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    detokeniser, said = Detokeniser(TOKENIZER), ""
    for count, one in enumerate(ids, 1):
        said += detokeniser.push(one)
        assert said.rstrip("\ufffd") == TOKENIZER.decode(ids[:count]).rstrip("\ufffd")
    assert said + detokeniser.close() == text


WORDS = ("<unk>", "\u2581hello", "\u2581world", "!", "is", "\u2581", "\u65e5\u672c")
BYTES_FROM = len(WORDS)
END_MARK = BYTES_FROM + 256


def piece_tokenizer(*, strip: bool = True) -> Tokenizer:
    """As SentencePiece has it: blanks belong to words, and bytes are tokens."""
    vocab = {word: number for number, word in enumerate(WORDS)}
    vocab |= {f"<0x{byte:02X}>": BYTES_FROM + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


PIECES = piece_tokenizer()
FUSED = byte_tokenizer()
FUSED.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])


def as_bytes(text: str) -> list[int]:
    return [BYTES_FROM + byte for byte in text.encode()]


def words_of(ids: list[int]) -> bytes:
    """What tokens stand for, one by one."""
    raw = b"".join(
        bytes([one - BYTES_FROM]) if BYTES_FROM <= one < END_MARK else
        b"" if one == END_MARK else WORDS[one].replace("\u2581", " ").encode()
        for one in ids
    )  # fmt: skip
    return raw


def stream(tokens: Tokens, runs: list[list[int]], **how: Any) -> tuple[str, str | None]:
    text = tokens.stream(**{"stops": [], **how})
    said = ""
    for run in runs:
        piece = text.push(np.asarray(run, "<u4"))
        said += piece.text
        if piece.stop is not None:
            return said, piece.stop
    return said + text.close(), None


def tokens_of(tokenizer: Tokenizer) -> Tokens:
    return Tokens(tokenizer, template=None, end_tokens=frozenset())


def test_sentence_piece_spaces_are_kept() -> None:
    ids = [1, 2, 3, *as_bytes("\u20ac")] * 20
    said, _ = stream(tokens_of(PIECES), [[one] for one in ids])
    assert said == PIECES.decode(ids)
    assert said.startswith("hello world!\u20ac hello")


parts = st.one_of(
    st.sampled_from([[word] for word in range(1, len(WORDS))]),
    st.just([END_MARK]),
    st.text(st.characters(codec="utf-8", exclude_characters=" "), max_size=3).map(
        as_bytes
    ),  # no blank is a byte
)


@settings(max_examples=1000, deadline=None)
@given(st.lists(parts, max_size=12), st.integers(1, 12), st.booleans())
def test_characters_that_are_bytes_are_shown_once_however_they_come(
    given_parts: list[list[int]], run: int, strip: bool
) -> None:
    tokenizer = piece_tokenizer(strip=strip)
    ids = [one for part in given_parts for one in part]
    runs = [ids[first : first + run] for first in range(0, len(ids), run)]
    said, _ = stream(tokens_of(tokenizer), runs)
    assert said == tokenizer.decode(ids)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.one_of(st.integers(0, END_MARK), st.sampled_from(as_bytes("\u20ac"))), max_size=120
    ),
    st.integers(1, 40),
)
def test_broken_characters_that_are_bytes_take_nothing_whole_with_them(
    ids: list[int], run: int
) -> None:
    """The decoder of the library gives up all bytes beside a broken one."""
    runs = [ids[first : first + run] for first in range(0, len(ids), run)]
    said, _ = stream(tokens_of(piece_tokenizer(strip=False)), runs)
    assert said == words_of(ids).decode(errors="replace")


def test_a_stop_string_is_found_among_bytes() -> None:
    ids = as_bytes("\u65e5\u672c\u8a9e\u3067")
    for run in (1, 2, len(ids)):
        runs = [ids[first : first + run] for first in range(0, len(ids), run)]
        said = stream(tokens_of(PIECES), runs, stops=["\u8a9e"])
        assert said == ("\u65e5\u672c", "\u8a9e")


def test_tokens_of_bytes_may_be_called_so_in_small_letters() -> None:
    vocab = {f"<0x{byte:02x}>": byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.ByteFallback()
    assert byte_tokens_of(tokenizer) == {byte: byte for byte in range(256)}


@settings(deadline=None)
@given(
    st.lists(st.integers(1, END_MARK), min_size=1, max_size=20),
    st.lists(st.integers(1, 5), max_size=20), st.integers(1, 9),
)  # fmt: skip
def test_a_text_that_goes_on_from_another_is_its_rest(
    prompt: list[int], ids: list[int], run: int
) -> None:
    runs = [ids[first : first + run] for first in range(0, len(ids), run)]
    said, _ = stream(tokens_of(PIECES), runs, after=np.asarray([1, *prompt, 2], "<u4"))
    assert PIECES.decode([1, *prompt, 2]) + said == PIECES.decode([1, *prompt, 2, *ids])


def test_a_text_of_its_own_begins_without_a_blank_and_one_that_goes_on_with_it() -> None:
    tokens = tokens_of(PIECES)
    assert stream(tokens, [[2], [3]]) == ("world!", None)
    assert stream(tokens, [[2], [3]], after=np.asarray([1], "<u4")) == (" world!", None)
    assert stream(tokens, [[5, 4]], stops=[" is"], after=np.asarray([1], "<u4")) == ("", " is")


def test_a_character_that_a_prompt_ends_in_the_middle_of_is_shown_whole() -> None:
    ids = as_bytes("\U0001f600")
    after = np.asarray([1, *ids[:2]], "<u4")
    assert stream(tokens_of(PIECES), [[one] for one in ids[2:]], after=after) == (
        "\U0001f600",
        None,
    )
    whole = TOKENIZER.encode("so \U0001f600").ids
    for cut_at in range(1, len(whole) - 1):
        after = np.asarray(whole[:cut_at], "<u4")
        said, _ = stream(tokens_of(TOKENIZER), [[one] for one in whole[cut_at:]], after=after)
        assert said == "so \U0001f600"[len(TOKENIZER.decode(whole[:cut_at]).rstrip("\ufffd")) :]
        assert stream(tokens_of(FUSED), [whole[cut_at:]], after=after) == (said, None)


def test_a_broken_character_that_a_prompt_ends_in_is_not_said_again() -> None:
    for tokenizer in (TOKENIZER, PIECES):
        tokens = tokens_of(tokenizer)
        ends = [
            tokens.encode("x\ufffd\ufffd", add_special_tokens=False),
            np.asarray([1, *as_bytes("\ufffd")], "<u4"),
        ]
        word = [3] if tokenizer is PIECES else [_id("the")]
        after = ends[tokenizer is PIECES]
        assert stream(tokens, [word], after=after) == (tokenizer.decode(word), None)


def test_special_tokens_that_end_a_prompt_are_looked_through() -> None:
    after = np.asarray([1, *[END_MARK] * 9], "<u4")
    assert stream(tokens_of(PIECES), [[2]], after=after) == (" world", None)


def test_a_special_token_that_is_not_shown_parts_no_character() -> None:
    first, *rest = as_bytes("\u20ac")
    assert stream(tokens_of(PIECES), [[first], [END_MARK], rest]) == ("\u20ac", None)


class Counting:
    """Counts the tokens that are decoded."""

    decoded = 0

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        self.decoded += len(ids)
        text: str = TOKENIZER.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


def test_an_answer_that_comes_whole_is_decoded_in_long_runs() -> None:
    counting, ids = Counting(), TOKENIZER.encode("wörds and more " * 300).ids
    text = StreamText(Detokeniser(counting), StopMatcher([]), min_tokens=9)
    piece = text.push(np.asarray(ids, "<u4"))
    assert (piece.text + text.close(), piece.used_count) == ("wörds and more " * 300, len(ids))
    assert counting.decoded < 2 * len(ids)


def test_whole_characters_are_decoded_once_where_texts_are_bytes() -> None:
    counting, ids = Counting(), TOKENIZER.encode("more words " * 300).ids
    detokeniser = Detokeniser(counting, by_bytes=True)
    assert "".join(detokeniser.push(one) for one in ids) == "more words " * 300
    assert counting.decoded == len(ids)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(0, SIZE - 1), max_size=80), st.booleans())
def test_pieces_are_the_same_whether_or_not_texts_are_known_to_be_bytes(
    ids: list[int], skip: bool
) -> None:
    windowed = Detokeniser(TOKENIZER, hidden=SPECIAL if skip else NOTHING)
    by_bytes = Detokeniser(TOKENIZER, hidden=SPECIAL if skip else NOTHING, by_bytes=True)
    assert [by_bytes.push(one) for one in ids] == [windowed.push(one) for one in ids]
    assert by_bytes.close() == windowed.close()


def test_work_for_a_token_does_not_grow_with_the_output() -> None:
    debris = [_id("\u0122")] * 4_000  # the byte 0x80, again and again
    for ids in (TOKENIZER.encode("wörds and more " * 300).ids, debris):
        counting = Counting()
        detokeniser = Detokeniser(counting)
        for one in ids:
            detokeniser.push(one)
        assert counting.decoded < 80 * len(ids)


@pytest.mark.parametrize(("include", "shown"), [(False, "one "), (True, "one two")])
def test_the_token_that_completes_a_stop_string_is_the_last_that_counts(
    include: bool, shown: str
) -> None:
    ids = np.asarray(TOKENIZER.encode("one two three").ids, "<u4")
    stops = StopMatcher(["two"], include=include)
    text = StreamText(Detokeniser(TOKENIZER), stops, min_tokens=0)
    piece = text.push(ids)
    assert (piece.text + text.close(), piece.used_count, piece.stop) == (shown, 7, "two")


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens() -> None:
    ids = np.asarray(TOKENIZER.encode("two one two").ids, "<u4")
    text = StreamText(Detokeniser(TOKENIZER), StopMatcher(["two"]), min_tokens=5)
    piece = text.push(ids)
    assert (piece.text, piece.stop) == ("two one ", "two")


def test_special_tokens_are_text_only_for_who_wants_them() -> None:
    ids = [*TOKENIZER.encode("a").ids, _id(END)]
    for skip, expected in ((True, "a"), (False, "a" + END)):
        detokeniser = Detokeniser(TOKENIZER, hidden=SPECIAL if skip else NOTHING)
        assert "".join(map(detokeniser.push, ids)) + detokeniser.close() == expected
