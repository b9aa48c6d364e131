"""A simulated disk: its contents outlive every process, and it can be slow, full or damaged.

``DiskHands`` stands for a pager's threads: one writes and one reads, each in order, and what they
are doing when the pager dies is left half done.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import or_

import numpy as np
from tests.sim import model
from tests.sim.bugs import Bugs
from tests.sim.growths import DEAD
from tests.sim.memory import PoolMemory
from tests.sim.world import Process

from pagemesh.pager.events import Command
from pagemesh.pager.pages.runs import table_of
from pagemesh.pager.tiers.chain_keys import chain_over, root_chain
from pagemesh.pager.tiers.disk_tier import DiskTier
from pagemesh.pager.tiers.load import PAGER
from pagemesh.pager.tiers.tier_events import (
    DiskContents,
    DiskFailed,
    DiskFound,
    ForgetRetired,
    ForgetSlots,
    FoundRecords,
    GiveUpDisk,
    LoadPages,
    PagesLoaded,
    PagesWritten,
    RememberRetired,
    RetiredRoots,
    SkipSlots,
    StorePages,
    TellDamaged,
    TierEvent,
)

_CHAIN_KEY = b"chains" * 5


@dataclass(slots=True)
class Line:
    """The record in a slot that has been written completely."""

    root: bytes
    tokens: bytes
    """Tokens of the whole prefix, packed."""
    chain: int
    before: int
    """Chain key of the page before."""
    values: list[int]
    growth: int
    """The growth of its root in which it was computed."""
    damaged: bool = False
    """Its checksum does not match its values."""


@dataclass(slots=True)
class DiskMemory:
    """The disk itself. It has ``dice`` of its own, so that runs without a disk did not change."""

    slot_count: int
    dice: random.Random
    lines: dict[int, Line] = field(default_factory=dict)
    slowness: float = 1.0
    refuses: bool = False
    """Writes fail."""
    retired: dict[int, RetiredRoots] = field(default_factory=dict)
    """The stored roots to forget (in production beside the pool if need be), by the number of the
    request in this life of the pager; 0 for those of earlier lives."""
    killed_count: int = 0

    def damage(self) -> None:
        """Flip a bit in some of the records."""
        for line in self.lines.values():
            if self.dice.random() < 0.7:
                line.values = [value ^ 1 for value in line.values]
                line.damaged = True

    def kill(self) -> None:
        """From now on, nothing that is on the disk or on its way there may be found."""
        self.killed_count += 1
        for line in self.lines.values():
            line.growth = DEAD

    def all_retired(self) -> RetiredRoots:
        """All roots to forget; from now on they count as those of earlier lives."""
        self.retired = {0: reduce(or_, self.retired.values(), RetiredRoots())}
        return self.retired[0]

    def contents(self) -> DiskContents:
        roots = list(dict.fromkeys(line.root for line in self.lines.values()))
        records = FoundRecords(
            np.array(list(self.lines), np.uint32),
            np.array([line.chain for line in self.lines.values()], np.uint64),
            np.array([line.before for line in self.lines.values()], np.uint64),
            np.array([roots.index(line.root) for line in self.lines.values()], np.intp),
            tuple(roots),
        )
        return DiskContents(self.slot_count, records, 0, _CHAIN_KEY)


@dataclass(frozen=True, slots=True)
class _Taken:
    """A command to write, with the contents of the pages when it was given."""

    command: StorePages
    values: list[list[int]]
    growths: list[int]
    killed_count: int


class DiskHands:
    """The disk tier's threads in one life of a pager; ``tell`` gets events, and ``tier_of`` makes
    the tier from the disk's contents."""

    def __init__(
        self,
        process: Process,
        memory: PoolMemory,
        disk: DiskMemory,
        bugs: Bugs,
        tell: Callable[[TierEvent], None],
        tier_of: Callable[[DiskContents], DiskTier],
    ) -> None:
        self._process, self._memory, self._disk = process, memory, disk
        self._bugs, self._tell, self._tier_of = bugs, tell, tier_of
        self._width = 4 * memory.page_size
        self._writes: deque[_Taken | ForgetSlots | ForgetRetired] = deque()
        self._skipped: set[int] = set()
        self._reads: deque[LoadPages] = deque()
        self._writing = self._reading = self._failed = False
        disk.all_retired()
        process.at(self._delay_ms(4.0), self._open)

    def perform(self, command: Command) -> bool:
        """Perform ``command`` after a delay; False if it is not one for a disk."""
        match command:
            case StorePages():
                pages, memory = table_of(command.pages).tolist(), self._memory
                values = [list(memory.slots[page]) for page in pages]
                self.store(command, values, [memory.grown[page] for page in pages])
            case SkipSlots(slots):
                self._skipped.update(slots)
            case TellDamaged():
                pass
            case GiveUpDisk() if not self._failed:
                self._failed = True
                self._tell(DiskFailed("too much is damaged"))
            case RememberRetired(number, retired):
                self._disk.retired[number] = retired
            case ForgetSlots() | ForgetRetired():
                self._writes.append(command)
                self._write()
            case LoadPages():
                self._reads.append(command)
                self._read()
            case _:
                return False
        return True

    def _forget(self, slots: Iterable[int]) -> None:
        if not (self._failed or self._disk.refuses):
            for slot in slots:
                self._disk.lines.pop(slot, None)

    def _delay_ms(self, mean_ms: float) -> float:
        return mean_ms * self._disk.slowness * self._disk.dice.expovariate(1.0)

    def _open(self) -> None:
        if self._disk.refuses and self._disk.dice.random() < 0.5:
            self._failed = True
            self._tell(DiskFailed("read-only"))
        else:
            tier = self._tier_of(self._disk.contents())
            self._tell(DiskFound(tier, 0, self._disk.all_retired()))

    # Writing

    def store(self, command: StorePages, values: list[list[int]], growths: list[int]) -> None:
        """Queue a write of the pages' contents when they were taken, which must follow from their
        tokens."""
        size = self._memory.page_size
        tokens = np.frombuffer(command.tokens, "<u4").tolist()
        right = model.slots_of(command.root, tokens)
        for index, found in zip(command.indexes, values, strict=True):
            self._process.world.expect(
                self._bugs.take_late or found == right[index * size : (index + 1) * size],
                "a page is stored that holds something else",
            )
        self._writes.append(_Taken(command, values, growths, self._disk.killed_count))
        self._write()

    def _write(self) -> None:
        while self._writes and not self._writing:
            match self._writes.popleft():
                case ForgetRetired(number):
                    self._forget_retired(number)
                case ForgetSlots(slots):
                    self._skipped.difference_update(slots)
                    self._forget(slots)
                case taken:
                    self._writing = True
                    self._forget(taken.command.slots)
                    self._process.at(self._delay_ms(6.0), partial(self._written, taken))

    def _forget_retired(self, number: int) -> None:
        if not (self._failed or self._disk.refuses):
            kept = {at: one for at, one in self._disk.retired.items() if at > number}
            self._disk.retired = kept

    def _written(self, taken: _Taken) -> None:
        command, values, growths = taken.command, taken.values, taken.growths
        self._writing = False
        if self._disk.refuses and not self._failed:
            self._failed = True
            self._tell(DiskFailed("no space left"))
        elif not self._failed:
            if self._bugs.take_late:
                values = [list(self._memory.slots[page]) for page in table_of(command.pages)]
            if taken.killed_count != self._disk.killed_count:
                growths = [DEAD] * len(values)
            columns = (command.slots, command.indexes, command.chains, values, growths)
            for slot, index, chain, slots, growth in zip(*columns, strict=True):
                if slot not in self._skipped:
                    tokens = command.tokens[: (index + 1) * self._width]
                    start, end = root_chain(_CHAIN_KEY, command.root), len(tokens) - self._width
                    before = chain_over(start, tokens, 0, end, self._width)
                    line = Line(command.root, tokens, chain, before, slots, growth)
                    self._disk.lines[slot] = line
            self._tell(PagesWritten(command.slots))
        self._write()

    # Reading

    def _read(self) -> None:
        if self._reading or not self._reads:
            return
        self._reading = True
        command = self._reads.popleft()
        took_ms = self._delay_ms(2.0 * len(command.slots))
        self._process.at(took_ms, lambda: self._loaded(command, took_ms))

    def _loaded(self, command: LoadPages, took_ms: float) -> None:
        self._reading = False
        lines, bad = self._found(command)
        for page, line in zip(table_of(command.pages).tolist(), lines, strict=False):
            for offset, value in enumerate(line.values):
                self._memory.write(page, offset, value, PAGER, line.growth)
        self._tell(PagesLoaded(command.load, len(lines), int(1_000 * took_ms), bad))
        self._read()

    def _found(self, command: LoadPages) -> tuple[list[Line], int | None]:
        """The records that ``command`` asks for, up to the first bad slot, and that slot."""
        lines: list[Line] = []
        for slot in command.slots:
            if self._failed:
                break
            line = self._disk.lines.get(slot)
            end = (command.first_index + len(lines) + 1) * self._width
            if line is None or (line.root, line.tokens) != (command.root, command.tokens[:end]):
                return lines, slot
            if line.damaged and not self._bugs.trust_disk:
                return lines, slot
            lines.append(line)
        return lines, None
