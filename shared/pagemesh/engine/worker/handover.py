"""Handover from prefill to decode by ticket, both sides of it.

    prefill                         pager                       decode
      | Offer(lease, ticket) -------->|
      |<-------------------- Offered  |
      | Attach(ticket, handle, tokens) --------------------------->|
      |<------------------------------------------------ Accepted  |
      |                               |<------------------- Redeem |
      |<----------- TicketClosed      | Granted ------------------>|

While a sequence is offered, nobody computes it. The holder of the ticket redeems or cancels it,
and only the holder of the lease continues the sequence: decode once it has redeemed the ticket,
prefill once it has withdrawn it (or when decode certainly never had it). A restarted pager may not
know who redeemed a ticket. A worker that cannot tell gives the attempt up, and the gateway makes
another: if two workers continued one attempt, they would mix two answers.
"""

from __future__ import annotations

from functools import partial

from pagemesh.engine.worker import admission, ending, frames, leases
from pagemesh.engine.worker.desk import Desk, Offer, unanswered
from pagemesh.engine.worker.lease import Hold, Lease
from pagemesh.engine.worker.sequence import Phase, Sequence, Ticket
from pagemesh.wire import pager_messages
from pagemesh.wire.errors import Stale
from pagemesh.wire.messages import Message, Ok, Refused
from pagemesh.wire.pager_messages import Granted, Offered, Redeem, TicketClosed, Withdraw
from pagemesh.wire.tokens import pack
from pagemesh.wire.work_messages import Accepted, Attach

_BUSY_OFFERS_MAX = 3
"""Offers refused for lack of room for a ticket before a sequence stays where it is."""

# Prefill's side -----------------------------------------------------------------------------


def route(desk: Desk, sequence: Sequence) -> None:
    """After the first token: hand the sequence over to its decode worker, or keep it here."""
    decode = sequence.decode
    here = decode is None or decode == desk.identity.name or decode in desk.lost_workers
    if here or not desk.role.hand_over:
        keep(desk, sequence)
        return
    sequence.ticket = Ticket(desk.make_ticket(), desk.now + desk.limits.ticket_ttl_ms)
    sequence.retries = 0
    desk.move(sequence, Phase.OFFERING)
    _offer(desk, sequence)


def keep(desk: Desk, sequence: Sequence) -> None:
    """Continue the sequence here, for good."""
    sequence.decode = sequence.ticket = None
    desk.move(sequence, Phase.DECODE)


def push(desk: Desk, sequence: Sequence) -> None:
    """Repeat the call of the current phase if it was not answered and it is time."""
    if sequence.calling or sequence.retry_ms > desk.now:
        return
    match sequence.phase:
        case Phase.OFFERING if desk.may_ask:
            _offer(desk, sequence)
        case Phase.OFFERED:
            _attach_or_withdraw(desk, sequence)
        case Phase.WITHDRAWING if desk.may_ask:
            _withdraw(desk, sequence)
        case Phase.REDEEMING if desk.may_ask:
            redeem(desk, sequence)
        case _:
            pass


def _pause(desk: Desk, sequence: Sequence, refused: Refused) -> None:
    sequence.retry_ms = desk.pause(sequence.retries, refused.retry_after_ms)
    sequence.retries += 1


def _offer(desk: Desk, sequence: Sequence) -> None:
    lease, ticket = sequence.lease, sequence.ticket
    assert lease is not None and ticket is not None
    if not desk.may_ask:
        return
    sequence.calling = True
    ticket.tries += 1
    lease.ticket = ticket.ticket
    desk.call_pager(
        pager_messages.Offer(
            key=sequence.key,
            worker=desk.identity.name,
            incarnation=desk.identity.incarnation,
            epoch=desk.epoch,
            lease=lease.lease,
            ticket=ticket.ticket,
            fill=lease.fill(),
            ttl_ms=desk.limits.ticket_ttl_ms,
        ),
        partial(_offer_answered, desk, sequence, lease, ticket),
        moves_leases=True,
    )


def _offer_answered(
    desk: Desk, sequence: Sequence, lease: Lease, ticket: Ticket, message: Message
) -> None:
    if sequence.ticket is not ticket:
        if isinstance(message, Offered):
            leases.cancel_ticket(desk, sequence.key, ticket.ticket, lease.lease)
        return
    sequence.calling = False
    if isinstance(message, Refused) and message.code == "Busy":
        ticket.busy_count += 1
    match message:
        case Offered():
            lease.move(Hold.OFFERED)
            sequence.lease = None
            sequence.retries = ticket.tries = 0
            ticket.handle = message.handle
            desk.offers[ticket.ticket] = Offer(sequence, lease)
            desk.move(sequence, Phase.OFFERED)
            _attach_or_withdraw(desk, sequence)
        case Refused(code="Stale" | "Gone"):
            desk.session_doubted = True
            admission.revoked(desk, lease, "stale")
        case Refused(code="Busy") if ticket.is_never_taken(_BUSY_OFFERS_MAX):
            lease.ticket = None
            keep(desk, sequence)
        case Refused() if unanswered(message) and desk.now < ticket.expires_ms:
            _pause(desk, sequence, message)
        case Refused() if unanswered(message) or ticket.tries > 1:
            # The lease may belong to the ticket by now, or soon, if an offer arrives late; and
            # the end of a ticket frees its pages at once. Go on here, with other pages.
            sequence.decode = None
            leases.cancel_ticket(desk, sequence.key, ticket.ticket, lease.lease)
            admission.revoked(desk, lease, "stale")
        case _:
            lease.ticket = None
            keep(desk, sequence)


def _attach_or_withdraw(desk: Desk, sequence: Sequence) -> None:
    ticket = sequence.ticket
    assert ticket is not None and ticket.handle is not None and sequence.decode is not None
    gone = sequence.decode in desk.lost_workers
    if gone or ticket.tries >= desk.limits.attach_tries_max:
        ticket.refused = ticket.refused or not ticket.tries
        sequence.retries = 0
        desk.move(sequence, Phase.WITHDRAWING)
        _withdraw(desk, sequence)
        return
    ticket.tries += 1
    sequence.calling = True
    prompt = sequence.prompt_count
    desk.call_worker(
        sequence.decode,
        Attach(
            key=sequence.key,
            order=sequence.order,
            gateway=sequence.owner.name,
            gateway_incarnation=sequence.owner.incarnation,
            prefill=desk.identity.name,
            root=sequence.root,
            model_root=desk.identity.model_root,
            prompt=pack(sequence.tokens.view(0, prompt)),
            generated=pack(sequence.tokens.view(prompt, sequence.tokens.length)),
            logprobs=frames.packed_scores(sequence.scores) if sequence.scores else None,
            waterfall=sequence.waterfall,
            sampling=sequence.sampling,
            ticket=ticket.ticket,
            handle=ticket.handle,
            read_cache=sequence.read_cache,
            terms=sequence.terms,
            deadline_ms=max(int(sequence.deadline_ms - desk.now), 0),
        ),
        partial(_attach_answered, desk, sequence, ticket),
    )


def _attach_answered(desk: Desk, sequence: Sequence, ticket: Ticket, message: Message) -> None:
    if sequence.ticket is not ticket or sequence.phase is not Phase.OFFERED:
        return
    sequence.calling = False
    match message:
        case Accepted():
            ending.hand_away(desk, sequence)
        case Refused(code="DeadlineExceeded" | "Disconnected"):
            if ticket.expired:
                _expired(desk, sequence, ticket)
            else:
                _pause(desk, sequence, message)
        case _:
            # Decode does not have the sequence, unless it took it at an unanswered try.
            ticket.refused = ticket.tries == 1
            ticket.tries = desk.limits.attach_tries_max
            if ticket.expired:
                _expired(desk, sequence, ticket)
            else:
                _attach_or_withdraw(desk, sequence)


def _withdraw(desk: Desk, sequence: Sequence) -> None:
    ticket = sequence.ticket
    assert ticket is not None
    if not desk.may_ask:
        return
    sequence.calling = True
    desk.call_pager(
        Withdraw(
            worker=desk.identity.name,
            incarnation=desk.identity.incarnation,
            ticket=ticket.ticket,
        ),
        partial(_withdraw_answered, desk, sequence, ticket),
        moves_leases=True,
    )


def _withdraw_answered(desk: Desk, sequence: Sequence, ticket: Ticket, message: Message) -> None:
    assert ticket.handle is not None
    if sequence.ticket is not ticket or sequence.phase is not Phase.WITHDRAWING:
        if isinstance(message, Ok) and sequence.ended:
            leases.give_back_unused(desk, sequence.key, ticket.handle.lease)
        return
    sequence.calling = False
    match message:
        case Ok():
            lease = desk.offers.pop(ticket.ticket).lease
            lease.move(Hold.HELD)
            sequence.lease = lease
            lease.ticket = None
            keep(desk, sequence)
        case Refused() if unanswered(message) and desk.now < ticket.expires_ms:
            _pause(desk, sequence, message)
        case Refused(code="Gone"):
            ending.hand_away(desk, sequence)
        case _:
            _expired(desk, sequence, ticket)


def _expired(desk: Desk, sequence: Sequence, ticket: Ticket) -> None:
    """Nobody holds the pages any more. If decode cannot have the sequence, continue it here.
    Otherwise fail it: decode may be continuing this attempt, so the gateway has to make another."""
    assert ticket.handle is not None
    leases.cancel_ticket(desk, sequence.key, ticket.ticket, ticket.handle.lease)
    _close(desk, ticket.ticket)
    if ticket.refused:
        sequence.ticket = sequence.decode = None
        sequence.is_again = True
        sequence.calling = False  # a withdrawal may be open; its answer no longer matters
        sequence.retry_ms = desk.now
        desk.move(sequence, Phase.WAITING)
        admission.ask(desk, sequence)
    else:
        ending.fail(desk, sequence, Stale("the ticket expired before the decode worker answered"))


def _close(desk: Desk, ticket: str) -> None:
    offer = desk.offers.pop(ticket, None)
    if offer is not None:
        del desk.leases[offer.lease.lease]


def closed(desk: Desk, message: TicketClosed) -> None:
    """The pager says how a ticket ended."""
    offer = desk.offers.get(message.ticket)
    if offer is None:
        return
    sequence = offer.sequence
    ticket = sequence.ticket
    if sequence.ended or ticket is None or ticket.ticket != message.ticket:
        _close(desk, message.ticket)
    elif message.outcome != "expired":
        _close(desk, message.ticket)
        ending.hand_away(desk, sequence)
    elif sequence.phase is Phase.OFFERED and sequence.calling:
        ticket.expired = True
        _close(desk, message.ticket)
    else:
        _expired(desk, sequence, ticket)


def taken_back(desk: Desk, lease: Lease) -> None:
    """The pager ended an offered lease."""
    assert lease.ticket is not None
    closed(desk, TicketClosed(ticket=lease.ticket, outcome="expired"))
    leases.acknowledge_unknown(desk, lease.lease)


def forget_old_offers(desk: Desk) -> None:
    """Forget offers of sequences that ended long ago: their tickets are closed by now, even if
    no notice said so."""
    for name, offer in list(desk.offers.items()):
        if offer.sequence.ended:
            if offer.sequence.ended_ms + 2 * desk.limits.ticket_ttl_ms < desk.now:
                _close(desk, name)


# Decode's side ------------------------------------------------------------------------------


def redeem(desk: Desk, sequence: Sequence) -> None:
    """Exchange the ticket for its lease."""
    ticket = sequence.ticket
    assert ticket is not None and ticket.handle is not None
    if not desk.may_ask:
        return
    sequence.calling = True
    desk.call_pager(
        Redeem(
            key=sequence.key,
            worker=desk.identity.name,
            incarnation=desk.identity.incarnation,
            epoch=desk.epoch,
            ticket=ticket.ticket,
            handle=ticket.handle,
            reserve_tokens=admission.reserve(desk, sequence),
        ),
        partial(_redeem_answered, desk, sequence, ticket),
        moves_leases=True,
    )


def _redeem_answered(desk: Desk, sequence: Sequence, ticket: Ticket, message: Message) -> None:
    assert ticket.handle is not None
    sequence.calling = False
    if sequence.phase is not Phase.REDEEMING:
        sequence.ticket = None
        if isinstance(message, Granted):
            leases.give_back_unused(desk, sequence.key, message.lease)
        elif isinstance(message, Refused) and unanswered(message):
            leases.cancel_ticket(desk, sequence.key, ticket.ticket, ticket.handle.lease)
        return
    match message:
        case Granted():
            _redeemed(desk, sequence, ticket, message)
        case Refused(code="Gone"):
            sequence.ticket = None  # somebody else has withdrawn, cancelled or redeemed it
            ending.abort(desk, sequence)
        case Refused() if unanswered(message) and desk.now < ticket.expires_ms:
            _pause(desk, sequence, message)
        case Refused(code="Stale") if not ticket.doubted:  # and not ``TicketOver``
            # Perhaps only our session is over, and in a new one the ticket is still good.
            ticket.doubted = desk.session_doubted = True
            _pause(desk, sequence, message)
        case _:
            ending.fail(desk, sequence, Stale("the ticket is no longer valid"))


def _redeemed(desk: Desk, sequence: Sequence, ticket: Ticket, granted: Granted) -> None:
    filled = min(granted.cached_tokens, sequence.tokens.length - 1)
    was_revoked = granted.lease in desk.dead  # by a notice that came before this answer
    lease = leases.take(desk, sequence, granted, filled=filled)
    if lease is not None and lease.capacity >= filled:
        sequence.ticket = None
        admission.enter(desk, sequence)
        admission.extend(desk, sequence)
        if sequence.beams is not None:
            frames.tell(desk, sequence, 0)  # no token comes for long: say who has it now
        return
    if lease is not None:
        sequence.lease = None
        lease.filled = 0
        leases.give_back(desk, lease)
    desk.session_doubted = desk.session_doubted or not was_revoked
    _admit_instead(desk, sequence, ticket)


def _admit_instead(desk: Desk, sequence: Sequence, ticket: Ticket) -> None:
    """The sequence is ours, but its lease has already ended: ask for pages for its tokens."""
    assert ticket.handle is not None
    leases.cancel_ticket(desk, sequence.key, ticket.ticket, ticket.handle.lease)
    sequence.ticket = None
    sequence.is_again = True
    sequence.retry_ms = desk.now
    desk.move(sequence, Phase.WAITING)
    admission.ask(desk, sequence)
