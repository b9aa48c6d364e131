"""What was invalidated while there was no disk tier is not found when there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.pager.disk_rig import PROMPT, DiskRig, put_on_disk
from tests.unit.pager.rig import ROOT, Worker, code_of
from tests.unit.pager.steps import OTHER, invalidated, stats

from pagemesh.pager.storage.disk_file import DiskPlace
from pagemesh.pager.storage.retired_notes import RetiredNotes
from pagemesh.pager.tiers.tier_events import (
    RETIRED_ROOTS_MAX,
    DiskOpening,
    RememberRetired,
    RetiredRoots,
)
from pagemesh.wire.cache_messages import InvalidateCache

ONE, TWO = RetiredRoots(frozenset([ROOT])), RetiredRoots(frozenset([OTHER]))
ALL = RetiredRoots(everything=True)


@pytest.fixture
def rig() -> DiskRig:
    return DiskRig(16)


@pytest.fixture
def stored(rig: DiskRig, worker: Worker) -> DiskRig:
    """Two roots are on disk."""
    put_on_disk(rig, worker, PROMPT)
    granted = worker.granted(5, PROMPT, root=OTHER)
    worker.release(granted, PROMPT)
    put_on_disk(rig, worker, range(50, 67))
    assert rig.prefixes(OTHER)
    return rig


def test_a_root_that_is_invalidated_before_the_disk_is_open_is_not_found(stored: DiskRig) -> None:
    stored.restart()
    stored.handle(DiskOpening())
    assert stats(stored).disk.state == "opening"
    invalidated(stored, "root", ROOT.hex())
    stored.open()
    assert not stored.prefixes() and stored.prefixes(OTHER) and not stored.kept


def test_a_root_that_is_invalidated_after_the_disk_has_failed_is_not_found_by_the_next_pager(
    stored: DiskRig,
) -> None:
    stored.fail()
    assert stats(stored).disk.why_off == "disk: no space left on device"
    invalidated(stored, "root", ROOT.hex())
    assert stored.prefixes() and stored.kept == ONE
    stored.restart()
    stored.open()
    assert not stored.prefixes() and stored.prefixes(OTHER) and not stored.kept
    worker = Worker(stored, "late", 2)
    assert worker.granted(9, PROMPT).cached_tokens == 0


def test_a_root_that_only_a_closed_disk_has_is_invalidated_by_its_whole_name(
    stored: DiskRig,
) -> None:
    stored.fail()
    stored.restart()
    far = bytes([9]) * 32
    ask = InvalidateCache(what="root", name=far.hex()[:20])
    assert code_of(stored.ask(ask)) == "Gone", "nobody can tell which that is"
    assert invalidated(stored, "root", far.hex()).root_count == 1
    assert stored.kept.roots == {far}


@pytest.mark.parametrize("what", ["tenant", "model", "idle"])
def test_what_nobody_can_look_up_on_a_closed_disk_counts_as_meant(
    stored: DiskRig, what: str
) -> None:
    stored.fail()
    invalidated(stored, what, "" if what == "idle" else "somebody")
    stored.restart()
    stored.open()
    assert not stored.slots and not stored.kept


# The files


def notes(folder: Path) -> RetiredNotes:
    (folder / "disk").mkdir(exist_ok=True)
    return RetiredNotes.beside(folder, "host", DiskPlace(folder / "disk", "host", 1, b""))


def test_what_is_kept_is_there_for_the_next_pager_until_it_is_forgotten(tmp_path: Path) -> None:
    first = notes(tmp_path)
    first.add(RememberRetired(1, ONE))
    first.add(RememberRetired(2, TWO))
    assert notes(tmp_path).read() == ONE | TWO
    first.forget(1)
    assert notes(tmp_path).read() == TWO, "the second was not forgotten on disk yet"
    first.forget(2)
    assert not notes(tmp_path).read()
    assert [path.name for path in tmp_path.rglob("*")] == ["disk"]


def test_a_pager_adds_to_what_earlier_ones_kept_and_forgets_both(tmp_path: Path) -> None:
    notes(tmp_path).add(RememberRetired(7, ONE))
    second = notes(tmp_path)
    second.add(RememberRetired(1, TWO))
    assert second.read() == ONE | TWO == notes(tmp_path).read()
    second.forget(1)
    assert not notes(tmp_path).read()


def test_what_the_core_of_an_earlier_pool_kept_stays_though_the_next_numbers_anew(
    tmp_path: Path,
) -> None:
    kept = notes(tmp_path)
    kept.add(RememberRetired(1, ONE))
    kept.add(RememberRetired(1, TWO))
    assert kept.read() == ONE | TWO == notes(tmp_path).read()


@pytest.mark.parametrize("lost", ["host.retired", "disk/host.disk.retired"])
def test_either_file_is_enough(tmp_path: Path, lost: str) -> None:
    notes(tmp_path).add(RememberRetired(1, ONE))
    (tmp_path / lost).unlink()
    assert notes(tmp_path).read() == ONE


def test_a_torn_file_means_everything(tmp_path: Path) -> None:
    notes(tmp_path).add(RememberRetired(1, ONE))
    file = tmp_path / "host.retired"
    file.write_bytes(file.read_bytes()[:-3])
    assert notes(tmp_path).read() == ALL


def test_a_disk_folder_that_cannot_be_written_leaves_the_file_beside_the_pool(
    tmp_path: Path,
) -> None:
    place = DiskPlace(tmp_path / "gone", "host", 1, b"")
    RetiredNotes.beside(tmp_path, "host", place).add(RememberRetired(1, ONE))
    assert RetiredNotes.beside(tmp_path, "host", None).read() == ONE


def test_more_roots_than_are_kept_one_by_one_are_everything(tmp_path: Path) -> None:
    some = notes(tmp_path)
    for number in range(1, 4):
        roots = frozenset(bytes([number, *index.to_bytes(31)]) for index in range(400))
        some.add(RememberRetired(number, RetiredRoots(roots)))
    assert 3 * 400 > RETIRED_ROOTS_MAX and notes(tmp_path).read() == ALL
