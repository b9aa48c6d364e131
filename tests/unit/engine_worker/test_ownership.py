"""One attempt, one owner: between an offer and its end only who has the lease goes on."""

from __future__ import annotations

import msgspec
from tests.unit.engine_worker.bench import PREFILL, Bench, attach, opened, submit

from pagemesh.wire.messages import Ok
from pagemesh.wire.pager_messages import (
    AckRevoke,
    Admit,
    CancelTicket,
    Declare,
    Declared,
    Offer,
    OpenSession,
    Redeem,
    Release,
    Revoke,
    TicketClosed,
    Withdraw,
)
from pagemesh.wire.pager_reports import InspectWorker, WorkerReport
from pagemesh.wire.tokens import unpack
from pagemesh.wire.work_messages import Accepted, Attach


def _redeeming() -> Bench:
    bench = Bench().start()
    bench.ask(attach())
    return bench


def _offered() -> Bench:
    bench = Bench(PREFILL).start()
    bench.ask(submit(10, decode="d"))
    bench.grant(cached=8)
    bench.step(51)
    bench.offered()
    return bench


def _new_session(bench: Bench, epoch: int) -> None:
    bench.tick()
    bench.answer(OpenSession, opened(epoch=epoch))
    bench.tick()
    bench.answer(Declare, Declared(lost=[]))
    bench.tick()


def _error(bench: Bench) -> str:
    failure = bench.frames[-1].error
    return failure.code if failure is not None else ""


def test_decode_drops_in_silence_what_was_withdrawn() -> None:
    bench = _redeeming()
    bench.fail(Redeem, "Gone")
    assert bench.core.idle and bench.frames == [], "prefill goes on with it"


def test_decode_redeems_in_a_new_session_what_was_stale_in_the_old() -> None:
    bench = _redeeming()
    bench.fail(Redeem, "Stale")
    _new_session(bench, epoch=2)
    assert bench.asked(Redeem).epoch == 2
    bench.answer(Redeem, bench.granted(bench.asked(Redeem), cached=10))
    bench.step(52)
    assert [frame.first_position for frame in bench.frames] == [1]


def test_decode_gives_up_what_it_could_not_redeem() -> None:
    bench = _redeeming()
    bench.fail(Redeem, "Stale")
    _new_session(bench, epoch=2)
    bench.fail(Redeem, "Stale")
    assert _error(bench) == "Stale", "prefill may be going on: only a new attempt is safe"
    assert "Admit" not in bench.open_kinds()
    bench.answer(CancelTicket, Ok())
    assert bench.core.idle


def test_decode_gives_up_when_it_cannot_learn_in_time_whether_it_redeemed() -> None:
    bench = _redeeming()
    bench.now += 10_001
    bench.fail(Redeem, "DeadlineExceeded")
    assert _error(bench) == "Stale" and bench.asked(CancelTicket)


def test_decode_asks_for_pages_when_what_it_redeemed_was_taken_away_meanwhile() -> None:
    bench = _redeeming()
    bench.notice(Revoke(key=attach().key, lease=900, reason="preempted"))
    bench.answer(AckRevoke, Ok())
    granted = bench.granted(bench.asked(Redeem), cached=10)
    bench.answer(Redeem, msgspec.structs.replace(granted, lease=900))
    assert len(unpack(bench.asked(Admit).tokens)) == 11, "nobody else can have redeemed it"


def test_prefill_goes_on_alone_only_when_decode_never_had_it() -> None:
    refused = _offered()
    refused.fail(Attach, "Busy")
    refused.fail(Withdraw, "Stale")
    assert refused.asked(Admit)
    perhaps = _offered()
    perhaps.fail(Attach, "DeadlineExceeded")
    perhaps.tick(50)
    perhaps.fail(Attach, "Busy")
    perhaps.fail(Withdraw, "Stale")
    assert _error(perhaps) == "Stale", "the first try may have come through"
    assert "Admit" not in perhaps.open_kinds()


def test_prefill_goes_on_at_once_when_the_ticket_expires_while_it_is_withdrawn() -> None:
    bench = _offered()
    ticket = bench.asked(Attach).ticket
    bench.fail(Attach, "Busy")
    bench.notice(TicketClosed(ticket=ticket, outcome="expired"))
    assert len(unpack(bench.asked(Admit).tokens)) == 11
    bench.fail(Withdraw, "Stale")
    bench.grant(cached=8)
    bench.step(52)
    assert bench.tokens() == [51, 52]


def test_prefill_lets_go_of_what_decode_accepted_even_if_the_ticket_expires() -> None:
    bench = _offered()
    bench.answer(Attach, Accepted(worker="d", incarnation=2))
    assert bench.core.idle and bench.frames[-1].finish is None


def test_prefill_answers_for_what_it_offered_until_the_ticket_is_surely_closed() -> None:
    bench = _offered()
    bench.answer(Attach, Accepted(worker="d", incarnation=2))
    for wait_ms, states in ((0, ["offered"]), (19_000, ["offered"]), (1_001, [])):
        bench.tick(wait_ms)
        report = bench.ask(InspectWorker())
        assert isinstance(report, WorkerReport)
        assert [lease.state for lease in report.leases] == states


def _offering() -> Bench:
    bench = Bench(PREFILL).start()
    bench.ask(submit(10, decode="d"))
    bench.grant(cached=8)
    bench.step(51)
    return bench


def test_pages_whose_offer_may_have_been_taken_are_not_used_again() -> None:
    bench = _offering()
    offer = bench.asked(Offer)
    bench.now += 10_001
    bench.fail(Offer, "DeadlineExceeded")
    assert bench.plan is None, "the end of the ticket would free them under our step"
    assert bench.asked(CancelTicket).ticket == offer.ticket
    bench.fail(CancelTicket, "Gone")
    assert bench.asked(Release).lease == offer.lease
    assert bench.grant(cached=8).lease != offer.lease
    bench.step(52)
    assert bench.tokens() == [51, 52] and "Offer" not in bench.open_kinds()


def test_pages_whose_only_offer_was_refused_are_kept() -> None:
    bench = _offering()
    bench.fail(Offer, "NoCapacity")
    bench.step(52)
    assert bench.tokens() == [51, 52]


def test_a_refused_offer_does_not_excuse_one_that_was_not_answered() -> None:
    bench = _offering()
    bench.fail(Offer, "DeadlineExceeded")
    bench.tick(50)
    bench.fail(Offer, "NoCapacity")
    assert bench.plan is None and bench.asked(CancelTicket)
