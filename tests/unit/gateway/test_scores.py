"""Log-probabilities in JSON: as anybody would encode them, and as they come."""

from __future__ import annotations

import codecs
import json
import random
from typing import Any

import msgspec
import numpy as np
import pytest

from pagemesh.gateway.api.scores import LOGPROB_MIN, ChatScores, Echo, Offsets, TextScores, Written
from pagemesh.wire.work_messages import TopLogprobs

RAW = [b"a", b"the", b' "quoted"\n', b"\xf0\x9f\x98", "\u00e9".encode(), b"", b"a", b"\\", b"\x00"]
"""Bytes by token: one is half a character, two are the same text."""


def written(token: int) -> Written:
    return Written.of(RAW[token])


def text_of(token: int) -> str:
    return RAW[token].decode("utf-8", "replace")


def made_up(count: int, width: int, seed: int) -> tuple[list[int], list[float], Any, Any]:
    """Tokens, their values, and ``width`` alternatives of each with theirs."""
    draw = random.Random(seed)

    def values(size: int) -> list[float]:
        choices = [0.0, -1e-30, -0.1, -12.5, -9999.0, -1e30, float("-inf"), float("nan")]
        return [float(np.float32(draw.choice(choices))) for _ in range(size)]

    tokens = [draw.randrange(len(RAW)) for _ in range(count)]
    tops = [[draw.randrange(len(RAW)) for _ in range(width)] for _ in range(count)]
    return tokens, values(count), tops, [values(width) for _ in range(count)]


def packed(chosen: list[float], tops: Any, top_values: Any, width: int) -> TopLogprobs:
    return TopLogprobs(
        chosen=np.array(chosen, "<f4").tobytes(),
        width=width,
        top_tokens=np.array(tops, "<u4").tobytes(),
        top_values=np.array(top_values, "<f4").tobytes(),
    )


def shown(value: float) -> float:
    return value if value > LOGPROB_MIN else LOGPROB_MIN


def chat_token(token: int, value: float) -> dict[str, Any]:
    return {"token": text_of(token), "bytes": list(RAW[token]), "logprob": shown(value)}


@pytest.mark.parametrize("width", [0, 1, 5])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_chats_scores_are_those_of_every_token_and_its_alternatives(
    count: int, width: int
) -> None:
    scores, expected = ChatScores(written), []
    for seed in range(3):
        tokens, chosen, tops, values = made_up(count, width, seed)
        scores.add(tokens, packed(chosen, tops, values, width))
        for index, token in enumerate(tokens):
            pairs = zip(tops[index], values[index], strict=True)
            row = chat_token(token, chosen[index])
            expected.append(row | {"top_logprobs": [chat_token(*pair) for pair in pairs]})
    found = msgspec.json.encode({"logprobs": scores.json()})
    assert json.loads(found) == {"logprobs": {"content": expected, "refusal": None}}
    assert 0 <= len(found) - scores.size_bytes < 64 + len(expected)


def whole_characters(raw: bytes) -> str:
    return codecs.getincrementaldecoder("utf-8")("replace").decode(raw)


@pytest.mark.parametrize("width", [0, 1, 5])
def test_a_completions_scores_are_four_lists_and_offsets_count_characters(width: int) -> None:
    prompt, scores = TextScores(written), TextScores(written)
    prompt.add_unscored([1])
    names, values_shown, tops_shown, raws = ["the"], [None], [None], [b"the"]
    for part, seed in ((prompt, 1), (scores, 2), (scores, 3)):
        tokens, chosen, tops, values = made_up(6, width, seed)
        part.add(tokens, packed(chosen, tops, values, width))
        for index, token in enumerate(tokens):
            top: dict[str, float] = {}
            for other, value in zip(tops[index], values[index], strict=True):
                top.setdefault(text_of(other), shown(value))
            top.setdefault(text_of(token), shown(chosen[index]))
            names.append(text_of(token))
            raws.append(RAW[token])
            values_shown.append(shown(chosen[index]))  # type: ignore[arg-type]
            tops_shown.append(top)  # type: ignore[arg-type]
    before = Offsets()
    before.of([b"10 letters"])
    offsets = [10 + len(whole_characters(b"".join(raws[:index]))) for index in range(len(raws))]
    found = json.loads(bytes(prompt.followed_by(scores).json(before)))
    for given, wanted in zip(found["top_logprobs"], tops_shown, strict=True):
        assert list(given or ()) == list(wanted or ()), "the likeliest first"
    assert found == {
        "tokens": names,
        "token_logprobs": values_shown,
        "top_logprobs": tops_shown,
        "text_offset": offsets,
    }


def test_offsets_point_into_the_text_where_characters_are_several_tokens() -> None:
    raws = [b"a", b"\xf0\x9f", b"\x98\x80", b"b", b"\xe2", b"c", b""]
    offsets = Offsets()
    assert offsets.of(raws[:2]) + offsets.of(raws[2:]) == [0, 1, 1, 2, 3, 3, 5]
    assert b"".join(raws).decode(errors="replace")[3:5] == "\ufffdc"


def offsets_in(text: str, vocab: list[tuple[bytes, bool]], tokens: list[int]) -> list[int]:
    """Of an echoed prompt's ``tokens``; ``vocab`` has their bytes, and which are special."""

    def known(token: int) -> Written:
        raw, is_special = vocab[token]
        return Written.of(raw, is_special=is_special)

    scores = TextScores(known, echo=Echo(text))
    scores.add_unscored(tokens)
    offsets: list[int] = json.loads(bytes(scores.json()))["text_offset"]
    return offsets


def test_offsets_of_a_prompt_are_those_in_the_text_that_was_given() -> None:
    """Some tokens the tokenizer puts there itself, others the text writes out."""
    vocab = [(b"<s>", True), (b" Hi", False), (b" yo", False), (b"\xc3", False), (b"\xa9", False)]
    for text, tokens, expected in (
        ("Hi yo", [0, 1, 2], [0, 0, 2]),
        (" Hi yo", [0, 1, 2], [0, 0, 3]),
        ("<s> Hi<s> yo", [0, 1, 0, 2], [0, 3, 6, 9]),
        ("Hi\u00e9 yo", [0, 1, 3, 4, 2, 0], [0, 0, 2, 2, 3, 6]),
    ):
        assert offsets_in(text, vocab, tokens) == expected, text


def test_offsets_know_the_blank_before_each_stretch_of_a_prompt() -> None:
    """SentencePiece puts one before the first word, and before what follows a special token."""
    vocab = [(b"</s>", True), (b" ", False), (b"  ", False), (b"a", False), (b" a", False)]
    for text, tokens, expected in (
        ("aa", [1, 3, 3], [0, 0, 1]),
        (" a", [2, 3], [0, 1]),
        ("  a", [2, 1, 3], [0, 2, 2]),
        (" a", [1, 4], [0, 1]),
        ("aa</s>aa", [4, 3, 0, 1, 3, 3], [0, 1, 2, 6, 6, 7]),
        (" a</s> a", [2, 3, 0, 2, 3], [0, 1, 2, 6, 7]),
        ("a  a", [4, 1, 4], [0, 1, 2]),
    ):
        assert offsets_in(text, vocab, tokens) == expected, text


def test_a_special_token_takes_room_where_the_text_shows_it() -> None:
    def special(token: int) -> Written:
        return Written.of(RAW[token], is_special=token == 1)

    for shows, expected in ((False, [0, 0]), (True, [0, len(RAW[1])])):
        scores = TextScores(special, shows_special=shows)
        scores.add_unscored((1, 2))
        assert json.loads(bytes(scores.json()))["text_offset"] == expected


def test_what_is_scored_beyond_the_tokens_that_are_shown_is_left_out() -> None:
    for scores in (ChatScores(written), TextScores(written)):
        scores.add([0], packed([-1.0, -2.0], [[1], [2]], [[-0.5], [-0.25]], 1))
        text = bytes(scores.json()).decode()
        assert "-1.0" in text and "-2.0" not in text and "-0.25" not in text


def test_no_scores_are_empty_lists() -> None:
    assert json.loads(bytes(ChatScores(written).json()))["content"] == []
    assert set(map(str, json.loads(bytes(TextScores(written).json())).values())) == {"[]"}
