"""A prompt's log-probabilities come with the first frame: without it nothing is delivered."""

from __future__ import annotations

import pytest
from msgspec import structs
from tests.unit.gateway.support import DECODE, PREFILL, frame, spec
from tests.unit.gateway.test_request import LIMITS, OTHER_ROUTE, Desk, of

from pagemesh.gateway.calls import events as ev
from pagemesh.wire.errors import Gone
from pagemesh.wire.messages import Ok, Refused
from pagemesh.wire.work_messages import Frame, TopLogprobs

SCORES = TopLogprobs(chosen=bytes(4 * 7))


def first(attempt: int = 1) -> Frame:
    """Prefill's, which it keeps for a while."""
    return structs.replace(frame(0, [5], attempt=attempt), prompt_logprobs=SCORES)


@pytest.fixture
def desk() -> Desk:
    """A request whose first frame was lost; decode's next one has come, with the answer's end."""
    made = Desk(spec(prompt_logprobs=True, max_tokens=2))
    made.start()
    out = made.arrive(frame(1, [6], finish="length"))
    asked = [(one.worker, one.message.position) for one in of(out, ev.SendResend)]
    assert asked == [(PREFILL, 0), (DECODE, 0)]
    return made


def test_prefill_is_asked_for_a_lost_first_frame_whoever_has_the_tokens_by_now(desk: Desk) -> None:
    whole = frame(0, [5, 6], finish="length")
    desk.arrive(whole)
    assert desk.tokens() == []
    assert of(desk.arrive(first(), PREFILL), ev.PromptScored) == [ev.PromptScored(SCORES)]
    key = whole.key
    gone = Refused.of(Gone("the sequence went on elsewhere"))
    assert desk.feed(ev.ResendAnswered(key, PREFILL, gone)) == []
    assert desk.feed(ev.ResendAnswered(key, DECODE, Ok())) == []
    desk.wait(LIMITS.silence_ms_max)
    desk.arrive(whole)
    assert (desk.tokens(), desk.ends()) == ([5, 6], [ev.Ended(ev.Completed())])


def test_where_nobody_has_the_scores_any_more_they_are_computed_again(desk: Desk) -> None:
    routes: list[ev.ChooseRoute] = []
    for _ in range(2 * LIMITS.resends_max):
        routes += of(desk.wait(LIMITS.gap_patience_ms), ev.ChooseRoute)
        if routes:
            break
        routes += of(desk.arrive(frame(0, [5, 6], finish="length")), ev.ChooseRoute)
    assert routes and desk.tokens() == []
    (submit,) = of(desk.place(OTHER_ROUTE), ev.SendSubmit)
    assert submit.message.prompt_logprobs and submit.message.choices[0].generated == b""
    desk.arrive(first(attempt=2), OTHER_ROUTE.worker)
    desk.arrive(frame(1, [6], attempt=2, finish="length"), OTHER_ROUTE.worker)
    assert (desk.tokens(), desk.ends()) == ([5, 6], [ev.Ended(ev.Completed())])
