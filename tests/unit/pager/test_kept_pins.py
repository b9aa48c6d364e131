"""Pins that outlive the pager, and when they do not."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.pager.rig import ROOT, Rig, Worker
from tests.unit.pager.steps import OTHER, cache, invalidated, pinned, stats
from xxhash import xxh3_128_hexdigest

from pagemesh.pager.events import Answer, Asked, KeptPin, StorePins
from pagemesh.pager.limits import PagerLimits
from pagemesh.pager.storage.kept_file import PinFile
from pagemesh.wire.cache_messages import PinPrefix, UnpinPrefix
from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.pager_messages import Granted
from pagemesh.wire.pool_format import HeaderState

FORK = [*range(8), 9, 9, 9, 9]


def names(rig: Rig) -> list[str]:
    return [line.pin for line in stats(rig).pins]


def test_a_pin_is_kept_before_it_is_confirmed(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, range(8))
    call = Asked("call", PinPrefix(root=ROOT.hex(), tokens=list(range(8))))
    kept, answer = rig.handle(call)[-2:]
    assert isinstance(kept, StorePins) and isinstance(answer, Answer)
    gone, answer = rig.handle(Asked("call", UnpinPrefix(pin=None)))[-2:]
    assert gone == StorePins(()) and isinstance(answer, Answer)


def test_pins_hold_what_they_held_after_a_restart(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, range(12))
    cache(worker, 2, FORK)
    first, second = pinned(rig, range(12)), pinned(rig, FORK)
    rig.restart()
    assert [(line.pin, line.pages) for line in stats(rig).pins] == [(first.pin, 3), (second.pin, 3)]
    assert rig.core.books.pool.pinned == 4
    late = Worker(rig, "late", 2)
    for number in range(3, 6):
        cache(late, number, range(100 * number, 100 * number + 48))
    assert late.granted(9, [*range(12), 0]).cached_tokens == 12
    rig.restart()
    assert names(rig) == [first.pin, second.pin]


def test_a_pin_that_ends_within_a_longer_edge_pins_no_more_than_before(
    rig: Rig, worker: Worker
) -> None:
    cache(worker, 1, range(16))
    pinned(rig, range(8))
    rig.restart()
    assert (rig.core.books.pool.pinned, rig.core.books.pool.idle) == (2, 2)


def test_the_time_that_a_pin_has_goes_on_over_a_restart(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, range(8))
    pinned(rig, range(8), ttl_s=5)
    rig.now_ms += 3_000
    rig.restart()
    assert [line.expires_in_s for line in stats(rig).pins] == [2]
    rig.tick(2_000)
    assert not names(rig) and not rig.kept_pins


def test_a_pin_that_was_ended_does_not_come_back(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, range(8))
    rig.ask(UnpinPrefix(pin=pinned(rig, range(8)).pin))
    pinned(rig, range(8), ttl_s=1)
    rig.tick(1_000)
    rig.restart()
    assert not names(rig)


def test_a_pin_that_gave_way_does_not_come_back(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, range(16))
    pinned(rig, range(16))
    worker.admit(3, range(200, 256))
    rig.tick()
    assert rig.taken(Granted)
    rig.restart()
    assert not names(rig)


def test_a_pin_whose_pages_are_not_all_there_ends_with_its_pager(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, range(12))
    cache(worker, 2, range(50, 54))
    pinned(rig, range(12))
    kept = pinned(rig, range(50, 54))
    [page] = [p for p in range(16) if rig.headers.tokens[p][0] == 4]
    rig.headers.states[page] = HeaderState.INVALID  # torn
    rig.cached.clear()
    rig.restart()
    assert names(rig) == [kept.pin]
    assert [pin.name for pin in rig.kept_pins] == [kept.pin]


def test_a_pin_of_a_prefix_whose_time_is_over_outlives_its_pager(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, range(8), terms=CacheTerms(ttl_s=10))
    worker.release(lease, range(8))
    pin = pinned(rig, range(8))
    rig.now_ms += 20_000
    rig.restart()
    assert names(rig) == [pin.pin]
    assert Worker(rig, "late", 2).granted(2, range(9)).cached_tokens == 8, "it is in use"


def test_a_pin_is_not_believed_of_a_root_that_was_retired_or_of_another(
    rig: Rig, worker: Worker
) -> None:
    cache(worker, 1, range(8))
    pinned(rig, range(8))
    before = rig.kept_pins
    invalidated(rig, "root", ROOT.hex())
    cache(worker, 2, range(8))  # the same tokens, computed anew
    assert rig.kept_pins == ()
    rig.kept_pins = before  # as if the pager had died in between
    rig.restart()
    assert not names(rig)
    cache(Worker(rig, "late", 2), 3, range(8))
    pinned(rig, range(8))
    rig.kept_pins = (replace(rig.kept_pins[0], root=OTHER),)
    rig.restart()
    assert not names(rig)


@pytest.mark.parametrize("change", [{"pages": 1}, {"pages": 3}, {"identity": 12_345}])
def test_a_pin_is_not_believed_that_names_another_place(
    rig: Rig, worker: Worker, change: dict[str, int]
) -> None:
    cache(worker, 1, range(12))
    pinned(rig, range(8))
    rig.kept_pins = (replace(rig.kept_pins[0], **change),)  # type: ignore[arg-type]
    rig.restart()
    assert not names(rig)


def test_no_more_is_pinned_again_than_may_be_now(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, range(12))
    cache(worker, 2, range(50, 54))
    small = pinned(rig, range(50, 54))
    pinned(rig, range(12))
    rig.limits = PagerLimits(lease_count_max=64, pin_share_max=0.125)
    rig.restart()
    assert names(rig) == [small.pin]


# The file

PINS = (
    KeptPin("0" * 16, ROOT, 1 << 41, 3, None),
    KeptPin("f" * 16, OTHER, (1 << 56) - 1, 1, 5_000),
)


def test_the_file_gives_back_what_was_kept_and_what_time_it_has_left(tmp_path: Path) -> None:
    pool, now_ms = tmp_path / "a.host.pool", 1_000_000
    PinFile(pool, 7, lambda: now_ms).write(PINS)
    assert PinFile(pool, 7, lambda: now_ms).read() == PINS
    later = PinFile(pool, 7, lambda: now_ms + 4_000).read()
    assert later == (PINS[0], replace(PINS[1], expires_in_ms=1_000))
    assert PinFile(pool, 7, lambda: now_ms + 5_000).read() == PINS[:1]
    assert PinFile(pool, 7, lambda: 5).read() == PINS, "a clock that was set back gives no time"
    assert [path.name for path in tmp_path.iterdir()] == ["a.host.pins"]


def test_the_pins_of_another_pool_are_not_believed(tmp_path: Path) -> None:
    PinFile(tmp_path / "host.pool", 7).write(PINS)
    assert PinFile(tmp_path / "host.pool", 8).read() == ()
    assert PinFile(tmp_path / "other.pool", 7).read() == ()


@pytest.mark.parametrize("damage", ["cut", "empty", "zeros", "bit", "kind", "folder", "pipe"])
def test_a_file_that_is_not_whole_is_not_believed(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "host.pins"
    PinFile(tmp_path / "host.pool", 7).write(PINS)
    whole, strange = file.read_bytes(), json.dumps([1, 2]).encode()
    torn = {
        "cut": whole[:-9], "empty": b"", "zeros": bytes(len(whole)),
        "bit": whole.replace(b'"pages":3', b'"pages":2'),
        "kind": xxh3_128_hexdigest(strange).encode() + b"\n" + strange,
    }  # fmt: skip
    assert torn.get(damage) != whole
    if damage in torn:
        file.write_bytes(torn[damage])
    else:
        file.unlink()
        file.mkdir() if damage == "folder" else os.mkfifo(file)
    assert PinFile(tmp_path / "host.pool", 7).read() == ()


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    PinFile(tmp_path / "gone" / "host.pool", 7).write(PINS)
    assert not list(tmp_path.iterdir())


def test_a_prefix_of_what_is_pinned_takes_no_more_of_what_pins_may_keep(
    rig: Rig, worker: Worker
) -> None:
    cache(worker, 1, range(16))
    pinned(rig, range(16))
    assert stats(rig).pin_pages_max == 4
    assert pinned(rig, range(8)).pages == 2


def test_the_seconds_that_a_pin_has_left_are_rounded_up(rig: Rig, worker: Worker) -> None:
    """Told as none it would be taken for over."""
    cache(worker, 1, range(8))
    pinned(rig, range(8), ttl_s=2)
    seen = []
    for _ in range(3):
        rig.tick(500)
        seen += [line.expires_in_s for line in stats(rig).pins]
    assert seen == [2, 1, 1]
