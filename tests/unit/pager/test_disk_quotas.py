"""Tenants' quotas on disk: who stores too much drives out its own oldest pages."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from tests.unit.pager.disk_rig import CHAIN_KEY, PROMPT, DiskRig, flood, prefixes_of, pushed
from tests.unit.pager.rig import LIMITS, ROOT, Worker, is_queued
from tests.unit.pager.steps import OTHER, cache, stats
from tests.unit.pager.test_disk_file import FACTS
from tests.unit.pager.test_tiers_dropped import put_away

from pagemesh.pager.tiers.disk_accounts import DiskAccounts
from pagemesh.pager.tiers.disk_shelves import DiskAccount, Record
from pagemesh.pager.tiers.disk_tier import DiskTier
from pagemesh.pager.tiers.tier_events import DiskContents, FoundRecords
from pagemesh.wire.cache_messages import DiskTenantLine
from pagemesh.wire.cache_terms import NO_TERMS, CacheTerms

FOUR = CacheTerms(tenant="alice", disk_pages_max=4)


def records_of(slots: list[int], chains: list[int]) -> FoundRecords:
    """Of ``ROOT``, each following one that is not there."""
    befores = np.array([-1 - chain for chain in chains]).astype(np.uint64)
    roots = np.zeros(len(slots), np.intp)
    return FoundRecords(
        np.array(slots, np.uint32), np.array(chains, np.uint64), befores, roots, (ROOT,)
    )  # fmt: skip


def tier(slots: int = 10, records: FoundRecords | None = None) -> DiskTier:
    records = records_of([], []) if records is None else records
    found = DiskContents(slots, records, 0, CHAIN_KEY)
    return DiskTier(FACTS, found, 1_000)


def store(disk: DiskTier, chains: range, root: bytes, terms: CacheTerms = NO_TERMS) -> int:
    """How many found a slot."""
    _, slots, _ = disk.claim([*chains], -1 - chains.start, root, terms)
    disk.written(slots)
    disk.check()
    return len(slots)


def found(disk: DiskTier, chains: range, root: bytes) -> list[int]:
    return [chain for chain in chains if disk.find(root, chain) is not None]


def test_a_tenants_flood_drops_its_own_oldest_pages_and_costs_the_others_nothing() -> None:
    disk = tier()
    store(disk, range(6), OTHER)
    for first in range(100, 150, 2):
        assert store(disk, range(first, first + 2), ROOT, FOUR) == 2
    assert found(disk, range(6), OTHER) == [*range(6)]
    assert found(disk, range(100, 150), ROOT) == [146, 147, 148, 149]
    assert (disk.counts.over_quota, disk.counts.evicted) == (46, 0)


def test_what_a_tenant_uses_again_outlives_what_it_does_not() -> None:
    disk = tier()
    store(disk, range(4), ROOT, FOUR)
    kept = disk.find(ROOT, 0)
    assert isinstance(kept, Record)
    disk.touch([kept])
    store(disk, range(10, 13), ROOT, FOUR)
    assert found(disk, range(4), ROOT) == [0]


def test_what_others_follow_is_not_driven_out_before_them_however_old_it_is() -> None:
    disk = tier(2)
    store(disk, range(1), ROOT)
    _, slots, _ = disk.claim([1], 0, ROOT)
    disk.written(slots)
    store(disk, range(20, 21), OTHER)
    assert found(disk, range(2), ROOT) == [0]


def test_what_a_tenant_has_put_away_is_not_driven_out_by_what_else_it_has() -> None:
    rig = DiskRig(16, limits=replace(LIMITS, staged_bytes_max=4 << 12))
    worker = Worker(rig, "w", 1)
    for number in range(2):
        cache(worker, number, range(100 * number, 100 * number + 16), terms=FOUR)
    assert put_away(rig) == 1, "it may have four pages there"


def test_the_roots_of_a_tenant_share_its_quota_the_oldest_page_goes_first() -> None:
    disk = tier()
    store(disk, range(2), ROOT, FOUR)
    store(disk, range(20, 22), OTHER, FOUR)
    store(disk, range(40, 43), bytes([4]) * 32, FOUR)
    assert not found(disk, range(2), ROOT)
    assert len(found(disk, range(20, 22), OTHER)) == 1
    assert disk.accounts.by_tenant["alice"].page_count == 4


def test_a_root_whose_pages_are_used_again_gives_none_before_those_that_are_not() -> None:
    disk = tier(4)
    store(disk, range(2), ROOT)
    store(disk, range(20, 22), OTHER)
    disk.touch([one for chain in range(2) if (one := disk.find(ROOT, chain)) is not None])
    store(disk, range(40, 42), bytes([4]) * 32)
    assert found(disk, range(2), ROOT) == [0, 1] and not found(disk, range(20, 22), OTHER)


def test_the_flood_of_those_without_a_quota_leaves_a_tenant_its_share() -> None:
    disk = tier()
    store(disk, range(4), ROOT, FOUR)
    for first in range(100, 200, 5):
        store(disk, range(first, first + 5), OTHER)
    assert found(disk, range(4), ROOT) == [*range(4)]


def test_who_gives_is_looked_for_only_when_it_may_be_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There may be a thousand tenants, and the pager's event loop waits."""
    disk, looks = tier(400), 0
    look = disk.accounts._look_for_richest

    def counted() -> DiskAccount:
        nonlocal looks
        looks += 1
        return look()

    monkeypatch.setattr(disk.accounts, "_look_for_richest", counted)
    for number in range(1, 51):
        terms = CacheTerms(tenant=f"{number}", disk_pages_max=4)
        store(disk, range(4), number.to_bytes(32, "big"), terms)
    store(disk, range(100, 300), OTHER)
    for first in range(300, 1_300, 50):
        assert store(disk, range(first, first + 50), OTHER) == 50
    assert disk.accounts.common.page_count == 200 and looks == 1
    store(disk, range(4), ROOT, CacheTerms(tenant="new", disk_pages_max=4))
    assert disk.accounts.common.page_count == 196 and looks == 2


def test_shares_of_the_disk_are_quotas_too() -> None:
    disk = tier()
    store(disk, range(10), ROOT, CacheTerms(tenant="alice", disk_share=0.3))
    assert disk.page_count == 3


def test_what_an_earlier_pager_stored_counts_once_its_tenant_stores_again() -> None:
    disk = tier(records=records_of([*range(8)], [*range(8)]))
    assert not disk.accounts.by_tenant
    store(disk, range(100, 102), ROOT, FOUR)
    assert disk.accounts.by_tenant["alice"].page_count == 8, "it gave two of its own for them"
    assert found(disk, range(8), ROOT) == [*range(2, 8)]
    store(disk, range(200, 204), OTHER)
    assert disk.accounts.by_tenant["alice"].page_count == 6, (
        "others took what was free, and then from it"
    )


def test_where_quotas_are_more_than_the_disk_who_gave_most_stops_when_others_have_more() -> None:
    disk = tier()
    alice, bob = (CacheTerms(tenant=name, disk_pages_max=8) for name in ("alice", "bob"))
    store(disk, range(8), ROOT, alice)
    store(disk, range(8), OTHER, bob)
    assert {name: one.page_count for name, one in disk.accounts.by_tenant.items()} == {
        "alice": 4,
        "bob": 6,
    }


def test_who_has_its_quota_cut_gives_next() -> None:
    def terms(tenant: str, pages: int) -> CacheTerms:
        return CacheTerms(tenant=tenant, disk_pages_max=pages)

    accounts = DiskAccounts(100)
    alice, bob = accounts.of(terms("alice", 40)), accounts.of(terms("bob", 40))
    for account, pages in ((alice, 20), (bob, 10)):
        for _ in range(pages):
            accounts.grew(account)
    assert accounts.richest() is alice
    assert accounts.of(terms("bob", 12)) is bob
    assert accounts.richest() is bob


def test_of_a_page_that_an_earlier_pager_wrote_twice_the_older_slot_is_free() -> None:
    """Its record was to be overwritten when that pager died."""
    disk = tier(records=records_of([3, 7], [5, 5]))
    disk.check()
    kept = disk.find(ROOT, 5)
    assert kept is not None and kept.slot == 7


def test_a_tenant_without_pages_on_disk_has_no_account_there() -> None:
    disk = tier()
    store(disk, range(2), ROOT, FOUR)
    disk.retire([ROOT])
    disk.sweep(100)
    disk.check()
    assert not disk.accounts.by_tenant
    store(disk, range(2), ROOT, FOUR)
    store(disk, range(2, 4), ROOT)  # its limit was taken away
    assert not disk.accounts.by_tenant and disk.accounts.common.page_count == 4


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_uses_keeps_slots_shelves_and_quotas_in_step(seed: int) -> None:
    dice, disk = random.Random(seed), tier(12)
    roots = [bytes([number]) * 32 for number in range(5)]
    terms = [NO_TERMS, FOUR, CacheTerms(tenant="bob", disk_pages_max=3)]
    writing: list[int] = []
    for _ in range(400):
        root = dice.choice(roots)
        match dice.randrange(6):
            case 0 | 1 | 2:
                first = dice.randrange(20)
                whose = terms[roots.index(root) % 3] if dice.random() < 0.95 else dice.choice(terms)
                chains = [*range(first, first + dice.randrange(1, 6))]
                writing += disk.claim(chains, first - 1, root, whose).slots
            case 3:
                disk.written(writing)
                writing = []
            case 4:
                known = [disk.find(root, chain) for chain in range(20)]
                there = [one for one in known if one is not None]
                if there and dice.random() < 0.8:
                    disk.touch(there[:3])
                elif there:
                    disk.drop_all(there[:1])
            case _:
                if dice.random() < 0.3:
                    disk.retire([root])
                disk.sweep(dice.randrange(4))
        disk.check()


def test_the_terms_of_a_prompt_say_what_its_tenant_may_have_on_disk() -> None:
    rig = DiskRig(16)
    worker = Worker(rig, "w", 1)
    two = CacheTerms(tenant="alice", disk_pages_max=2)
    worker.release(worker.granted(1, PROMPT), PROMPT)
    worker.release(worker.granted(2, PROMPT, root=OTHER, terms=two), PROMPT)
    flood(worker)
    rig.write()
    assert rig.prefixes(OTHER) == prefixes_of(range(8)), "without its start nothing is found"
    assert rig.prefixes() == prefixes_of(PROMPT)
    told = stats(rig).disk
    assert told.tenants == [DiskTenantLine(tenant="alice", pages=2, quota_pages=2)]
    assert (told.state, told.used_pages, told.stored) == ("on", 6, 6)


def test_a_pager_that_stops_stores_the_starts_of_what_a_tenant_may_have() -> None:
    rig = DiskRig(32)
    worker = Worker(rig, "w", 1)
    two = CacheTerms(tenant="alice", disk_pages_max=2)
    worker.release(worker.granted(1, PROMPT, root=OTHER, terms=two), PROMPT)
    worker.release(worker.granted(2, PROMPT), PROMPT)
    put_away(rig)
    assert rig.prefixes(OTHER) == prefixes_of(range(8))
    assert rig.prefixes() == prefixes_of(PROMPT)


EIGHT = CacheTerms(tenant="alice", pages_max=8)
ALICE = b"a" * 32


def used(rig: DiskRig) -> int:
    return rig.core.books.accounts.by_tenant["alice"].used_pages


def test_what_is_read_from_disk_counts_against_the_quota_of_who_asked() -> None:
    rig, prompts = DiskRig(24), [range(1_000 * at, 1_000 * at + 17) for at in (1, 2, 3)]
    worker = Worker(rig, "w", 1)
    for number, ids in enumerate(prompts):
        cache(worker, number, ids, root=ALICE, terms=EIGHT)
        flood(worker)
    rig.write()
    cache(worker, 50, range(40), root=OTHER)
    for number, ids in enumerate(prompts, 100):
        assert is_queued(worker.admit(number, ids, root=ALICE, terms=EIGHT))
    assert [len(load.pages) for load in rig.loads] == [4], "one more page each is to compute"
    assert used(rig) == 4
    rig.load()
    assert used(rig) == 5, "what was read is cached, and the first has it and a page of its own"
    [first] = pushed(rig)
    assert first.cached_tokens == 16 and rig.core.books.waiting.count == 2
    worker.release(first, prompts[0])
    assert len(pushed(rig)) == 1, "then comes the next"
    assert worker.granted(200, range(40), root=OTHER).cached_tokens == 36, "nothing of others went"


def test_what_is_being_read_goes_with_a_tree_that_changes_hands() -> None:
    rig = DiskRig(16)
    worker = Worker(rig, "w", 1)
    cache(worker, 1, PROMPT, root=ALICE)
    flood(worker)
    rig.write()
    assert is_queued(worker.admit(2, PROMPT, root=ALICE))
    assert rig.core.books.accounts.common.used_pages == 4
    assert is_queued(worker.admit(3, PROMPT, root=ALICE, terms=EIGHT))
    rig.load()
    assert used(rig) == 6 and not rig.core.books.accounts.common.used_pages
