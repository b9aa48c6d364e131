"""Which pages on disk come right after which, as pages come and go, and go with each other."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.pager.rig import ROOT
from tests.unit.pager.test_disk_quotas import found, tier

from pagemesh.pager.tiers.disk_shelves import Record
from pagemesh.pager.tiers.disk_tier import DiskTier
from pagemesh.pager.tiers.followers import Followers
from pagemesh.pager.tiers.severed import DROPPED_MAX
from pagemesh.pager.tiers.tier_events import FoundRecords

COUNT = 3_000


def in_a_row(count: int, *, before: int) -> FoundRecords:
    """Pages 1 to ``count`` of ``ROOT``, each following the last, the first ``before``."""
    chains = np.arange(1, count + 1, dtype=np.uint64)
    befores = np.concatenate([[before], chains[:-1]]).astype(np.uint64)
    slots = np.arange(count, dtype=np.uint32)
    return FoundRecords(slots, chains, befores, np.zeros(count, np.intp), (ROOT,))


def of_one(count: int) -> FoundRecords:
    """Pages 1 to ``count`` of ``ROOT``, all after the first."""
    chains = np.arange(1, count + 1, dtype=np.uint64)
    befores = np.minimum(chains - 1, 1)
    slots = np.arange(count, dtype=np.uint32)
    return FoundRecords(slots, chains, befores, np.zeros(count, np.intp), (ROOT,))


def first_of(disk: DiskTier) -> Record:
    record = disk.find(ROOT, 1)
    assert record is not None
    return record


def test_a_page_that_nothing_follows_any_more_may_be_followed_again() -> None:
    followers = Followers()
    for _ in range(2):
        for chain in (2, 3):
            followers.add(1, chain)
        assert followers.of(1) == [2, 3]
        for chain in (2, 3):
            followers.remove(1, chain)
        assert 1 not in followers and followers.of(1) == []


@pytest.mark.parametrize("records", [in_a_row(COUNT, before=0), of_one(COUNT)])
def test_of_what_follows_a_page_that_is_gone_a_turn_drops_a_part(records: FoundRecords) -> None:
    disk = tier(COUNT, records)
    dropped = [one.chain for one in disk.drop_all([first_of(disk)])]
    assert len(dropped) == 1 + DROPPED_MAX
    turns = 1
    while disk.severed:
        disk.check()
        more = disk.drop_all(())
        assert len(more) <= DROPPED_MAX
        dropped += [one.chain for one in more]
        turns += 1
    disk.check()
    assert sorted(dropped) == [*range(1, COUNT + 1)] and turns == 3 and not disk.page_count


def test_what_must_not_be_found_again_is_dropped_at_once_with_all_that_waits_for_it() -> None:
    disk = tier(COUNT, in_a_row(COUNT, before=0))
    disk.drop_all([first_of(disk)])
    assert disk.severed and disk.page_count
    disk.drop_all((), at_once=True)
    assert not disk.severed and not disk.page_count


def test_what_follows_a_page_that_is_stored_again_meanwhile_stays() -> None:
    disk = tier(COUNT, of_one(COUNT))
    disk.drop_all([first_of(disk)])
    kept = found(disk, range(COUNT + 1), ROOT)
    disk.written(disk.claim([1], 0, ROOT).slots)
    assert disk.drop_all(()) == [] and not disk.severed
    assert found(disk, range(COUNT + 1), ROOT) == [1, *kept]
    disk.check()
    assert len(disk.drop_all([first_of(disk)], at_once=True)) == 1 + len(kept)
    disk.check()
