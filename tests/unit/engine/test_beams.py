"""A beam search over real pages gives what ``transformers`` gives with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.engine.test_executor import Host, key_of, make_row

from pagemesh.engine.loading import LoadedModel, load_model
from pagemesh.engine.sampler import draw
from pagemesh.engine.worker.beam_group import BeamGroup
from pagemesh.engine.worker.lease import Lease, TokenBuffer
from pagemesh.engine.worker.plan import Sample, StepPlan
from pagemesh.runtime.model_folder import find_model
from pagemesh.wire.messages import Order
from pagemesh.wire.tokens import U32, unpack
from pagemesh.wire.work_messages import Beams, Hypothesis, Sampling

PAGE_SIZE = 8
TEXTS = (
    "Once upon a time there was",
    "What is the color of the sky?",
    "a",
    "The dog and the cat went to the river, and there they saw a boat. The boat was",
)


@dataclass(frozen=True, slots=True)
class Demo:
    model: LoadedModel
    twin: Any
    prompts: list[U32]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = find_model("").path
    cache = tmp_path_factory.mktemp("beams")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    prompts = [np.array(tokenizer.encode(text), "<u4") for text in TEXTS]
    twin = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Demo(load_model(folder, name="m", page_size=PAGE_SIZE, cache=cache), twin, prompts)


@pytest.fixture
def host(demo: Demo, tmp_path: Path) -> Iterator[Host]:
    made = Host(demo.model, demo.twin, tmp_path)
    yield made
    made.executor.close()
    made.file.remove()


class Run:
    """One search under one lease, which gets its pages bit by bit."""

    def __init__(self, host: Host, number: int, prompt: U32, sampling: Sampling) -> None:
        self._host = host
        self.group = BeamGroup(sampling, prompt, PAGE_SIZE)
        table = host.grant(number, len(prompt))
        self.lease = Lease.of(
            lease=number, slot=number, granted_at=5, key=key_of(number),
            order=Order(priority=0, arrival_us=0, request="0" * 32, choice=0),
            root=b"r" * 32, tokens=TokenBuffer(prompt, len(prompt)), page_size=PAGE_SIZE,
            pages=table, filled=len(prompt) - 1, known=len(prompt),
        )  # fmt: skip
        if len(prompt) > 1:
            host.run(make_row(number, table, prompt, 0, len(prompt) - 1))

    def plan(self) -> StepPlan:
        """The next step, with as many pages as it wants."""
        lacking = self.group.wanted_slots(self.lease) - self.lease.capacity
        if lacking > 0:
            fresh = self._host.pages.table(lacking)
            self._host.publish(fresh, 5)
            self.lease.add_pages(self.lease.page_count, fresh)
        assert self.group.ready(self.lease)
        rows, copies = self.group.rows(self.lease)
        return StepPlan(1, tuple(rows), tuple(copies))

    def step(self) -> None:
        self.group.take(self._host.executor.run(self.plan()).rows)
        self.group.check()


def searched(host: Host, number: int, prompt: U32, sampling: Sampling) -> list[Hypothesis]:
    run = Run(host, number, prompt, sampling)
    while run.group.hypotheses is None:
        run.step()
    return run.group.hypotheses


def by_twin(twin: Any, prompt: U32, sampling: Sampling) -> list[tuple[list[int], float]]:
    want = sampling.beams
    assert want is not None
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    found = twin.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=want.width,
        num_return_sequences=want.keep, max_new_tokens=sampling.max_tokens,
        length_penalty=want.length_penalty, early_stopping=want.early_stopping,
        min_new_tokens=sampling.min_tokens or None, eos_token_id=sampling.stop_tokens,
        pad_token_id=0, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    answers = []
    for row, score in zip(found.sequences, found.sequences_scores, strict=True):
        tokens = row[len(prompt) :].tolist()
        ends = [at for at, token in enumerate(tokens) if token in sampling.stop_tokens]
        answers.append((tokens[: ends[0] + 1] if ends else tokens, float(score)))
    return answers


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "want",
    [
        {"width": 4, "keep": 4},
        {"width": 16, "keep": 2, "early_stopping": True},
        {"width": 3, "keep": 3, "length_penalty": 0.0, "early_stopping": "never"},
        {"width": 5, "keep": 1, "length_penalty": 2.0, "early_stopping": "never"},
        {"width": 2, "keep": 2, "length_penalty": -0.25},
    ],
    ids=str,
)
def test_a_search_finds_what_transformers_finds(host: Host, demo: Demo, want: Any) -> None:
    # A frequent token that ends an answer, so that some end early and some do not.
    common = int(np.bincount(np.concatenate(demo.prompts)).argmax())
    ends = demo.twin.generation_config.eos_token_id
    stops = [*(ends if isinstance(ends, list) else [ends]), common]
    sampling = Sampling(max_tokens=24, min_tokens=3, stop_tokens=stops, beams=Beams(**want))
    for number, prompt in enumerate(demo.prompts, 1):
        got = searched(host, number, prompt, sampling)
        right = by_twin(demo.twin, prompt, sampling)
        assert [unpack(one.tokens).tolist() for one in got] == [tokens for tokens, _ in right]
        for one, (_, score) in zip(got, right, strict=True):
            assert one.score == pytest.approx(score, abs=1e-4)


def test_beams_are_the_same_to_the_last_bit_beside_another_search(host: Host, demo: Demo) -> None:
    sampling = Sampling(max_tokens=12, beams=Beams(width=4, keep=4))
    alone = searched(host, 1, demo.prompts[0], sampling)
    one = Run(host, 2, demo.prompts[0], sampling)
    two = Run(host, 3, demo.prompts[3], sampling)
    while one.group.hypotheses is None:
        plans = one.plan(), two.plan()
        joined = StepPlan(1, plans[0].rows + plans[1].rows, plans[0].copies + plans[1].copies)
        rows = host.executor.run(joined).rows
        one.group.take(rows[: len(plans[0].rows)])
        two.group.take(rows[len(plans[0].rows) :])
    assert one.group.hypotheses == alone


def test_a_search_whose_lease_ends_is_revoked_in_every_row(host: Host, demo: Demo) -> None:
    run = Run(host, 1, demo.prompts[0], Sampling(max_tokens=12, beams=Beams(width=3, keep=1)))
    run.step()
    host.file.headers.set_lease_word(1, 0)
    rows = host.executor.run(run.plan()).rows
    assert len(rows) == 3 and all(row.revoked for row in rows)


def test_beams_hold_far_fewer_pages_than_copies_would(host: Host, demo: Demo) -> None:
    prompt = demo.prompts[3]
    run = Run(host, 1, prompt, Sampling(max_tokens=16, beams=Beams(width=8, keep=1)))
    while run.group.hypotheses is None:
        run.step()
    assert run.group.saved_pages >= 7 * ((len(prompt) - 1) // PAGE_SIZE)


def test_candidates_are_reported_beside_draws_and_cover_the_models_own_scores() -> None:
    logits = np.random.default_rng(1).normal(0, 3, (2, 50)).astype(np.float32)
    prompt = np.array([1, 2], np.uint32)
    beam = Sampling(max_tokens=9, min_tokens=1, stop_tokens=[7], logprobs=2)
    plain = Sampling(max_tokens=9, temperature=0.0)
    samples = [
        Sample(key_of(1), beam, prompt, 2, candidate_count=50),
        Sample(key_of(2), plain, prompt, 2),
    ]
    found, drawn = draw(logits, np.array([0, 1]), samples)
    assert drawn.token == int(logits[1].argmax()) and drawn.candidates is None
    assert found.candidates is not None and found.scores is not None
    ids = np.frombuffer(found.candidates.top_tokens, "<u4")
    values = np.frombuffer(found.candidates.top_values, "<f4")
    expected = torch.from_numpy(logits[0]).log_softmax(-1).numpy()
    assert ids[-1] == 7 and values[-1] == -np.inf, "no stop before min_tokens"
    assert values[:-1] == pytest.approx(expected[ids[:-1]], abs=1e-5)
    assert np.all(np.diff(values) <= 0.0)
    best = np.frombuffer(found.scores.top_tokens, "<u4")
    assert best.tolist() == np.argsort(-logits[0])[:2].tolist()


@pytest.mark.parametrize("stops", [[], [31]])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_beam_without_numbers_is_poisoned_wherever_they_are_missing(
    wrong: float, stops: list[int]
) -> None:
    logits = np.zeros((1, 50), np.float32)
    logits[0, 31] = wrong
    beams = Beams(width=2, keep=1)
    sampling = Sampling(max_tokens=9, min_tokens=1, stop_tokens=stops, beams=beams)
    sample = Sample(key_of(1), sampling, np.array([1], np.uint32), 1, candidate_count=4)
    (found,) = draw(logits, np.array([0]), [sample])
    assert found.poisoned


def test_a_beam_that_may_not_go_on_is_poisoned_and_not_an_answer_of_nothing() -> None:
    sampling = Sampling(
        max_tokens=9, min_tokens=1, stop_tokens=list(range(50)), beams=Beams(width=2, keep=1)
    )
    sample = Sample(key_of(1), sampling, np.array([1], np.uint32), 1, candidate_count=4)
    (found,) = draw(np.zeros((1, 50), np.float32), np.array([0]), [sample])
    assert found.poisoned
