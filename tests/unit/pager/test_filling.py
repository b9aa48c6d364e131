"""Commit and release: what becomes matchable, what stays private, what is refused."""

from __future__ import annotations

import pytest
from tests.unit.pager.rig import Rig, Worker, code_of, fill_of, is_queued, key_of, table_of
from tests.unit.pager.test_recovery import declare, line

from pagemesh.pager.events import PagesStored
from pagemesh.pager.leases.ended import EndedLeases
from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.messages import Ok
from pagemesh.wire.pager_messages import Committed, Fill, Granted, Revoke
from pagemesh.wire.tokens import pack

YOUNG = 1_000_000
"""What is so much younger is not waited for, so the same is computed twice."""


def test_full_pages_can_be_read_while_the_writer_goes_on(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, range(10), 12)
    assert worker.committed(lease, range(10), 7) == 4
    assert worker.granted(2, [0, 1, 2, 3, 99]).cached_tokens == 4
    assert worker.committed(lease, range(10), 10) == 8
    assert worker.granted(3, range(10)).cached_tokens == 8


def test_a_partial_tail_never_enters_the_tree(rig: Rig, worker: Worker) -> None:
    worker.release(worker.granted(1, range(11)), range(11))
    assert rig.core.books.pool.idle == 2


def test_generated_tokens_come_with_the_commit_that_fills_them(worker: Worker) -> None:
    lease = worker.granted(1, range(3), 12)
    answer = worker.commit(lease, fill_of([3, 4, 5, 6, 7, 8], first=3))
    assert isinstance(answer, Committed)
    assert (answer.committed_tokens, answer.known_tokens) == (8, 9)
    assert worker.granted(2, range(9)).cached_tokens == 8


def test_committing_again_changes_nothing(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, range(10), 12)
    worker.committed(lease, range(10))
    before = rig.core.books.pool.last_sequence
    assert worker.committed(lease, range(10)) == 8
    assert worker.commit(lease, fill_of(range(6))) == worker.commit(lease, fill_of(range(10)))
    assert rig.core.books.pool.last_sequence == before


def test_content_that_is_there_already_leaves_the_page_private_and_the_table_as_it_was(
    rig: Rig, worker: Worker
) -> None:
    """Two compute the same at once; the second one's next page hangs under the first's."""
    one, two = worker.granted(YOUNG, range(14), 16), worker.granted(2, range(14), 16)
    worker.committed(one, range(14), 8)
    worker.committed(two, range(14), 12)
    assert list(rig.core.books.leases[two.lease].copies[0]) == table_of(two)[:2]
    assert worker.granted(2, range(14), 16).extents == two.extents
    reader = worker.granted(3, range(14))
    assert table_of(reader)[:3] == [*table_of(one)[:2], table_of(two)[2]]
    assert rig.core.books.pool.held == (4 - 2) + (4 - 1) + (4 - 3)


def test_the_canonical_pages_stay_while_a_copy_of_them_is_in_use(rig: Rig, worker: Worker) -> None:
    one, two = worker.granted(YOUNG, range(9), 12), worker.granted(2, range(9), 12)
    worker.release(one, range(9))
    worker.committed(two, range(9))
    assert (rig.core.books.pool.pinned, rig.core.books.pool.idle) == (2, 0)
    worker.release(two, range(9))
    assert (rig.core.books.pool.free, rig.core.books.pool.idle) == (14, 2)


@pytest.mark.parametrize(
    "fill",
    [
        Fill(filled_tokens=11, first_token=0, tokens=pack(range(10))),
        Fill(filled_tokens=4, first_token=11, tokens=b""),
        Fill(filled_tokens=4, first_token=0, tokens=pack([0, 1, 99, 3])),
        Fill(filled_tokens=4, first_token=0, tokens=b"abc"),
        Fill(filled_tokens=13, first_token=10, tokens=pack(range(10, 14))),
        Fill(filled_tokens=4, first_token=10, tokens=pack(range(10, 200))),
    ],
    ids=["unknown", "gap", "other tokens", "odd bytes", "beyond its slots", "far beyond"],
)
def test_a_fill_that_does_not_fit_is_malformed_and_changes_nothing(
    rig: Rig, worker: Worker, fill: Fill
) -> None:
    lease = worker.granted(1, range(10), 12)
    before = rig.core.report()
    assert code_of(worker.commit(lease, fill)) == "Malformed"
    assert rig.core.report() == before and not rig.commands[:-1]
    assert worker.committed(lease, range(10)) == 8


def test_a_lease_of_somebody_else_is_stale_an_unknown_one_gone(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, range(10))
    other = Worker(rig, "other", 2)
    assert code_of(other.commit(lease, fill_of(range(10)))) == "Stale"
    assert code_of(other.release(lease)) == "Stale"
    worker.release(lease)
    assert code_of(worker.commit(lease, fill_of(range(10)))) == "Gone"


def test_a_lease_under_another_key_is_malformed(worker: Worker) -> None:
    lease = worker.granted(1, range(10))
    wrong = Granted(
        key=key_of(2), lease=lease.lease, lease_slot=0, granted_at=1, extents=b"", cached_tokens=0
    )
    assert code_of(worker.extend(wrong, 1)) == "Malformed"


def test_releasing_twice_is_ok_for_the_holder_and_gone_for_others(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, range(10))
    other = Worker(rig, "other", 2)
    assert worker.release(lease) == Ok()
    assert worker.release(lease) == Ok()
    assert code_of(other.release(lease)) == "Gone"


def test_release_without_cache_keeps_nothing_that_it_wrote_or_read(
    rig: Rig, worker: Worker
) -> None:
    worker.release(worker.granted(1, [*range(4), 99, 98, 97, 96]), [*range(4), 99, 98, 97, 96])
    lease = worker.granted(2, range(12), 16)
    assert lease.cached_tokens == 4
    worker.committed(lease, range(12))
    worker.release(lease, range(12), cache=False)
    assert (rig.core.books.pool.idle, rig.core.books.pool.free) == (2, 14), "others go on from it"
    worker.release(worker.granted(3, [*range(4), 99, 98, 97, 96, 0]), cache=False)
    assert (rig.core.books.pool.idle, rig.core.books.pool.free) == (0, 16)


def test_of_a_crowd_that_reads_what_is_wrong_the_last_leaves_nothing(
    rig: Rig, worker: Worker
) -> None:
    """A passing fault in the first part of a prompt shows when all have read it."""
    writer = worker.granted(1, range(12), 16)
    worker.committed(writer, range(4))
    readers = [worker.granted(number, [*range(4), number]) for number in (2, 3)]
    for lease in (writer, *readers):
        worker.release(lease, cache=False)
    assert rig.core.books.pool.free == 16
    assert worker.granted(4, range(12)).cached_tokens == 0


def test_release_without_cache_keeps_nothing_of_a_lease_that_was_taken_back_before(
    rig: Rig, worker: Worker
) -> None:
    young = worker.granted(YOUNG, range(12), 16)
    worker.committed(young, range(12))
    assert is_queued(worker.admit(1, range(100, 152))), "its last page is to come of the young"
    assert [each.reason for each in rig.taken(Revoke)] == ["preempted"]
    assert worker.release(young, range(12), cache=False) == Ok()
    assert rig.core.books.pool.idle == 0
    assert worker.granted(7, range(12)).cached_tokens == 0


def test_release_without_cache_leaves_what_others_read(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, range(12), 16)
    worker.committed(lease, range(12))
    reader = worker.granted(2, range(6), 8)
    worker.release(lease, range(12), cache=False)
    assert rig.core.books.pool.pinned == 1 and rig.core.books.pool.idle == 0
    worker.release(reader)


def test_a_growing_answer_makes_one_edge_not_one_for_each_page(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, range(4), 64)
    for count in range(4, 64):
        worker.committed(lease, range(count))
    forest = rig.core.books.forest
    [tree] = forest.trees.values()
    assert len(list(tree.root.below())) == 1


def test_every_stored_page_is_announced_once_with_its_place(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, range(12), 16)
    worker.committed(lease, range(12), 4)
    [first] = [c for c in rig.commands if isinstance(c, PagesStored)]
    worker.committed(lease, range(12), 12)
    [then] = [c for c in rig.commands if isinstance(c, PagesStored)]
    assert list(first.after) == [] and list(first.pages) == table_of(lease)[:1]
    assert list(then.after) == table_of(lease)[:1]
    assert then.tokens == pack(range(4, 12))


def test_the_rest_of_a_prompt_is_not_copied_with_each_of_its_chunks(
    rig: Rig, worker: Worker
) -> None:
    lease = worker.granted(1, range(60))
    before = rig.core.books.leases[lease.lease].tokens
    for filled in range(4, 56, 4):
        worker.commit(lease, fill_of([], filled, first=60))
        assert rig.core.books.leases[lease.lease].tokens is before
    worker.commit(lease, fill_of([], 56, first=60))
    worker.commit(lease, fill_of([], 59, first=60))
    assert rig.core.books.leases[lease.lease].tokens is before, "a page is still to come"
    worker.commit(lease, fill_of([], 60, first=60))
    assert rig.core.books.leases[lease.lease].tokens == b""
    worker.committed(lease, range(60))


def test_no_lease_that_was_never_granted_counts_as_ended() -> None:
    """Places that nothing was noted in yet hold zeros."""
    assert not EndedLeases(4).was_held_by(0, 0)


def test_what_is_released_to_be_forgotten_is_though_others_have_still_to_declare(
    rig: Rig, worker: Worker
) -> None:
    slow = Worker(rig, "slow", 2)
    rig.restart([worker.holder, slow.holder])
    declare(rig, worker)
    lease = worker.granted(1, range(10))
    worker.committed(lease, range(10))
    worker.release(lease, cache=False)
    assert worker.granted(2, range(10)).cached_tokens == 0
    declare(rig, slow)
    rig.tick(2_000)
    worker.heartbeat()
    assert rig.core.books.pool.idle == 0, "and once they have, it leaves the pool"


def test_nor_does_it_come_back_when_the_same_is_computed_again(rig: Rig, worker: Worker) -> None:
    slow = Worker(rig, "slow", 2)
    bad = worker.granted(1, range(9))
    worker.release(bad, range(9))
    rig.restart([worker.holder, slow.holder])
    declare(rig, worker)
    reader = worker.granted(2, range(9))
    assert reader.cached_tokens == 8
    worker.release(reader, range(8), cache=False)
    anew = worker.granted(3, range(9))
    assert anew.cached_tokens == 0
    worker.release(anew, range(9))
    for number in (4, 5):
        found = worker.granted(number, range(9))
        assert table_of(found)[:2] == table_of(anew)[:2] != table_of(bad)[:2]
        worker.release(found, range(9))
        assert rig.core.books.pool.draining == 2, "somebody may read them"
        if number == 4:
            rig.restart([worker.holder, slow.holder])
            declare(rig, worker)
    declare(rig, slow)
    assert rig.core.books.pool.draining == 0


def test_who_declares_that_it_reads_what_was_given_up_has_lost_it(rig: Rig, worker: Worker) -> None:
    slow = Worker(rig, "slow", 2)
    worker.release(worker.granted(1, range(8)), range(8))
    reads = slow.granted(2, range(9), 16)
    assert reads.cached_tokens == 8
    rig.restart([worker.holder, slow.holder])
    declare(rig, worker)
    worker.release(worker.granted(3, range(9)), range(8), cache=False)
    assert declare(rig, slow, line(reads, 2, [*range(9)])) == [reads.lease]
    slow.release(reads)
    assert worker.granted(4, range(9)).cached_tokens == 0
    assert rig.core.books.pool.draining == 0


def test_what_is_over_below_it_goes_with_it(rig: Rig, worker: Worker) -> None:
    slow = Worker(rig, "slow", 2)
    for others in ([], [slow.holder]):
        rig.restart([worker.holder, *others])
        declare(rig, worker)
        worker.release(worker.granted(1, range(8)), range(8))
        timed = worker.granted(2, range(13), terms=CacheTerms(ttl_s=1))
        worker.release(timed, range(12))
        rig.now_ms += 1_001
        worker.release(worker.granted(3, range(9)), range(8), cache=False)
        assert worker.granted(4, range(9)).cached_tokens == 0
        worker.release(worker.granted(5, [90]), [90])


def test_so_is_what_forks_share_when_the_last_of_them_is_released(rig: Rig, worker: Worker) -> None:
    slow = Worker(rig, "slow", 2)
    rig.restart([worker.holder, slow.holder])
    declare(rig, worker)
    lease = worker.granted(1, range(8), 16)
    (child,) = worker.forked(lease, fill_of(range(8)), [1], 16).children
    for one, first in ((child, 50), (lease, 60)):
        worker.committed(one, [*range(8), *range(first, first + 4)])
        worker.release(one, cache=False)
    assert worker.granted(2, [*range(8), 9]).cached_tokens == 0
