"""Which continuations a beam search goes on with, against all there are, and where their pages
are."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from pagemesh.engine.worker.beam_pages import BeamPages
from pagemesh.engine.worker.beam_search import Beam, BeamSearch
from pagemesh.engine.worker.plan import Drawn, TokenScores
from pagemesh.wire.messages import SequenceKey
from pagemesh.wire.tokens import unpack
from pagemesh.wire.work_messages import Beams, Hypothesis, Sampling

KEY = SequenceKey(request="0" * 32, attempt=1, choice=0)
VOCAB = 5
END = 4


def logprobs(tokens: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """float32 [VOCAB], of what follows ``tokens``."""
    weights = np.random.default_rng([seed, *tokens]).random(VOCAB) + 0.05
    found: np.ndarray = np.log(weights / weights.sum()).astype("<f4")
    return found


def drawn(values: np.ndarray) -> Drawn:
    order = np.argsort(-values, kind="stable")
    found = TokenScores(
        b"", len(order), order.astype("<u4").tobytes(), values[order].astype("<f4").tobytes()
    )
    return Drawn(KEY, int(order[0]), candidates=found)


def sampling(max_tokens: int = 4, **beams: float | str) -> Sampling:
    want = {"width": 3, "keep": 3, **beams}
    return Sampling(max_tokens=max_tokens, stop_tokens=[END], beams=Beams(**want))  # type: ignore[arg-type]


def tokens_of(beam: Beam) -> tuple[int, ...]:
    return tuple(one.token for one in beam.path)


def searched(want: Sampling, seed: int = 0) -> list[Hypothesis]:
    search = BeamSearch(want)
    while not search.ended:
        search.advance([drawn(logprobs(tokens_of(beam), seed)) for beam in search.beams])
    return search.hypotheses()


def every_answer(max_tokens: int, penalty: float, seed: int) -> list[tuple[float, list[int]]]:
    """All continuations that end, the best first."""
    found = []
    for length in range(1, max_tokens + 1):
        for tokens in itertools.product(range(VOCAB), repeat=length):
            ends = tokens[-1] == END or length == max_tokens
            if ends and END not in tokens[:-1]:
                whole = sum(logprobs(tokens[:i], seed)[tokens[i]] for i in range(length))
                found.append((float(whole) / length**penalty, list(tokens)))
    return sorted(found, key=lambda one: -one[0])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_a_beam_as_wide_as_there_are_continuations_finds_the_best(
    seed: int, penalty: float
) -> None:
    want = sampling(3, width=16, length_penalty=penalty, early_stopping="never")
    got = [(one.score, unpack(one.tokens).tolist()) for one in searched(want, seed)]
    for (score, tokens), (best, right) in zip(got, every_answer(3, penalty, seed), strict=False):
        assert tokens == right
        assert score == pytest.approx(best, abs=1e-5)


def test_every_token_of_an_answer_has_its_log_probability() -> None:
    for one in searched(sampling(6)):
        tokens = tuple(unpack(one.tokens).tolist())
        expected = [logprobs(tokens[:at])[token] for at, token in enumerate(tokens)]
        assert np.frombuffer(one.logprobs.chosen, "<f4").tolist() == expected
        assert one.score == pytest.approx(sum(expected) / len(expected), abs=1e-6)


def test_a_beam_goes_on_from_another_without_a_copy_of_it_however_long_it_is() -> None:
    search = BeamSearch(sampling(5_000, early_stopping="never"))
    values = logprobs(())
    values[END] = -np.inf
    while not search.ended:
        before = search.beams
        search.advance([drawn(values) for _ in before])
        assert all(beam.before in before for beam in search.beams)
    assert len(unpack(search.hypotheses()[0].tokens)) == 5_000


def test_an_answer_says_how_it_ended() -> None:
    for one in searched(sampling(5, width=8, keep=8)):
        stopped = unpack(one.tokens).tolist()[-1] == END
        assert (one.finish, one.stop_token) == (("stop", END) if stopped else ("length", None))


def test_as_many_answers_are_given_as_were_asked_for() -> None:
    assert len(searched(sampling(4, keep=2))) == 2


def test_early_stopping_ends_with_the_first_answers_and_never_waits_for_better_ones() -> None:
    def steps(early: bool | str) -> int:
        search = BeamSearch(sampling(40, early_stopping=early))
        while not search.ended:
            search.advance([drawn(logprobs(tokens_of(beam))) for beam in search.beams])
        return search.length

    assert steps(True) <= steps(False) < steps("never")


def test_what_may_not_come_is_not_gone_on_with() -> None:
    values = logprobs(())
    values[1:] = -np.inf
    search = BeamSearch(sampling())
    assert search.advance([drawn(values)]) == [0]
    assert [tokens_of(beam) for beam in search.beams] == [(0,)]


def test_each_beam_reads_its_own_tokens_whatever_is_shared_and_copied() -> None:
    dice = random.Random(3)
    for _ in range(60):
        size, prompt, width = dice.choice([1, 2, 4]), dice.randrange(1, 14), dice.randrange(1, 7)
        steps = dice.randrange(1, 20)
        most = Beams(width=width, keep=1).pages_max(prompt, steps, size)
        table = np.array(dice.sample(range(500), most), "<u4")
        pages = BeamPages(table[: -(-prompt // size)], prompt, size)
        memory: dict[tuple[int, int], int] = {}
        for slot in range(prompt - 1):
            memory[int(table[slot // size]), slot % size] = slot
        texts = [list(range(prompt - 1))]
        for step in range(steps):
            length = prompt - 1 + step
            pages.learn(table)
            assert pages.prepare(length), "as many pages as are ever needed"
            assert pages.prepare(length), "asking twice changes nothing"
            for source, target in pages.take_copies():
                for slot in range(size):
                    memory[target, slot] = memory.get((source, slot), -1)
            for index, text in enumerate(texts):
                own = pages.table(index).tolist()
                value = 1000 * step + index
                memory[own[length // size], length % size] = value
                text.append(value)
            for index, text in enumerate(texts):
                own = pages.table(index).tolist()
                assert [memory[own[at // size], at % size] for at in range(length + 1)] == text
            pages.check()
            parents = [dice.randrange(len(texts)) for _ in range(width)]
            texts = [list(texts[parent]) for parent in parents]
            pages.fork(parents)
            pages.check()


def test_beams_wait_when_there_are_too_few_pages_and_go_on_with_more() -> None:
    table = np.arange(20, dtype="<u4")
    pages = BeamPages(table[:1], 3, 4)
    assert pages.prepare(2), "the prompt's page has room"
    pages.fork([0, 0, 0])
    assert not pages.prepare(3), "two need a copy"
    pages.learn(table[:3])
    assert pages.prepare(3)
    assert sorted(pages.take_copies()) == [(0, 1), (0, 2)]


def test_what_sharing_saves_is_counted() -> None:
    table = np.arange(20, dtype="<u4")
    pages = BeamPages(table[:3], 10, 4)
    pages.learn(table)
    assert pages.prepare(9)
    pages.fork([0, 0, 0, 0])
    assert pages.prepare(10)
    assert pages.saved_count_max == 3 * 2, "two full pages, which three need not hold"
