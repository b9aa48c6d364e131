"""Pages that a gateway asks for in a worker's name, beside its submit (ADR 0026)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.unit.engine_worker.bench import (
    DECODE,
    PREFILL,
    REQUEST,
    ROOT,
    Bench,
    key,
    of_kind,
    opened,
    submit,
)

from pagemesh.engine.worker import events as ev
from pagemesh.engine.worker.settings import RoleSettings
from pagemesh.gateway.calls import outgoing
from pagemesh.gateway.calls.choice import Choice, TokensOnly
from pagemesh.gateway.calls.events import AskPages, PagesFrom, Route, SendSubmit, Worker
from pagemesh.gateway.calls.spec import RequestSpec
from pagemesh.wire.messages import Refused
from pagemesh.wire.pager_messages import (
    Admit,
    AskedAs,
    Declare,
    DeclareWanted,
    Granted,
    Heartbeat,
    OpenSession,
    Queued,
    Release,
)
from pagemesh.wire.work_messages import Abort, Beams, Sampling, Submit

ME = 5
"""The incarnation of a bench's worker."""


def asked(prompt: int = 10, *, incarnation: int = ME, epoch: int = 1, choices: int = 1) -> Submit:
    made = submit(prompt, choices=choices)
    return msgspec.structs.replace(made, asked_as=AskedAs(incarnation=incarnation, epoch=epoch))


def sent(bench: Bench, *, attempt: int = 1, choices: int = 1, **how: Any) -> SendSubmit:
    """What a gateway sends to the worker of ``bench``."""
    pages = PagesFrom("h", 1, bench.core.needs)
    route = Route(Worker("me", ME), None, b"m" * 32, ROOT, 0, pages=pages)
    spec = RequestSpec(
        request=REQUEST, gateway="gw", gateway_incarnation=1, priority=-3, arrival_us=7,
        prompt=np.arange(30, dtype="<u4"), choice_count=choices,
        sampling=Sampling(max_tokens=5), deadline_ms=60_000,
    )  # fmt: skip
    group = [Choice(index, TokensOnly(), 0) for index in range(choices)]
    return outgoing.submit(
        replace(spec, **how), route, group, attempt, 60_000,
        timeout_ms=100, scored=not how.get("prompt_logprobs"),
    )  # fmt: skip


def grant(bench: Bench, *, cached: int = 0, asked_as: AskedAs | None = None) -> Granted:
    """The pager's answer comes to the worker."""
    want = Admit(
        key=key(), order=next(iter(bench.core._desk.live.values())).order, worker="me",
        incarnation=ME, epoch=1, root=ROOT, tokens=b"", reserve_tokens=16, deadline_ms=1,
    )  # fmt: skip
    granted = msgspec.structs.replace(bench.granted(want, cached=cached), asked_as=asked_as)
    bench.notice(granted)
    return granted


@pytest.mark.parametrize("role", [PREFILL, DECODE])
@pytest.mark.parametrize("max_tokens", [1, 2, 200])
@pytest.mark.parametrize("choices", [1, 3])
def test_a_gateway_asks_for_what_the_worker_would_have_asked_for(
    role: RoleSettings, max_tokens: int, choices: int
) -> None:
    bench = Bench(role).start()
    out = sent(bench, choices=choices, sampling=Sampling(max_tokens=max_tokens))
    assert out.pages is not None and out.message.asked_as == AskedAs(incarnation=ME, epoch=1)
    bench.ask(msgspec.structs.replace(out.message, asked_as=None))
    assert out.pages == AskPages("h", bench.asked(Admit))


@pytest.mark.parametrize(
    "how",
    [
        {"attempt": 2},
        {"read_cache": False},
        {"prompt_logprobs": True},
        {"sampling": Sampling(max_tokens=5, beams=Beams(width=2, keep=1))},
    ],
    ids=["again", "no cache", "scores", "beams"],
)
def test_whoever_is_to_be_computed_in_another_way_asks_for_itself(how: dict[str, Any]) -> None:
    out = sent(Bench().start(), **how)
    assert out.pages is None and out.message.asked_as is None


def test_pages_that_come_are_used_without_asking() -> None:
    bench = Bench().start()
    bench.ask(asked())
    assert bench.open_kinds() == [] and bench.plan is None
    granted = grant(bench, cached=8)
    assert bench.plan is not None and bench.open_kinds() == []
    (row,) = bench.plan.rows
    assert (row.lease, row.start, len(row.tokens)) == (granted.lease, 8, 2)


def test_of_several_choices_the_first_is_expected_and_the_others_follow() -> None:
    bench = Bench().start()
    bench.ask(asked(choices=3))
    grant(bench)
    assert bench.plan is not None and len(bench.plan.rows) == 1


def test_what_does_not_come_in_time_is_asked_for() -> None:
    bench = Bench().start()
    bench.ask(asked())
    for _ in range(5):
        bench.tick(40)
    assert bench.open_kinds() == []
    for _ in range(3):
        bench.tick(40)
    bench.grant(cached=8)
    assert bench.plan is not None


def test_what_comes_after_that_is_only_a_hint() -> None:
    bench = Bench().start()
    bench.ask(asked())
    for _ in range(8):
        bench.tick(40)
    late = grant(bench)
    assert bench.plan is None
    bench.answer(Admit, late)
    assert bench.plan is not None and bench.plan.rows[0].lease == late.lease


@pytest.mark.parametrize(("incarnation", "epoch"), [(ME - 1, 1), (ME, 0), (ME, 2)])
def test_what_was_asked_in_the_name_of_another_life_or_of_another_pager_is_not_believed(
    incarnation: int, epoch: int
) -> None:
    bench = Bench().start()
    bench.ask(asked(incarnation=incarnation, epoch=epoch))
    assert bench.open_kinds() == ["Admit"]
    grant(bench)
    assert bench.plan is None


def test_who_is_queued_waits_and_asks_again_as_if_it_had_asked_itself() -> None:
    bench = Bench(retry_ms=10).start()
    bench.ask(asked())
    bench.notice(Queued(key=key(), ahead_count=2, ask_again_ms=300))
    bench.tick(100)
    assert bench.open_kinds() == []
    bench.tick(100)
    assert bench.open_kinds() == ["Admit"]


def test_who_is_queued_takes_what_comes_later_for_the_answer() -> None:
    bench = Bench().start()
    bench.ask(asked())
    bench.notice(Queued(key=key(), ahead_count=2, ask_again_ms=300))
    granted = grant(bench, cached=8, asked_as=AskedAs(incarnation=ME, epoch=1))
    assert bench.plan is not None and bench.plan.rows[0].lease == granted.lease
    assert bench.open_kinds() == []


def test_pages_for_who_was_aborted_meanwhile_are_given_back() -> None:
    bench = Bench().start()
    bench.ask(asked())
    bench.ask(Abort(request=REQUEST, attempt=1, reason="client"))
    granted = grant_of_nobody(bench)
    assert bench.asked(Release).lease == granted.lease


def test_pages_for_a_submit_that_never_came_are_given_back() -> None:
    bench = Bench().start()
    granted = grant_of_nobody(bench)
    assert bench.asked(Release).lease == granted.lease


def grant_of_nobody(bench: Bench) -> Granted:
    granted = Granted(
        key=key(), lease=900, lease_slot=9, granted_at=900, extents=b"", cached_tokens=0
    )
    bench.notice(granted)
    return granted


def test_a_refusal_which_does_not_say_whose_it_is_has_everybody_ask_for_itself() -> None:
    bench = Bench(retry_ms=10).start()
    bench.ask(asked())
    bench.notice(Refused(code="OverQuota", message="too much"))
    bench.tick(20)
    bench.answer(Admit, Refused(code="OverQuota", message="too much"))
    assert [frame.error.code for frame in bench.frames if frame.error] == ["OverQuota"]


def test_leases_are_declared_only_when_what_is_expected_has_come() -> None:
    bench = Bench(beat_late_ms_max=0).start()
    bench.tick(960 - bench.now)
    bench.ask(asked())
    bench.tick(40)
    bench.answer(Heartbeat, DeclareWanted(epoch=1))
    bench.tick(40)
    assert "Declare" not in bench.open_kinds()
    granted = grant(bench)
    bench.tick(40)
    assert [line.lease for line in bench.asked(Declare).leases] == [granted.lease]


def test_nothing_is_expected_while_leases_are_declared() -> None:
    """What comes may have been granted before the list, in which it is not: its pages are others'
    when the list is read."""
    bench = Bench().start()
    bench.tick(1_000)
    bench.answer(Heartbeat, DeclareWanted(epoch=1))
    bench.tick()
    assert "Declare" in bench.open_kinds()
    bench.ask(asked())
    grant(bench)
    assert bench.plan is None and not of_kind(bench.log, ev.RunStep)


def test_another_pager_ends_what_was_expected_of_the_last() -> None:
    bench = Bench().start()
    bench.ask(asked())
    bench.handle(ev.PagerChanged(2))
    bench.tick()
    bench.answer(OpenSession, opened(2))
    grant(bench)
    assert bench.plan is None, "it is the last pager's"
    bench.tick()
    assert bench.asked(Declare).leases == []
