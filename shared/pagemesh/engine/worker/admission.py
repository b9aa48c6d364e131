"""Pages for sequences: ask for them, ask for more, commit full ones, lose them."""

from __future__ import annotations

from functools import partial

from pagemesh.engine.worker import ending, leases
from pagemesh.engine.worker.ahead import next_part
from pagemesh.engine.worker.desk import Desk, unanswered
from pagemesh.engine.worker.events import Preempted
from pagemesh.engine.worker.lease import Hold, Lease
from pagemesh.engine.worker.sequence import Phase, Sequence
from pagemesh.wire.errors import Internal, Malformed
from pagemesh.wire.messages import Message, Refused
from pagemesh.wire.pager_messages import (
    Admit,
    AskedAs,
    Commit,
    Committed,
    Extend,
    Extended,
    Granted,
    Queued,
)
from pagemesh.wire.tokens import pack, unpack_extents


def reserve(desk: Desk, sequence: Sequence) -> int:
    """Slots to ask for: the tokens so far, and room to grow as far as the sequence can use it."""
    length = sequence.tokens.length
    if sequence.beams is not None:
        leaves = sequence.decode is not None and desk.role.hand_over
        return length if leaves else sequence.beams.wanted_slots(sequence.lease)
    return desk.needs.reserve_tokens(length, sequence.tokens_max)


def _first_tokens(desk: Desk, sequence: Sequence) -> int:
    """Slots beyond the cached ones that are wanted at once; 0: all. A beam search gets the pages
    of its beams together with those of its prompt."""
    if sequence.beams is not None:
        return 0
    return desk.needs.first_tokens


def enter(desk: Desk, sequence: Sequence) -> None:
    """Start computing under the new lease of ``sequence``."""
    lease = sequence.lease
    assert lease is not None
    single = sequence.tokens.length - lease.filled <= 1
    if sequence.beams is None:
        single = single and sequence.has_first_token
    elif single:
        # Only the last prompt token is left, and the worker that searches computes that one:
        # there is nothing to hand over.
        sequence.decode = None
    stays = sequence.decode is None or not desk.role.hand_over
    desk.move(sequence, Phase.DECODE if single and stays else Phase.PREFILL)


def ask(desk: Desk, sequence: Sequence) -> None:
    """Ask for pages, or ask again, which keeps the place in the pager's queue."""
    if not desk.may_ask or sequence.calling or sequence.retry_ms > desk.now:
        return
    if sequence.phase is Phase.WAITING:
        desk.move(sequence, Phase.ADMITTING)
    sequence.calling, sequence.told = True, False
    desk.call_pager(
        Admit(
            key=sequence.key,
            order=sequence.order,
            worker=desk.identity.name,
            incarnation=desk.identity.incarnation,
            epoch=desk.epoch,
            root=sequence.root,
            tokens=pack(sequence.tokens.view(0, sequence.tokens.length)),
            reserve_tokens=reserve(desk, sequence),
            read_cache=_reads_cache(sequence),
            terms=sequence.terms,
            tokens_max=sequence.tokens_max,
            first_tokens=_first_tokens(desk, sequence),
            again=sequence.is_again,
            deadline_ms=max(int(sequence.deadline_ms - desk.now), 0),
        ),
        partial(_admit_answered, desk, sequence),
        moves_leases=True,
    )


def expect(desk: Desk, sequence: Sequence) -> None:
    """The gateway has asked for the sequence's pages: wait for the answer as if to a call of ours.
    As always, a step checks that the lease stands before it uses the pages."""
    if not desk.may_ask:
        return  # the grant may precede our declaration of leases: a hint, see ``heard_of``
    desk.move(sequence, Phase.ADMITTING)
    sequence.calling = True
    desk.expect(sequence.key, partial(_admit_answered, desk, sequence))


def _reads_cache(sequence: Sequence) -> bool:
    """False for a prompt that has to be computed. Once it was, here or elsewhere, cached pages are
    as good as computed ones."""
    return not sequence.scoring and (sequence.read_cache or sequence.has_first_token)


def _admit_answered(desk: Desk, sequence: Sequence, message: Message) -> None:
    sequence.calling = False
    if sequence.phase is not Phase.ADMITTING:
        if isinstance(message, Granted):
            leases.give_back_unused(desk, sequence.key, message.lease)
        elif isinstance(message, Queued) and sequence.ended:
            leases.leave_queue(desk, sequence.key)  # it ended before we knew that
        return
    match message:
        case Granted():
            _granted(desk, sequence, message)
        case Queued():
            sequence.queued = True
            sequence.retry_ms = desk.now + _patience_ms(message, told=sequence.told)
            ask(desk, sequence)
        case Refused():
            _admit_refused(desk, sequence, message)
        case _:
            ending.fail(
                desk, sequence, Internal("unexpected answer from the pager to an admission")
            )


def _patience_ms(queued: Queued, *, told: bool) -> int:
    """How long to wait before asking again. ``told``: the notice that pages are there has
    overtaken this answer."""
    return 0 if told else max(queued.ask_again_ms // 2, 1)


def _granted(desk: Desk, sequence: Sequence, granted: Granted) -> None:
    # A match is whole pages. But the lease of a fork whose answer was lost also counts its tail
    # as cached, which nobody copied.
    filled = granted.cached_tokens - granted.cached_tokens % desk.page_size
    lease = leases.take(desk, sequence, granted, filled=filled)
    if lease is None:
        _later(desk, sequence)
        return
    length = sequence.tokens.length
    needed = min(length, filled + (_first_tokens(desk, sequence) or length))
    if lease.capacity < needed or lease.filled >= length:
        sequence.lease = None
        lease.filled = 0
        leases.give_back(desk, lease)
        ending.fail(desk, sequence, Internal("the pager granted a lease of the wrong size"))
        return
    sequence.queued = False
    lease.known = length
    lease.reserved_pages = -(-reserve(desk, sequence) // desk.page_size)
    if sequence.waterfall is None and not sequence.waterfall_told:
        sequence.waterfall = granted.waterfall
    if not sequence.is_again:
        sequence.cached_tokens = filled
    if sequence.scoring:
        sequence.prompt_scores.clear()
    enter(desk, sequence)


def _later(desk: Desk, sequence: Sequence, wanted_ms: int = 0) -> None:
    sequence.retry_ms = desk.pause(sequence.retries, wanted_ms)
    sequence.retries += 1
    desk.move(sequence, Phase.WAITING)


def _admit_refused(desk: Desk, sequence: Sequence, refused: Refused) -> None:
    if refused.code in ("Stale", "Gone"):
        desk.session_doubted = True
        _later(desk, sequence)
    elif unanswered(refused) or (_lacks_pages(refused) and refused.retry_after_ms):
        _later(desk, sequence, refused.retry_after_ms)
    else:
        ending.fail(desk, sequence, refused.error())


def _lacks_pages(refused: Refused) -> bool:
    return refused.code in ("NoCapacity", "OverQuota")


def heard_of(desk: Desk, message: Granted | Extended) -> None:
    """A notice brings pages that were queued for. It may be late or repeated: unless it can only
    be the answer to what was asked (``_answers``), it is taken as a hint to ask again."""
    sequence = desk.live.get(message.key)
    if isinstance(message, Extended):
        if sequence is not None and sequence.lease is not None:
            sequence.lease.retry_ms, sequence.lease.told = desk.now, True
            extend(desk, sequence)
    elif sequence is None:
        # Ended meanwhile. (A live sequence's lease is never given back on a notice: the
        # answer to its next call may bring that very lease.)
        if message.lease not in desk.leases and message.lease not in desk.dead:
            leases.give_back_unused(desk, message.key, message.lease)
    elif _answers(desk, sequence, message):
        _granted(desk, sequence, message)
    elif sequence.phase in (Phase.WAITING, Phase.ADMITTING):
        sequence.retry_ms, sequence.told = desk.now, True
        ask(desk, sequence)


def _answers(desk: Desk, sequence: Sequence, granted: Granted) -> bool:
    """Whether ``granted`` is what a queued sequence waits for. Pages asked of another pager, or in
    the name of another incarnation of ours, may belong to others by now. No leases were declared
    since it asked (``Session`` would have moved it to WAITING). If it had pages before, a late
    notice may grant those, and a step would be lost on them, as it checks the lease first."""
    asked_as = AskedAs(incarnation=desk.identity.incarnation, epoch=desk.epoch)
    is_queued = sequence.phase is Phase.ADMITTING and not sequence.calling and desk.may_ask
    is_first = not sequence.preempted_count and not sequence.computed_tokens
    return is_queued and is_first and granted.asked_as == asked_as


def extend(desk: Desk, sequence: Sequence, computing: int = 0) -> None:
    """Ask for pages ahead of need, for a prompt or for growth; no step waits for the answer.
    ``computing``: tokens of the sequence that the current step computes."""
    lease = sequence.lease
    if lease is None or lease.extending or lease.retry_ms > desk.now or not desk.may_ask:
        return
    if _has_enough(desk, sequence, lease):
        return
    low, wanted = _lacking(desk, sequence, lease.filled + computing)
    if lease.capacity >= low or lease.hold is not Hold.HELD:
        return
    lease.extending, lease.told = True, False
    desk.call_pager(
        Extend(
            key=sequence.key,
            worker=desk.identity.name,
            incarnation=desk.identity.incarnation,
            lease=lease.lease,
            have_pages=lease.page_count,
            page_count=-(-wanted // desk.page_size),
        ),
        partial(_extend_answered, desk, sequence, lease),
        moves_leases=True,
    )


def _has_enough(desk: Desk, sequence: Sequence, lease: Lease) -> bool:
    """A quick check that settles most decoding sequences without ``_lacking``: it is asked at each
    token."""
    if sequence.phase is not Phase.DECODE or sequence.beams is not None:
        return False
    return lease.capacity >= sequence.tokens.length + desk.page_size


def _lacking(desk: Desk, sequence: Sequence, end: int) -> tuple[int, int]:
    """``low`` and ``wanted``: with fewer slots than ``low``, more are asked for, up to ``wanted``.
    ``end``: slots that are filled or that the current step will fill."""
    whole, length = reserve(desk, sequence), sequence.tokens.length
    if sequence.beams is not None:
        return whole, whole
    assert sequence.lease is not None
    if sequence.lease.exact:
        return length, length
    if sequence.phase is not Phase.PREFILL:
        return min(length + desk.page_size, sequence.tokens_max), whole
    chunk_tokens, chunks = desk.role.chunk_tokens_max, desk.limits.prompt_chunks
    return next_part(end, length, whole, chunk_tokens=chunk_tokens, chunks=chunks)


def _extend_answered(desk: Desk, sequence: Sequence, lease: Lease, message: Message) -> None:
    lease.extending = False
    if sequence.lease is not lease or lease.hold is not Hold.HELD:
        return
    match message:
        case Extended():
            _lengthen(desk, lease, message)
        case Queued():
            lease.retry_ms = desk.now + _patience_ms(message, told=lease.told)
            extend(desk, sequence)
        case Refused(code="Stale" | "Gone"):
            # The lease ended; its revocation, or the word that a step reads, will say so. The
            # session may have ended too, which a heartbeat would show only later.
            desk.session_doubted = True
            lease.retry_ms = desk.pause(lease.retries)
            lease.retries += 1
        case Refused(code="NoCapacity" | "OverQuota", retry_after_ms=0):
            if lease.exact or sequence.beams is not None:
                ending.fail(desk, sequence, message.error())
            else:
                lease.exact = True
                extend(desk, sequence)
        case Refused():
            lease.retry_ms = desk.pause(lease.retries, message.retry_after_ms)
            lease.retries += 1
        case _:
            ending.fail(
                desk, sequence, Internal("unexpected answer from the pager to an extension")
            )


def _lengthen(desk: Desk, lease: Lease, extended: Extended) -> None:
    try:
        pages = unpack_extents(extended.extents, page_count_max=desk.pool_pages)
    except Malformed:
        pages = lease.table[:0]
    lease.retries = 0
    if extended.first_index <= lease.page_count and len(pages):
        lease.add_pages(extended.first_index, pages)
        lease.granted_at = extended.granted_at
    else:
        lease.retry_ms = desk.pause(0)


def commit(desk: Desk, sequence: Sequence, pages_min: int) -> None:
    """Make full pages matchable if ``pages_min`` or more became full; nothing waits for it."""
    lease = sequence.lease
    if lease is None or lease.committing or lease.hold is not Hold.HELD:
        return
    if sequence.phase is Phase.PREFILL and not _reads_cache(sequence):
        # Pages that are cached already would be held twice, and the lease be taken back for
        # that, again and again.
        return
    full = lease.filled - lease.filled % desk.page_size
    if full - lease.committed < pages_min * desk.page_size:
        return
    lease.committed = full
    lease.committing = True
    desk.call_pager(
        Commit(
            key=lease.key,
            worker=desk.identity.name,
            incarnation=desk.identity.incarnation,
            lease=lease.lease,
            fill=lease.fill(),
        ),
        partial(_commit_answered, desk, sequence, lease),
        moves_leases=False,
    )


def _commit_answered(desk: Desk, sequence: Sequence, lease: Lease, message: Message) -> None:
    # The next commit, or the release, makes good one that failed.
    lease.committing = False
    if isinstance(message, Committed):
        lease.known = max(lease.known, message.known_tokens)
    elif isinstance(message, Refused) and message.code == "Malformed":
        lease.known = 0
    if sequence.lease is lease and lease.committed + desk.page_size <= sequence.prompt_count:
        # Others may wait for the rest of the prompt, which was computed meanwhile.
        commit(desk, sequence, 1)


def revoked(
    desk: Desk, lease: Lease, reason: str, usage: str = "", *, is_told: bool = True
) -> None:
    """The pager took a lease back, though it may not have said so yet (``is_told``). The sequence
    keeps its tokens and asks for pages again, with its old place in the order."""
    sequence = _holder(desk, lease)
    leases.lose(desk, lease, is_told=is_told)
    if sequence is None:
        return
    sequence.lease = None
    sequence.is_again = True
    sequence.preempted_count += 1
    sequence.lost_tokens += lease.filled
    desk.commands.append(Preempted(sequence.key, lease.filled, reason, usage))
    sequence.retry_ms = desk.now
    sequence.calling = False
    desk.move(sequence, Phase.WAITING)
    sequence.ticket = None
    ask(desk, sequence)


def _holder(desk: Desk, lease: Lease) -> Sequence | None:
    sequence = desk.live.get(lease.key)
    return sequence if sequence is not None and sequence.lease is lease else None
