"""The sampler of a device draws what the host's draws, a whole batch at once."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.engine.test_sampler import (
    VOCAB,
    is_valid_draw,
    make_sample,
    some_logits,
)

from pagemesh.engine.cuda import sampler as device
from pagemesh.engine.sampler import draw
from pagemesh.engine.worker.plan import Drawn, Sample
from pagemesh.wire.work_messages import Sampling

GREEDY = Sampling(temperature=0.0, max_tokens=9)


def some_samplings(count: int, seed: int) -> list[Sampling]:
    """Every parameter, in combinations that a batch of strangers may have."""
    rng = np.random.default_rng(seed)
    return [
        Sampling(
            temperature=float(rng.choice([0.0, 0.1, 1.0, 2.5])),
            top_k=int(rng.choice([0, 1, 5, 500])),
            top_p=float(rng.choice([0.05, 0.6, 0.95, 1.0])),
            min_p=float(rng.choice([0.0, 0.02, 0.5])),
            presence_penalty=float(rng.choice([0.0, 1.5])),
            frequency_penalty=float(rng.choice([0.0, -0.7])),
            repetition_penalty=float(rng.choice([1.0, 1.3])),
            logit_bias={int(rng.integers(VOCAB)): float(rng.choice([-100.0, 4.0]))},
            seed=int(rng.integers(2**63)),
            max_tokens=9,
            min_tokens=int(rng.choice([0, 4])),
            stop_tokens=[0, 50],
        )
        for _ in range(count)
    ]


def some_samples(count: int, seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        make_sample(
            sampling,
            choice=index,
            generated=tuple(rng.integers(VOCAB, size=int(rng.integers(6))).tolist()),
        )
        for index, sampling in enumerate(some_samplings(count, seed))
    ]


def drawn(logits: np.ndarray[tuple[int, int], np.dtype[np.float32]], rows: list[int],
          samples: list[Sample]) -> tuple[Drawn, ...]:  # fmt: skip
    given = torch.from_numpy(logits)
    before = given.clone()
    found = device.draw(given, np.array(rows), samples)
    assert torch.equal(given.nan_to_num(7.0), before.nan_to_num(7.0)), "logits are not ours"
    return found


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_batch_of_strangers_draws_what_the_definitions_give(seed: int) -> None:
    samples = some_samples(24, seed)
    logits = some_logits(24, seed % 1000)
    for index, one in enumerate(drawn(logits, list(range(24)), samples)):
        sample = samples[index]
        assert one.key == sample.key
        if sample.sampling.temperature > 0.0:
            assert is_valid_draw(logits[index], sample, one.token)


def test_it_draws_the_tokens_of_the_host() -> None:
    samples, logits = some_samples(200, 1), some_logits(200, 1)
    rows = np.arange(200)
    host = draw(logits.copy(), rows, samples)
    assert drawn(logits, rows.tolist(), samples) == host


def test_samples_that_fork_share_a_row_and_edits_stay_their_own() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [7, 40]] = 5.0, 4.0
    banned = Sampling(temperature=0.0, max_tokens=1, logit_bias={7: -100.0})
    found = drawn(
        logits, [0, 0, 0], [make_sample(GREEDY), make_sample(banned), make_sample(GREEDY)]
    )
    assert [one.token for one in found] == [7, 40, 7]


def test_the_lowest_id_among_equals_is_drawn_and_kept() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[:, [7, 40, 90]] = 5.0
    one = Sampling(temperature=1.0, top_k=1, max_tokens=1, seed=3)
    found = drawn(logits, [0, 1], [make_sample(GREEDY), make_sample(one)])
    assert [one.token for one in found] == [7, 7]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_without_numbers_is_poisoned_and_changes_no_other(
    value: float, temperature: float
) -> None:
    samples = [make_sample(Sampling(temperature=temperature, max_tokens=1, seed=s)) for s in (1, 2)]
    logits = some_logits(2)
    alone = drawn(logits[1:].copy(), [0], samples[1:])
    logits[0, 5] = value
    found = drawn(logits, [0, 1], samples)
    assert (found[0].poisoned, found[1].poisoned) == (True, False)
    assert found[1].token == alone[0].token


def test_rows_that_report_scores_or_search_get_what_the_host_gives() -> None:
    scored = Sampling(temperature=0.8, seed=5, max_tokens=2, logprobs=3)
    search = Sample(make_sample(GREEDY).key, GREEDY, make_sample(GREEDY).context, 3,
                    candidate_count=4)  # fmt: skip
    samples = [make_sample(GREEDY), make_sample(scored), search]
    logits = some_logits(4)
    assert drawn(logits, [3, 1, 2], samples) == draw(logits.copy(), np.array([3, 1, 2]), samples)


def test_blocks_of_a_large_batch_agree_with_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, logits = some_samples(40, 2), some_logits(40, 2)
    whole = drawn(logits, list(range(40)), samples)
    monkeypatch.setattr(device, "DRAW_ELEMENTS_MAX", 3 * VOCAB)
    assert drawn(logits, list(range(40)), samples) == whole


@pytest.mark.parametrize("seed", range(5))
def test_a_device_draws_only_what_a_grammar_allows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = some_samples(6, seed)
    for index in (0, 2, 3):
        mask = rng.random(VOCAB) < 0.1
        mask[1] = True
        samples[index] = replace(samples[index], allowed=mask)
    logits = some_logits(6, seed)
    before = logits.copy()
    own = drawn(logits, list(range(6)), samples)
    assert np.array_equal(logits, before)
    for sample, one in zip(samples, own, strict=True):
        assert sample.allowed is None or sample.allowed[one.token]
    cold = [
        replace(one, sampling=msgspec.structs.replace(one.sampling, temperature=0.0))
        for one in samples
    ]
    host = draw(logits.copy(), np.arange(6), cold)
    there = drawn(logits, list(range(6)), cold)
    assert [one.token for one in there] == [one.token for one in host]
