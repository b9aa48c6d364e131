"""Attempts at a request, whatever came before them: what is taken, from where it goes on, and what
is told of it."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.engine_worker.bench import (
    PREFILL,
    REQUEST,
    Bench,
    attach,
    code,
    finished,
    key,
    of_kind,
    submit,
)

from pagemesh.engine.worker import events as ev
from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.messages import Ok
from pagemesh.wire.pager_messages import AckRevoke, Admit, Redeem, Revoke
from pagemesh.wire.work_messages import Abort, Accepted, Attach, Resend, Submit

STOP = 9
TERMS = CacheTerms(tenant="t", pages_max=20)


def patient(message: Submit, min_tokens: int) -> Submit:
    """``message``, with so many tokens to come before a stop token counts."""
    sampling = msgspec.structs.replace(message.sampling, min_tokens=min_tokens)
    return msgspec.structs.replace(message, sampling=sampling)


def named(message: Submit, number: int) -> Submit:
    """``message`` as another request."""
    return msgspec.structs.replace(message, request=f"{number:032x}")


# Stops --------------------------------------------------------------------------------------


def test_a_stop_token_among_those_that_have_to_come_ends_nothing() -> None:
    bench = Bench().start()
    bench.ask(patient(submit(10, stop=STOP), 2))
    bench.grant(cached=8)
    ends = []
    for _ in range(3):
        bench.step(STOP)
        ends.append(bench.frames[-1].finish)
    assert ends == [None, None, "stop"]


@pytest.mark.parametrize(("count", "finish"), [(1, None), (2, None), (3, "stop")])
def test_an_attempt_that_begins_with_a_stop_token_is_over_if_it_counts(
    count: int, finish: str | None
) -> None:
    bench = Bench().start()
    bench.ask(patient(submit(10, stop=STOP, generated=(STOP,) * count), 2))
    bench.tick()
    assert [frame.finish for frame in bench.frames] == ([finish] if finish else [])
    assert bench.open_kinds() == ([] if finish else ["Admit"])


# What is taken ------------------------------------------------------------------------------


def test_a_choice_whose_abort_came_first_is_not_begun_and_the_others_are() -> None:
    bench = Bench().start()
    bench.ask(Abort(request=REQUEST, attempt=1, choice=0, reason="stop"))
    assert isinstance(bench.ask(submit(10, choices=2)), Accepted)
    assert bench.asked(Admit).key == key(1)
    assert isinstance(bench.ask(submit(10, choices=2, attempt=2)), Accepted)


def test_an_abort_that_comes_late_does_not_undo_a_later_one() -> None:
    bench = Bench().start()
    for attempt in (2, 1):
        bench.ask(Abort(request=REQUEST, attempt=attempt, reason="client"))
    assert code(bench.ask(submit(10, attempt=2))) == "Gone"


@pytest.mark.parametrize(("max_tokens", "answer"), [(5, ""), (6, "NoCapacity")])
def test_the_context_need_not_hold_the_last_token(max_tokens: int, answer: str) -> None:
    bench = Bench(context_tokens_max=14).start()
    assert code(bench.ask(submit(10, max_tokens=max_tokens))) == answer


def test_what_was_computed_of_a_prompt_does_not_wait_any_more() -> None:
    bench = Bench().start()
    bench.ask(submit(20))
    bench.grant()
    assert bench.core.load.waiting_tokens == 20
    bench.step()
    assert bench.core.load.waiting_tokens == 12


def test_the_tenants_terms_go_with_every_admission() -> None:
    bench = Bench().start()
    bench.ask(msgspec.structs.replace(submit(10), terms=TERMS))
    assert bench.asked(Admit).terms == TERMS
    decode = Bench().start()
    decode.ask(msgspec.structs.replace(attach(), terms=TERMS))
    decode.notice(Revoke(key=key(), lease=900, reason="preempted"))
    decode.answer(AckRevoke, Ok())
    granted = decode.granted(decode.asked(Redeem), cached=10)
    decode.answer(Redeem, msgspec.structs.replace(granted, lease=900))
    assert decode.asked(Admit).terms == TERMS


# Choices that wait for one another ----------------------------------------------------------


def test_choices_whose_leader_is_aborted_wait_for_the_next_and_leave_it_as_they_came() -> None:
    bench = Bench().start()
    bench.ask(submit(10, choices=3))
    bench.ask(Abort(request=REQUEST, attempt=1, choice=0, reason="stop"))
    bench.ask(Abort(request=REQUEST, attempt=1, choice=2, reason="stop"))
    bench.grant()  # the first one's, which is given back
    bench.settle()
    bench.tick()
    bench.grant(cached=8)
    assert [one.key for one in bench.step().rows[0].samples] == [key(1)]


# Handed over --------------------------------------------------------------------------------


def test_decode_is_told_the_time_that_is_left() -> None:
    bench = Bench(PREFILL).start()
    bench.ask(submit(10, decode="d", deadline_ms=5_000))
    bench.grant(cached=8)
    bench.tick(1_000)
    bench.step(51)
    bench.offered()
    assert bench.asked(Attach).deadline_ms == 4_000


def test_decode_computes_the_last_token_even_if_its_slot_is_said_to_be_filled() -> None:
    bench = Bench().start()
    bench.ask(attach(10, filled=11))
    bench.answer(Redeem, bench.granted(bench.asked(Redeem), cached=11))
    row = bench.step(52).rows[0]
    assert (row.start, row.tokens.tolist()) == (10, [50])


def test_a_ticket_is_given_up_when_its_own_time_is_over() -> None:
    bench, asked = Bench().start(), attach()
    short = msgspec.structs.replace(asked.handle, ttl_ms=3_000)
    bench.ask(msgspec.structs.replace(asked, handle=short))
    bench.now += 3_001
    bench.fail(Redeem, "DeadlineExceeded")
    failure = bench.frames[-1].error
    assert failure is not None and failure.code == "Stale"


# What is told -------------------------------------------------------------------------------


def test_what_is_sent_again_comes_in_parts_and_the_last_has_the_end() -> None:
    bench = finished(5, bench=Bench(resend_tokens_max=2).start())
    bench.frames.clear()
    for position in (0, 2, 4):
        bench.ask(Resend(key=key(), position=position))
    assert bench.tokens() == [51, 52, 53, 54, 55]
    assert [frame.finish for frame in bench.frames] == [None, None, "length"]


def test_frames_that_are_too_large_together_go_in_several_messages() -> None:
    bench = Bench(frames_bytes_max=2_500).start()
    for number in range(3):
        bench.ask(named(submit(3), number))
        bench.grant()
    while len(bench.sent) < 3:
        bench.step()
    bench.sent.clear()
    bench.step()
    assert [len(one.frames.frames) for one in bench.sent] == [2, 1], "each may have a kilobyte"
    first, second = (one.frames.counter for one in bench.sent)
    assert second == first + 1


def test_only_so_many_that_ended_are_kept_to_be_sent_again() -> None:
    bench = Bench(retained_max=2).start()
    for number in range(4):
        bench.ask(named(submit(10, max_tokens=1, generated=(51,)), number))
    bench.tick()
    answers = []
    for number in range(4):
        one = msgspec.structs.replace(key(), request=f"{number:032x}")
        answers.append(code(bench.ask(Resend(key=one, position=0))))
    assert answers == ["Gone", "Gone", "", ""]


def test_tokens_that_an_attempt_began_with_are_not_counted_as_its_own() -> None:
    bench = Bench().start()
    bench.ask(submit(10, max_tokens=4, generated=(51, 52)))
    bench.grant(cached=8)
    for token in (53, 54):
        bench.step(token)
    (ended,) = of_kind(bench.log, ev.Finished)
    assert (ended.facts.prompt_tokens, ended.facts.generated_tokens) == (10, 2)
