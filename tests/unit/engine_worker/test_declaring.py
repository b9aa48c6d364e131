"""A worker that holds much declares it in parts, and others have their turns in between."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.engine_worker.bench import Bench, opened, submit

from pagemesh.engine.worker import events as ev
from pagemesh.wire.messages import Message, Ok, Refused
from pagemesh.wire.pager_messages import (
    AckRevoke,
    Declare,
    Declared,
    DeclareWanted,
    Heartbeat,
    OpenSession,
    Release,
)
from pagemesh.wire.work_messages import Abort

NAMES = [f"{number:032x}" for number in (1, 2, 3)]


@pytest.fixture
def bench() -> Bench:
    """One that met a new pager, and declares each of its three leases
    in a part of its own."""
    bench = Bench(declare_bytes_max=600).start()
    for name in NAMES:
        bench.ask(msgspec.structs.replace(submit(10), request=name))
        bench.grant(cached=8)
    bench.handle(ev.PagerChanged(2))
    bench.tick()
    bench.answer(OpenSession, opened(epoch=2))
    bench.tick()
    return bench


def part(bench: Bench) -> tuple[int, int, int, list[str]]:
    """Number, part, how many there are, and whose leases it names."""
    message = bench.asked(Declare)
    requests = [line.key.request for line in message.leases]
    return message.number, message.part, message.parts, requests


def test_each_part_goes_out_when_the_one_before_it_is_answered(bench: Bench) -> None:
    for index, name in enumerate(NAMES):
        assert part(bench) == (1, index, 3, [name])
        bench.answer(Declare, Declared(lost=[]) if index == 2 else Ok())
        assert "Extend" not in bench.open_kinds() or index == 2
    bench.tick()
    assert "Declare" not in bench.open_kinds()


def test_what_is_given_back_meanwhile_is_in_no_later_part(bench: Bench) -> None:
    """The pager has heard of that before, and would believe in it for good."""
    bench.ask(Abort(request=NAMES[1], attempt=1, reason="client"))
    assert bench.asked(Release).key.request == NAMES[1]
    bench.answer(Declare, Ok())
    assert part(bench) == (1, 1, 3, [])
    bench.answer(Declare, Ok())
    assert part(bench) == (1, 2, 3, NAMES[2:])


def test_what_was_lost_is_told_with_the_last_part(bench: Bench) -> None:
    [first] = [line.lease for line in bench.asked(Declare).leases]
    for answer in (Ok(), Ok(), Declared(lost=[first])):
        bench.answer(Declare, answer)
    bench.step(51)
    assert bench.asked(AckRevoke).leases == [first]


@pytest.mark.parametrize(
    "answer", [Refused(code="Busy", message="full"), Refused(code="DeadlineExceeded", message="")]
)
def test_a_part_that_was_not_heard_has_all_of_it_declared_anew(
    bench: Bench, answer: Message
) -> None:
    bench.answer(Declare, Ok())
    bench.answer(Declare, answer)
    assert "Declare" not in bench.open_kinds()
    bench.tick()
    assert part(bench) == (2, 0, 3, NAMES[:1])


def test_an_ok_to_the_last_part_has_all_of_it_declared_anew(bench: Bench) -> None:
    """The pager misses something."""
    for _ in NAMES:
        bench.answer(Declare, Ok())
    bench.tick()
    assert part(bench) == (2, 0, 3, NAMES[:1])


def test_a_pager_that_asks_for_what_is_being_declared_is_not_told_twice(bench: Bench) -> None:
    bench.tick(1_000)
    bench.answer(Heartbeat, DeclareWanted(epoch=2))
    for answer in (Ok(), Ok(), Declared(lost=[])):
        bench.answer(Declare, answer)
    bench.tick()
    assert "Declare" not in bench.open_kinds()


def test_another_session_ends_a_declaration_that_was_begun(bench: Bench) -> None:
    bench.open.clear()  # nobody answers
    bench.handle(ev.PagerChanged(3))
    bench.tick()
    bench.answer(OpenSession, opened(epoch=3))
    bench.tick()
    assert part(bench) == (2, 0, 3, NAMES[:1]) and bench.asked(Declare).epoch == 3
