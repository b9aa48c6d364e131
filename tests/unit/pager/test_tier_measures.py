"""Evictions by tier and reason are one counter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.unit.pager.disk_rig import PROMPT, DiskRig, flood, put_on_disk
from tests.unit.pager.rig import ROOT, Worker
from tests.unit.pager.steps import invalidated

from pagemesh.pager.tier_measures import TierMeasures
from pagemesh.pager.tiers.disk_tier import DiskTier
from pagemesh.runtime.metrics import REGISTRY
from pagemesh.wire.cache_terms import CacheTerms

OTHERS = range(50, 67)
"""Four full pages too."""


def for_room(rig: DiskRig, worker: Worker) -> None:
    put_on_disk(rig, worker, OTHERS)


def over_quota(rig: DiskRig, worker: Worker) -> None:
    terms = CacheTerms(tenant="alice", disk_pages_max=2)
    for first in (100, 200):
        ids = range(first, first + 9)
        worker.release(worker.granted(1, ids, root=bytes(32), terms=terms), ids)
        flood(worker, 901)
        rig.write()


def invalidate(rig: DiskRig, worker: Worker) -> None:
    invalidated(rig, "root", ROOT.hex())


def expire(rig: DiskRig, worker: Worker) -> None:
    terms = CacheTerms(ttl_s=1)
    worker.release(worker.granted(2, PROMPT, read_cache=False, terms=terms), PROMPT)
    for _ in range(5):
        rig.tick(1_000)


def damage(rig: DiskRig, worker: Worker) -> None:
    worker.admit(2, PROMPT)
    rig.load(bad_at=1)


def evicted() -> dict[str, float]:
    """Pages that left the disk, by reason."""
    name = "pagemesh_pager_evicted_pages_total"
    reasons = ("evicted", "quota", "expired", "invalidated", "corrupt")
    labels = [{"tier": "disk", "reason": reason} for reason in reasons]
    return {one["reason"]: REGISTRY.get_sample_value(name, one) or 0.0 for one in labels}


def pages_of(disk: DiskTier | None) -> int:
    assert disk is not None
    return disk.page_count


@pytest.mark.parametrize(
    ("leave", "reason", "left", "stored"),
    [
        (for_room, "evicted", 2, 4),
        (over_quota, "quota", 2, 4),
        (expire, "expired", 4, 0),
        (invalidate, "invalidated", 4, 0),
        (damage, "corrupt", 3, 0),
    ],
)
def test_every_page_that_leaves_the_disk_is_counted_with_its_reason(
    leave: Callable[[DiskRig, Worker], None], reason: str, left: int, stored: int
) -> None:
    rig = DiskRig(16, slot_count=6)
    worker, measures = Worker(rig, "w", 1), TierMeasures()
    put_on_disk(rig, worker, PROMPT)
    before = evicted()
    measures.sample(rig.core.books.disk)
    assert evicted() == before, "nothing has left"
    pages = pages_of(rig.core.books.disk)
    leave(rig, worker)
    measures.sample(rig.core.books.disk)
    gone = {why: count - before[why] for why, count in evicted().items() if count > before[why]}
    assert gone == {reason: left}
    assert pages_of(rig.core.books.disk) == pages + stored - left


def test_slots_of_the_disk_are_either_used_or_free() -> None:
    rig = DiskRig(16, slot_count=6)
    put_on_disk(rig, Worker(rig, "w", 1), PROMPT)
    TierMeasures().sample(rig.core.books.disk)
    assert [slots(state) for state in ("used", "free")] == [4, 2]


def test_what_happened_before_the_disk_was_given_up_is_counted() -> None:
    rig = DiskRig(16, slot_count=6)
    worker, measures = Worker(rig, "w", 1), TierMeasures()
    measures.sample(rig.core.books.disk)
    before = stored_pages()
    put_on_disk(rig, worker, PROMPT)
    rig.fail()
    for _ in range(2):
        measures.sample(rig.core.books.disk)
        assert stored_pages() == before + 4
    assert [slots(state) for state in ("used", "free")] == [0, 0]


def test_what_was_measured_of_a_disk_that_was_given_up_is_not_told_any_more() -> None:
    rig, measures = DiskRig(16, slot_count=6), TierMeasures()
    disk = rig.core.books.disk
    assert disk is not None
    disk.cost.prefill_tokens_per_ms = 3.0
    measures.sample(disk)
    assert rates()["prefill_tokens_per_second"] == 3_000
    rig.fail()
    measures.sample(rig.core.books.disk)
    assert set(rates().values()) == {0}


def rates() -> dict[str, float | None]:
    names = ("disk_bytes_per_second", "memory_bytes_per_second", "prefill_tokens_per_second")
    metric = "pagemesh_pager_fetch_rates"
    return {name: REGISTRY.get_sample_value(metric, {"rate": name}) for name in names}


def slots(state: str) -> float | None:
    return REGISTRY.get_sample_value("pagemesh_pager_disk_slots", {"state": state})


def stored_pages() -> float:
    name = "pagemesh_pager_disk_pages_total"
    return REGISTRY.get_sample_value(name, {"fate": "stored"}) or 0.0
