"""Taking leases and giving them back, so that none is ever used late or stranded."""

from __future__ import annotations

from pagemesh.engine.worker.desk import Desk
from pagemesh.engine.worker.lease import Copy, Hold, Lease
from pagemesh.engine.worker.sequence import Sequence
from pagemesh.wire.errors import Malformed
from pagemesh.wire.messages import SequenceKey
from pagemesh.wire.pager_messages import (
    NO_LEASE,
    AckRevoke,
    CancelTicket,
    Fill,
    Granted,
    Release,
)
from pagemesh.wire.tokens import EMPTY, unpack_extents

_NOTHING = Fill(filled_tokens=0, first_token=0)


def take(desk: Desk, sequence: Sequence, granted: Granted, *, filled: int) -> Lease | None:
    """The lease of ``granted``, from now on ``sequence``'s; None when it has ended already,
    or is held already: the grant is then of no use, and asking again tells. Its pages are
    none when they cannot be read, which is too few for anybody."""
    if granted.lease in desk.dead or granted.lease in desk.leases or desk.lets_go(granted.lease):
        return None
    try:
        pages = unpack_extents(granted.extents, page_count_max=desk.pool_pages)
    except Malformed:
        pages = EMPTY
    lease = Lease.of(
        lease=granted.lease,
        slot=granted.lease_slot,
        granted_at=granted.granted_at,
        key=sequence.key,
        order=sequence.order,
        root=sequence.root,
        tokens=sequence.tokens,
        page_size=desk.page_size,
        pages=pages,
        filled=filled,
        known=filled,
    )
    lease.terms, lease.tokens_max = sequence.terms, sequence.tokens_max
    desk.leases[lease.lease] = lease
    sequence.lease = lease
    sequence.retries = 0
    return lease


def give_back(desk: Desk, lease: Lease) -> None:
    """Release ``lease``, at once or when the step that uses it has ended."""
    lease.move(Hold.RELEASING)
    _drop_copies(desk, lease)
    if not lease.in_step:
        _release(desk, lease)


def give_back_unused(desk: Desk, key: SequenceKey, lease: int) -> None:
    """Release a lease that nothing of ours uses. Harmless when it is not ours."""
    desk.owe(release_message(desk, key, lease), lease=lease)


def release_message(desk: Desk, key: SequenceKey, lease: int) -> Release:
    return Release(
        key=key,
        worker=desk.identity.name,
        incarnation=desk.identity.incarnation,
        lease=lease,
        fill=_NOTHING,
    )


def leave_queue(desk: Desk, key: SequenceKey) -> None:
    """Have the pager keep no pages back for a sequence that waited for them. Said once: who is
    silent is forgotten there too, only later."""
    message = release_message(desk, key, NO_LEASE)
    desk.call_pager(message, lambda _answer: None, moves_leases=False)


def cancel_ticket(desk: Desk, key: SequenceKey, ticket: str, lease: int) -> None:
    """Have a ticket's lease released, wherever the ticket stands: when it cannot be
    cancelled because its lease came to us, the lease is given back."""
    desk.owe(
        CancelTicket(
            worker=desk.identity.name, incarnation=desk.identity.incarnation, ticket=ticket
        ),
        lease=lease,
        otherwise=release_message(desk, key, lease),
    )


def lose(desk: Desk, lease: Lease, *, is_told: bool) -> None:
    """``lease`` is no use any more: acknowledge, when no step of ours uses it, that the pager took
    it back; where it was not ``is_told`` so, which it may not have done, give it back."""
    lease.move(Hold.LOST)
    lease.is_told = is_told
    _drop_copies(desk, lease)
    if not lease.in_step:
        _acknowledge(desk, lease)


def acknowledge_unknown(desk: Desk, lease: int) -> None:
    """A revoked lease that we do not hold: its grant, if it still comes, is void."""
    desk.dead[lease] = desk.next_call
    desk.acks.append(lease)


def step_ended(desk: Desk, lease: Lease) -> None:
    """The step that used ``lease`` is over."""
    lease.in_step = False
    if lease.hold is Hold.RELEASING:
        _release(desk, lease)
    elif lease.hold is Hold.LOST:
        _acknowledge(desk, lease)


def send_acks(desk: Desk) -> None:
    """One acknowledgement for all that this event ended."""
    if desk.acks:
        desk.owe(
            AckRevoke(
                worker=desk.identity.name,
                incarnation=desk.identity.incarnation,
                leases=list(dict.fromkeys(desk.acks)),
            )
        )
        desk.acks.clear()


def _release(desk: Desk, lease: Lease) -> None:
    del desk.leases[lease.lease]
    desk.owe(
        Release(
            key=lease.key,
            worker=desk.identity.name,
            incarnation=desk.identity.incarnation,
            lease=lease.lease,
            fill=lease.fill(),
            cache=lease.cache,
        ),
        lease=lease.lease,
        otherwise=release_message(desk, lease.key, lease.lease),
    )


def _acknowledge(desk: Desk, lease: Lease) -> None:
    del desk.leases[lease.lease]
    if not lease.is_told:
        give_back_unused(desk, lease.key, lease.lease)
    acknowledge_unknown(desk, lease.lease)


def _drop_copies(desk: Desk, lease: Lease) -> None:
    """Copies that wait for a step can no longer be done. A target that misses its copy has
    its shared full pages all the same, and computes the tail anew."""
    kept: list[Copy] = []
    for copy in desk.copies:
        if copy.source is lease:
            whole_page(copy.target)
        elif copy.target is not lease:
            kept.append(copy)
    desk.copies = kept


def whole_page(lease: Lease) -> None:
    """Count only full pages as filled."""
    lease.filled -= lease.filled % lease.page_size
    lease.known = min(lease.known, lease.filled)
