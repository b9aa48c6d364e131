"""A worker that searches: one lease, a ticket without beams, one answer at the end."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from tests.unit.engine_worker.bench import DECODE, PREFILL, Bench, of_kind, submit

from pagemesh.engine.worker import events as ev
from pagemesh.engine.worker import measures
from pagemesh.engine.worker.batching import PASSED_MAX
from pagemesh.engine.worker.costs import StepCosts, StepShape
from pagemesh.engine.worker.plan import (
    Drawn,
    RowResult,
    StepPlan,
    StepResult,
    StepRow,
    TokenScores,
)
from pagemesh.engine.worker.vetting import vet
from pagemesh.runtime.metrics import REGISTRY
from pagemesh.wire import codec
from pagemesh.wire.errors import Malformed, NoCapacity
from pagemesh.wire.messages import Refused
from pagemesh.wire.pager_messages import (
    Admit,
    Extend,
    Extended,
    Offer,
    Release,
    Revoke,
)
from pagemesh.wire.tokens import pack, pack_extents, unpack
from pagemesh.wire.work_messages import Abort, Accepted, Attach, Beams, ChoiceStart, Resend, Submit

WIDTH = 3
END = 9


def asked(
    prompt: int = 10, *, max_tokens: int = 6, decode: str | None = None, **beams: object
) -> Submit:
    plain = submit(prompt, max_tokens=max_tokens, decode=decode, stop=END)
    want = Beams(**{"width": WIDTH, "keep": 2, **beams})  # type: ignore[arg-type]
    sampling = msgspec.structs.replace(plain.sampling, beams=want)
    return msgspec.structs.replace(plain, sampling=sampling)


def candidates(*pairs: tuple[int, float]) -> TokenScores:
    ids, values = zip(*pairs, strict=True)
    return TokenScores(
        b"", len(pairs), np.array(ids, "<u4").tobytes(), np.array(values, "<f4").tobytes()
    )


def report(bench: Bench, *pairs: tuple[int, float], poisoned: int | None = None) -> StepPlan:
    """Finish the running step; every beam may go on with ``pairs``, less likely by its place."""
    plan = bench.plan
    assert plan is not None, "no step is running"
    bench.plan = None
    rows = []
    for place, row in enumerate(plan.rows):
        drawn = tuple(
            Drawn(
                one.key, 0, poisoned=place == poisoned,
                candidates=candidates(*((token, value - place) for token, value in pairs)),
            )
            for one in row.samples
        )  # fmt: skip
        rows.append(RowResult(row.key, row.lease, revoked=False, drawn=drawn))
    bench.handle(ev.StepsFinished((StepResult(plan.step, tuple(rows)),)))
    return plan


GOING = ((50, -0.1), (51, -0.2), (52, -0.3), (53, -0.4), (54, -0.5), (55, -0.6))
ENDING = ((END, -0.1), *GOING)


def searching(*, pages: int | None = None) -> Bench:
    """Ten prompt tokens, eight of them cached; the beams are about to part."""
    bench = Bench(DECODE).start()
    bench.ask(asked())
    bench.grant(cached=8, pages=pages)
    bench.step()
    return bench


def test_a_search_computes_the_prompt_up_to_its_last_token_and_then_a_row_for_each_beam() -> None:
    bench = Bench(DECODE).start()
    bench.ask(asked())
    bench.grant(cached=8)
    chunk = bench.step()
    assert [(row.start, len(row.tokens), row.samples) for row in chunk.rows] == [(8, 1, ())]
    first = report(bench, *GOING)
    assert [(row.start, row.tokens.tolist()) for row in first.rows] == [(9, [109])]
    beams = report(bench, *GOING)
    assert [(row.start, row.tokens.tolist()) for row in beams.rows] == [
        (10, [50]),
        (10, [51]),
        (10, [52]),
    ]
    assert not bench.frames or not any(frame.tokens for frame in bench.frames)


def test_beams_share_the_prompts_pages_and_copy_only_the_one_they_write_into() -> None:
    bench = searching()
    report(bench, *GOING)
    plan = bench.plan
    assert plan is not None
    tables = [row.page_table.tolist() for row in plan.rows]
    assert len({tuple(table[:2]) for table in tables}) == 1, "full pages are shared"
    assert len({table[2] for table in tables}) == WIDTH, "each writes its own"
    assert sorted(plan.copies) == sorted((tables[-1][2], table[2]) for table in tables[:-1])
    assert "Fork" not in bench.open_kinds()


def test_rows_of_beams_are_never_in_a_run() -> None:
    bench = searching()
    for _ in range(3):
        assert bench.plan is not None and bench.plan.repeat_count == 0
        report(bench, *GOING)


def test_what_a_step_of_beams_costs_is_learnt_and_asked_for_at_their_length() -> None:
    class Observed(StepCosts):
        def observe(self, shape: StepShape, duration_us: float) -> None:
            seen.append((shape.drawing_rows, shape.read_slots))

        def us(self, shape: StepShape) -> float:
            asked_for.append((shape.drawing_rows, shape.read_slots))
            return 1.0

        def tokens_within(self, spare_us: float, start: int) -> int:
            return 16

        knows_prompts = True

    seen: list[tuple[int, int]] = []
    asked_for: list[tuple[int, int]] = []
    bench = searching()
    bench.core._batching.costs = Observed()
    for _ in range(3):
        report(bench, *GOING)
    assert seen == [(1, 10), (WIDTH, WIDTH * 11), (WIDTH, WIDTH * 12)]
    other = msgspec.structs.replace(submit(30), request="2" * 32)
    bench.ask(other)
    bench.grant()
    report(bench, *GOING)
    assert asked_for == [(WIDTH, WIDTH * 14)], "beside the prompt of another"


def test_the_answer_comes_in_one_frame_and_again_when_it_was_lost() -> None:
    bench = searching()
    while bench.plan is not None:
        report(bench, *ENDING)
    [last] = [frame for frame in bench.frames if frame.finish]
    assert last.hypotheses is not None and len(last.hypotheses) == 2
    best = last.hypotheses[0]
    assert (best.finish, best.stop_token, unpack(best.tokens).tolist()[-1]) == ("stop", END, END)
    assert best.score >= last.hypotheses[1].score
    bench.ask(Resend(key=last.key, position=0))
    assert bench.frames[-1].hypotheses == last.hypotheses
    released = bench.asked(Release)
    assert released.fill.filled_tokens == 10, "the prompt is cached, the beams are not"


@pytest.mark.parametrize(("bytes_max", "messages"), [(1 << 19, 1), (4_096, 2)])
def test_searches_that_end_in_one_step_share_a_message_as_far_as_it_holds_their_answers(
    bytes_max: int, messages: int
) -> None:
    bench = Bench(DECODE, frames_bytes_max=bytes_max).start()
    for number in range(2):  # the second one begins a step later
        one = asked(max_tokens=20 - number, width=4, keep=4)
        bench.ask(msgspec.structs.replace(one, request=f"{number:032x}"))
        bench.grant(cached=8, pages=30)
    while bench.plan is not None:
        before = len(bench.sent)
        report(bench, *GOING)
    sent = [one.frames for one in bench.sent[before:]]
    assert [one.counter for one in sent] == [before + 1 + index for index in range(messages)]
    answers = [frame.hypotheses for one in sent for frame in one.frames]
    assert len(answers) == 2 and all(answers)
    assert all(len(codec.encode(one)) <= bytes_max for one in sent)


def test_a_search_is_handed_over_by_one_ticket_before_there_are_beams() -> None:
    bench = Bench(PREFILL).start()
    bench.ask(asked(12, decode="d"))
    want = bench.asked(Admit)
    assert want.reserve_tokens == 12, "growth is for who searches"
    bench.grant()
    bench.step()
    bench.step()
    assert bench.frames[-1].tokens == b"" and bench.frames[-1].finish is None
    assert bench.asked(Offer).fill.filled_tokens == 11
    bench.offered()
    handed = bench.asked(Attach)
    assert handed.generated == b"" and handed.sampling.beams is not None
    bench.answer(Attach, Accepted(worker="d", incarnation=3))
    assert bench.plan is None


def test_a_search_whose_prompt_is_cached_whole_stays_where_it_came() -> None:
    bench = Bench(PREFILL).start()
    bench.ask(asked(9, decode="d"))
    bench.grant(cached=8)
    report(bench, *GOING)
    assert bench.asked(Extend).page_count > 3
    assert "Offer" not in bench.open_kinds()


def test_beams_wait_for_pages_and_go_on_with_them() -> None:
    bench = searching(pages=3)
    report(bench, *GOING)
    assert bench.plan is None, "two beams need a page for their copies"
    extend = bench.asked(Extend)
    bench.answer(
        Extend,
        Extended(
            key=extend.key, lease=extend.lease, granted_at=500, first_index=3,
            extents=pack_extents(range(40, 40 + extend.page_count - 3)),
        ),
    )  # fmt: skip
    assert bench.plan is not None and len(bench.plan.rows) == WIDTH
    assert {row.granted_at for row in bench.plan.rows} == {500}


def test_a_preempted_search_begins_again_at_its_prompt() -> None:
    bench = Bench(DECODE).start()
    bench.ask(asked(max_tokens=20))
    wanted = bench.asked(Admit).reserve_tokens
    bench.grant(cached=8, pages=30)
    bench.step()
    for _ in range(12):
        report(bench, *GOING)
    assert bench.plan is not None
    lease = bench.plan.rows[0].lease
    bench.notice(Revoke(key=bench.plan.rows[0].key, lease=lease, reason="preempted"))
    report(bench, *GOING)
    assert bench.asked(Admit).reserve_tokens == wanted, "not what its beams had"
    bench.grant(cached=8)
    assert bench.step().rows[0].samples == ()
    assert report(bench, *GOING).rows[0].tokens.tolist() == [109]
    assert [row.tokens.tolist() for row in report(bench, *GOING).rows] == [[50], [51], [52]]


def test_an_aborted_search_gives_its_lease_back_when_its_step_has_ended() -> None:
    bench = searching()
    report(bench, *GOING)
    bench.ask(Abort(request=asked().request, attempt=1, reason="client"))
    assert "Release" not in bench.open_kinds()
    report(bench, *GOING)
    assert bench.asked(Release).fill.filled_tokens == 10
    assert bench.plan is None


def test_one_beam_that_is_no_numbers_ends_the_search_with_an_error() -> None:
    bench = searching()
    report(bench, *GOING)
    report(bench, *GOING, poisoned=1)
    assert bench.frames[-1].finish == "error" and bench.frames[-1].hypotheses is None
    assert not bench.asked(Release).cache


def number_of(row: StepRow) -> int:
    return int(row.key.request, 16)


def crowded() -> Bench:
    """Two that draw, a search whose beams do not fit beside them, and two more that draw."""
    bench = Bench(DECODE, step_rows_max=4).start()
    for number in range(1, 6):
        message = asked(max_tokens=40) if number == 3 else submit(4, max_tokens=40)
        message = msgspec.structs.replace(message, request=f"{number:032x}", arrival_us=number)
        bench.ask(message)
        bench.grant(pages=12)
        while bench.plan is not None:
            report(bench, *GOING)
            if bench.plan is not None and len(bench.plan.rows) >= min(number, 4):
                break
    return bench


def test_a_search_that_does_not_fit_holds_nobody_up_and_has_its_turn_all_the_same() -> None:
    bench = crowded()
    steps: list[set[int]] = []
    for _ in range(40):
        plan = report(bench, *GOING)
        assert len(plan.rows) == 4, "no row idles"
        assert plan.repeat_count < PASSED_MAX, "who was passed over would wait for a whole run"
        steps.append(set(map(number_of, plan.rows)))
    for number in range(1, 6):
        missed = [number not in step for step in steps]
        longest = max(len(run) for run in "".join(" x"[one] for one in missed).split(" "))
        assert longest <= PASSED_MAX, (number, steps)


def test_a_search_that_never_fits_the_pool_is_refused() -> None:
    bench = Bench(DECODE).start()
    answer = bench.ask(asked(10, max_tokens=100, width=16))
    assert isinstance(answer, Refused) and answer.code == "NoCapacity"
    assert not isinstance(bench.ask(asked(10, max_tokens=20, width=8)), Refused)


def test_what_a_search_saved_and_the_tokens_of_the_answers_it_keeps_are_told_at_its_end() -> None:
    bench = searching()
    facts = []
    while bench.plan is not None:
        before = len(bench.log)
        report(bench, *ENDING)
        facts += of_kind(bench.log[before:], ev.Finished)
    assert facts[0].facts.saved_pages >= 2 * 2, "two full pages, which two beams need not hold"
    answers = bench.frames[-1].hypotheses
    assert answers is not None and len(answers) == 2
    assert facts[0].facts.generated_tokens == sum(len(unpack(one.tokens)) for one in answers) > 0


def test_the_metric_of_rows_counts_beams_and_says_so() -> None:
    def observed() -> float:
        return REGISTRY.get_sample_value("pagemesh_step_rows_sum") or 0.0

    bench = searching()
    report(bench, *GOING)
    plan = bench.plan
    assert plan is not None
    rows = tuple(RowResult(row.key, row.lease, revoked=False) for row in plan.rows)
    before = observed()
    measures.steps_ended([(plan, StepResult(plan.step, rows))])
    assert observed() - before == WIDTH
    (told,) = measures._step_rows.describe()
    assert "each beam" in told.documentation


@pytest.mark.parametrize(
    "wrong",
    [
        {"choices": [ChoiceStart(choice=0), ChoiceStart(choice=1)]},
        {"choices": [ChoiceStart(choice=0, generated=pack([5]))]},
        {"prompt_logprobs": True},
        {"sampling": msgspec.structs.replace(asked().sampling, max_tokens=0)},
        {"sampling": msgspec.structs.replace(asked().sampling, beams=Beams(width=2, keep=3))},
        {"sampling": msgspec.structs.replace(asked().sampling, grammar="g")},
    ],
)
def test_a_search_that_makes_no_sense_is_refused_at_the_door(wrong: dict[str, object]) -> None:
    message = msgspec.structs.replace(asked(), **wrong)
    with pytest.raises(Malformed, match=r"^beams: "):
        vet(message, vocab_tokens=1_000, message_bytes_max=1 << 20, output_bytes_max=1 << 25)


def test_answers_that_no_message_could_carry_are_refused_before_they_are_searched_for() -> None:
    limits = {"vocab_tokens": 1_000, "message_bytes_max": 1 << 20, "output_bytes_max": 1 << 25}
    vet(asked(max_tokens=60_000), **limits)
    with pytest.raises(NoCapacity, match="lower max_tokens"):
        vet(asked(max_tokens=70_000), **limits)
