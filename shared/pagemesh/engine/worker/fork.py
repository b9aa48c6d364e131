"""Several choices of one prompt: the leader computes it once, and all share its pages.

    leader    PREFILL --first tokens of all--> FORKING --Forked, tails copied--> DECODE or OFFERING
    follower  FOLLOWING ---------------------> FORKING ------------------------> DECODE or OFFERING

A follower that gets no share (the pager has no room, the leader is gone) asks for pages of
its own, and finds the prompt in the cache.
"""

from __future__ import annotations

from functools import partial

from pagemesh.engine.worker import admission, handover, leases
from pagemesh.engine.worker.desk import Desk, unanswered
from pagemesh.engine.worker.lease import Copy, Lease
from pagemesh.engine.worker.sequence import Phase, Sequence
from pagemesh.wire.messages import Message, Refused
from pagemesh.wire.pager_messages import Fork, Forked, Granted

_FORK_TRIES_MAX = 3


def begin(desk: Desk, leader: Sequence, children: list[Sequence]) -> None:
    """Every choice has its first token; ``children`` still need pages. Until they have them, the
    leader writes nothing, so that the page they copy stays as it is."""
    desk.move(leader, Phase.FORKING)
    for child in children:
        leader.followers.remove(child)
        child.leader = None
        desk.move(child, Phase.FORKING)
    _ask(desk, leader, children)


def _ask(desk: Desk, leader: Sequence, children: list[Sequence]) -> None:
    lease = leader.lease
    assert lease is not None
    leader.calling = True
    for child in children:
        child.calling = True
    desk.call_pager(
        Fork(
            key=leader.key,
            worker=desk.identity.name,
            incarnation=desk.identity.incarnation,
            lease=lease.lease,
            fill=lease.fill(),
            children=[child.key for child in children],
            reserve_tokens=admission.reserve(desk, leader),
        ),
        partial(_answered, desk, leader, lease, children),
        moves_leases=True,
    )


def _answered(
    desk: Desk, leader: Sequence, lease: Lease, children: list[Sequence], message: Message
) -> None:
    here = leader.phase is Phase.FORKING and leader.lease is lease
    if here:
        leader.calling = False
    for child in children:
        child.calling = False
    match message:
        case Forked():
            _share(desk, lease if here else None, children, message)
        case Refused() if unanswered(message) and here and leader.retries < _FORK_TRIES_MAX:
            leader.retries += 1
            _ask(desk, leader, [child for child in children if not child.ended])
            return
        case _:
            pass
    for child in children:
        if child.phase is Phase.FORKING and child.lease is None:
            desk.move(child, Phase.WAITING)
    settle(desk, [leader, *children])


def _share(desk: Desk, source: Lease | None, children: list[Sequence], forked: Forked) -> None:
    by_key = {child.key: child for child in children}
    tails = {copy.target_page: copy.source_page for copy in forked.copies}
    for granted in forked.children:
        child = by_key.get(granted.key)
        if child is None or child.phase is not Phase.FORKING:
            if child is None or child.ended:
                leases.give_back_unused(desk, granted.key, granted.lease)
            continue
        _give_share(desk, source, child, granted, tails)


def _give_share(
    desk: Desk, source: Lease | None, child: Sequence, granted: Granted, tails: dict[int, int]
) -> None:
    lease = leases.take(desk, child, granted, filled=granted.cached_tokens)
    if lease is None:
        return
    if lease.capacity < lease.filled or lease.filled > child.prompt_count:
        child.lease = None
        lease.filled = 0
        leases.give_back(desk, lease)
        return
    tail = child.forked_pages = lease.filled // desk.page_size
    if lease.filled % desk.page_size:
        target = int(lease.table[tail])
        if source is not None and target in tails:
            desk.copies.append(Copy(source, tails[target], lease, target))
        else:
            leases.whole_page(lease)


def settle(desk: Desk, choices: list[Sequence]) -> None:
    """Route the ``choices`` that no longer wait for an answer or a copy."""
    waiting = {id(copy.source) for copy in desk.copies} | {id(copy.target) for copy in desk.copies}
    if desk.step is not None:
        for copy in desk.step.copies:
            waiting |= {id(copy.source), id(copy.target)}
    for choice in choices:
        lease = choice.lease
        if choice.phase is Phase.FORKING and lease is not None and not choice.calling:
            if id(lease) not in waiting:
                handover.route(desk, choice)
