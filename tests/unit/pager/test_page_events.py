"""The event stream: what listeners can know of the cache, and when."""

from __future__ import annotations

import numpy as np
import pytest

from pagemesh.pager import page_events
from pagemesh.pager.events import PagesDropped, PagesStored
from pagemesh.pager.limits import PoolFacts
from pagemesh.pager.page_events import PageEvents
from pagemesh.pager.pages.runs import Run
from pagemesh.wire.identity import prefix_keys
from pagemesh.wire.tokens import pack

SECRET, ROOT, SIZE = b"s" * 32, b"r" * 32, 4
PAGES = 64
NONE = Run(0, 0)


def stream() -> PageEvents:
    return PageEvents(PoolFacts("here", 1, 7, PAGES, SIZE, 256, b"l" * 32, "/pool"), SECRET)


def stored(pages: Run, after: Run = NONE) -> PagesStored:
    """Pages whose tokens are their own numbers."""
    tokens = [page for page in pages for _ in range(SIZE)]
    return PagesStored(ROOT, after, pages, pack(tokens))


def keys_of(pages: range) -> list[int]:
    """Of pages in one chain from the root, tokens like ``stored``."""
    tokens = np.repeat(np.array(pages, np.uint32), SIZE)
    return list(map(int, prefix_keys(SECRET, ROOT, tokens, SIZE)))


def listed(packed: bytes) -> list[int]:
    return list(map(int, np.frombuffer(packed, "<u8")))


def test_a_page_is_told_of_under_the_key_of_its_whole_prefix() -> None:
    events = stream()
    events.note(stored(Run(0, 3)))
    events.note(stored(Run(3, 5), after=Run(2, 3)))
    events.work(PAGES)
    changed = events.take()
    assert changed is not None and changed.sequence == 1 and not changed.removed
    assert listed(changed.stored) == keys_of(range(5))
    assert sorted(listed(events.snapshot(0).keys)) == sorted(keys_of(range(5)))
    assert events.take() is None, "nothing has changed since"


def test_what_a_restart_finds_is_told_a_part_at_a_time_and_in_order() -> None:
    events = stream()
    for first in range(0, 24, 8):
        events.note(stored(Run(first, first + 8), after=Run(first - 1, first) if first else NONE))
    events.note(PagesDropped(Run(20, 24)))
    told = []
    for _ in range(3):
        events.work(8)
        changed = events.take()
        assert changed is not None and not changed.removed
        told.append(listed(changed.stored))
    assert told == [keys_of(range(24))[first : first + 8] for first in range(0, 24, 8)]
    events.work(8)
    changed = events.take()
    assert changed is not None and listed(changed.removed) == keys_of(range(24))[20:]
    assert sorted(listed(events.snapshot(0).keys)) == sorted(keys_of(range(20)))


def test_pages_that_leave_between_two_parts_of_a_listing_hide_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_events, "SNAPSHOT_KEYS_MAX", 8)
    events = stream()
    events.note(stored(Run(0, 20)))
    events.work(PAGES)
    found: list[int] = []
    more, parts = True, 0
    while more:
        part = events.snapshot(len(found))
        found += listed(part.keys)
        more, parts = part.more, parts + 1
        events.note(PagesDropped(Run(parts - 1, parts)))
        events.work(PAGES)
    assert parts == 3
    assert [key for key in found if key] == keys_of(range(20))


def test_what_a_sweep_frees_in_a_turn_is_told_in_that_turn() -> None:
    """It is many more pages than keys can be made of, and takes none."""
    events = stream()
    events.note(stored(Run(0, PAGES)))
    events.work(PAGES)
    for first in (32, 0):
        events.note(PagesDropped(Run(first, first + 32)))
    events.work(5)
    assert not events.is_behind
    changed = events.take()
    assert changed is not None and not changed.stored
    assert sorted(listed(changed.removed)) == sorted(keys_of(range(PAGES)))
    assert not events.snapshot(0).keys


def test_many_small_drops_are_worked_off_a_part_at_a_time() -> None:
    events = stream()
    events.note(stored(Run(0, PAGES)))
    events.work(PAGES)
    for page in range(10):
        events.note(PagesDropped(Run(page, page + 1)))
    turns = 0
    while events.is_behind:
        events.work(8)
        turns += 1
    assert turns == 3, "four at a time"


def test_a_page_that_came_and_went_between_two_events_is_told_of_as_gone() -> None:
    events = stream()
    events.note(stored(Run(0, 2)))
    events.note(PagesDropped(Run(1, 2)))
    events.work(PAGES)
    changed = events.take()
    assert changed is not None
    assert (listed(changed.stored), listed(changed.removed)) == (
        keys_of(range(2))[:1],
        keys_of(range(2))[1:],
    )


def test_a_page_with_other_content_than_at_the_last_event_is_told_of_under_both_keys() -> None:
    events = stream()
    events.note(stored(Run(0, 2)))
    events.work(PAGES)
    events.take()
    events.note(PagesDropped(Run(0, 2)))
    events.note(PagesStored(ROOT, NONE, Run(0, 2), pack([9] * 2 * SIZE)))
    events.work(PAGES)
    changed = events.take()
    assert changed is not None and listed(changed.removed) == keys_of(range(2))
    assert sorted(listed(changed.stored)) == sorted(listed(events.snapshot(0).keys))
    assert not set(listed(changed.stored)) & set(keys_of(range(2)))
