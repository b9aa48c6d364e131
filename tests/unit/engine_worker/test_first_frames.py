"""First tokens are on their way before anything that follows from them is decided."""

from __future__ import annotations

from tests.unit.engine_worker.bench import Bench, result_of, submit

from pagemesh.engine.worker import events as ev


def after_the_prompt(max_tokens: int) -> tuple[list[str], list[str]]:
    """What is wanted at once, and then, when a prompt's step has ended; calls by their message."""
    bench = Bench().start()
    bench.ask(submit(12, max_tokens=max_tokens))
    bench.grant()
    while bench.plan is not None and not bench.plan.rows[0].samples:
        bench.step()
    assert bench.plan is not None
    ended = ev.StepsFinished((result_of(bench.plan, 50),))
    at_once, then = bench.core.take(ended, bench.now), bench.core.go_on()
    bench.core.check()
    return [name(one) for one in at_once], [name(one) for one in then]


def name(command: ev.Command) -> str:
    of = command.message if isinstance(command, ev.CallPager) else command
    return type(of).__name__


def test_the_first_frame_goes_before_calls_of_the_pager_and_the_next_step_after_both() -> None:
    at_once, then = after_the_prompt(8)
    assert at_once[0] == "SendFrames" and {"Commit", "Extend"} & set(at_once[1:])
    assert "RunStep" in then and "SendFrames" not in then


def test_pages_are_given_back_before_a_first_frame_that_is_the_last() -> None:
    at_once, _ = after_the_prompt(1)
    assert at_once.index("Release") < at_once.index("SendFrames")
