"""Which continuations a beam search goes on with, against all there are, and where their pages
are."""

from __future__ import annotations

import itertools
import random

import msgspec
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


def test_where_longer_answers_score_worse_nothing_is_given_up_for_what_they_would_score() -> None:
    never = sampling(40, width=2, keep=2, length_penalty=-1.0, early_stopping="never")
    search = BeamSearch(never)
    unlikely = [-9.0] * VOCAB
    for rows in ([[-1.1, -3.0, -9.0, -9.0, -1.0]], [[-0.1, -5.0, -9.0, -9.0, -2.0], unlikely]):
        search.advance([drawn(np.array(row, "<f4")) for row in rows])
    assert [one.score for one in search.hypotheses()] == pytest.approx([-1.0, -6.2])
    assert not search.ended, "what goes on would have -2.4 if it ended now, -48 at its longest"


def likely(*tokens: int, vocab: int = VOCAB) -> Drawn:
    """``tokens`` are the likeliest, in that order, before those of the lowest ids."""
    order = [*tokens, *(token for token in range(vocab) if token not in tokens)]
    values = np.empty(vocab, "<f4")
    values[order] = -np.arange(1, vocab + 1)
    return drawn(values)


def test_what_ends_counts_only_among_as_many_of_the_likeliest_as_there_are_beams() -> None:
    search = BeamSearch(sampling(width=2, keep=2))
    search.advance([likely(0, 1, END)])
    assert search.hypotheses() == []
    assert [tokens_of(beam) for beam in search.beams] == [(0,), (1,)]
    search.advance([likely(0, END), likely(0, 1)])
    assert [unpack(one.tokens).tolist() for one in search.hypotheses()] == [[0, END]]


def test_as_many_answers_as_there_are_beams_are_found_before_the_best_are_kept() -> None:
    search = BeamSearch(sampling(40, width=2, keep=1, early_stopping=True))
    search.advance([likely(END, 0, 1)])
    assert not search.ended and len(search.hypotheses()) == 1
    search.advance([likely(END, 0), likely(END, 0)])
    assert search.ended and len(search.hypotheses()) == 1


def test_however_many_tokens_end_an_answer_there_are_others_to_go_on_with() -> None:
    stops = msgspec.structs.replace(sampling(width=2, keep=2), stop_tokens=[4, 5])
    search = BeamSearch(stops)
    search.advance([likely(0, 1, vocab=6)])
    search.advance([likely(4, 5, 2, vocab=6), likely(4, 5, 3, vocab=6)])
    assert [tokens_of(beam) for beam in search.beams] == [(0, 2), (0, 0)]


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
    pages.take_copies()
    pages.fork([0])
    assert pages.prepare(11)
    assert pages.saved_count_max == 3 * 2, "it is the most that were saved at once"
