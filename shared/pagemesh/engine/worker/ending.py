"""Every way a sequence ends here. Whatever it holds or has asked for is given back."""

from __future__ import annotations

from pagemesh.engine.worker import frames, leases
from pagemesh.engine.worker.desk import Desk
from pagemesh.engine.worker.events import Finished, SequenceFacts
from pagemesh.engine.worker.sequence import Phase, Sequence
from pagemesh.wire.errors import Fault
from pagemesh.wire.tokens import unpack
from pagemesh.wire.work_messages import Failure, Finish


def finish(desk: Desk, sequence: Sequence, reason: Finish, *, first_position: int) -> None:
    """The sequence is complete; its last frame has the tokens from ``first_position`` on."""
    sequence.finish = reason
    _end(desk, sequence, Phase.DONE)
    frames.tell(desk, sequence, first_position)


def fail(desk: Desk, sequence: Sequence, error: Fault) -> None:
    """The sequence cannot go on here; its gateway is told why and decides what to do."""
    sequence.finish = "error"
    sequence.failure = Failure(code=error.code, message=error.message[:1024])
    _end(desk, sequence, Phase.DONE)
    frames.tell(desk, sequence, sequence.generated_count)


def abort(desk: Desk, sequence: Sequence) -> None:
    """Nobody wants the sequence any more, so nobody is told."""
    sequence.finish = "abort"
    _end(desk, sequence, Phase.DONE)


def hand_away(desk: Desk, sequence: Sequence) -> None:
    """The sequence goes on at the decode worker."""
    _end(desk, sequence, Phase.HANDED)


def _end(desk: Desk, sequence: Sequence, phase: Phase) -> None:
    _leave_pages(desk, sequence, handed=phase is Phase.HANDED)
    _leave_group(desk, sequence)
    desk.move(sequence, phase)
    desk.commands.append(Finished(sequence.key, _facts(sequence)))


def _leave_pages(desk: Desk, sequence: Sequence, *, handed: bool) -> None:
    ticket, lease = sequence.ticket, sequence.lease
    sequence.ticket = sequence.lease = None
    match sequence.phase:
        case Phase.OFFERING:
            # The pager may or may not have taken the offer: cancel the ticket, else release.
            assert lease is not None and ticket is not None
            _forget_lease(desk, lease.lease)
            leases.cancel_ticket(desk, sequence.key, ticket.ticket, lease.lease)
        case Phase.OFFERED | Phase.WITHDRAWING if not handed:
            assert ticket is not None
            offer = desk.offers.pop(ticket.ticket, None)
            if offer is not None:
                _forget_lease(desk, offer.lease.lease)
                leases.cancel_ticket(desk, sequence.key, ticket.ticket, offer.lease.lease)
        case Phase.REDEEMING if not sequence.calling and ticket is not None:
            # While the call is open, its answer decides (see ``handover``).
            assert ticket.handle is not None
            leases.cancel_ticket(desk, sequence.key, ticket.ticket, ticket.handle.lease)
        case Phase.REDEEMING:
            sequence.ticket = ticket
        case _ if lease is not None:
            leases.give_back(desk, lease)
        case Phase.WAITING | Phase.ADMITTING if sequence.queued:
            leases.leave_queue(desk, sequence.key)


def _forget_lease(desk: Desk, lease: int) -> None:
    """The lease belongs to the ticket: cancelling the ticket releases it."""
    del desk.leases[lease]
    desk.dead[lease] = desk.next_call


def _leave_group(desk: Desk, sequence: Sequence) -> None:
    """Choices that waited for this one to compute the prompt get another leader."""
    leader = sequence.leader
    if leader is not None:
        leader.followers.remove(sequence)
        sequence.leader = None
    followers, sequence.followers = sequence.followers, []
    for follower in followers:
        follower.leader = None
    waiting = [follower for follower in followers if follower.phase is Phase.FOLLOWING]
    if waiting:
        head, *rest = waiting
        desk.move(head, Phase.WAITING)
        head.followers = rest
        for follower in rest:
            follower.leader = head


def _generated_tokens(sequence: Sequence) -> int:
    """Tokens drawn here; for a beam search those of the answers it kept, which are not in
    ``sequence.tokens``."""
    if sequence.beams is None:
        return sequence.generated_count - sequence.start_count
    return sum(len(unpack(answer.tokens)) for answer in sequence.beams.hypotheses or ())


def _facts(sequence: Sequence) -> SequenceFacts:
    return SequenceFacts(
        prompt_tokens=sequence.prompt_count,
        generated_tokens=_generated_tokens(sequence),
        cached_tokens=sequence.cached_tokens,
        computed_tokens=sequence.computed_tokens,
        preempted_count=sequence.preempted_count,
        lost_tokens=sequence.lost_tokens,
        saved_pages=sequence.saved_pages,
        finish=sequence.finish,
        error_code=sequence.failure.code if sequence.failure is not None else "",
    )
