"""A row whose logits are no numbers ends its own sequence, and no other."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
from tests.unit.engine_worker.bench import Bench, key, result_of, submit

from pagemesh.engine.worker import events as ev
from pagemesh.engine.worker.plan import StepResult, TokenScores, plan_after
from pagemesh.wire.messages import SequenceKey
from pagemesh.wire.pager_messages import Release
from pagemesh.wire.work_messages import Abort, Finish

OTHER = SequenceKey(request="2" * 32, attempt=1, choice=0)


def _finish(bench: Bench, *results: StepResult) -> None:
    bench.plan = None
    bench.handle(ev.StepsFinished(results))


def _ends(bench: Bench, request: str) -> list[tuple[Finish | None, str]]:
    return [
        (frame.finish, frame.error.code if frame.error is not None else "")
        for frame in bench.frames
        if frame.key.request == request and frame.finish is not None
    ]


def _two_decoding() -> Bench:
    bench = Bench().start()
    for request in (key().request, OTHER.request):
        bench.ask(msgspec.structs.replace(submit(7, max_tokens=40), request=request))
        bench.grant(pages=8)
        bench.step(50)
    bench.step(50)
    return bench


def test_a_poisoned_row_ends_its_sequence_with_its_reason_and_the_others_go_on() -> None:
    bench = _two_decoding()
    assert bench.plan is not None and len(bench.plan.rows) == 2
    _finish(bench, result_of(bench.plan, 51, spoiled=OTHER))
    assert _ends(bench, OTHER.request) == [("error", "Internal")]
    assert bench.plan is not None and [row.key for row in bench.plan.rows] == [key()]
    assert bench.tokens()[-1] == 51
    release = bench.asked(Release)
    assert release.key == OTHER and not release.cache, "what is there may be what did it"


def test_tokens_drawn_before_a_run_was_poisoned_are_delivered() -> None:
    bench = _two_decoding()
    plan = bench.plan
    assert plan is not None and plan.repeat_count
    sound = result_of(plan, 52)
    following = plan_after(plan, sound)
    assert following is not None
    spoiled = result_of(following, 53, spoiled=OTHER)
    assert plan_after(following, spoiled) is None, "the scheduler has to decide"
    _finish(bench, sound, spoiled)
    told = [frame for frame in bench.frames if frame.key == OTHER][-2:]
    assert [(len(frame.tokens) // 4, frame.finish) for frame in told] == [(1, None), (0, "error")]
    assert bench.tokens()[-2:] == [52, 53]


def test_all_choices_that_draw_from_a_poisoned_row_end_at_once() -> None:
    bench = Bench().start()
    bench.ask(submit(6, choices=3))
    bench.grant()
    assert bench.plan is not None
    _finish(bench, result_of(bench.plan, 50, spoiled=key()))
    assert _ends(bench, key().request) == [("error", "Internal")] * 3
    bench.settle()
    assert bench.core.idle


def test_a_prompt_whose_scores_are_no_numbers_is_not_answered() -> None:
    bench = Bench().start()
    bench.ask(submit(6, max_tokens=0, prompt_logprobs=True))
    bench.grant()
    assert bench.plan is not None
    scores = TokenScores(np.full(5, np.nan, "<f4").tobytes())
    (row,) = result_of(bench.plan, 50).rows
    _finish(bench, StepResult(bench.plan.step, (replace(row, prompt_scores=scores),)))
    assert _ends(bench, key().request) == [("error", "Internal")]


def test_pages_of_a_step_that_was_no_numbers_are_not_cached_when_its_client_has_left() -> None:
    bench = Bench().start()
    bench.ask(submit(8))
    bench.grant()
    plan = bench.plan
    assert plan is not None
    bench.ask(Abort(request=key().request, attempt=1, reason="client"))
    _finish(bench, result_of(plan, 50, spoiled=key()))
    assert not bench.asked(Release).cache
