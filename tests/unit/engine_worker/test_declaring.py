"""A worker that holds much declares it in parts, and others have their turns in between."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.engine_worker.bench import POOL_PAGES, Bench, opened, submit

from pagemesh.engine.worker import events as ev
from pagemesh.engine.worker import session
from pagemesh.wire.cache_terms import CACHE_TTL_S_MAX, CacheTerms
from pagemesh.wire.messages import Message, Ok, Order, Refused, SequenceKey
from pagemesh.wire.pager_messages import (
    AckRevoke,
    Admit,
    Declare,
    Declared,
    DeclareWanted,
    Heartbeat,
    HeldLease,
    OpenSession,
    Release,
)
from pagemesh.wire.tokens import unpack_extents
from pagemesh.wire.work_messages import Abort

NAMES = [f"{number:032x}" for number in (1, 2, 3)]


def restarted(*, declare_bytes_max: int) -> Bench:
    """One with three leases that met a new pager."""
    bench = Bench(declare_bytes_max=declare_bytes_max).start()
    for name in NAMES:
        bench.ask(msgspec.structs.replace(submit(10), request=name))
        bench.grant(cached=8)
    bench.handle(ev.PagerChanged(2))
    bench.tick()
    bench.answer(OpenSession, opened(epoch=2))
    bench.tick()
    return bench


@pytest.fixture
def bench() -> Bench:
    """One that declares each of its leases in a part of its own."""
    return restarted(declare_bytes_max=600)


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


def test_a_part_that_is_too_large_goes_in_halves() -> None:
    """Whatever the bus carries; what was declared before stays so."""
    large = restarted(declare_bytes_max=1 << 20)
    assert part(large) == (1, 0, 1, NAMES)
    large.fail(Declare, "Malformed")
    assert part(large) == (1, 0, 2, NAMES[:1])
    large.answer(Declare, Ok())
    assert part(large) == (1, 1, 2, NAMES[1:])
    large.fail(Declare, "Malformed")
    assert part(large) == (1, 1, 3, NAMES[1:2])
    large.answer(Declare, Ok())
    assert part(large) == (1, 2, 3, NAMES[2:])
    large.answer(Declare, Declared(lost=[]))
    large.tick()
    assert "Declare" not in large.open_kinds()


def test_a_part_is_as_long_as_a_message_may_be() -> None:
    lines = restarted(declare_bytes_max=1 << 20).asked(Declare).leases
    [line_bytes] = {
        session._LINE_BYTES + len(line.tokens)
        + 8 * len(unpack_extents(line.extents, page_count_max=POOL_PAGES))
        for line in lines
    }  # fmt: skip
    assert part(restarted(declare_bytes_max=2 * line_bytes)) == (1, 0, 2, NAMES[:2])
    assert part(restarted(declare_bytes_max=2 * line_bytes - 1)) == (1, 0, 3, NAMES[:1])


def test_a_lease_that_no_message_can_carry_is_lost_and_the_others_are_declared(
    bench: Bench,
) -> None:
    [too_long] = [line.lease for line in bench.asked(Declare).leases]
    bench.fail(Declare, "Malformed")
    bench.tick()
    assert "Declare" not in bench.open_kinds(), "a step still uses what is lost"
    bench.step()
    assert bench.asked(AckRevoke).leases == [too_long]
    bench.tick()
    for index, answer in enumerate((Ok(), Declared(lost=[]))):
        assert part(bench) == (2, index, 2, NAMES[1 + index : 2 + index])
        bench.answer(Declare, answer)
    bench.tick()
    assert bench.asked(Admit).key.request == NAMES[0], "it asks for its pages again"


def test_what_was_given_back_before_its_part_was_refused_is_not_lost_too(bench: Bench) -> None:
    [first] = [line.lease for line in bench.asked(Declare).leases]
    bench.ask(Abort(request=NAMES[0], attempt=1, reason="client"))
    bench.step()
    assert bench.asked(Release).lease == first
    bench.fail(Declare, "Malformed")
    bench.tick()
    assert "AckRevoke" not in bench.open_kinds()


def test_an_ok_to_the_last_part_has_all_of_it_declared_anew(bench: Bench) -> None:
    """The pager misses something."""
    for _ in NAMES:
        bench.answer(Declare, Ok())
    bench.tick()
    assert part(bench) == (2, 0, 3, NAMES[:1])


def test_a_pager_that_asks_for_what_is_being_declared_is_not_told_twice(bench: Bench) -> None:
    bench.tick(1_000 + bench.limits.beat_late_ms_max)
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


def test_a_lease_is_declared_with_what_it_may_come_to(bench: Bench) -> None:
    """Ten tokens of prompt and five more, the last of which is never written."""
    [line] = bench.asked(Declare).leases
    assert line.tokens_max == 14


def test_the_longest_line_of_a_declaration_is_as_long_as_is_counted() -> None:
    """Beside its tokens and pages: or a part would be too long for a message."""
    largest, digits = (1 << 64) - 1, "f" * 32
    line = HeldLease(
        lease=largest, lease_slot=0xFFFF_FFFF, root=bytes(32), granted_at=largest, extents=b"",
        tokens=b"", promised_pages=0xFFFF_FFFF, tokens_max=0xFFFF_FFFF, trace=digits, ticket=digits,
        key=SequenceKey(request=digits, attempt=0xFFFF, choice=1023),
        order=Order(priority=-1000, arrival_us=largest, request=digits, choice=1023),
        terms=CacheTerms(
            tenant="t" * 64, pool_share=0.1, pages_max=0xFFFF_FFFF, ttl_s=CACHE_TTL_S_MAX,
            disk_share=0.1, disk_pages_max=0xFFFF_FFFF,
        ),
    )  # fmt: skip
    assert len(msgspec.msgpack.encode(line)) <= session._LINE_BYTES
