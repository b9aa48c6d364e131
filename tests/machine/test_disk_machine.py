"""The machine of ``test_pager_machine`` with a disk tier: what is evicted is written when the disk
comes to it, and what is read comes when it comes, damaged now and then, or never again.

A page that comes back must hold the context that it is said to be of, like any other.

Of a pool on a device it is a worker that fills pages, in whose name they are held; one that stands
still may do so long after the pager that asked has died.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from tests.machine.examples import EXAMPLES
from tests.machine.peers import Context, Memory
from tests.machine.prompts import picks
from tests.machine.test_pager_machine import PAGES, ROOTS, PagerMachine
from tests.unit.pager.disk_rig import DiskRig
from tests.unit.pager.rig import LIMITS, PAGE_SIZE, key_of

from pagemesh.pager.events import Command, Holder, Sweep
from pagemesh.pager.pages.runs import table_of
from pagemesh.pager.tiers.load import PAGER
from pagemesh.pager.tiers.tier_events import (
    ForgetSlots,
    LoadPages,
    PagesLoaded,
    PagesNotTaken,
    StorePages,
)
from pagemesh.wire.pool_format import IN_FILE, HeaderState

SLOTS = 9
"""Fewer than the pool has pages: what is on disk is driven out too."""
STAGED_LIMITS = replace(LIMITS, staged_bytes_max=2 << 12)
"""Of what leaves at once more than fits may have to wait to be written."""


class MachineDisk(DiskRig):
    """Keeps what pages held when they were stored, and gives it back."""

    memory: Memory | None = None

    def __init__(self) -> None:
        self.copied: dict[int, list[Context | None]] = {}
        """By slot: what the page held when its bytes were taken."""
        self.lives: dict[int, int] = {}
        """By slot: how often its root had been invalidated by then."""
        super().__init__(PAGES, SLOTS, limits=STAGED_LIMITS)

    def perform(self, command: Command) -> None:
        if isinstance(command, StorePages):
            assert self.memory is not None
            for page, slot in zip(table_of(command.pages).tolist(), command.slots, strict=True):
                self.lives[slot] = self.memory.ages.get(command.root, 0)
                self.copied[slot] = [self.memory.read([page], at) for at in range(PAGE_SIZE)]
        elif isinstance(command, LoadPages):
            assert self.memory is not None
            lives = {self.lives[slot] for slot in command.slots}
            assert lives == {self.memory.ages.get(command.root, 0)}, "it was invalidated"
        elif isinstance(command, ForgetSlots):
            writing = {slot for store in self.stores for slot in store.slots}
            assert not writing & set(command.slots), "it would be there again"
        super().perform(command)

    def read(self, load: LoadPages, good: int) -> None:
        """The first ``good`` pages are read, and one more that is damaged."""
        assert self.memory is not None
        for page, slot in list(zip(table_of(load.pages).tolist(), load.slots, strict=True))[:good]:
            for at, context in enumerate(self.copied[slot]):
                assert context is not None, "a page was stored that was not full"
                self.memory.write([page], at, context, load.mover)
        bad = load.slots[good] if good < len(load.slots) else None
        self.handle(PagesLoaded(load.load, good, 100, bad))

    def lose(self) -> None:
        """The bytes of what was last to be stored cannot be had."""
        slots = self.stores.pop().slots
        self.handle(PagesNotTaken(slots))

    def restart(self, holders: Iterable[Holder] = (), after_ms: int = 0) -> None:
        """What the disk had not written yet is lost; what it was reading, it reads no more."""
        self.stores, self.loads = [], []
        super().restart(holders, after_ms)
        self.open()


class DiskMachine(PagerMachine):
    rig: MachineDisk

    @staticmethod
    def make_rig() -> MachineDisk:
        return MachineDisk()

    def __init__(self) -> None:
        super().__init__()
        self.rig.memory = self.memory

    @rule(pick=picks, prompt=st.lists(st.integers(0, 1), min_size=9, max_size=14))
    def leaves_memory_and_is_wanted_again(self, pick: int, prompt: list[int]) -> None:
        """Cached, driven out by something large that is not kept, and asked for."""
        self.runs_from_start_to_end(pick, prompt, ROOTS[0])
        room_tokens = PAGE_SIZE * self.rig.core.books.room
        if room_tokens > 1:
            self.admits(pick, [0], ROOTS[0], room_tokens - 1, False, 0)
            peer = self.peer(pick)
            for view in [v for v in peer.held() if v.key == key_of(self.number)]:
                self.release(peer, view, cache=False)
        self.rig.write()
        self.pass_on()
        self.admits(pick + 1, prompt, ROOTS[0], 0, True, 0)

    @precondition(lambda self: self.rig.stores)
    @rule()
    def disk_writes(self) -> None:
        self.rig.write()
        self.pass_on()

    @precondition(lambda self: self.rig.stores)
    @rule()
    def bytes_are_lost(self) -> None:
        self.rig.lose()
        self.pass_on()

    @precondition(lambda self: self.rig.loads)
    @rule(pick=picks, good=st.sampled_from([0, 1, 2, 9, 9, 9]))
    def disk_reads(self, pick: int, good: int) -> None:
        load = self.rig.loads.pop(pick % len(self.rig.loads))
        self.rig.read(load, min(good, len(load.slots)))
        self.pass_on()

    @precondition(lambda self: self.rig.core.books.disk is not None)
    @rule(pick=picks)
    def disk_fails(self, pick: int) -> None:
        if pick % 16 == 0:
            self.rig.stores = []
            self.rig.fail()
            self.pass_on()

    @precondition(lambda self: self.rig.core.is_sweeping)
    @rule()
    def sweeps(self) -> None:
        self.rig.handle(Sweep())
        self.pass_on()

    @invariant()
    def what_is_read_is_held_for_it_alone(self) -> None:
        for load in self.rig.loads:
            assert (load.mover == PAGER) == (self.rig.place == IN_FILE)
            pages = table_of(load.pages)
            assert (self.rig.headers.writers[pages] == load.mover).all()
            assert (self.rig.headers.states[pages] == HeaderState.HELD).all()
        assert len(self.rig.loads) == len(self.rig.core.books.loads)

    @invariant()
    def what_is_on_disk_can_be_found(self) -> None:
        self.rig.core.tiers.check()

    def end_what_is_under_way(self) -> None:
        """Also reads that the last deaths began: they made room for who waited then."""
        while self.rig.loads:
            load = self.rig.loads.pop()
            self.rig.read(load, len(load.slots))


class MachineDevice(MachineDisk):
    place = "device"

    def __init__(self) -> None:
        self.late: list[LoadPages] = []
        """What earlier pagers asked workers to fill, and nobody knows to be over."""
        super().__init__()

    def restart(self, holders: Iterable[Holder] = (), after_ms: int = 0) -> None:
        self.late += self.loads
        super().restart(holders, after_ms)


class DeviceMachine(DiskMachine):
    rig: MachineDevice

    @staticmethod
    def make_rig() -> MachineDevice:
        return MachineDevice()

    @invariant()
    def what_a_worker_may_write_still_is_nobody_elses(self) -> None:
        """Until it has opened a session, before which it is asked whether it is done, or died."""
        asked = {peer.incarnation for peer in self.peers if peer.epoch < self.rig.epoch}
        self.rig.late = [load for load in self.rig.late if load.mover in asked]
        for load in self.rig.late:
            for page in table_of(load.pages).tolist():
                self.memory.write([page], 0, (b"late",), load.mover)


DiskMachine.TestCase.settings = EXAMPLES
DeviceMachine.TestCase.settings = EXAMPLES


class TestDiskMachine(DiskMachine.TestCase):  # type: ignore[misc,valid-type]
    """Any order of events keeps ledger, pool, disk and contents in step."""


class TestDeviceMachine(DeviceMachine.TestCase):  # type: ignore[misc,valid-type]
    """The same of a pool whose pages are on a device."""
