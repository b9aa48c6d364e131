"""A simulated disk: what is on it outlives every process, and it can be slow, full or damaged.

``DiskHands`` is what a pager's threads are: one writes, one reads, each in the order it was told,
and what they are at when the pager dies is left half done.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from tests.sim import model
from tests.sim.bugs import Bugs
from tests.sim.memory import PoolMemory
from tests.sim.world import Process

from pagemesh.pager.events import Command
from pagemesh.pager.load import PAGER
from pagemesh.pager.runs import table_of
from pagemesh.pager.tier_events import (
    DiskFailed,
    DiskFound,
    ForgetRetired,
    ForgetSlots,
    FoundRecords,
    LoadPages,
    PagesLoaded,
    PagesWritten,
    RememberRetired,
    RetiredRoots,
    StorePages,
    TierEvent,
)


@dataclass(slots=True)
class Line:
    """What is whole in a slot."""

    root: bytes
    tokens: bytes
    """Of the whole prefix, packed."""
    chain: int
    values: list[int]
    damaged: bool = False
    """Its checksum is not that of its values."""


@dataclass(slots=True)
class DiskMemory:
    """``dice`` are its own, so that meshes without a disk are what they always were."""

    slot_count: int
    dice: random.Random
    lines: dict[int, Line] = field(default_factory=dict)
    slowness: float = 1.0
    refuses: bool = False
    """Nothing can be written any more."""
    retired: RetiredRoots = field(default_factory=RetiredRoots)
    """What is kept, beside the pool if need be, to be forgotten here."""

    def damage(self) -> None:
        """Flip something in some of what is there."""
        for line in self.lines.values():
            if self.dice.random() < 0.7:
                line.values = [value ^ 1 for value in line.values]
                line.damaged = True

    def found(self) -> DiskFound:
        roots = list(dict.fromkeys(line.root for line in self.lines.values()))
        records = FoundRecords(
            np.array(list(self.lines), np.uint32),
            np.array([line.chain for line in self.lines.values()], np.uint64),
            np.array([roots.index(line.root) for line in self.lines.values()], np.intp),
            tuple(roots),
        )
        return DiskFound(self.slot_count, records, 0, self.retired)


class DiskHands:
    """The disk tier's threads in one life of a pager; ``tell`` hears events."""

    def __init__(
        self,
        process: Process,
        memory: PoolMemory,
        disk: DiskMemory,
        bugs: Bugs,
        tell: Callable[[TierEvent], None],
    ) -> None:
        self._process, self._memory, self._disk = process, memory, disk
        self._bugs, self._tell = bugs, tell
        self._width = 4 * memory.page_size
        self._writes: deque[tuple[StorePages, list[list[int]]]] = deque()
        self._reads: deque[LoadPages] = deque()
        self._writing = self._reading = self._failed = False
        self._retired_number = 0
        process.at(self._delay_ms(4.0), self._open)

    def perform(self, command: Command) -> bool:
        """Do what ``command`` says soon; False when it is not for a disk."""
        match command:
            case StorePages():
                self._writes.append((command, self._values(command)))
                self._write()
            case ForgetSlots(slots):
                if not (self._failed or self._disk.refuses):
                    for slot in slots:
                        self._disk.lines.pop(slot, None)
            case RememberRetired(number, retired):
                self._disk.retired |= retired
                self._retired_number = number
            case ForgetRetired(number):
                if not (self._failed or self._disk.refuses) and number == self._retired_number:
                    self._disk.retired = RetiredRoots()
            case LoadPages():
                self._reads.append(command)
                self._read()
            case _:
                return False
        return True

    def _delay_ms(self, mean_ms: float) -> float:
        return mean_ms * self._disk.slowness * self._disk.dice.expovariate(1.0)

    def _open(self) -> None:
        if self._disk.refuses and self._disk.dice.random() < 0.5:
            self._failed = True
            self._tell(DiskFailed("read-only"))
        else:
            self._tell(self._disk.found())

    # Writing

    def _values(self, command: StorePages) -> list[list[int]]:
        """The pages' slots as they are now, which must be what their tokens make them."""
        memory, size = self._memory, self._memory.page_size
        values = [list(memory.slots[page]) for page in table_of(command.pages).tolist()]
        tokens = np.frombuffer(command.tokens, "<u4").tolist()
        right = model.slots_of(command.root, tokens)
        for index, found in zip(command.indexes, values, strict=True):
            self._process.world.expect(
                self._bugs.take_late or found == right[index * size : (index + 1) * size],
                "a page is stored that holds something else",
            )
        return values

    def _write(self) -> None:
        if self._writing or not self._writes:
            return
        self._writing = True
        command, values = self._writes.popleft()
        for slot in [] if self._failed or self._disk.refuses else command.slots:
            self._disk.lines.pop(slot, None)
        self._process.at(self._delay_ms(6.0), lambda: self._written(command, values))

    def _written(self, command: StorePages, values: list[list[int]]) -> None:
        self._writing = False
        if self._disk.refuses and not self._failed:
            self._failed = True
            self._tell(DiskFailed("no space left"))
        elif not self._failed:
            if self._bugs.take_late:
                values = [list(self._memory.slots[page]) for page in table_of(command.pages)]
            rows = zip(command.slots, command.indexes, command.chains, values, strict=True)
            for slot, index, chain, slots in rows:
                tokens = command.tokens[: (index + 1) * self._width]
                self._disk.lines[slot] = Line(command.root, tokens, chain, slots)
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
        count, bad = 0, None
        for page, slot in zip(table_of(command.pages).tolist(), command.slots, strict=True):
            line = self._disk.lines.get(slot)
            end = (command.first_index + count + 1) * self._width
            if self._failed:
                break
            if line is None or (line.root, line.tokens) != (command.root, command.tokens[:end]):
                bad = slot
                break
            for offset, value in enumerate(line.values):
                self._memory.write(page, offset, value, PAGER)
            if line.damaged and not self._bugs.trust_disk:
                bad = slot
                break
            count += 1
        self._tell(PagesLoaded(command.load, count, int(1_000 * took_ms), bad))
        self._read()
