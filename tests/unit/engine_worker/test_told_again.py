"""What came with a first frame that was lost comes again, from whoever has the sequence by now."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from tests.unit.engine_worker.bench import PREFILL, Bench, attach, key, result_of, submit

from pagemesh.engine.worker import events as ev
from pagemesh.engine.worker.plan import StepResult, TokenScores
from pagemesh.wire.messages import Ok, Refused
from pagemesh.wire.pager_messages import Admit, Redeem, Revoke, Waterfall
from pagemesh.wire.tokens import unpack
from pagemesh.wire.work_messages import Attach, Frame, Resend, Submit, TopLogprobs

FALL = Waterfall(available_tokens=8, selected_tokens=8, delivered_tokens=8)


def scored(token: int) -> TokenScores:
    """Those of ``token``: itself, with one alternative."""
    return TokenScores(
        np.array([-token], "<f4").tobytes(), 1, np.array([token + 1], "<u4").tobytes(),
        np.array([-token - 1], "<f4").tobytes(),
    )  # fmt: skip


def step(bench: Bench, token: int) -> None:
    """One in which ``token`` is drawn, with its scores where they are wanted."""
    plan, bench.plan = bench.plan, None
    assert plan is not None
    drawn = result_of(plan, token)
    rows = tuple(
        replace(row, drawn=tuple(replace(one, scores=scored(token)) for one in row.drawn))
        for row in drawn.rows
    )
    bench.handle(ev.StepsFinished((StepResult(plan.step, rows),)))


def scores_of(*tokens: int) -> TopLogprobs:
    runs = [scored(token) for token in tokens]
    return TopLogprobs(
        chosen=b"".join(run.chosen for run in runs),
        width=1,
        top_tokens=b"".join(run.top_tokens for run in runs),
        top_values=b"".join(run.top_values for run in runs),
    )


def wanted(message: Submit) -> Submit:
    """``message``, with log-probabilities and one alternative."""
    return msgspec.structs.replace(
        message, sampling=msgspec.structs.replace(message.sampling, logprobs=1)
    )


def again(bench: Bench, position: int) -> list[Frame]:
    bench.frames.clear()
    answer = bench.ask(Resend(key=key(), position=position))
    assert isinstance(answer, Ok) or (isinstance(answer, Refused) and answer.code == "Gone")
    return bench.frames


def granted(bench: Bench) -> None:
    answer = bench.granted(bench.asked(Admit), cached=8)
    bench.answer(Admit, msgspec.structs.replace(answer, waterfall=FALL))


def test_pages_computed_before_a_preemption_do_not_count_as_cached() -> None:
    nothing = Waterfall(available_tokens=0)
    bench = Bench().start()
    bench.ask(submit(20))
    first = bench.granted(bench.asked(Admit))
    bench.answer(Admit, msgspec.structs.replace(first, waterfall=nothing))
    bench.step()
    bench.notice(Revoke(key=key(), lease=first.lease, reason="preempted"))
    bench.step(revoked=True)
    while "Admit" not in bench.open_kinds():
        bench.tick()
    granted(bench)
    while not bench.frames:
        bench.step(51)
    assert bench.frames[0].waterfall == nothing


def test_what_was_cached_is_said_with_the_first_frame_and_whenever_that_is_sent_again() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    granted(bench)
    bench.step(51)
    bench.step(52)
    assert [frame.waterfall for frame in bench.frames] == [FALL, None]
    assert [frame.waterfall for frame in again(bench, 0)] == [FALL]
    assert [frame.waterfall for frame in again(bench, 1)] == [None]


def test_what_an_admission_after_a_preemption_found_is_not_said_for_the_first() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    granted(bench)
    bench.step(51)
    (lease,) = bench.core._desk.leases
    bench.notice(Revoke(key=key(), lease=lease, reason="preempted"))
    bench.step(52, revoked=True)
    bench.grant(cached=4)
    while len(bench.tokens()) < 2:
        bench.step(52)
    assert [frame.waterfall for frame in bench.frames[1:]] == [None]
    assert again(bench, 0)[0].waterfall == FALL


def handed_over() -> Attach:
    """What prefill says of a sequence whose first token it drew."""
    prefill = Bench(PREFILL).start()
    prefill.ask(wanted(submit(10, decode="d")))
    granted(prefill)
    step(prefill, 50)
    prefill.offered()
    return prefill.asked(Attach)


def test_decode_has_the_scores_of_the_token_that_prefill_drew_and_what_was_cached() -> None:
    message = handed_over()
    assert (message.logprobs, message.waterfall) == (scores_of(50), FALL)
    decode = Bench().start()
    decode.ask(message)
    decode.answer(Redeem, decode.granted(decode.asked(Redeem), cached=10, pages=4))
    step(decode, 51)
    (own,) = decode.frames
    assert (own.first_position, own.logprobs, own.waterfall) == (1, scores_of(51), None)
    (both,) = again(decode, 0)
    assert unpack(both.tokens).tolist() == [50, 51]
    assert (both.logprobs, both.waterfall) == (scores_of(50, 51), FALL)


def test_tokens_of_an_earlier_attempt_go_without_scores_in_a_frame_of_their_own() -> None:
    bench = Bench().start()
    bench.ask(wanted(submit(9, generated=(49,))))
    granted(bench)
    step(bench, 50)
    frames = again(bench, 0)
    assert [(one.first_position, one.logprobs) for one in frames] == [(0, None), (1, scores_of(50))]


def test_tokens_of_an_earlier_attempt_are_said_again_in_parts_too() -> None:
    bench = Bench(resend_tokens_max=2).start()
    bench.ask(wanted(submit(10, max_tokens=9, generated=(51, 52, 53, 54, 55))))
    told = b"".join(frame.tokens for frame in again(bench, 0))
    assert unpack(told).tolist() == [51, 52]


@pytest.mark.parametrize(
    "wrong",
    [
        scores_of(50, 51),
        TopLogprobs(chosen=b"123"),
        msgspec.structs.replace(scores_of(50), width=2),
        msgspec.structs.replace(scores_of(50), top_values=b""),
    ],
)
def test_scores_that_are_not_of_the_tokens_are_refused(wrong: TopLogprobs) -> None:
    answer = Bench().start().ask(msgspec.structs.replace(attach(), logprobs=wrong))
    assert isinstance(answer, Refused) and answer.code == "Malformed"


def whole_prompt_scored(max_tokens: int) -> Bench:
    """After the step in which the scores of a prompt of six tokens are found."""
    bench = Bench().start()
    bench.ask(submit(6, max_tokens=max_tokens, prompt_logprobs=True))
    bench.answer(Admit, bench.granted(bench.asked(Admit)))
    plan, bench.plan = bench.plan, None
    assert plan is not None
    found = result_of(plan, 51)
    parts = [scored(token) for token in range(101, 106)]
    joined = TokenScores(
        b"".join(one.chosen for one in parts), 1, b"".join(one.top_tokens for one in parts),
        b"".join(one.top_values for one in parts),
    )  # fmt: skip
    rows = (replace(found.rows[0], prompt_scores=joined),)
    bench.handle(ev.StepsFinished((StepResult(plan.step, rows),)))
    return bench


def test_scores_of_a_prompt_that_are_said_again_leave_room_for_the_tokens() -> None:
    bench = whole_prompt_scored(5)
    bench.step(52)
    scores, tokens = again(bench, 0)
    assert scores.prompt_logprobs == scores_of(*range(101, 106)) and not scores.tokens
    assert tokens.prompt_logprobs is None and unpack(tokens.tokens).tolist() == [51, 52]


def test_scores_of_a_prompt_that_nothing_follows_are_said_again_once_with_the_end() -> None:
    (frame,) = again(whole_prompt_scored(0), 0)
    assert frame.prompt_logprobs is not None and frame.finish == "length"
