"""Leases taken, lost and given back: nothing is used late, nothing is stranded."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.engine_worker.bench import (
    DECODE,
    PREFILL,
    Bench,
    attach,
    key,
    of_kind,
    opened,
    submit,
)

from pagemesh.engine.worker import events as ev
from pagemesh.wire.messages import Ok, Refused
from pagemesh.wire.pager_messages import (
    AckRevoke,
    Admit,
    CancelTicket,
    Commit,
    Committed,
    Declare,
    Declared,
    DeclareWanted,
    Extend,
    Fork,
    Heartbeat,
    Offer,
    OpenSession,
    Redeem,
    Release,
    Revoke,
    Withdraw,
)
from pagemesh.wire.tokens import unpack
from pagemesh.wire.work_messages import Abort, Accepted, Attach


def _revoke(lease: int) -> Revoke:
    return Revoke(key=key(), lease=lease, reason="preempted", usage="full")


def _decoding() -> tuple[Bench, int]:
    bench = Bench().start()
    bench.ask(submit(10))
    lease = bench.grant(cached=8).lease
    bench.step(51)
    return bench, lease


def test_a_revoked_lease_is_acknowledged_only_after_the_step_that_uses_it() -> None:
    bench, lease = _decoding()
    bench.notice(_revoke(lease))
    assert "AckRevoke" not in bench.open_kinds()
    bench.step(52)
    assert bench.asked(AckRevoke).leases == [lease]
    assert bench.tokens() == [51], "what the step drew is thrown away"


def test_a_preempted_sequence_keeps_its_tokens_and_its_place() -> None:
    bench, lease = _decoding()
    bench.step(52)
    bench.notice(_revoke(lease))
    bench.step(53)
    admit = bench.asked(Admit)
    assert unpack(admit.tokens).tolist()[10:] == [51, 52] and admit.order.arrival_us == 7
    bench.grant(cached=8)
    bench.step(53)
    assert bench.tokens() == [51, 52, 53]
    assert [one.lost_tokens for one in of_kind(bench.log, ev.Preempted)] == [11]


def test_a_row_whose_word_changed_is_treated_as_revoked_without_being_told() -> None:
    bench, lease = _decoding()
    bench.step(revoked=True)
    assert bench.asked(AckRevoke).leases == [lease]
    assert bench.asked(Admit).key == key()


def test_an_unknown_revoked_lease_is_acknowledged_and_its_late_grant_not_used() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    granted = bench.granted(bench.asked(Admit))
    bench.notice(_revoke(granted.lease))
    assert bench.asked(AckRevoke).leases == [granted.lease]
    bench.answer(Admit, granted)
    assert bench.plan is None
    bench.tick()
    assert bench.grant().lease != granted.lease and bench.plan is not None


def test_what_never_fits_is_told_to_the_gateway() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    bench.fail(Admit, "NoCapacity")
    failure = bench.frames[-1].error
    assert failure is not None and failure.code == "NoCapacity"


def test_a_lost_release_is_sent_again_until_it_is_answered() -> None:
    bench, lease = _decoding()
    bench.ask(Abort(request=key().request, attempt=1, reason="client"))
    assert "Release" not in bench.open_kinds(), "the step still writes"
    bench.step(52)
    bench.fail(Release, "DeadlineExceeded")
    assert not bench.core.idle
    bench.tick(50)
    assert bench.asked(Release).lease == lease
    bench.answer(Release, Ok())
    assert bench.core.idle


def _into(phase: str) -> Bench:
    bench = Bench(DECODE if phase == "redeeming" else PREFILL).start()
    if phase == "redeeming":
        bench.ask(attach())
        return bench
    several = 2 if phase == "forking" else 1
    bench.ask(submit(10, decode=None if phase == "decode" else "d", choices=several))
    if phase == "admitting":
        return bench
    bench.grant(cached=8)
    if phase == "prefill":
        return bench
    bench.step(51)
    if phase in ("offered", "withdrawing"):
        bench.offered()
    if phase == "withdrawing":
        bench.fail(Attach, "Busy")
    return bench


PHASES = ["admitting", "prefill", "decode", "forking", "offering", "offered", "withdrawing",
          "redeeming"]  # fmt: skip


@pytest.mark.parametrize("phase", PHASES)
def test_an_abort_in_any_phase_leaves_nothing(phase: str) -> None:
    bench = _into(phase)
    asked = bench.open_kinds()
    bench.ask(Abort(request=key().request, attempt=1, reason="client"))
    if bench.plan is not None:
        bench.step(52)
    if "Admit" in asked:
        lease = bench.grant().lease
        assert bench.asked(Release).lease == lease
    elif "Redeem" in asked:
        bench.answer(Redeem, bench.granted(bench.asked(Redeem), cached=10))
        assert bench.asked(Release)
    elif phase in ("offering", "offered", "withdrawing"):
        assert bench.asked(CancelTicket)
    else:
        assert bench.asked(Release)
    bench.settle()
    assert bench.core.idle and bench.plan is None
    assert all(frame.finish is None for frame in bench.frames), "nobody is told"


@pytest.mark.parametrize("phase", PHASES)
def test_a_gateway_that_is_gone_leaves_nothing(phase: str) -> None:
    bench = _into(phase)
    bench.handle(ev.GatewayLost("gw", 1))
    if bench.plan is not None:
        bench.step(52)
    for kind in (Admit, Redeem, Fork, Offer, Attach, Withdraw):
        if kind.__name__ in bench.open_kinds():
            bench.fail(kind, "DeadlineExceeded")
    bench.settle()
    assert bench.core.idle


def test_an_aborted_redeem_of_unknown_outcome_is_cancelled_and_else_released() -> None:
    bench = _into("redeeming")
    bench.ask(Abort(request=key().request, attempt=1, reason="client"))
    bench.fail(Redeem, "DeadlineExceeded")
    bench.fail(CancelTicket, "Gone")
    assert bench.asked(Release).lease == 900


def test_a_lease_that_is_owed_is_not_taken_from_a_later_grant() -> None:
    bench = _into("redeeming")
    bench.notice(_revoke(900))
    bench.answer(AckRevoke, Ok())
    redeemed = bench.granted(bench.asked(Redeem), cached=10)
    bench.answer(Redeem, msgspec.structs.replace(redeemed, lease=900))
    granted = bench.granted(bench.asked(Admit))
    bench.answer(Admit, msgspec.structs.replace(granted, lease=900))
    assert bench.plan is None, "the ticket's lease is being cancelled"


# Sessions -----------------------------------------------------------------------------------


def test_a_declaration_waits_for_calls_that_move_leases_and_holds_back_new_ones() -> None:
    bench, lease = _decoding()
    bench.ask(submit(10, attempt=2))
    bench.tick(1_000 + bench.limits.beat_late_ms_max)
    bench.answer(Heartbeat, DeclareWanted(epoch=1))
    bench.tick()
    assert "Declare" not in bench.open_kinds() and "Admit" in bench.open_kinds()
    second = bench.grant(cached=8).lease
    bench.tick()
    held = bench.asked(Declare).leases
    assert [one.lease for one in held if one.lease == second] == [second]
    assert lease not in [one.lease for one in held] or bench.plan is not None


def test_leases_that_the_pager_lost_are_asked_for_anew() -> None:
    bench, lease = _decoding()
    bench.step(52)
    bench.tick(1_000)
    bench.answer(Heartbeat, DeclareWanted(epoch=1))
    bench.tick()
    bench.answer(Declare, Declared(lost=[lease]))
    bench.step(53)
    bench.tick()
    assert bench.asked(AckRevoke).leases == [lease] and bench.asked(Admit)


def test_a_new_pager_is_met_with_a_new_session_and_a_declaration() -> None:
    bench, lease = _decoding()
    bench.handle(ev.PagerChanged(2))
    bench.tick()
    bench.answer(OpenSession, opened(epoch=2))
    assert bench.plan is not None, "running sequences go on"
    bench.tick()
    assert [one.lease for one in bench.asked(Declare).leases] == [lease]
    bench.answer(Declare, Declared(lost=[]))
    bench.step(52)
    assert bench.tokens() == [51, 52]


def test_a_new_pager_is_told_the_tokens_that_no_declaration_named() -> None:
    bench = Bench().start()
    bench.ask(submit(30))
    lease = bench.grant().lease
    bench.step()
    bench.answer(Commit, Committed(lease=lease, committed_tokens=8, known_tokens=30))
    bench.handle(ev.PagerChanged(2))
    bench.tick()
    bench.answer(OpenSession, opened(epoch=2))
    bench.tick()
    declared = bench.asked(Declare).leases[0]
    assert (declared.lease, len(unpack(declared.tokens))) == (lease, 8)
    bench.answer(Declare, Declared(lost=[]))
    bench.step()
    fill = bench.asked(Commit).fill
    assert (fill.filled_tokens, fill.first_token, len(unpack(fill.tokens))) == (16, 8, 8)


def test_a_new_pool_ends_every_lease_and_must_be_mapped() -> None:
    bench, _ = _decoding()
    bench.handle(ev.PagerChanged(2))
    bench.tick()
    commands = bench.answer(OpenSession, opened(epoch=2, pool_incarnation=2))
    assert of_kind(commands, ev.UsePool)
    bench.step(52)
    assert bench.tokens() == [51], "that step ran on the old pool"
    bench.tick()
    bench.answer(Declare, Declared(lost=[]))
    bench.tick()
    assert len(unpack(bench.asked(Admit).tokens)) == 11


def test_a_pool_that_is_not_there_is_asked_for_again_and_what_was_granted_in_it_is_void() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    lease = bench.grant(cached=8).lease
    bench.handle(ev.PoolMissing(1))
    bench.step(revoked=True)
    assert bench.asked(AckRevoke).leases == [lease] and not bench.core.ready
    bench.tick(bench.limits.retry_ms_max - 1)
    assert "OpenSession" not in bench.open_kinds(), "no hurry"
    bench.tick(1)
    commands = bench.answer(OpenSession, opened())
    assert of_kind(commands, ev.UsePool), "the same incarnation must be mapped this time"
    bench.tick()
    bench.answer(Declare, Declared(lost=[]))
    bench.tick()
    bench.grant(cached=8)
    bench.step(51)
    assert bench.tokens() == [51]


def test_the_loss_of_a_pool_that_was_replaced_is_no_news() -> None:
    bench, lease = _decoding()
    bench.handle(ev.PoolMissing(7))
    assert bench.core.ready
    bench.step(52)
    assert bench.tokens() == [51, 52] and lease in bench.core._desk.leases


def test_answers_to_calls_of_an_earlier_session_are_void() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    late = bench.granted(bench.asked(Admit))
    bench.handle(ev.PagerChanged(2))
    bench.tick()
    bench.answer(Admit, late)
    assert bench.plan is None


def test_a_session_that_the_pager_ended_is_opened_again() -> None:
    bench, _ = _decoding()
    bench.tick(1_000)
    bench.fail(Heartbeat, "Stale")
    bench.tick()
    assert bench.asked(OpenSession)


# Handing over -------------------------------------------------------------------------------


def test_the_first_token_goes_out_before_the_offer_and_nothing_is_computed_meanwhile() -> None:
    bench = Bench(PREFILL).start()
    bench.ask(submit(10, decode="d"))
    bench.grant(cached=8)
    bench.step(51)
    assert bench.tokens() == [51] and bench.asked(Offer).fill.filled_tokens == 10
    bench.offered()
    sent = bench.asked(Attach)
    assert unpack(sent.generated).tolist() == [51] and bench.plan is None
    bench.answer(Attach, Accepted(worker="d", incarnation=2))
    assert bench.core.idle


def test_a_refused_handover_is_withdrawn_and_kept() -> None:
    bench = _into("offered")
    bench.fail(Attach, "Busy")
    bench.answer(Withdraw, Ok())
    bench.step(52)
    assert bench.tokens() == [51, 52]


def test_a_withdrawal_that_comes_too_late_leaves_the_sequence_to_decode() -> None:
    bench = _into("withdrawing")
    bench.fail(Withdraw, "Gone")
    assert bench.core.idle and bench.frames[-1].finish is None


def test_an_expired_ticket_that_decode_may_have_is_left_to_a_new_attempt() -> None:
    bench = _into("offered")
    for _ in range(bench.limits.attach_tries_max):
        bench.fail(Attach, "DeadlineExceeded")
        bench.tick(500)
    bench.fail(Withdraw, "Stale")
    failure = bench.frames[-1].error
    assert failure is not None and failure.code == "Stale"


def test_an_expired_ticket_that_decode_refused_is_computed_here() -> None:
    bench = _into("withdrawing")
    bench.fail(Withdraw, "Stale")
    assert len(unpack(bench.asked(Admit).tokens)) == 11


def test_decode_goes_on_at_once_with_what_it_redeemed() -> None:
    bench = _into("redeeming")
    bench.answer(Redeem, bench.granted(bench.asked(Redeem), cached=10))
    row = bench.step(52).rows[0]
    assert (row.start, row.tokens.tolist()) == (10, [50])
    assert [frame.first_position for frame in bench.frames] == [1]


def test_an_attach_twice_is_one_sequence() -> None:
    bench = _into("redeeming")
    assert isinstance(bench.ask(attach()), Accepted)
    assert bench.open_kinds() == ["Redeem"]


def test_an_attach_after_its_abort_is_refused() -> None:
    bench = Bench(DECODE).start()
    bench.ask(Abort(request=key().request, attempt=1, reason="client"))
    answer = bench.ask(attach())
    assert isinstance(answer, Refused) and answer.code == "Gone"


@pytest.mark.parametrize("code", ["OverQuota", "NoCapacity"])
def test_what_is_asked_for_ahead_of_need_and_never_fits_ends_nobody(code: str) -> None:
    bench = Bench(growth_pages=2).start()
    bench.ask(submit(10, max_tokens=100))
    bench.grant()
    while "Extend" not in bench.open_kinds():
        bench.step(50)
    wanted, drawn = bench.asked(Extend), len(bench.tokens())
    bench.fail(Extend, code)
    while "Extend" not in bench.open_kinds():
        bench.step(50)
    again = bench.asked(Extend)
    assert again.page_count == wanted.have_pages + 1 < wanted.page_count
    assert len(bench.tokens()) > drawn and not any(frame.error for frame in bench.frames)
    bench.fail(Extend, code)
    error = bench.frames[-1].error
    assert error is not None and error.code == code
