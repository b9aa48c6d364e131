"""Why a prompt was not cached, told no further than it is known."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import pytest
from tests.unit.pager.rig import Rig, Worker, is_queued

from pagemesh.pager.retention.ages import Ages
from pagemesh.wire.cache_messages import InvalidateCache
from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.messages import Message
from pagemesh.wire.pager_messages import Admit, Granted, Waterfall


def ask(worker: Worker, number: int, tokens: Iterable[int], tenant: str = "") -> Waterfall:
    """Admit, compute and release."""
    ids = list(tokens)
    lease = worker.granted(number, ids, terms=CacheTerms(tenant=tenant))
    worker.release(lease, ids)
    return lease.waterfall


def crowd_out(worker: Worker, number: int, pages: int = 16) -> None:
    ask(worker, number, range(1_000 * number, 1_000 * number + 4 * pages))


def test_what_was_evicted_is_said_to_be(worker: Worker) -> None:
    ask(worker, 1, range(33))
    crowd_out(worker, 2)
    told = ask(worker, 3, range(33))
    assert (told.available_tokens, told.delivered_tokens) == (32, 0)
    assert told.lost == {"evicted": 32}


def test_what_was_evicted_below_what_is_still_there_is_said_to_be(worker: Worker) -> None:
    ask(worker, 1, range(32))
    kept = worker.granted(2, range(17))
    ask(worker, 3, range(1_000, 1_044))
    told = worker.granted(4, range(33)).waterfall
    assert told.selected_tokens == 16 and told.lost == {"evicted": 16}
    worker.release(kept)


def test_a_run_that_is_shared_in_part_is_told_to_the_last_mark(worker: Worker) -> None:
    ask(worker, 1, range(33))
    crowd_out(worker, 2)
    told = ask(worker, 3, [*range(22), 99, *range(23, 33)])  # 5 whole pages alike
    assert told.lost == {"evicted": 16}


def test_what_was_never_cached_is_not_explained(worker: Worker) -> None:
    ask(worker, 1, range(33))
    crowd_out(worker, 2)
    assert ask(worker, 3, range(500, 533)).lost == {}


def test_what_was_invalidated_is_said_to_be(rig: Rig, worker: Worker) -> None:
    ask(worker, 1, range(33))
    rig.ask(InvalidateCache(what="idle"))
    assert ask(worker, 2, range(33)).lost == {"invalidated": 32}
    assert ask(worker, 3, range(33)).lost == {}


def test_what_the_tenant_has_under_another_root_is_said_and_what_others_have_is_not() -> None:
    worker = Worker(Rig(64), "w", 1)
    other = worker.granted(1, range(33), root=bytes(32), terms=CacheTerms(tenant="alice"))
    worker.release(other, range(33))
    assert ask(worker, 2, range(33), tenant="bob").lost == {}
    worker.rig.ask(InvalidateCache(what="tenant", name="bob"))
    told = worker.granted(3, range(37), terms=CacheTerms(tenant="alice")).waterfall
    assert "other_root" not in told.lost, "that it was invalidated is known"
    fresh = worker.granted(4, [*range(33)], root=bytes([9]) * 32, terms=CacheTerms(tenant="alice"))
    assert fresh.waterfall.lost == {"other_root": 32}


def test_marks_follow_edges_however_they_were_cut(worker: Worker) -> None:
    dice = np.random.default_rng(5)
    base = dice.integers(0, 1 << 30, 48).tolist()
    ask(worker, 1, base[:33])
    ask(worker, 2, [*base[:9], 7, 7, 7, 7])  # cuts the edge after two pages
    crowd_out(worker, 3)
    assert ask(worker, 4, base[:33]).lost == {"evicted": 32}


def test_what_left_below_an_edge_is_told_as_the_edge_grows_shorter(worker: Worker) -> None:
    """The hash of the path above is kept from one departure to the next."""
    shared, ends = [*range(16)], ([1] * 5, [2] * 5, [3] * 5)
    for number, end in enumerate(ends, 1):
        ask(worker, number, [*shared, *end])
    crowd_out(worker, 4, pages=12)  # all three ends, below the same edge
    for number, end in enumerate(ends, 5):
        told = ask(worker, number, [*shared, *end])
        assert (told.selected_tokens, told.lost) == (16, {"evicted": 4})
    crowd_out(worker, 8, pages=14)  # half of the edge too
    told = ask(worker, 9, [*shared, *ends[1]])
    assert (told.selected_tokens, told.lost) == (8, {"evicted": 12})


def test_ages_are_known_to_the_second_and_later_on_more_coarsely() -> None:
    ages = Ages()
    for second in range(5_000):
        ages.note(10 * second, 1_000 * second)
    assert ages.age_s(10 * 4_000, 5_000_000) in range(990, 1_010)
    assert ages.age_s(0, 5_000_000) is None
    assert ages.age_s(10**9, 5_000_000) == 0, "given out since the last look"


def test_what_was_waited_for_and_did_not_come_was_selected_and_not_delivered(
    rig: Rig, worker: Worker
) -> None:
    writer = Worker(rig, "w-2", 2)
    begun = writer.granted(1, range(33))
    assert is_queued(worker.admit(2, range(33)))
    writer.committed(begun, range(16))
    rig.die(2)
    (granted,) = rig.taken(Granted)
    told = granted.waterfall
    assert (told.available_tokens, told.selected_tokens, told.delivered_tokens) == (32, 32, 16)
    assert told.lost == {"abandoned": 16}


class Preempted(Worker):
    """Admits what lost its pages."""

    def _ask(self, message: Message) -> Message:
        if isinstance(message, Admit):
            message = msgspec.structs.replace(message, again=True)
        return super()._ask(message)


@pytest.mark.parametrize(("kind", "attempt"), [(Preempted, 1), (Worker, 2)])
def test_what_is_admitted_again_is_no_new_prompt(
    kind: type[Worker], attempt: int, rig: Rig, worker: Worker
) -> None:
    ask(worker, 1, range(33))
    ask(worker, 2, range(33))
    lease = kind(rig, "w-2", 2).granted(3, range(40), attempt=attempt)
    assert lease.cached_tokens == 32, "it reads what is cached like any other"
    books = rig.core.books
    assert (books.prompt_tokens, books.cached_tokens) == (66, 32)
