"""The rules of the machines send every event that the pager core handles.

Each rule played here sends some of them. If this fails, it names the events that the core handles
and no rule sends: add a rule, and a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tests.machine.operators import LABELS
from tests.machine.prompts import ROOTS
from tests.machine.test_disk_machine import DiskMachine
from tests.machine.test_pager_machine import PagerMachine

from pagemesh.pager.events import Asked, Event, Tick
from pagemesh.pager.tiers.disk_tier import DiskTier

PROMPT, OTHER = [0] * 10, [1] * 10
Play = Callable[[DiskMachine], None]


def _kinds_of(event: object) -> Iterator[str]:
    """Its type, with each flag and each choice that it has: those change what is done."""
    if isinstance(event, Asked):
        yield from _kinds_of(event.message)
        return
    yield type(event).__name__
    if isinstance(event, Tick) and event.away_ms:
        yield "Tick after an absence"
    for name, _ in _choices(type(event)):
        yield f"{type(event).__name__} {name}={getattr(event, name)}"


def _choices(event: type) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name, hint in get_type_hints(event, localns={"DiskTier": DiskTier}).items():
        if hint is bool:
            yield name, (False, True)
        elif get_origin(hint) is Literal:
            yield name, get_args(hint)


def _handled() -> set[str]:
    """What may come to a core, as ``_kinds_of`` names it."""
    events = [one for one in get_args(Event) if one is not Asked]
    found = {"Tick after an absence"}
    for event in [*events, *PagerMachine.make_rig().core._handlers]:
        found.add(event.__name__)
        found |= {
            f"{event.__name__} {name}={one}" for name, some in _choices(event) for one in some
        }
    return found


def work(machine: DiskMachine) -> None:
    """Admit, and be admitted again; compute, commit, grow, fork, release."""
    machine.admits(0, PROMPT, ROOTS[0], 4, True, 0)
    machine.admits(1, OTHER, ROOTS[0], 4, False, 0)
    machine.step_begins(0, 9)
    machine.step_ends(0, 0)
    machine.commits(0)
    machine.extends(0, 1)
    machine.forks(0, 1, 0)
    for cache in (True, False):
        machine.releases(0, cache)


def hand_over(machine: DiskMachine) -> None:
    """Three tickets, each with another end, and one whose end is told twice."""
    for number in range(3):
        machine.admits(number, PROMPT, ROOTS[1], 0, True, 0)
        machine.offers(number, 30_000)
        (machine.redeems, machine.cancels)[number % 2](0, 1, *[0] * (1 - number % 2))
    machine.admits(0, PROMPT, ROOTS[1], 0, True, 0)
    machine.offers(0, 30_000)
    peer, _ = machine.view(0, "offered")
    machine.withdraws(0, hears=False)
    machine.opens_and_declares(peer, 1)
    machine.withdraws(0)


def operate(machine: DiskMachine) -> None:
    machine.runs_from_start_to_end(0, PROMPT, ROOTS[0])
    machine.admits(0, PROMPT, ROOTS[0], 0, True, 0)
    machine.somebody_pins(0, None)
    machine.somebody_unpins(0)
    for what in ("idle", "root"):
        machine.somebody_invalidates(0, what)
    for label in LABELS:
        machine.somebody_invalidates_what_is_of(label)


def restart(machine: DiskMachine) -> None:
    machine.admits(0, PROMPT, ROOTS[0], 0, True, 0)
    machine.pager_is_killed_and_restarts(1 << 2)
    machine.somebody_invalidates(0, "root")
    machine.sweeps()
    machine.heartbeats(0)
    machine.time_passes(0, 0)
    machine.nobody_is_heard_for_a_while(900, 0)
    machine.dies_and_is_replaced(0)


def lose(machine: DiskMachine) -> None:
    """What is held, by silence."""
    machine.admits(0, PROMPT, ROOTS[0], 0, True, 0)
    machine.time_passes(600, 7)
    machine.opens_again_and_declares(0, 1)
    machine.acknowledges_and_asks_again(0)


def use_the_disk(machine: DiskMachine) -> None:
    machine.leaves_memory_and_is_wanted_again(0, PROMPT)
    machine.disk_reads(0, 1, True)
    machine.what_is_cached_is_put_away(False)
    machine.disk_writes()
    machine.survives_the_pool_and_is_wanted_again(0, PROMPT)
    machine.disk_reads(0, 9, False)
    machine.what_is_cached_is_put_away(True)
    machine.runs_from_start_to_end(0, OTHER, ROOTS[0])
    machine.what_is_cached_is_put_away(True)
    machine.bytes_are_lost()
    machine.disk_fails(0)
    machine.pager_is_killed_and_its_disk_opens_late(0)
    machine.disk_opens()


def test_the_rules_of_the_machines_send_every_event_that_the_core_handles() -> None:
    sent: set[str] = set()
    for play in (work, hand_over, operate, restart, lose, use_the_disk):
        sent |= _sent_by(play)
    assert _handled() - sent == set()


def _sent_by(play: Play) -> set[str]:
    sent: set[str] = set()
    machine = DiskMachine()
    handle = machine.rig.handle

    def note(event: Event) -> Any:
        sent.update(_kinds_of(event))
        return handle(event)

    machine.rig.handle = note  # type: ignore[method-assign]
    machine.start()
    play(machine)
    machine.teardown()
    return sent
