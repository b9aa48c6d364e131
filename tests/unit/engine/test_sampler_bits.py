"""Edits and log-probabilities are those of plain numpy, to the last bit, as a text grows and
wherever it goes on."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.engine.plain_sampler import best_of, edit, plain_draw
from tests.unit.engine.test_sampler import make_sample, some_logits

from pagemesh.engine import sampler_edits
from pagemesh.engine.sampler import draw, score
from pagemesh.engine.worker.lease import TokenBuffer
from pagemesh.engine.worker.plan import Drawn, Sample, TokenScores
from pagemesh.kernels.ops import log_softmax
from pagemesh.wire.work_messages import Beams, Sampling

VOCAB = 211


def some_sampling(rng: np.random.Generator, vocab: int = VOCAB) -> Sampling:
    """Every edit, in combinations that a batch of strangers may have."""
    return Sampling(
        temperature=float(rng.choice([0.0, 0.7, 1.0])),
        top_k=int(rng.choice([0, 20])),
        top_p=float(rng.choice([0.8, 1.0])),
        presence_penalty=float(rng.choice([0.0, 0.0, 1.5, -0.4])),
        frequency_penalty=float(rng.choice([0.0, 0.0, -0.7, 0.3])),
        repetition_penalty=float(rng.choice([1.0, 1.0, 1.3, 0.8])),
        logit_bias={
            int(token): float(rng.choice([-100.0, 4.0, 0.1]))
            for token in rng.integers(vocab + 20, size=int(rng.choice([0, 0, 9])))
        },
        logprobs=[None, -1, 0, 5, 20][int(rng.integers(5))],
        seed=int(rng.integers(2**63)),
        max_tokens=99,
        min_tokens=int(rng.choice([0, 0, 6])),
        stop_tokens=[0, 50, vocab + 3],
    )


class Text:
    """A sequence's tokens, of which a worker gives out views."""

    def __init__(self, rng: np.random.Generator, sampling: Sampling, choice: int) -> None:
        prompt = rng.integers(VOCAB, size=int(rng.integers(1, 30))).astype(np.uint32)
        self.buffer = TokenBuffer(prompt, len(prompt) + int(rng.choice([0, 40])))
        self.sample = replace(
            make_sample(sampling, choice=choice), context=prompt, prompt_count=len(prompt)
        )
        self.drawn: tuple[int, ...] = ()

    def now(self) -> Sample:
        context = self.buffer.view(0, self.buffer.length)
        return replace(self.sample, context=context, drawn=self.drawn)

    def report(self) -> None:
        for token in self.drawn:
            self.buffer.append(token)
        self.drawn = ()


def expect_the_edits_of_plain_numpy(
    logits: sampler_edits.F32, rows: sampler_edits.I64, samples: list[Sample]
) -> None:
    own, expected = logits.copy(), logits.copy()
    for row, sample in zip(rows.tolist(), samples, strict=True):
        edit(expected[row], sample)
    with sampler_edits.edited(own, rows, samples):
        assert own.tobytes() == expected.tobytes()
    assert own.tobytes() == logits.tobytes()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_steps_of_growing_texts_draw_and_report_what_plain_numpy_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    texts = [Text(rng, some_sampling(rng), choice) for choice in range(9)]
    for step in range(25):
        logits = some_logits(12, int(rng.integers(2**31)), VOCAB)
        if step % 5 == 0:
            logits = np.round(logits)  # many equals
        rows = rng.permutation(12)[:9]
        samples = [text.now() for text in texts]
        expect_the_edits_of_plain_numpy(logits, rows, samples)
        found = draw(logits.copy(), rows, samples)
        assert found == plain_draw(logits, rows, samples)
        for text, one in zip(texts, found, strict=True):
            happening = rng.integers(10)
            text.drawn += (one.token,)
            if happening == 0:  # preempted within a run, which draws something else then
                text.drawn = tuple(rng.integers(VOCAB, size=len(text.drawn) - 1).tolist())
            elif happening == 1:  # on another worker now
                text.report()
                moved = text.buffer.view(0, text.buffer.length).copy()
                text.buffer = TokenBuffer(moved, len(moved) + 3)
            elif happening < 6:
                text.report()


@pytest.mark.parametrize("vocab", [97, 49_152])
def test_what_is_reported_has_the_order_and_the_bits_of_plain_numpy(vocab: int) -> None:
    samples = [
        make_sample(Sampling(temperature=0.0, max_tokens=9, logprobs=width), choice=index)
        for index, width in enumerate((-1, 0, 1, 5, 20))
    ]
    rows = np.array([4, 0, 2, 2, 0])
    for logits in (some_logits(5, vocab=vocab), np.round(some_logits(5, vocab=vocab))):
        assert draw(logits.copy(), rows, samples) == plain_draw(logits, rows, samples)


@pytest.mark.parametrize("width", [0, 1, 20])
def test_scores_of_a_prompt_have_the_bits_of_plain_numpy(width: int) -> None:
    logits = np.round(some_logits(70, vocab=1025) * 2)
    targets = np.random.default_rng(1).integers(1025, size=70)
    whole = log_softmax(torch.from_numpy(logits)).numpy()
    best = np.array([best_of(row, width) for row in logits]).reshape(70, width)
    assert score(logits, targets, width) == TokenScores(
        chosen=whole[np.arange(70), targets].tobytes(),
        width=width,
        top_tokens=best.astype(np.uint32).tobytes(),
        top_values=np.take_along_axis(whole, best, axis=-1).tobytes(),
    )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), low=st.booleans())
def test_candidates_of_searches_have_the_bits_of_plain_numpy(seed: int, low: bool) -> None:
    rng = np.random.default_rng(seed)
    logits = np.round(some_logits(4, seed, VOCAB) * 3)
    if low:
        logits[:, rng.integers(VOCAB, size=180)] = -np.inf
    samples = [
        replace(
            make_sample(
                Sampling(
                    max_tokens=9, min_tokens=int(rng.integers(2)), beams=Beams(width=2, keep=1),
                    stop_tokens=rng.integers(VOCAB + 9, size=6).tolist(), logit_bias={3: 50.0},
                    logprobs=[None, 0, 5][int(rng.integers(3))],
                )
            ),
            candidate_count=int(rng.choice([1, 4, 40, VOCAB])),
        )
        for _ in range(6)
    ]  # fmt: skip
    rows = rng.integers(4, size=6)
    for found, row, sample in zip(draw(logits, rows, samples), rows, samples, strict=True):
        assert found == plain_candidates(logits[row], sample)


def plain_candidates(row: sampler_edits.F32, sample: Sample) -> Drawn:
    allowed, scores = row.copy(), log_softmax(torch.from_numpy(row[None])).numpy()[0]
    reported = part(best_of(row, sample.sampling.logprobs or 0), scores)
    if sample.sampling.min_tokens:
        stops = [token for token in sample.sampling.stop_tokens if token < len(row)]
        allowed[stops] = scores[stops] = -np.inf
    best = best_of(allowed, sample.candidate_count)
    if not np.isfinite(scores[best[0]]):
        return Drawn(sample.key, int(best[0]), poisoned=True)
    wanted = reported if sample.sampling.logprobs else None
    return Drawn(sample.key, int(best[0]), wanted, candidates=part(best, scores))


def part(best: sampler_edits.I64, scores: sampler_edits.F32) -> TokenScores:
    tokens = best.astype(np.uint32).tobytes()
    return TokenScores(b"", len(best), tokens, scores[best].tobytes())


PENALISED = Sampling(
    temperature=0.0, max_tokens=99, repetition_penalty=1.4, frequency_penalty=0.3,
    logit_bias={5: 2.0}, logprobs=5,
)  # fmt: skip


def test_samples_of_one_text_at_different_places_each_have_their_own() -> None:
    text = np.random.default_rng(2).integers(VOCAB, size=40).astype(np.uint32)
    whole = make_sample(PENALISED)
    samples = [
        replace(whole, context=text[first:end], drawn=drawn, prompt_count=3)
        for first, end, drawn in
        [(0, 20, ()), (0, 30, ()), (0, 20, (7, 8)), (0, 20, (9,)), (5, 30, ()), (0, 20, ())]
    ]  # fmt: skip
    samples.append(replace(whole, context=text[0:40:2], prompt_count=3))
    samples.append(replace(whole, context=text[:20], prompt_count=9))
    logits = some_logits(8, vocab=VOCAB)
    for order in (samples, samples[::-1], samples):
        expect_the_edits_of_plain_numpy(logits, np.arange(8), order)
    for first, second in itertools.permutations(samples, 2):  # the next goes on with the one before
        expect_the_edits_of_plain_numpy(logits, np.array([2]), [first])
        expect_the_edits_of_plain_numpy(logits, np.array([3]), [second])


def test_samples_that_share_a_row_are_edited_apart_and_it_is_left_alone() -> None:
    samples = [
        make_sample(PENALISED, generated=(9, 9, choice), choice=choice) for choice in range(4)
    ]
    samples.insert(2, make_sample(Sampling(temperature=0.0, max_tokens=9, logprobs=3)))
    logits, rows = some_logits(2, vocab=VOCAB), np.array([1, 1, 1, 0, 1])
    before = logits.copy()
    found = draw(logits, rows, samples)
    assert np.array_equal(logits, before)
    assert found == plain_draw(logits, rows, samples)


def test_a_token_that_the_logits_have_not_is_refused_and_they_are_left_alone() -> None:
    samples = [make_sample(PENALISED), make_sample(PENALISED, generated=(VOCAB,))]
    logits = some_logits(2, vocab=VOCAB)
    before = logits.copy()
    with pytest.raises(IndexError, match=f"column {VOCAB} is not one of the {VOCAB}"):
        draw(logits, np.arange(2), samples)
    assert np.array_equal(logits, before)


def test_a_text_is_counted_once_and_then_by_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text(np.random.default_rng(3), PENALISED, 0)
    text.buffer = TokenBuffer(text.buffer.view(0, text.buffer.length), 100)
    logits = some_logits(1, vocab=VOCAB)
    draw(logits, np.zeros(1, np.int64), [text.now()])
    with monkeypatch.context() as patched:
        patched.setattr(sampler_edits._Text, "_count_anew", _refuse)
        for step in range(30):
            (one,) = draw(logits, np.zeros(1, np.int64), [text.now()])
            text.drawn += (one.token,)
            if step % 4 == 0:
                text.report()
        with pytest.raises(AssertionError, match="counted anew"):
            text.buffer = TokenBuffer(text.buffer.view(0, text.buffer.length), 100)
            draw(logits, np.zeros(1, np.int64), [text.now()])


def _refuse(*_: object) -> None:
    raise AssertionError("counted anew")


def test_what_was_counted_goes_with_its_text_and_is_never_more_than_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampler_edits, "_KEPT_MAX", 3)
    sampler_edits._kept.clear()
    logits = some_logits(5, vocab=VOCAB)
    samples = [make_sample(PENALISED, choice=choice) for choice in range(5)]
    draw(logits, np.arange(5), samples)
    assert len(sampler_edits._kept) == 3
    assert draw(logits, np.arange(5), samples) == plain_draw(logits, np.arange(5), samples)
    del samples
    gc.collect()
    assert not sampler_edits._kept
