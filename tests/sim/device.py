"""How one life of a pager has pages of a device moved: by workers (``box``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tests.sim.box import Device, Done, Job
from tests.sim.bugs import Bugs
from tests.sim.disk import DiskHands
from tests.sim.host import Host
from tests.sim.memory import PoolMemory
from tests.sim.world import Process

from pagemesh.pager.events import Command
from pagemesh.pager.pages.runs import table_of
from pagemesh.pager.tiers.disk_tier import DiskTier
from pagemesh.pager.tiers.tier_events import (
    DiskContents,
    LoadPages,
    PagesLoaded,
    PagesNotTaken,
    StorePages,
    TierEvent,
)

PLACE = "device"
OUT_MS, HAND_MS = 60.0, 200.0
"""How long a pager waits for pages to be copied out, and for a worker to take the memory over."""
_LOOK_MS = 20.0
_REST_MS = 400.0
_ROWS_MAX = 3
"""Pages that are moved with one request."""
Row = tuple[int, list[int], int]
"""A page, its contents, and the growth of its root in which they were computed."""


class DeviceHands:
    """The moves of one life of ``pager``."""

    def __init__(
        self, pager: Process, host: Host, memory: PoolMemory, device: Device, bugs: Bugs
    ) -> None:
        self._pager, self._host, self._memory = pager, host, memory
        self._bugs = bugs
        self._dice = device.dice
        self._resting: dict[int, float] = {}

    def told_us(self) -> int:
        """The reported duration of a fetch: mostly short enough to be worth it."""
        return self._dice.choice([1, 1, 1, 5_000])

    def hand_over(self, incarnation: int, done: Done) -> None:
        """Make sure that the worker has the pool's memory, and is done with earlier requests."""
        answered = self._once(HAND_MS, done)
        box = self._host.box(incarnation)
        if box is not None:
            box.ask(_then(box.take(self._memory.incarnation), partial(answered, True)))

    def copy_out(self, pages: Sequence[int], done: Callable[[list[Row] | None], None]) -> None:
        """Have any worker copy ``pages`` out; ``done`` gets their contents, None if none could."""
        now = self._pager.world.now
        holders = [one for one in self._memory.holders if self._resting.get(one, 0.0) <= now]
        self._copy_out(pages, [one for one in holders if self._host.living(one)], done)

    def fill(self, rows: Sequence[Row], mover: int, done: Callable[[int], None]) -> None:
        """Have the worker ``mover`` write ``rows``. Once it no longer works on any, ``done`` gets
        the number of leading rows that were written."""
        self._fill(rows, 0, mover, done)

    # Out

    def _copy_out(
        self,
        pages: Sequence[int],
        left: list[int],
        done: Callable[[list[Row] | None], None],
    ) -> None:
        if not left:
            done(None)
            return
        incarnation, memory = left[0], self._memory
        rows: list[Row] = []

        def copy(page: int) -> None:
            rows.append((page, list(memory.slots[page]), memory.grown[page]))

        def over(went_well: bool) -> None:
            if went_well:
                done(rows)
                return
            self._resting[incarnation] = self._pager.world.now + _REST_MS
            self._copy_out(pages, left[1:], done)

        answered = self._once(OUT_MS, over)
        box = self._host.box(incarnation)
        if box is not None:
            parts = [partial(copy, one) for one in pages]
            box.ask_to_move(memory.incarnation, parts, answered, is_filling=False)

    # In

    def _fill(
        self, rows: Sequence[Row], first: int, mover: int, done: Callable[[int], None]
    ) -> None:
        if first == len(rows):
            done(first)
            return
        part = rows[first : first + self._dice.randrange(1, _ROWS_MAX + 1)]
        is_over = False

        def over(went_well: bool) -> None:
            nonlocal is_over
            if is_over:
                return
            is_over = True
            if went_well:
                self._fill(rows, first + len(part), mover, done)
            else:
                done(first)

        def write(row: Row) -> None:
            page, values, growth = row
            for offset, value in enumerate(values):
                self._memory.write(page, offset, value, mover, growth)

        box = self._host.box(mover)
        if box is not None:
            parts, pool = [partial(write, row) for row in part], self._memory.incarnation
            box.ask_to_move(pool, parts, self._heard(over), is_filling=True)

        def watch() -> None:
            """A worker that has ended no longer works on the rows."""
            if self._host.living(mover) is None or self._bugs.give_up_filling:
                over(False)
            elif not is_over:
                self._pager.at(_LOOK_MS, watch)

        self._pager.at(_LOOK_MS, watch)

    # Answers

    def _heard(self, done: Done) -> Done:
        """Deliver a worker's answer to this life of the pager only."""
        life, pager = self._pager.life, self._pager

        def heard(went_well: bool) -> None:
            if pager.life == life:
                pager.at(self._dice.random(), partial(done, went_well))

        return heard

    def _once(self, limit_ms: float, done: Done) -> Done:
        """Call ``done`` once: with the answer, or with False after ``limit_ms``."""
        is_over = False

        def once(went_well: bool) -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                done(went_well)

        self._pager.at(limit_ms, partial(once, False))
        return self._heard(once)


def _then(job: Job, act: Callable[[], None]) -> Job:
    yield from job
    act()


class DeviceDiskHands(DiskHands):
    """The disk's threads for pages on a device: each load has a thread of its own."""

    def __init__(
        self, hands: DeviceHands, process: Process, memory: PoolMemory, host: Host, bugs: Bugs,
        tell: Callable[[TierEvent], None], tier_of: Callable[[DiskContents], DiskTier],
    ) -> None:  # fmt: skip
        assert host.disk is not None
        super().__init__(process, memory, host.disk, bugs, tell, tier_of)
        self._hands = hands

    def take(self, command: StorePages, done: Callable[[], None]) -> None:
        """Have the bytes copied; the pager does nothing else until ``done`` is called."""

        def copied(rows: list[Row] | None) -> None:
            if rows is not None:
                self.store(command, [row[1] for row in rows], [row[2] for row in rows])
            else:
                self._process.at(0.0, lambda: self._tell(PagesNotTaken(command.slots)))
            done()

        self._hands.copy_out(table_of(command.pages).tolist(), copied)

    def perform(self, command: Command) -> bool:
        match command:
            case LoadPages():
                self._process.at(
                    self._delay_ms(2.0 * len(command.slots)), lambda: self._fill(command)
                )
            case _:
                return super().perform(command)
        return True

    def _fill(self, command: LoadPages) -> None:
        lines, bad = self._found(command)
        pages = table_of(command.pages).tolist()
        rows = [(page, line.values, line.growth) for page, line in zip(pages, lines, strict=False)]

        def filled(count: int) -> None:
            self._tell(PagesLoaded(command.load, count, self._hands.told_us(), bad))

        self._hands.fill(rows, command.mover, filled)
