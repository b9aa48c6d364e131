"""What a grammar allows to be drawn, token by token."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from llguidance import LLMatcher, grammar_from
from numpy.typing import NDArray
from tokenizers import Tokenizer

from pagemesh.engine.grammars import Follower, Followers, Grammars
from pagemesh.engine.worker.plan import Sample
from pagemesh.runtime.model_folder import find_model
from pagemesh.wire.errors import Busy, Fault, GrammarRefused
from pagemesh.wire.messages import SequenceKey
from pagemesh.wire.work_messages import Sampling

VOCAB, END, OTHER_END = 2560, 2, 0
PROMPT = (7, 8, 9)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
DIGITS = grammar_from("regex", "[0-9]{3}(-[0-9]{2})?")


@cache
def folder() -> Path:
    return find_model("").path


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(folder() / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(folder(), VOCAB)


def sample(
    grammar: str, generated: list[int], *, stops: tuple[int, ...] = (END,), attempt: int = 1
) -> Sample:
    sampling = Sampling(max_tokens=500, grammar=grammar, stop_tokens=list(stops))
    key = SequenceKey(request="1" * 32, attempt=attempt, choice=0)
    tokens = np.array([*PROMPT, *generated], np.uint32)
    return Sample(key, sampling, tokens, len(PROMPT))


def mask_of(followers: Followers, one: Sample) -> NDArray[np.bool_]:
    [found] = followers.allowed([one])
    if isinstance(found, Fault):
        raise found
    assert found is not None
    return found


def allowed(followers: Followers, one: Sample) -> list[int]:
    mask = mask_of(followers, one)
    assert mask.dtype == np.bool_ and mask.shape == (VOCAB,)
    return np.flatnonzero(mask).tolist()


def walk(followers: Followers, grammar: str, draw: random.Random) -> tuple[list[int], bool]:
    """An answer of tokens that are allowed, and whether it came to an end."""
    generated: list[int] = []
    for _ in range(400):
        choices = allowed(followers, sample(grammar, generated))
        # Short answers: ends first, then what closes something.
        closing = [token for token in choices if tokenizer().decode([token]).strip()[:1] in '"}],']
        token = draw.choice(closing if closing and draw.random() < 0.5 else choices)
        if END in choices and draw.random() < 0.5:
            token = END
        if token == END:
            return generated, True
        generated.append(token)
    return generated, False


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_drawn_the_answer_follows_the_grammar(grammars: Grammars, seed: int) -> None:
    draw, followers = random.Random(seed), Followers(grammars)
    tokens, ended = walk(followers, JSON, draw)
    assert ended
    answer = json.loads(tokenizer().decode(tokens))
    assert set(answer) <= {"name", "age", "tags"} and {"name", "age"} <= set(answer)
    assert 0 <= answer["age"] <= 120 and len(answer["name"]) <= 12
    tokens, ended = walk(Followers(grammars), DIGITS, draw)
    assert ended and re.fullmatch("[0-9]{3}(-[0-9]{2})?", tokenizer().decode(tokens))


def test_every_end_is_allowed_where_the_answer_may_end_and_nowhere_else(
    grammars: Grammars,
) -> None:
    followers = Followers(grammars)
    for text, ends in (("12", []), ("123", [OTHER_END, END]), ("123-4", []), ("123-45", None)):
        tokens = tokenizer().encode(text, add_special_tokens=False).ids
        found = allowed(
            followers, sample(DIGITS, tokens, stops=(END, OTHER_END), attempt=len(text))
        )
        if ends is None:
            assert found == [OTHER_END, END], "there is nothing else to draw"
        else:
            assert [token for token in found if token in (OTHER_END, END)] == ends
    tokens = tokenizer().encode("123", add_special_tokens=False).ids
    found = allowed(followers, sample(DIGITS, tokens, stops=(5,), attempt=9))
    assert 5 in found and END not in found, "only what ends the answer"


def test_an_end_that_is_text_too_ends_no_answer_in_its_middle(grammars: Grammars) -> None:
    [one] = tokenizer().encode("1", add_special_tokens=False).ids
    followers = Followers(grammars)
    assert one in allowed(followers, sample(DIGITS, []))
    for count in range(3):
        found = allowed(followers, sample(DIGITS, [one] * count, stops=(END, one), attempt=2))
        assert found and not {END, one} & set(found), count
    found = allowed(followers, sample(DIGITS, [one] * 3, stops=(END, one), attempt=2))
    assert {END, one} <= set(found)


def test_who_takes_over_an_answer_goes_on_as_who_began_it(grammars: Grammars) -> None:
    tokens, _ = walk(Followers(grammars), JSON, random.Random(5))
    followers = Followers(grammars)
    for count in range(len(tokens)):
        began = mask_of(followers, sample(JSON, tokens[:count]))
        taken_over = mask_of(Followers(grammars), sample(JSON, tokens[:count]))
        assert np.array_equal(began, taken_over), count


def test_what_a_revoked_run_drew_is_forgotten(grammars: Grammars) -> None:
    tokens, _ = walk(Followers(grammars), JSON, random.Random(3))
    followers, middle = Followers(grammars), len(tokens) // 2
    before = mask_of(followers, sample(JSON, tokens[:middle]))
    mask_of(followers, sample(JSON, tokens))
    assert np.array_equal(mask_of(followers, sample(JSON, tokens[:middle])), before)


def test_tokens_drawn_within_a_run_count(grammars: Grammars) -> None:
    first, *rest = tokenizer().encode("123", add_special_tokens=False).ids
    one = sample(DIGITS, [first]).after(*rest)
    assert END in allowed(Followers(grammars), one)


def test_a_grammar_is_compiled_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    text = grammar_from("regex", "compiled{1,3} once")
    assert not grammars.has(text)
    grammars.begun(text)
    assert grammars.has(text)
    monkeypatch.setattr(grammars, "_compile", None)
    grammars.begun(text)


def test_only_the_latest_grammars_are_remembered(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagemesh.engine.grammars._COMPILED_MAX", 2)
    texts = [grammar_from("regex", f"{number}+") for number in range(3)]
    grammars.begun(texts[0])
    grammars.begun(texts[1])
    grammars.begun(texts[0])
    grammars.begun(texts[2])
    assert [grammars.has(text) for text in texts] == [True, False, True]


def test_long_grammars_are_remembered_in_smaller_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [grammar_from("regex", f"{number}" * 300) for number in range(4)]
    grammars = Grammars(folder(), VOCAB)
    monkeypatch.setattr("pagemesh.engine.grammars._COMPILED_CHARACTERS_MAX", 2 * len(texts[0]))
    for text in texts[:3]:
        grammars.begun(text)
    assert [grammars.has(text) for text in texts[:3]] == [False, True, True]
    monkeypatch.setattr("pagemesh.engine.grammars._COMPILED_CHARACTERS_MAX", 1)
    grammars.begun(texts[3])
    assert [grammars.has(text) for text in texts] == [False, False, False, True]


def test_what_sequences_that_ended_held_is_dropped(grammars: Grammars) -> None:
    followers = Followers(grammars)

    def step(*attempts: int) -> int:
        others = [sample("", [], attempt=attempt) for attempt in (500, 501)]
        own = [sample(DIGITS, [], attempt=attempt) for attempt in attempts]
        found = followers.allowed([*others, *own])
        assert found[:2] == [None, None] and all(isinstance(one, np.ndarray) for one in found[2:])
        return len(followers._kept)

    assert step(*range(1, 101)) == 100
    assert step() == 100, "a step of others says nothing of these"
    assert step(*range(50, 90)) == 96
    assert step(3) == 18
    assert step(3) == 18


def test_a_dropped_sequence_reads_its_tokens_again(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagemesh.engine.grammars._FOLLOWED_MAX", 1)
    followers = Followers(grammars)
    tokens = tokenizer().encode("123-45", add_special_tokens=False).ids
    for count in range(len(tokens)):
        for attempt in (1, 2):
            found = mask_of(followers, sample(DIGITS, tokens[:count], attempt=attempt))
            assert np.array_equal(
                found, mask_of(Followers(grammars), sample(DIGITS, tokens[:count]))
            )


@pytest.mark.parametrize(
    ("grammar", "generated", "said"),
    [
        ("{", [], "the grammar cannot be followed"),
        (" ", [], "the grammar cannot be followed"),
        (grammar_from("lark", "start: missing"), [], "missing"),
        (LLMatcher.grammar_from_json_schema({"type": "objekt"}), [], "objekt"),
        (grammar_from("lark", "start: <|nothing|>"), [], "the grammar cannot be followed"),
        (DIGITS, [1000], "the answer so far does not follow"),
        (DIGITS, [VOCAB + 5], "the answer so far does not follow"),
    ],
)
def test_what_cannot_be_followed_is_refused_and_said(
    grammars: Grammars, grammar: str, generated: list[int], said: str
) -> None:
    with pytest.raises(GrammarRefused, match=re.escape(said)) as caught:
        mask_of(Followers(grammars), sample(grammar, generated))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_an_answer_that_no_token_can_continue_is_refused(grammars: Grammars) -> None:
    tokens = tokenizer().encode("123-45", add_special_tokens=False).ids
    with pytest.raises(GrammarRefused, match="no token"):
        mask_of(Followers(grammars), sample(DIGITS, tokens, stops=()))


@pytest.mark.parametrize("vocab", [VOCAB - 500, VOCAB + 64])
def test_a_model_may_have_more_or_fewer_logits_than_its_tokenizer_has_tokens(vocab: int) -> None:
    mask = mask_of(Followers(Grammars(folder(), vocab)), sample(DIGITS, []))
    assert mask.shape == (vocab,)
    assert mask.any() and not mask[VOCAB:].any()


@pytest.mark.parametrize("content", [None, "{}", "no JSON"])
def test_a_model_without_a_usable_tokenizer_refuses_grammars(
    tmp_path: Path, content: str | None
) -> None:
    shutil.copy(folder() / "config.json", tmp_path)
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(GrammarRefused, match="this model's tokenizer cannot follow grammars"):
        Grammars(tmp_path, VOCAB).begun(DIGITS)


# Grammars that take too long ----------------------------------------------------------------------


class Hung:
    """A follower that never comes back, until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def allowed(self, _sample: Sample) -> NDArray[np.bool_]:
        assert self.go.wait(60)
        return np.ones(VOCAB, np.bool_)


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Grammars, Hung]]:
    """Grammars of which those with ``slow`` in their text hang."""
    monkeypatch.setattr("pagemesh.engine.grammars._PATIENCE_S", 0.05)
    monkeypatch.setattr("pagemesh.engine.grammars._GRACE_S", 0.05)
    grammars, hung = Grammars(folder(), VOCAB), Hung()
    begun = grammars.begun
    grammars.begun(DIGITS)

    def begins(text: str) -> Follower:
        made = begun(text)
        return cast(Follower, hung) if "slow" in text else made

    monkeypatch.setattr(grammars, "begun", begins)
    yield grammars, hung
    hung.go.set()


def slow(number: int = 0) -> str:
    return grammar_from("regex", f"slow{number}")


def test_a_grammar_that_takes_too_long_is_refused_and_others_are_followed(
    hung: tuple[Grammars, Hung],
) -> None:
    grammars, _ = hung
    followers = Followers(grammars)
    before = mask_of(followers, sample(DIGITS, [], attempt=1))
    samples = [
        sample(DIGITS, [], attempt=1), sample(slow(), [], attempt=2), sample("", [], attempt=3),
        sample(DIGITS, [], attempt=4),
    ]  # fmt: skip
    first, second, third, fourth = followers.allowed(samples)
    assert isinstance(second, GrammarRefused) and "takes too long" in second.message
    assert third is None
    for one in (first, fourth):
        assert isinstance(one, np.ndarray) and np.array_equal(one, before)
    assert not grammars.has(slow())
    with pytest.raises(GrammarRefused, match="takes too long"):
        grammars.begun(slow())
    assert np.array_equal(mask_of(followers, sample(DIGITS, [], attempt=1)), before)


def test_threads_that_are_left_behind_are_few(hung: tuple[Grammars, Hung]) -> None:
    grammars, slowness = hung
    followers = Followers(grammars)
    for number in range(2):
        [found] = followers.allowed([sample(slow(number), [], attempt=number + 1)])
        assert isinstance(found, GrammarRefused)
    with pytest.raises(Busy):
        grammars.begun(grammar_from("regex", "another"))
    assert mask_of(followers, sample(DIGITS, [], attempt=9)).any(), "a known one is followed"
    slowness.go.set()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(Busy):
            grammars.begun(grammar_from("regex", "another"))
            return
        time.sleep(0.01)
    pytest.fail("who has come back is still counted")
