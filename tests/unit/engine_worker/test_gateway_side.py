"""What gateways hear and may ask: frames, counters, resends, attempts, deadlines, draining."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
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
    result_of,
    submit,
)

from pagemesh.engine.worker import events as ev
from pagemesh.engine.worker import frames
from pagemesh.engine.worker.lease import TokenBuffer
from pagemesh.engine.worker.plan import StepResult, TokenScores
from pagemesh.engine.worker.sequence import IllegalMove, Phase
from pagemesh.engine.worker.vetting import vet
from pagemesh.wire.errors import NoCapacity
from pagemesh.wire.messages import Message, Ok
from pagemesh.wire.pager_messages import Admit, Release
from pagemesh.wire.tokens import unpack
from pagemesh.wire.work_messages import (
    Abort,
    Accepted,
    Attach,
    Failure,
    Frame,
    Resend,
    Submit,
    TopLogprobs,
)


def test_a_first_token_is_sent_before_the_next_step_and_others_while_it_computes() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    bench.grant(cached=8)
    kinds: list[list[type[ev.Command]]] = []
    for token in (51, 52):
        bench.log.clear()
        bench.step(token)
        kinds.append(
            [type(one) for one in bench.log if isinstance(one, ev.SendFrames | ev.RunStep)]
        )
    assert kinds == [[ev.SendFrames, ev.RunStep], [ev.RunStep, ev.SendFrames]]


def test_frames_are_counted_and_a_beat_repeats_the_last_counter() -> None:
    bench = finished()
    assert [sent.frames.counter for sent in bench.sent] == [1, 2, 3]
    bench.sent.clear()
    for _ in range(30):
        bench.tick(bench.limits.beat_ms)
        bench.open.clear()
    beats = [sent.frames.counter for sent in bench.sent]
    assert beats == [3] * bench.limits.beats_max, "bounded once nothing lives"


def test_one_message_a_step_carries_every_sequence_of_a_gateway() -> None:
    bench = Bench().start()
    for request in ("1", "2"):
        bench.ask(msgspec.structs.replace(submit(4), request=request * 32))
        bench.grant()
    bench.step()
    bench.sent.clear()
    bench.step()
    assert [len(sent.frames.frames) for sent in bench.sent] == [2]


def sizes(bench: Bench) -> list[int]:
    """How many frames each message of one more step has."""
    bench.sent.clear()
    bench.step()
    return [len(one.frames.frames) for one in bench.sent]


def test_frames_after_a_full_message_share_one_again() -> None:
    bench = Bench(frames_bytes_max=2_500).start()
    for number in range(4):
        bench.ask(msgspec.structs.replace(submit(3), request=f"{number:032x}"))
        bench.grant()
    while sum(found := sizes(bench)) < 4:
        assert bench.plan is not None
    assert found == [2, 2]


def bytes_more(**more: Any) -> int:
    """What a frame counts for beyond one without these."""
    plain = Frame(key=key(), first_position=0, tokens=bytes(8))
    filled = msgspec.structs.replace(plain, **more)
    return frames._bytes_at_most(filled) - frames._bytes_at_most(plain)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_scores_count_for_what_a_message_carries_of_them(field: str) -> None:
    scores = TopLogprobs(chosen=bytes(8), width=20, top_tokens=bytes(160), top_values=bytes(160))
    assert bytes_more(**{field: scores}) == 8 + 160 + 160


def vet_scored(prompt: int, choices: int) -> None:
    """Vet a submit that wants 164 bytes of scores for each token of its prompt, of each choice."""
    message = submit(prompt, choices=choices, prompt_logprobs=True)
    sampling = msgspec.structs.replace(message.sampling, logprobs=20)
    message = msgspec.structs.replace(message, sampling=sampling)
    vet(message, vocab_tokens=10_000, message_bytes_max=1 << 20, output_bytes_max=16 << 20)


def test_the_prompts_scores_may_fill_a_message_for_each_choice() -> None:
    vet_scored(5_900, 8)
    with pytest.raises(NoCapacity, match="fewer alternatives or tokens"):
        vet_scored(6_100, 1)
    with pytest.raises(NoCapacity, match="for 9 choices, 8388608 can be sent at once"):
        vet_scored(5_900, 9)


def test_the_prompts_scores_of_several_choices_go_out_in_a_message_each() -> None:
    bench = Bench(frames_bytes_max=1_500).start()
    bench.ask(submit(8, choices=3, max_tokens=0, prompt_logprobs=True))
    bench.grant()
    plan, bench.plan = bench.plan, None
    assert plan is not None
    scores = TokenScores(bytes(28), 20, bytes(560), bytes(560))
    rows = (replace(result_of(plan, 51).rows[0], prompt_scores=scores),)
    bench.handle(ev.StepsFinished((StepResult(plan.step, rows),)))
    messages = [sent.frames.frames for sent in bench.sent]
    assert [len(frames) for frames in messages] == [1, 1, 1]
    assert all(frame.prompt_logprobs is not None for (frame,) in messages)


def test_the_words_of_an_error_count_whatever_their_letters() -> None:
    words = "\U0001f600" * 100
    assert bytes_more(error=Failure(code="Internal", message=words)) >= len(words.encode())


def test_what_ends_after_a_silence_is_counted_like_any_other_frame() -> None:
    bench = Bench().start()
    bench.ask(submit(10, deadline_ms=10 * bench.limits.beat_ms))
    bench.tick(10 * bench.limits.beat_ms)
    (last,) = [sent.frames for sent in bench.sent if sent.frames.frames]
    assert last.frames[0].finish == "error" and last.counter == 1


def test_lost_frames_are_sent_again_from_a_position_with_the_end() -> None:
    bench = finished()
    bench.frames.clear()
    assert isinstance(bench.ask(Resend(key=key(), position=1)), Ok)
    (frame,) = bench.frames
    assert frame.first_position == 1 and unpack(frame.tokens).tolist() == [52, 53]
    assert frame.finish == "length"


def test_a_resend_with_nothing_new_sends_nothing() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    assert isinstance(bench.ask(Resend(key=key(), position=0)), Ok)
    assert bench.sent == []


def test_a_sequence_is_forgotten_after_a_while() -> None:
    bench = finished()
    bench.tick(bench.limits.retain_ms + 1)
    assert code(bench.ask(Resend(key=key(), position=0))) == "Gone"


def test_a_higher_attempt_ends_the_lower_and_a_late_lower_one_is_refused() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    bench.grant(cached=8)
    assert isinstance(bench.ask(submit(10, attempt=2)), Accepted)
    bench.step()
    assert bench.asked(Release).key.attempt == 1
    bench.tick(bench.limits.retain_ms + 1)
    assert code(bench.ask(submit(10, attempt=1))) == "Gone"


def test_a_submit_twice_is_one_sequence() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    assert isinstance(bench.ask(submit(10)), Accepted)
    assert bench.open_kinds() == ["Admit"]


def test_an_abort_may_name_one_choice_and_the_others_go_on() -> None:
    bench = Bench().start()
    bench.ask(submit(10, choices=2))
    bench.ask(Abort(request=REQUEST, attempt=1, choice=0, reason="stop"))
    bench.grant()  # the leader's, which is given back
    bench.settle()
    bench.tick()
    assert bench.asked(Admit).key.choice == 1


@pytest.mark.parametrize(
    ("message", "refused"),
    [
        (submit(0), "Malformed"),
        (submit(10, deadline_ms=0), "DeadlineExceeded"),
        (submit(400), "NoCapacity"),
        (submit(10, choices=3), "Busy"),
    ],
)
def test_what_cannot_be_taken_is_refused_at_once(message: Message, refused: str) -> None:
    bench = Bench(sequences_max=2).start()
    assert code(bench.ask(message)) == refused


def test_a_passed_deadline_ends_a_sequence_with_its_reason() -> None:
    bench = Bench().start()
    bench.ask(submit(10, deadline_ms=500))
    bench.grant(cached=8)
    bench.tick(600)
    failure = bench.frames[-1].error
    assert failure is not None and failure.code == "DeadlineExceeded"
    bench.step()
    bench.settle()
    assert bench.core.idle


def test_draining_accepts_nothing_finishes_what_it_can_and_reports_the_rest() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    bench.grant(cached=8)
    bench.handle(ev.Drain(1_000))
    assert code(bench.ask(submit(10, attempt=2))) == "Busy"
    bench.step(51)
    assert bench.tokens() == [51]
    bench.tick(1_001)
    failure = bench.frames[-1].error
    assert failure is not None and failure.code == "Gone"
    bench.step(52)
    bench.settle()
    assert len(of_kind(bench.log, ev.Drained)) == 1


def test_the_loss_of_another_life_of_a_gateway_ends_nothing() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    bench.grant(cached=8)
    bench.handle(ev.GatewayLost("gw", 2**63))
    bench.step(51)
    bench.step(52)
    assert bench.tokens() == [51, 52], "incarnations are random: the larger is not the later"


def test_what_is_handed_over_for_a_gateway_that_is_gone_is_refused_for_a_while() -> None:
    bench = Bench().start()
    bench.handle(ev.GatewayLost("gw", 1))
    assert code(bench.ask(attach())) == "Gone"
    bench.tick(bench.limits.retain_ms + 1)
    assert isinstance(bench.ask(attach()), Accepted)


def test_a_gateway_that_was_only_silent_is_served_again() -> None:
    bench = Bench().start()
    bench.handle(ev.GatewayLost("gw", 1))
    bench.ask(msgspec.structs.replace(submit(10), request="2" * 32))
    assert isinstance(bench.ask(attach()), Accepted)


def test_gateways_and_workers_that_come_and_go_are_not_remembered_for_ever() -> None:
    bench = Bench(gateways_max=3, workers_max=3).start()
    for life in range(1, 20):
        request = f"{life:032x}"
        asked = msgspec.structs.replace(submit(10), request=request, gateway_incarnation=life)
        assert isinstance(bench.ask(asked), Accepted)
        bench.ask(Abort(request=request, attempt=1, reason="client"))
        bench.handle(ev.GatewayLost("other", life))
        bench.handle(ev.WorkerLost(f"d{life}", life))
    desk = bench.core._desk
    assert len(desk.lines) <= 3 and list(desk.lost_workers) == ["d17", "d18", "d19"]
    assert len(bench.core._intake._lost) <= 3


def test_prefill_keeps_a_sequence_when_its_decode_worker_is_gone() -> None:
    bench = Bench(PREFILL).start()
    bench.ask(submit(10, decode="d"))
    bench.grant(cached=8)
    bench.handle(ev.WorkerLost("d", 3))
    bench.step(51)
    bench.step(52)
    assert bench.tokens() == [51, 52]


def test_a_move_that_no_table_has_raises_with_the_way_that_led_there() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    sequence = bench.core._desk.live[key()]
    with pytest.raises(IllegalMove, match="WAITING -> ADMITTING"):
        sequence.move(Phase.HANDED)


def test_views_of_tokens_stay_true_while_tokens_are_added() -> None:
    buffer = TokenBuffer(np.array([1, 2], "<u4"), 2)
    view = buffer.view(0, 2)
    for token in range(100):
        buffer.append(token)
    assert view.tolist() == [1, 2] and buffer.view(2, 102).tolist() == list(range(100))


@pytest.mark.parametrize("message", [submit(), attach()])
def test_what_is_meant_for_one_of_our_name_with_other_weights_is_refused(
    message: Submit | Attach,
) -> None:
    bench = Bench().start()
    other = msgspec.structs.replace(message, model_root=b"n" * 32)
    assert code(bench.ask(other)) == "Stale"
    assert not bench.open, "no page of that tree is asked for"
    assert isinstance(bench.ask(message), Accepted)
