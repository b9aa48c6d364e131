"""The thread of a worker that moves pages of a device when a pager asks it to.

It does one job after the other, freezes and ends with its worker, and continues even if the pager
that asked has died.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from tests.sim.world import Process

_KEPT_MAX = 2
Job = Iterator[float]
"""Yields the duration of each of its parts, and does its work in between."""
Done = Callable[[bool], None]


@dataclass(slots=True)
class Device:
    """The device of one host. It has ``dice`` of its own, so that the runs of hosts without a
    device did not change."""

    dice: Random
    refuses: float = 0.0
    """Share of moves that fail, before or after they are done."""
    stalls: float = 0.0
    """Share of pages that are slow to move."""
    on_move: Callable[[Process, bool], None] | None = None
    """Called with each worker that is asked to move pages, and whether into the pool."""

    def page_ms(self) -> float:
        """How long moving a page takes, in ms."""
        return self.dice.expovariate(1 / 600 if self.dice.random() < self.stalls else 0.5)


class Box:
    """The thread in one life of the worker ``process``."""

    def __init__(self, process: Process, device: Device) -> None:
        self._process, self._device = process, device
        self._jobs: deque[Job] = deque()
        self._is_busy = False
        self._pools: list[int] = []

    def has(self, pool: int) -> bool:
        return pool in self._pools

    def take(self, pool: int) -> Job:
        """A job that takes over the memory of a pool."""
        yield self._device.dice.random()
        if pool not in self._pools:
            self._pools = [*self._pools, pool][-_KEPT_MAX:]

    def _move(self, pool: int, parts: Sequence[Callable[[], None]], done: Done) -> Job:
        fails = self._device.dice.random() < self._device.refuses
        if self.has(pool) and not (fails and self._device.dice.random() < 0.5):
            for part in parts:
                yield self._device.page_ms()
                part()
        else:
            fails = True
        yield self._device.dice.random()
        done(not fails)

    def ask_to_move(
        self, pool: int, parts: Sequence[Callable[[], None]], done: Done, *, is_filling: bool
    ) -> None:
        """Queue a move of ``parts``, one page each; ``done`` is told whether it succeeded."""
        if self._device.on_move is not None:
            self._device.on_move(self._process, is_filling)
        self.ask(self._move(pool, parts, done))

    def ask(self, job: Job) -> None:
        """Queue ``job`` after those asked for before."""
        self._jobs.append(job)
        if not self._is_busy:
            self._is_busy = True
            self._go_on()

    def _go_on(self) -> None:
        while self._jobs:
            for delay_ms in self._jobs[0]:
                self._process.at(delay_ms, self._go_on)
                return
            self._jobs.popleft()
        self._is_busy = False
