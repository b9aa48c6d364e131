"""The machine of ``test_pager_machine`` with a disk tier: evicted pages are written some time
later, and reads arrive some time later, sometimes damaged, or never.

A page that comes back must hold the context it stands for, like any other.

In a pool on a device, a worker fills the pages, which are held in its name; a frozen one may do so
long after the pager that asked it has died.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from tests.machine.examples import EXAMPLES
from tests.machine.mesh import RESTARTS_MAX
from tests.machine.peers import MODELS, Context, Memory
from tests.machine.policies import Evicting
from tests.machine.prompts import ROOTS, masks, picks
from tests.machine.test_pager_machine import PAGES, PagerMachine
from tests.unit.pager.disk_rig import DiskRig
from tests.unit.pager.plain_headers import blank
from tests.unit.pager.rig import LIMITS, PAGE_SIZE, key_of

from pagemesh.pager.events import Command, Event, Holder
from pagemesh.pager.pages.runs import table_of
from pagemesh.pager.tiers.load import PAGER
from pagemesh.pager.tiers.tier_events import (
    NOTHING_RETIRED,
    DiskFound,
    DiskOpening,
    ForgetSlots,
    LoadPages,
    PagesLoaded,
    PagesNotTaken,
    PutAway,
    StorePages,
)
from pagemesh.pager.tree.lifetime import FOREVER_MS
from pagemesh.wire.cache_messages import InvalidateCache
from pagemesh.wire.pool_format import IN_FILE, HeaderState

SLOTS = 9
"""Fewer than the pool has pages: what is on disk is driven out too."""
STAGED_LIMITS = replace(LIMITS, staged_bytes_max=2 << 12)
"""Of what leaves at once more than fits may have to wait to be written."""


@dataclass(frozen=True, slots=True)
class Copied:
    """``contexts``: what a page held when its bytes were taken; ``age``: how often its root had
    been invalidated by then."""

    contexts: list[Context | None]
    age: int


class MachineDisk(Evicting, DiskRig):
    """Keeps what pages held when they were stored, and gives it back."""

    memory: Memory | None = None
    opens_late = False
    """The disk of the next pager opens when it is told to ``open``."""
    _kept_then = NOTHING_RETIRED
    """What there was to be forgotten when it began to open: it reads that first."""

    def __init__(self) -> None:
        self.copied: dict[int, Copied] = {}
        """What is in each slot."""
        self.staged: dict[int, Copied] = {}
        """What is to be written to it: lost, unlike what is there already, with the pager."""
        super().__init__(PAGES, SLOTS, limits=STAGED_LIMITS)

    def evict_by(self, eviction: str) -> None:
        super().evict_by(eviction)
        self.begin_to_open()

    def begin_to_open(self) -> None:
        self._kept_then = self.kept
        self.handle(DiskOpening())
        if not self.opens_late:
            self.open()

    def handle(self, event: Event) -> list[Command]:
        if isinstance(event, DiskFound):
            event = replace(event, retired=self._kept_then)
        return super().handle(event)

    def perform(self, command: Command) -> None:
        if isinstance(command, StorePages):
            assert self.memory is not None
            age = self.memory.ages.get(command.root, 0)
            for page, slot in zip(table_of(command.pages).tolist(), command.slots, strict=True):
                held = [self.memory.read([page], at) for at in range(PAGE_SIZE)]
                self.staged[slot] = Copied(held, age)
                ages = {context[1] for context in held if context is not None}
                assert ages == {age}, "it is stored after it was invalidated"
        elif isinstance(command, LoadPages):
            assert self.memory is not None
            ages = {self.held(slot).age for slot in command.slots}
            assert ages == {self.memory.ages.get(command.root, 0)}, "it was invalidated"
        elif isinstance(command, ForgetSlots):
            writing = {slot for store in self.stores for slot in store.slots}
            assert not writing & set(command.slots), "it would be there again"
        super().perform(command)

    def held(self, slot: int) -> Copied:
        """What a read of ``slot`` gives."""
        return self.staged.get(slot) or self.copied[slot]

    def write(self, *, dies: bool = False) -> None:
        for store in self.stores:
            self.copied |= {slot: self.staged.pop(slot) for slot in store.slots}
        super().write(dies=dies)

    def forget_writes(self) -> None:
        """What had not been written is lost."""
        self.stores = []
        self.staged.clear()

    def read(self, load: LoadPages, good: int, *, is_other: bool = False) -> None:
        """The first ``good`` pages are read, and one more that is damaged, or ``is_other``."""
        assert self.memory is not None
        for page, slot in list(zip(table_of(load.pages).tolist(), load.slots, strict=True))[:good]:
            for at, context in enumerate(self.held(slot).contexts):
                assert context is not None, "a page was stored that was not full"
                self.memory.write([page], at, context, load.mover)
        bad = load.slots[good] if good < len(load.slots) else None
        is_other = is_other and bad is not None
        self.handle(PagesLoaded(load.load, good, 100, bad, is_other=is_other))

    def lose(self) -> None:
        """The bytes of what was last to be stored cannot be had."""
        slots = self.stores.pop().slots
        for slot in slots:
            del self.staged[slot]
        self.handle(PagesNotTaken(slots))

    def restart(self, holders: Iterable[Holder] = (), after_ms: int = 0) -> None:
        """What the disk had not written yet is lost; what it was reading, it reads no more."""
        self.forget_writes()
        self.loads = []
        super().restart(holders, after_ms)
        self.begin_to_open()

    def lose_all_but_the_disk(self) -> None:
        """The machine was switched off; its next pager makes a new pool."""
        self.forget_writes()
        self.loads = []
        self.epoch += 1
        self.headers = blank(self.page_count, self.page_size)
        self.words[:] = 0
        self.kept_pins, self.notices = (), []
        for what in (self.roots, self.known, self.cached):
            what.clear()
        self.core = self._new_core()
        self.begin_to_open()


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
    @rule(pick=picks, good=st.sampled_from([0, 1, 2, 9, 9, 9]), is_other=st.booleans())
    def disk_reads(self, pick: int, good: int, is_other: bool) -> None:
        load = self.rig.loads.pop(pick % len(self.rig.loads))
        self.rig.read(load, min(good, len(load.slots)), is_other=is_other)
        self.pass_on()

    @precondition(lambda self: self.rig.core.books.disk or self.rig.core.tiers.is_opening)
    @rule(pick=picks)
    def disk_fails(self, pick: int) -> None:
        if pick % 16 == 0:
            self.rig.forget_writes()
            self.rig.fail()
            self.pass_on()

    @precondition(lambda self: self.rig.epoch < RESTARTS_MAX)
    @rule(silent=masks)
    def pager_is_killed_and_its_disk_opens_late(self, silent: int) -> None:
        self.rig.opens_late = True
        self.pager_is_killed_and_restarts(silent)
        self.rig.opens_late = False

    @precondition(lambda self: self.rig.core.tiers.is_opening)
    @rule()
    def disk_opens(self) -> None:
        self.rig.open()
        self.pass_on()

    @rule(anew=st.booleans())
    def what_is_cached_is_put_away(self, anew: bool) -> None:
        """It stays in the pool as well: the pager may go on."""
        before = self.rig.core.report()
        self.rig.handle(PutAway(anew))
        after = self.rig.core.report()
        assert msgspec.structs.replace(after, disk_pages=before.disk_pages) == before
        self.pass_on()

    def host_is_switched_off(self) -> None:
        """Once the pager has put away what is cached. Workers begin anew, with nothing."""
        self.puts_all_away()
        self.rig.lose_all_but_the_disk()
        self.memory.slots.clear()
        self.taken_by_pins.clear()
        self.sent.clear()
        self.peers.clear()
        for name in MODELS:
            self.join(name)

    @precondition(lambda self: self.rig.epoch < RESTARTS_MAX and self.rig.core.books.disk)
    @rule(pick=picks, prompt=st.lists(st.integers(0, 1), min_size=9, max_size=14))
    def survives_the_pool_and_is_wanted_again(self, pick: int, prompt: list[int]) -> None:
        self.runs_from_start_to_end(pick, prompt, ROOTS[0])
        self.host_is_switched_off()
        self.admits(pick, prompt, ROOTS[0], 0, True, 0)

    @precondition(lambda self: self.rig.epoch < RESTARTS_MAX and self.rig.core.books.disk)
    @rule(pick=picks, prompt=st.lists(st.integers(0, 1), min_size=9, max_size=14))
    def is_invalidated_before_the_disk_opens(self, pick: int, prompt: list[int]) -> None:
        """And asked for afterwards: what is there of it must not be read."""
        self.runs_from_start_to_end(pick, prompt, ROOTS[0])
        self.puts_all_away()
        self.pager_is_killed_and_its_disk_opens_late(0)
        self.invalidate(InvalidateCache(what="root", name=ROOTS[0].hex()), {ROOTS[0]})
        self.disk_opens()
        self.admits(pick, prompt, ROOTS[0], 0, True, 0)

    @rule(pick=picks, prompt=st.lists(st.integers(0, 1), min_size=13, max_size=14), used=picks)
    def is_invalidated_while_it_is_put_away(self, pick: int, prompt: list[int], used: int) -> None:
        """More of it than may wait to be written, so that some is stored later, or would be."""
        self.runs_from_start_to_end(pick, prompt, ROOTS[0])
        if used % 2:
            self.admits(pick, prompt, ROOTS[0], 0, True, 0)
        self.what_is_cached_is_put_away(True)
        if ROOTS[0] in self.rig.core.books.forest.trees:
            self.invalidate(InvalidateCache(what="root", name=ROOTS[0].hex()), {ROOTS[0]})
        self.rig.write()
        self.what_is_cached_is_put_away(False)

    def puts_all_away(self) -> None:
        """As much as fits, of what has no time to live; a tenant no more than it may have there."""
        rig, disk = self.rig, self.rig.core.books.disk
        assert disk is not None
        can_fit = not rig.loads and not disk.is_sweeping
        rig.write()
        self.pass_on()
        had = self.pages_of_tenants()
        rig.handle(PutAway(anew=True))
        for _ in range(PAGES):
            rig.write()
            rig.handle(PutAway())
        assert not rig.stores, "it never ends"
        wanted = {root: self.kept(root) for root in ROOTS}
        # Within its share of the disk a tenant keeps what has left the pool, too.
        shared = SLOTS - max(had, self.pages_of_tenants())
        can_fit = can_fit and sum(map(len, wanted.values())) <= SLOTS
        if can_fit and len(wanted[ROOTS[0]]) <= shared:
            assert wanted[ROOTS[0]] <= rig.prefixes(ROOTS[0]), "it could have been put away"

    def pages_of_tenants(self) -> int:
        """Pages on disk of those with a share of their own."""
        disk = self.rig.core.books.disk
        assert disk is not None
        return sum(account.page_count for account in disk.accounts.by_tenant.values())

    def kept(self, root: bytes) -> set[bytes]:
        """Prefixes whose last pages are cached until they are evicted."""
        tree, width = self.rig.core.books.forest.trees.get(root), self.rig.width
        edges = [] if tree is None else tree.root.below()
        return {
            one.path()[: (one.depth - index) * width]
            for one in edges
            if one.expires_ms >= FOREVER_MS
            for index in range(len(one.pages))
        }

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

    def lose_all_but_the_disk(self) -> None:
        self.late.clear()
        super().lose_all_but_the_disk()


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
