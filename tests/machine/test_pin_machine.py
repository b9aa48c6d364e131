"""The machine of ``test_pager_machine`` with operators who pin prefixes: what is pinned stays, over
any number of restarts, until something ends it."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from tests.machine.examples import EXAMPLES
from tests.machine.mesh import RESTARTS_MAX
from tests.machine.prompts import ROOTS, picks
from tests.machine.test_pager_machine import PagerMachine
from tests.unit.pager.rig import LIMITS, PAGE_SIZE

from pagemesh.pager.pages.runs import table_of
from pagemesh.pager.retention.pins import Pin
from pagemesh.wire.cache_messages import PinPrefix

_SHORT = st.lists(st.integers(0, 1), min_size=PAGE_SIZE, max_size=9)


class PinMachine(PagerMachine):
    @rule(
        pick=picks, prompt=_SHORT, root=st.sampled_from(ROOTS),
        ttl_s=st.sampled_from([None, None, 1, 4]),
    )  # fmt: skip
    def is_computed_and_pinned(
        self, pick: int, prompt: list[int], root: bytes, ttl_s: int | None
    ) -> None:
        self.runs_from_start_to_end(pick, prompt, root)
        self.pin(PinPrefix(root=root.hex(), tokens=prompt, ttl_s=ttl_s))

    @precondition(lambda self: self.rig.epoch < RESTARTS_MAX and self.rig.core.books.pins)
    @rule(silent=st.sampled_from([0, 0, 1, 7]))
    def pager_is_killed_and_pins_stand(self, silent: int) -> None:
        kept = {
            pin.name: self.path(pin)
            for pin in self.rig.core.books.pins.values()
            # The headers of what has a time to live say nothing.
            if all(self.rig.headers.counts[self.path(pin)])
        }
        self.pager_is_killed_and_restarts(silent)
        books = self.rig.core.books
        found = {pin.name: self.path(pin) for pin in books.pins.values()}
        for name, path in kept.items():
            assert found.get(name) == path or self.pins_gave_way(), name
        assert found.keys() <= kept.keys()

    def pins_gave_way(self) -> bool:
        """To who was asked again at once."""
        return self.rig.core._pins.given_way_count > 0

    def path(self, pin: Pin) -> list[int]:
        pages: list[int] = table_of(self.rig.core.books.forest.table(pin.anchor)).tolist()
        return pages

    @invariant()
    def pins_keep_no_more_than_they_may(self) -> None:
        books = self.rig.core.books
        pages = {page for pin in books.pins.values() for page in self.path(pin)}
        assert len(pages) <= books.pool.total * LIMITS.pin_share_max


PinMachine.TestCase.settings = EXAMPLES


class TestPinMachine(PinMachine.TestCase):  # type: ignore[misc,valid-type]
    """Any order of events keeps what is pinned, and nothing else."""


def test_a_pin_may_take_what_was_promised_before_it() -> None:
    machine = PagerMachine()
    machine.start()
    machine.runs_from_start_to_end(0, [1] * 13, ROOTS[0])
    machine.admits(0, [0] * 13, ROOTS[0], more=31, read_cache=True, priority=0, first=4)
    machine.pin(PinPrefix(root=ROOTS[0].hex(), tokens=[1] * 12))
    books = machine.rig.core.books
    assert books.at_hand == 8 and books.promises.page_count == 10
    machine.what_is_promised_is_at_hand()
    machine.teardown()


def test_what_was_pinned_before_is_no_excuse_for_a_promise_that_is_not_kept() -> None:
    machine = PagerMachine()
    machine.start()
    machine.runs_from_start_to_end(0, [1] * 13, ROOTS[0])
    machine.pin(PinPrefix(root=ROOTS[0].hex(), tokens=[1] * 12))
    machine.admits(0, [0] * 13, ROOTS[0], more=23, read_cache=True, priority=0, first=4)
    machine.what_is_promised_is_at_hand()
    books = machine.rig.core.books
    lease = next(iter(books.leases.values()))
    assert books.at_hand == lease.promised_pages == 8
    books.promises.give(lease, 9)
    with pytest.raises(AssertionError, match="admitted to what is promised"):
        machine.what_is_promised_is_at_hand()
