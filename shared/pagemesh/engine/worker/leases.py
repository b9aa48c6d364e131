"""Taking leases and giving them back, so that none is used after its end or leaked."""

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
    """Make the lease of ``granted`` that of ``sequence``. None: it is already held, has ended, or
    is about to be given back, so the grant is void and the caller has to ask again. If the list
    of pages is malformed, the lease has none, which the caller rejects as too few."""
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
    """Release a lease that nothing here uses. Harmless if it is not ours."""
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
    """Tell the pager to keep no pages back for a sequence that waited for them. Sent only once: if
    it is lost, the pager forgets the silent sequence too, only later."""
    message = release_message(desk, key, NO_LEASE)
    desk.call_pager(message, lambda _answer: None, moves_leases=False)


def cancel_ticket(desk: Desk, key: SequenceKey, ticket: str, lease: int) -> None:
    """Have a ticket's lease released, whatever the state of the ticket: if it cannot be
    cancelled because its lease came to us, release the lease."""
    desk.owe(
        CancelTicket(
            worker=desk.identity.name, incarnation=desk.identity.incarnation, ticket=ticket
        ),
        lease=lease,
        otherwise=release_message(desk, key, lease),
    )


def lose(desk: Desk, lease: Lease, *, is_told: bool) -> None:
    """Stop using ``lease``, and once no step uses it, acknowledge that the pager took it back. If
    the pager has not said that it did (``is_told``), it may not have: then release it, too."""
    lease.move(Hold.LOST)
    lease.is_told = is_told
    _drop_copies(desk, lease)
    if not lease.in_step:
        _acknowledge(desk, lease)


def acknowledge_unknown(desk: Desk, lease: int) -> None:
    """Acknowledge a revoked lease that we do not hold. If its grant still arrives, it is void."""
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
    """Send one acknowledgement for all leases that ended in this event."""
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
    """Drop pending copies from or to ``lease``, which can no longer be done. A target that misses
    its copy keeps its shared full pages and recomputes the tail."""
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
