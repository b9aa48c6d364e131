"""The sampler draws what a slow, obvious sampler draws, and each row as if alone."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagemesh.engine.sampler import draw, is_edited, score
from pagemesh.engine.uniform import uniforms
from pagemesh.engine.worker.plan import Sample
from pagemesh.wire.messages import SequenceKey
from pagemesh.wire.work_messages import Sampling

VOCAB = 97
F32 = NDArray[np.float32]


def make_sample(
    sampling: Sampling, *, choice: int = 0, prompt: tuple[int, ...] = (1, 2, 3),
    generated: tuple[int, ...] = (),
) -> Sample:  # fmt: skip
    key = SequenceKey(request="0" * 32, attempt=1, choice=choice)
    tokens = np.array([*prompt, *generated], np.uint32)
    return Sample(key=key, sampling=sampling, context=tokens, prompt_count=len(prompt))


def some_logits(count: int = 1, seed: int = 0, vocab: int = VOCAB) -> F32:
    return np.random.default_rng(seed).normal(0, 3, (count, vocab)).astype(np.float32)


def drawn_tokens(logits: F32, samples: list[Sample]) -> list[int]:
    rows = np.arange(len(samples))
    return [drawn.token for drawn in draw(logits, rows, samples)]


def one_uniform(sample: Sample) -> float:
    position = len(sample.tokens) - sample.prompt_count
    words = (np.array([value], np.uint64) for value in (
        sample.sampling.seed, sample.key.choice, position
    ))  # fmt: skip
    return float(uniforms(*words)[0])


def edited_logits(row: F32, sample: Sample) -> list[float]:
    """Mask, bias and penalties, spelled out in double precision."""
    values = sample.sampling
    generated = sample.tokens[sample.prompt_count :].tolist()
    logits = [float(value) for value in row]
    if len(generated) < values.min_tokens:
        for token in values.stop_tokens:
            logits[token] = -math.inf
    for token, bias in values.logit_bias.items():
        logits[token] += bias
    for token in set(sample.tokens.tolist()):
        factor = values.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(generated):
        logits[token] -= values.frequency_penalty * generated.count(token)
        logits[token] -= values.presence_penalty
    return logits


def reference_intervals(row: F32, sample: Sample) -> list[tuple[float, float]]:
    """Each token's interval of the unit line, by the definition of every parameter."""
    values = sample.sampling
    logits = edited_logits(row, sample)
    highest = max(logits)
    weights = [math.exp((value - highest) / values.temperature) for value in logits]
    kept = {token for token in range(len(weights)) if weights[token] >= values.min_p}
    order = sorted(kept, key=lambda token: (-weights[token], token))
    if values.top_k:
        order = order[: values.top_k]
    whole, before, nucleus = sum(weights[token] for token in order), 0.0, []
    for token in order:
        if before < values.top_p * whole:
            nucleus.append(token)
        before += weights[token]
    total, at, intervals = sum(weights[token] for token in nucleus), 0.0, []
    for token in range(len(weights)):
        width = weights[token] / total if token in nucleus else 0.0
        intervals.append((at, at + width))
        at += width
    return intervals


def is_valid_draw(row: F32, sample: Sample, token: int) -> bool:
    low, high = reference_intervals(row, sample)[token]
    return high > low and low - 1e-4 <= one_uniform(sample) <= high + 1e-4


def test_temperature_zero_takes_the_highest_and_the_lowest_id_among_equals() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [7, 40, 90]] = 5.0
    greedy = Sampling(temperature=0.0, max_tokens=1)
    assert drawn_tokens(logits, [make_sample(greedy)]) == [7]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    data_seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 5, 500]),
    top_p=st.sampled_from([0.05, 0.6, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
    presence=st.sampled_from([0.0, 1.5]),
    frequency=st.sampled_from([0.0, -0.7]),
    repetition=st.sampled_from([1.0, 1.3]),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 4.0]), max_size=3),
    generated=st.lists(st.integers(0, VOCAB - 1), max_size=6),
    min_tokens=st.sampled_from([0, 4]),
)
def test_every_draw_lies_in_the_interval_that_the_definitions_give(
    seed: int, data_seed: int, temperature: float, top_k: int, top_p: float, min_p: float,
    presence: float, frequency: float, repetition: float, bias: dict[int, float],
    generated: list[int], min_tokens: int,
) -> None:  # fmt: skip
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition,
        logit_bias=bias, seed=seed, max_tokens=9, min_tokens=min_tokens, stop_tokens=[0, 50],
    )  # fmt: skip
    sample = make_sample(sampling, generated=tuple(generated))
    logits = some_logits(seed=data_seed)
    (token,) = drawn_tokens(logits, [sample])
    assert is_valid_draw(logits[0], sample, token)


@settings(max_examples=60, deadline=None)
@given(
    generated=st.lists(st.integers(0, VOCAB - 1), max_size=6),
    penalty=st.sampled_from([1.0, 1.7]),
    frequency=st.sampled_from([0.0, 1.1]),
    min_tokens=st.sampled_from([0, 5]),
)
def test_greedy_takes_the_highest_after_mask_bias_and_penalties(
    generated: list[int], penalty: float, frequency: float, min_tokens: int
) -> None:
    logits = some_logits(seed=5)
    stops = [int(logits[0].argmax())]
    sampling = Sampling(
        temperature=0.0, max_tokens=9, min_tokens=min_tokens, stop_tokens=stops,
        frequency_penalty=frequency, repetition_penalty=penalty, logit_bias={3: 6.0},
    )  # fmt: skip
    sample = make_sample(sampling, generated=tuple(generated))
    (token,) = drawn_tokens(logits, [sample])
    edited = edited_logits(logits[0], sample)
    assert edited[token] == pytest.approx(max(edited), abs=1e-5)


def test_a_stop_token_that_was_free_after_drafts_is_masked_again_where_they_were_wrong() -> None:
    """What was counted for the last draft is found again for the token in place of the first."""
    values = Sampling(
        max_tokens=9, temperature=0.0, min_tokens=3, stop_tokens=[5], logit_bias={7: -1.0}
    )
    logits, array = some_logits(), np.arange(10, 20, dtype=np.uint32)
    logits[0, 5], logits[0, 6] = 90.0, 80.0
    found = []
    for generated_count in (3, 2, 3):
        context = array[: 4 + generated_count]
        key = SequenceKey(request="0" * 32, attempt=1, choice=0)
        found += drawn_tokens(logits, [Sample(key, values, context, prompt_count=4)])
    assert found == [5, 6, 5]


def test_a_least_count_of_tokens_edits_nothing_where_no_token_stops() -> None:
    """Or one such request would keep all that are computed with it out of native runs."""
    for stop_tokens, edits in (([], False), ([5], True)):
        values = Sampling(max_tokens=9, min_tokens=3, stop_tokens=stop_tokens)
        assert is_edited(make_sample(values)) == edits
        assert not is_edited(make_sample(values, generated=(1, 2, 3)))


@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 1e-50, 5e-324])
def test_a_temperature_next_to_zero_leaves_only_the_highest(temperature: float) -> None:
    logits = some_logits()
    for top_p in (1.0, 0.5):
        sampling = Sampling(temperature=temperature, top_p=top_p, max_tokens=1)
        assert drawn_tokens(logits, [make_sample(sampling)]) == [int(logits[0].argmax())]


def test_the_same_seed_choice_and_position_give_the_same_token() -> None:
    logits = some_logits()
    sampling = Sampling(seed=11, max_tokens=9)
    assert drawn_tokens(logits, [make_sample(sampling)]) == drawn_tokens(
        logits, [make_sample(sampling, prompt=(9, 9, 9, 9))]
    )


def test_choices_and_positions_of_one_seed_draw_independently() -> None:
    count = 4000
    words = np.arange(count, dtype=np.uint64)
    zeros = np.zeros(count, np.uint64)
    for drawn in (uniforms(zeros, words, zeros), uniforms(zeros, zeros, words)):
        assert ((0.0 <= drawn) & (drawn < 1.0)).all()
        assert np.histogram(drawn, 10, (0.0, 1.0))[0] == pytest.approx(count / 10, rel=0.25)
        assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.06
    assert len(np.unique(uniforms(zeros, words, words[::-1]))) == count


def test_samples_that_fork_from_one_row_draw_with_their_own_choice() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    samples = [make_sample(Sampling(max_tokens=1), choice=choice) for choice in range(16)]
    tokens = [drawn.token for drawn in draw(logits, np.zeros(16, np.int64), samples)]
    assert tokens == [int(one_uniform(sample) * VOCAB) for sample in samples]


@pytest.mark.parametrize("shared", [0, 2])
def test_strangers_that_share_a_row_draw_as_if_each_had_one_of_its_own(shared: int) -> None:
    vocab = 5003  # more than one block of sums
    kinds = [
        Sampling(temperature=0.0, max_tokens=9),
        Sampling(temperature=0.8, max_tokens=9),
        Sampling(temperature=1.0, top_p=0.9, max_tokens=9),
        Sampling(temperature=0.8, max_tokens=9, presence_penalty=0.5),
        Sampling(temperature=1.0, max_tokens=9, min_p=0.1, logit_bias={4000: 6.0}),
    ]
    samples = [make_sample(kind, choice=choice) for kind in kinds for choice in range(4)]
    logits = some_logits(3, vocab=vocab)
    together = draw(logits, np.full(len(samples), shared), samples)
    own = np.repeat(logits[shared : shared + 1], len(samples), axis=0)
    assert draw(own, np.arange(len(samples)), samples) == together
    for sample, drawn in zip(samples, together, strict=True):
        if sample.sampling.temperature:
            assert is_valid_draw(logits[shared], sample, drawn.token)


@pytest.mark.parametrize("vocab", [97, 1000, 33_001])
def test_a_row_gives_the_same_bits_alone_and_in_any_batch(vocab: int) -> None:
    kinds = [
        Sampling(temperature=0.0, max_tokens=9, logprobs=3),
        Sampling(temperature=0.8, seed=1, max_tokens=9, logprobs=20),
        Sampling(temperature=1.0, top_p=0.9, seed=2, max_tokens=9, logprobs=0),
        Sampling(temperature=1.2, top_k=40, min_p=0.01, seed=3, max_tokens=9, logprobs=5),
        Sampling(temperature=0.0, repetition_penalty=1.2, max_tokens=9, logprobs=1),
    ]
    samples = [make_sample(kinds[index % 5], choice=index) for index in range(13)]
    logits = some_logits(13, vocab=vocab)
    together = draw(logits, np.arange(13), samples)
    for index, sample in enumerate(samples):
        assert draw(logits[index : index + 1].copy(), np.array([0]), [sample])[0] == together[index]


def test_reported_scores_are_the_models_own_log_probabilities() -> None:
    logits = some_logits(4)
    targets = np.array([5, 0, 96, 33])
    scores = score(logits, targets, 3)
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    chosen = np.frombuffer(scores.chosen, np.float32)
    assert chosen == pytest.approx(expected[np.arange(4), targets], abs=1e-5)
    best = np.argsort(-wide, axis=-1)[:, :3]
    assert np.frombuffer(scores.top_tokens, np.uint32).reshape(4, 3).tolist() == best.tolist()
    assert np.frombuffer(scores.top_values, np.float32).reshape(4, 3) == pytest.approx(
        np.take_along_axis(expected, best, axis=-1), abs=1e-5
    )


def test_bias_and_penalties_change_the_token_but_not_the_reported_scores() -> None:
    logits = some_logits()
    plain = Sampling(temperature=0.0, max_tokens=1, logprobs=2)
    biased = Sampling(temperature=0.0, max_tokens=1, logprobs=2, logit_bias={13: 100.0})
    first, second = draw(logits, np.zeros(2, np.int64), [make_sample(plain), make_sample(biased)])
    assert second.token == 13 != first.token
    assert first.scores is not None
    assert second.scores is not None
    assert first.scores.top_values == second.scores.top_values


def test_ids_outside_the_vocabulary_are_ignored() -> None:
    sampling = Sampling(
        temperature=0.0, max_tokens=1, min_tokens=1, stop_tokens=[5000], logit_bias={9999: 50.0}
    )
    logits = some_logits()
    assert drawn_tokens(logits, [make_sample(sampling)]) == [int(logits[0].argmax())]


def test_the_callers_logits_are_left_as_they_were() -> None:
    logits = some_logits(2)
    before = logits.copy()
    hot = Sampling(temperature=2.0, top_k=3, logit_bias={1: 3.0}, max_tokens=1)
    drawn_tokens(logits, [make_sample(hot), make_sample(hot)])
    assert (logits == before).all()


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0, max_tokens=4, logprobs=5),
        Sampling(temperature=0.0, max_tokens=4, presence_penalty=0.5),
        Sampling(temperature=0.9, max_tokens=4),
        Sampling(temperature=0.9, max_tokens=4, top_p=0.8, top_k=20, min_p=0.01, logprobs=5),
    ],
)
def test_a_row_without_numbers_is_poisoned_and_changes_no_other(
    sampling: Sampling, broken: float
) -> None:
    logits = some_logits(3)
    samples = [make_sample(sampling, choice=choice) for choice in range(3)]
    alone = draw(logits[[0, 2]].copy(), np.arange(2), [samples[0], samples[2]])
    logits[1, :] = broken
    drawn = draw(logits, np.arange(3), samples)
    assert [one.poisoned for one in drawn] == [False, True, False]
    assert (drawn[0], drawn[2]) == alone


@pytest.mark.parametrize("place", [0, 50, VOCAB - 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_logit_that_is_no_number_poisons_its_row(place: int, temperature: float) -> None:
    logits = some_logits()
    logits[0, place] = math.nan
    (drawn,) = draw(logits, np.zeros(1, np.int64), [make_sample(
        Sampling(temperature=temperature, max_tokens=4)
    )])  # fmt: skip
    assert drawn.poisoned


def test_scores_of_what_is_no_number_are_poisoned_at_any_width() -> None:
    logits = some_logits(2)
    assert not score(logits, np.array([3, 4]), 5).poisoned
    logits[1, 7:9] = math.nan
    assert score(logits, np.array([3, 4]), 5).poisoned
    logits[1] = math.nan
    assert score(logits, np.array([3, 4]), 5).poisoned


# Grammars -----------------------------------------------------------------------------------


def test_only_what_a_grammar_allows_is_drawn_and_the_rest_is_as_without() -> None:
    logits, mask = some_logits(3, seed=5), np.zeros(VOCAB, np.bool_)
    mask[[3, 50, 96]] = True
    before = logits.copy()
    hot = Sampling(max_tokens=9, grammar="g", temperature=1.5, logit_bias={7: 100.0}, seed=4)
    cold = Sampling(max_tokens=9, grammar="g", temperature=0.0, repetition_penalty=1.5)
    samples = [
        replace(make_sample(hot, generated=(50,)), allowed=mask),
        replace(make_sample(cold, choice=1, generated=(3, 96)), allowed=mask),
        make_sample(Sampling(max_tokens=9, temperature=0.0), choice=2),
    ]
    tokens = drawn_tokens(logits, samples)
    assert mask[tokens[:2]].all() and tokens[2] == before[2].argmax()
    assert np.array_equal(logits, before), "edits are undone"
    kept = before[1].copy()
    kept[~mask] = -np.inf
    kept[[3, 96]] = np.where(kept[[3, 96]] > 0, kept[[3, 96]] / 1.5, kept[[3, 96]] * 1.5)
    assert tokens[1] == kept.argmax()


def test_what_is_allowed_may_change_from_token_to_token() -> None:
    sampling, tokens = Sampling(max_tokens=9, grammar="g", temperature=0.0), [1, 2, 3]
    for allowed_token in (5, 60, 5, 96):
        mask = np.zeros(VOCAB, np.bool_)
        mask[allowed_token] = True
        context = np.array(tokens, np.uint32)
        key = SequenceKey(request="0" * 32, attempt=1, choice=0)
        sample = Sample(key=key, sampling=sampling, context=context, prompt_count=3, allowed=mask)
        assert drawn_tokens(some_logits(), [sample]) == [allowed_token]
        tokens.append(allowed_token)


def test_choices_that_fork_may_have_different_places_in_their_grammar() -> None:
    masks = np.zeros((2, VOCAB), np.bool_)
    masks[0, 10] = masks[1, 20] = True
    sampling = Sampling(max_tokens=9, grammar="g")
    samples = [
        replace(make_sample(sampling, choice=choice), allowed=masks[choice]) for choice in (0, 1)
    ]
    drawn = draw(some_logits(), np.zeros(2, np.int64), samples)
    assert [one.token for one in drawn] == [10, 20]


def test_end_tokens_wait_for_min_tokens_even_where_a_grammar_allows_them() -> None:
    mask = np.zeros(VOCAB, np.bool_)
    mask[[4, 8]] = True
    logits = some_logits()
    logits[0, 4] = 100.0
    sampling = Sampling(
        max_tokens=9, grammar="g", temperature=0.0, min_tokens=1, stop_tokens=[4, 500]
    )
    first = replace(make_sample(sampling), allowed=mask)
    assert drawn_tokens(logits, [first]) == [8]
    assert drawn_tokens(logits, [replace(make_sample(sampling, generated=(8,)), allowed=mask)]) == [
        4
    ]
