"""One host: the memory of its pools, and the processes that live on it. It outlives all of them."""

from __future__ import annotations

from collections.abc import Callable

from tests.sim.box import Box, Device
from tests.sim.disk import DiskMemory
from tests.sim.growths import Growths, meant
from tests.sim.memory import PoolMemory
from tests.sim.world import Process

from pagemesh.wire.cache_messages import InvalidateCache
from pagemesh.wire.messages import Message, Refused, SequenceKey
from pagemesh.wire.pager_messages import Admit
from pagemesh.wire.work_messages import Attach, Submit


class Host:
    def __init__(self, name: str, page_count: int, page_size: int) -> None:
        self.name = name
        self.pager_name = f"pager-{name}"
        self.disk: DiskMemory | None = None
        self.device: Device | None = None
        """The device that holds the pages; None: they are in a file."""
        self.weights = 0
        """The version of the model that workers started from now on serve."""
        self.roots: dict[tuple[str, int], bytes] = {}
        """The root of each attempt at a request, from which the model derives its start value."""
        self.growths = Growths()
        self.invalidated_count = 0
        self.drawers: dict[tuple[SequenceKey, int], int] = {}
        """The incarnation that drew the token of each generated position."""
        self.restart: Callable[[Process], None] = lambda process: None
        """Kills a process and starts it again later."""
        self._page_count = page_count
        self._page_size = page_size
        self._living: dict[int, Process] = {}
        self._boxes: dict[int, Box] = {}
        self._incarnations = 0
        self._pools: dict[int, PoolMemory] = {}
        self.new_pool(0)

    @property
    def memory(self) -> PoolMemory:
        return self._pools[max(self._pools)]

    def memory_of(self, incarnation: int) -> PoolMemory:
        """A pool by its incarnation: processes may still have an old file mapped."""
        return self._pools[incarnation]

    def new_pool(self, epoch: int) -> PoolMemory:
        """Replace the pool by a new one. Its ``epoch`` is chosen so that numbers of the last one
        hardly occur again."""
        incarnation = 1 + max(self._pools, default=0)
        memory = PoolMemory(incarnation, self._page_count, self._page_size, epoch)
        self._pools[incarnation] = memory
        return memory

    def note_root(self, message: Submit | Attach | Admit) -> None:
        """Remember the root of a request that this host is asked to compute or has pages for."""
        if isinstance(message, Submit):
            self.roots[message.request, message.attempt] = message.root
        else:
            self.roots[message.key.request, message.key.attempt] = message.root

    def root_of(self, key: SequenceKey) -> bytes:
        return self.roots[key.request, key.attempt]

    def invalidated(self, message: InvalidateCache, answer: Message) -> None:
        """An operator got ``answer`` to ``message``: from now on it must hold."""
        roots = meant(message, answer, set(self.roots.values()))
        self.growths.end(roots)
        self.invalidated_count += len(roots)
        is_done = not isinstance(answer, Refused)
        if is_done and message.what == "idle" and self.disk is not None:
            self.disk.kill()

    def new_incarnation(self, process: Process) -> int:
        self._incarnations += 1
        incarnation = sum(self.name.encode()) << 20 | self._incarnations
        self._living[incarnation] = process
        if self.device is not None:
            self._boxes[incarnation] = Box(process, self.device)
        return incarnation

    def died(self, incarnation: int) -> None:
        self._living.pop(incarnation, None)
        self._boxes.pop(incarnation, None)

    def living(self, incarnation: int) -> Process | None:
        """The process that holds the lock; None if the lock is free."""
        return self._living.get(incarnation)

    @property
    def has_memory(self) -> bool:
        """Whether a worker still has the pool's memory, which is on a device."""
        return any(box.has(self.memory.incarnation) for box in self._boxes.values())

    def box(self, incarnation: int) -> Box | None:
        """The worker's thread that moves pages, if the worker lives and there is a device."""
        return self._boxes.get(incarnation)
