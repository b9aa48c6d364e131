"""What machines have found, as short as it gets, played by hand."""

from __future__ import annotations

import pytest
from tests.machine.prompts import ROOTS
from tests.machine.test_pager_machine import PagerMachine

PROMPT = [0, 0, 0, 0, 0]


@pytest.mark.parametrize("in_step", [True, False])
def test_a_lease_that_nobody_declares_before_its_root_is_planted_anew(in_step: bool) -> None:
    """The pager after that takes it for one of the new tree, unless headers tell them apart."""
    machine, others, late = PagerMachine(), 0, 1
    machine.start()
    machine.admits(late, PROMPT, ROOTS[0], 0, True, 0)
    machine.step_begins(0, 5)
    if not in_step:
        machine.step_ends(0, 0)
    machine.pager_is_killed_and_restarts(silent=1 << late)
    machine.admits(others, PROMPT, ROOTS[0], 0, True, 0)
    machine.somebody_invalidates(0, "root")
    machine.releases(0, cache=False)  # the last lease of the tree that is known
    machine.admits(others, PROMPT, ROOTS[0], 0, True, 0)
    machine.pager_is_killed_and_restarts(silent=0)
    if in_step:
        machine.step_ends(0, 0)
    machine.commits(1)
    machine.admits(others, PROMPT, ROOTS[0], 0, True, 0)
    machine.every_filled_slot_holds_its_context()
    machine.acknowledges(0)
    machine.teardown()


def test_a_page_of_an_invalidated_root_that_drains_for_a_lost_lease_of_another() -> None:
    """The root is planted anew while the page's header names its line of before."""
    machine, slow = PagerMachine(), 1
    machine.start()
    machine.chat_goes_on(0, PROMPT, ROOTS[0], [0, 0, 0, 0])
    machine.admits(slow, PROMPT, ROOTS[1], 0, True, 0)
    machine.step_begins(1, 1)
    for _ in ROOTS:
        machine.somebody_invalidates(0, "root")
    machine.pager_is_killed_and_restarts(silent=0)
    assert machine.has("lost")
    machine.runs_from_start_to_end(2, PROMPT[:1], ROOTS[0])
    machine.pager_is_killed_and_restarts(silent=0)
    machine.admits(2, PROMPT, ROOTS[0], 0, True, 0)
    machine.teardown()


def test_what_is_given_up_while_somebody_has_to_declare_stays_so_after_another_death() -> None:
    """Headers said that the committed page is kept for ever, and could say only more."""
    machine, late = PagerMachine(), 0
    machine.start()
    machine.pager_is_killed_and_restarts(silent=1 << 1)
    machine.admits(late, PROMPT, ROOTS[0], 0, False, 0)
    machine.step_begins(0, 5)
    machine.step_ends(0, 0)
    machine.commits(0)
    machine.releases(0, cache=False)
    machine.pager_is_killed_and_restarts(silent=0)  # looks whether all is kept as long as before
    machine.teardown()
