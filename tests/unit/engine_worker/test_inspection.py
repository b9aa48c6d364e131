"""What a worker says of its leases to whoever compares it with the pager's books."""

from __future__ import annotations

import pytest
from tests.unit.engine_worker.bench import PAGE_SIZE, PREFILL, Bench, submit

from pagemesh.wire.pager_messages import Extend
from pagemesh.wire.pager_reports import InspectWorker, WorkerLease, WorkerReport


def told(bench: Bench) -> WorkerLease:
    report = bench.ask(InspectWorker())
    assert isinstance(report, WorkerReport)
    [lease] = report.leases
    return lease


def test_pages_that_it_asks_for_are_at_most_those_that_it_says_it_may_have_asked_for() -> None:
    bench = Bench().start()
    bench.ask(submit(10, max_tokens=40))
    granted = bench.grant(pages=3)
    assert (told(bench).lease, told(bench).page_count) == (granted.lease, 3)
    asked_pages = 0
    for token in range(50, 54):
        bench.step(token)
        if "Extend" in bench.open_kinds():
            asked_pages = bench.asked(Extend).page_count
    assert 3 < asked_pages <= told(bench).pages_max
    assert told(bench).page_count == 3, "until the answer comes"


def test_a_prompt_may_have_asked_for_all_that_its_admission_reserved() -> None:
    bench = Bench(PREFILL).start()
    bench.ask(submit(40))
    bench.grant(pages=2 * 16 // PAGE_SIZE)
    assert told(bench).pages_max >= 40 // PAGE_SIZE > told(bench).page_count


@pytest.mark.parametrize("length", [6, 20])
def test_what_has_all_of_its_pages_may_have_asked_for_no_more(length: int) -> None:
    bench = Bench().start()
    bench.ask(submit(length, max_tokens=1))
    bench.grant()
    assert told(bench).pages_max == told(bench).page_count == -(-length // PAGE_SIZE)
