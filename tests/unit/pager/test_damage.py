"""Pages on disk that are damaged: told of, computed again, and too many of them end the tier."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs
from tests.unit.pager.disk_rig import (
    PROMPT,
    DiskRig,
    fetched,
    flood,
    prefixes_of,
    pushed,
    put_on_disk,
)
from tests.unit.pager.rig import ROOT, Worker, is_queued, key_of, order_of
from tests.unit.pager.steps import cache, invalidated, stats
from tests.unit.pager.test_disk import disk_on
from tests.unit.pager.test_disk_file import PAGE_BYTES, PAGE_COUNT, load_of, store_of

from pagemesh.pager.storage.disk import log_event
from pagemesh.pager.tier_measures import TierMeasures
from pagemesh.pager.tiers.damage import DAMAGED_LOADS_MAX, LOADS_WATCHED, Damage
from pagemesh.pager.tiers.tier_events import (
    DiskFailed,
    DiskFound,
    GiveUpDisk,
    PagesLoaded,
    PagesWritten,
    TellDamaged,
)
from pagemesh.runtime.metrics import REGISTRY
from pagemesh.wire.pager_messages import Admit
from pagemesh.wire.tokens import pack


@pytest.fixture
def rig() -> DiskRig:
    return DiskRig(16)


def reads_whatever_is_there(rig: DiskRig) -> None:
    """How long computing takes is not known."""
    disk = rig.core.books.disk
    assert disk is not None
    disk.cost.prefill_tokens_per_ms = 0.0


def asked_for(rig: DiskRig, worker: Worker, number: int, *, is_damaged: bool) -> None:
    """A prompt of its own is put on disk, asked for, and its second page is damaged or not."""
    tokens = range(1_000 * number, 1_000 * number + 17)
    put_on_disk(rig, worker, tokens)
    reads_whatever_is_there(rig)
    assert is_queued(worker.admit(2, tokens))
    rig.load(bad_at=1 if is_damaged else None)
    [granted] = pushed(rig)
    assert granted.cached_tokens == (4 if is_damaged else 16)
    assert granted.waterfall.lost == ({"corrupt": 12} if is_damaged else {})
    worker.release(granted)


def test_people_are_told_of_each_page_that_is_damaged(rig: DiskRig, worker: Worker) -> None:
    put_on_disk(rig, worker, PROMPT)
    worker.admit(2, PROMPT)
    [load] = rig.loads
    rig.load(bad_at=1)
    assert rig.told_damaged == [load.slots[1]] and rig.given_up is None


def test_damaged_pages_and_those_behind_them_are_counted_apart(
    rig: DiskRig, worker: Worker
) -> None:
    fetched(rig, worker, bad_at=1)
    disk = rig.core.books.disk
    assert disk is not None and (disk.counts.corrupt, disk.counts.after_corrupt) == (1, 2)


def test_the_slots_behind_a_damaged_page_are_used_again() -> None:
    rig = DiskRig(16, slot_count=4)
    worker = Worker(rig, "w", 1)
    worker.release(fetched(rig, worker, bad_at=1))
    cache(worker, 3, PROMPT)
    flood(worker)
    rig.write()
    assert rig.prefixes() == prefixes_of(PROMPT)


def test_too_many_damaged_loads_switch_the_tier_off_and_serving_goes_on(
    rig: DiskRig, worker: Worker
) -> None:
    for number in range(1, DAMAGED_LOADS_MAX + 1):
        asked_for(rig, worker, number, is_damaged=True)
    assert rig.core.books.disk is not None and rig.given_up is None
    asked_for(rig, worker, 50, is_damaged=True)
    assert rig.core.books.disk is None and rig.given_up == GiveUpDisk(9, 9)
    assert stats(rig).disk.state == "off" and "damaged" in stats(rig).disk.why_off
    cache(worker, 60, PROMPT)
    assert worker.granted(61, PROMPT).cached_tokens == 16


def test_damage_now_and_then_costs_its_own_chains_alone(rig: DiskRig, worker: Worker) -> None:
    damage = Damage()
    for _ in range(20):
        for number in range(LOADS_WATCHED // DAMAGED_LOADS_MAX):
            damage.loaded(is_damaged=not number)
            assert not damage.is_too_much
    damage.loaded(is_damaged=True)
    assert damage.damaged_count == DAMAGED_LOADS_MAX  # the oldest is not among the last any more
    for number in range(1, 4):
        asked_for(rig, worker, number, is_damaged=number == 2)
    for number, cached_tokens in ((1, 16), (2, 4), (3, 16)):
        tokens = range(1_000 * number, 1_000 * number + 17)
        flood(worker, 900 + number)
        reads_whatever_is_there(rig)
        assert is_queued(worker.admit(number, tokens))
        rig.load()
        [granted] = pushed(rig)
        assert granted.cached_tokens == cached_tokens
        worker.release(granted)


def test_what_is_invalidated_while_it_is_read_is_no_damage(rig: DiskRig, worker: Worker) -> None:
    for number in range(1, 2 * DAMAGED_LOADS_MAX):
        put_on_disk(rig, worker, PROMPT)
        assert is_queued(worker.admit(number, PROMPT))
        [load] = rig.loads
        invalidated(rig, "root", ROOT.hex())  # so the reader finds no record
        rig.loads.clear()
        rig.handle(PagesLoaded(load.load, 0, 100, load.slots[0]))
        [granted] = pushed(rig)
        worker.release(granted)
    assert not rig.told_damaged and rig.core.books.disk is not None


def test_another_page_of_the_same_key_is_dropped_and_no_damage(
    rig: DiskRig, worker: Worker
) -> None:
    for number in range(1, 2 * DAMAGED_LOADS_MAX):
        put_on_disk(rig, worker, PROMPT)
        reads_whatever_is_there(rig)
        assert is_queued(worker.admit(number, PROMPT))
        [load] = rig.loads
        rig.loads.clear()
        rig.handle(PagesLoaded(load.load, 1, 100, load.slots[1], is_other=True))
        [granted] = pushed(rig)
        assert granted.cached_tokens == 4 and rig.prefixes() == {pack(PROMPT[:4])}
        worker.release(granted)
    disk = rig.core.books.disk
    assert disk is not None and (disk.counts.corrupt, disk.counts.after_corrupt) == (0, 0)
    assert not rig.told_damaged and damaged_pages(rig, [*PROMPT]) == 0


def damaged_pages(rig: DiskRig, tokens: list[int]) -> int:
    """As the waterfall asks."""
    books = rig.core.books
    message = Admit(
        key=key_of(70), order=order_of(70), worker="w", incarnation=1, epoch=rig.epoch, root=ROOT,
        tokens=pack(tokens), reserve_tokens=len(tokens), deadline_ms=60_000,
    )  # fmt: skip
    match = books.forest.match(books.forest.trees[ROOT].root, message.tokens, len(tokens) // 4)
    return rig.core.tiers.damaged_pages(match, message)


def test_a_prompt_is_told_how_many_of_its_pages_were_lost_to_damage_until_they_are_stored_anew(
    rig: DiskRig, worker: Worker
) -> None:
    granted = fetched(rig, worker, bad_at=1)
    assert damaged_pages(rig, [*PROMPT]) == 3
    assert damaged_pages(rig, [*range(12), 90, 91, 92, 93, 94]) == 2, "as far as it is the same"
    assert damaged_pages(rig, [*range(4), *range(90, 103)]) == 0
    worker.release(granted, PROMPT)
    flood(worker, 901)
    rig.write()
    worker.release(worker.granted(3, [4]), [4])  # the tree is there again
    assert damaged_pages(rig, [*PROMPT]) == 0


def test_pages_that_were_stored_anew_are_not_lost_any_more() -> None:
    damage = Damage()
    damage.lost(ROOT, [1, 2, 3])
    assert damage.lost_pages(ROOT, [1, 2, 3]) == 3
    damage.mended(ROOT, [1])
    assert damage.lost_pages(ROOT, [1, 2, 3]) == 0


def test_a_damaged_run_is_forgotten_once_it_is_stored_anew(rig: DiskRig, worker: Worker) -> None:
    granted = fetched(rig, worker, bad_at=1)
    worker.release(granted)
    cache(worker, 3, PROMPT)
    damage = rig.core.tiers._damage
    assert damage.has_runs
    flood(worker)
    assert not damage.has_runs


def corrupt() -> float:
    name = "pagemesh_pager_disk_pages_total"
    return REGISTRY.get_sample_value(name, {"fate": "corrupt"}) or 0.0


def test_damage_is_counted_though_the_tier_is_given_up_for_it_at_once(
    rig: DiskRig, worker: Worker
) -> None:
    measures, before = TierMeasures(), corrupt()
    measures.sample(rig.core.books.disk)
    for number in range(1, DAMAGED_LOADS_MAX + 2):
        asked_for(rig, worker, number, is_damaged=True)
    measures.sample(rig.core.books.disk)
    measures.sample(rig.core.books.disk)
    assert corrupt() == before + DAMAGED_LOADS_MAX + 1


# The hands


@pytest.fixture
def pool() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, PAGE_COUNT * PAGE_BYTES).astype(np.uint8)


async def test_the_log_names_the_file_of_a_damaged_page_at_most_once_a_minute(
    tmp_path: Path, pool: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr("pagemesh.pager.storage.disk.time.monotonic", lambda: now_s)
    async with disk_on(tmp_path, pool) as (disk, heard):
        assert isinstance(await heard.next(), DiskFound)
        with capture_logs() as logs:
            for slot in range(5):
                assert await disk.perform(TellDamaged(slot))
            now_s += 61.0
            await disk.perform(TellDamaged(7))
    found = [line for line in logs if line["event"] == "pager.disk_page_damaged"]
    assert [(line["slot"], line["damaged"]) for line in found] == [(0, 1), (7, 5)]
    assert {line["log_level"] for line in found} == {"error"}
    assert found[0]["file"] == str(tmp_path / "host.disk.pages") and "SMART" in found[0]["next"]


async def test_a_disk_that_is_given_up_says_why_once_and_writes_nothing_more(
    tmp_path: Path, pool: np.ndarray
) -> None:
    async with disk_on(tmp_path, pool) as (disk, heard):
        assert isinstance(await heard.next(), DiskFound)
        await disk.take(store_of((4,)))
        assert await heard.next() == PagesWritten((4,))
        await disk.perform(GiveUpDisk(9, 20))
        failed = await heard.next()
        assert isinstance(failed, DiskFailed)
        assert failed.why.startswith(
            f"{tmp_path / 'host.disk.pages'}: 9 of the last 20 reads found damaged pages"
        )
        await disk.perform(GiveUpDisk(9, 20))
        await disk.take(store_of((5,)))
        disk.load(load_of((4,)))
        answer = await heard.next()
        assert isinstance(answer, PagesLoaded) and answer.page_count == 0 and heard.is_empty
    with capture_logs() as logs:
        log_event(failed)
    assert logs[0]["event"] == "pager.disk_off" and logs[0]["log_level"] == "error"


@pytest.mark.parametrize("is_moved", [False, True])
async def test_a_tier_whose_files_somebody_removed_is_given_up_at_the_next_write(
    tmp_path: Path, pool: np.ndarray, is_moved: bool
) -> None:
    """It would go on with files that no later pager finds."""
    folder = tmp_path / "disk"
    async with disk_on(folder, pool) as (disk, heard):
        assert isinstance(await heard.next(), DiskFound)
        await disk.take(store_of((4,)))
        assert await heard.next() == PagesWritten((4,))
        if is_moved:
            folder.rename(tmp_path / "elsewhere")
        else:
            shutil.rmtree(folder)
        with capture_logs() as logs:
            for slot in (5, 6):
                await disk.take(store_of((slot,)))
            failed = await heard.next()
        index = folder / "host.disk.index"
        assert failed == DiskFailed(f"{index}: somebody has removed it")
        assert [(line["event"], line["path"]) for line in logs] == [
            ("pager.disk_removed", str(index))
        ]
    assert heard.is_empty
