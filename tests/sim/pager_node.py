"""A pager as a simulated process: it acts like the real actor, with the real core."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from tests.sim.bugs import Bugs
from tests.sim.device import PLACE, DeviceDiskHands, DeviceHands
from tests.sim.disk import DiskHands
from tests.sim.host import Host
from tests.sim.memory import PoolMemory
from tests.sim.world import Network, Process, Reply, World

from pagemesh.pager import events as ev
from pagemesh.pager.books import Books
from pagemesh.pager.eviction import make_policy
from pagemesh.pager.leases.lease import Lease
from pagemesh.pager.leases.patience import TICK_MS, patience_ms
from pagemesh.pager.limits import PagerLimits, PoolFacts
from pagemesh.pager.retention.retiring import Retiring
from pagemesh.pager.retention.root_lines import RootLines
from pagemesh.pager.state import PagerCore
from pagemesh.pager.tiers.disk_tier import DiskTier
from pagemesh.pager.tiers.tier_events import DiskContents, RememberRetired, StorePages
from pagemesh.runtime.settings import PagerConfig
from pagemesh.wire.messages import Message, Refused
from pagemesh.wire.pager_messages import Admit, Forked, Granted, OpenSession, PoolSpec
from pagemesh.wire.pool_format import IN_FILE
from pagemesh.wire.tokens import EMPTY, U32


class _FreesBeforeAck(Books):
    """Planted bug: a page is granted again before its writer has acknowledged the revocation."""

    def must_drain(self, lease: Lease) -> bool:
        return False


class _StartsOver(Books):
    """Planted bug: the ledger sequence of a new life starts at the same number as the first's."""

    def first_sequence(self) -> int:
        return 0


class _FreesLimbo(Books):
    """Planted bug: see ``Bugs``."""

    def settle(self) -> None:
        if not self.unsettled:
            self._free_drained(self.limbo)
            self.limbo = EMPTY
        super().settle()


class _NamesNone(RootLines):
    """Planted bug: see ``Bugs``."""

    def is_named(self, index: int) -> bool:
        return False


class _GivesNamedLines(Books):
    """Planted bug: see ``Bugs``."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.root_lines = _NamesNone()


class _TakesUpInvalidated(Retiring):
    """Planted bug: see ``Bugs``."""

    def meant(self, root: bytes, pages: U32) -> bool:
        return False


class _KeepsRetired(DiskTier):
    """Planted bug: see ``Bugs``."""

    def retire(self, roots: Collection[bytes]) -> None:
        pass


class PagerNode(Process):
    def __init__(
        self,
        world: World,
        network: Network,
        host: Host,
        limits: PagerLimits,
        spec: PoolSpec,
        bugs: Bugs,
    ) -> None:
        super().__init__(world, host.pager_name)
        self.host = host
        self.core: PagerCore | None = None
        self.preempted_count = 0
        self._saved_tokens = 0
        self._ticked_ms = 0.0
        self._sweeps = False
        self.dies_soon = False
        """Whether to die in the middle of the next commands it performs."""
        self.dies_amid: type[Message] | None = None
        """Die in the middle of the commands that the next message of this type causes."""
        self.when_back: list[Callable[[], None]] = []
        """Called once it has started again."""
        self._network = network
        self._limits = limits
        self._spec = spec
        self._bugs = bugs
        self._disk: DiskHands | None = None
        self._device: DeviceHands | None = None
        self._inbox: deque[Callable[[], None]] = deque()
        self._commands: deque[ev.Command] = deque()
        self._waits = False
        """Whether it waits for a worker, and does nothing else."""
        self._loaded_pages = 0
        self._books: type[Books] = Books
        if bugs.free_before_ack:
            self._books = _FreesBeforeAck
        elif bugs.sequence_goes_back:
            self._books = _StartsOver
        elif bugs.free_limbo:
            self._books = _FreesLimbo
        elif bugs.give_named_lines:
            self._books = _GivesNamedLines
        network.serve(self, self._received)

    @property
    def epoch(self) -> int:
        return self.host.memory.epoch

    @property
    def saved_tokens(self) -> int:
        """Tokens that sequences did not compute because others were computing them, over all
        lives."""
        now = self.core.books.in_flight.saved_tokens if self.core is not None else 0
        return self._saved_tokens + now

    @property
    def loaded_pages(self) -> int:
        """Pages read from disk, over all lives."""
        disk = self.core.books.disk if self.core is not None else None
        return self._loaded_pages + (disk.counts.loaded if disk is not None else 0)

    @property
    def hears(self) -> bool:
        """Whether it handles messages now."""
        return self.alive and not self.frozen and self.core is not None

    def start(self) -> None:
        self.begin()
        self.dies_soon = self._sweeps = False
        device = self.host.device
        if device is not None and not self.host.has_memory:
            self.host.new_pool(device.dice.randrange(1 << 15))
        memory = self.host.memory
        memory.epoch += 1
        facts = PoolFacts(
            host=self.host.name,
            epoch=memory.epoch,
            incarnation=memory.incarnation,
            page_count=memory.page_count,
            page_size=memory.page_size,
            page_bytes=self._spec.page_bytes,
            layout_digest=self._spec.layout_digest,
            path=f"/{self.host.name}.pool",
            place=IN_FILE if device is None else PLACE,
        )
        new_policy = partial(make_policy, PagerConfig().eviction)
        self.core = PagerCore(
            self._limits, facts, new_policy(facts.page_count), new_policy=new_policy,
            books=self._books,
        )  # fmt: skip
        if self._bugs.take_up_invalidated:
            own = self.core._retiring
            planted = _TakesUpInvalidated(self.core.books, own._pins, own._sweeps)
            self.core._recovery._retiring = planted
        found = ev.Recovered(
            memory.header_table(),
            tuple(memory.root_table.values()),
            memory.lease_words(),
            tuple(
                holder
                for holder in memory.holders.values()
                if self.host.living(holder.incarnation) is not None
            ),
            memory.pins,
        )
        self.handle(found)
        if device is not None:
            self._device = DeviceHands(self, self.host, memory, device, self._bugs)
        self._disk = self._new_disk()
        self._ticked_ms = self.world.now
        self._tick()
        while self.when_back:
            self.at(0.0, self.when_back.pop())

    def _new_disk(self) -> DiskHands | None:
        host, memory = self.host, self.host.memory
        if host.disk is None:
            return None
        if self._device is None:
            return DiskHands(self, memory, host.disk, self._bugs, self.handle, self._tier_of)
        return DeviceDiskHands(
            self._device, self, memory, host, self._bugs, self.handle, self._tier_of
        )

    def _tier_of(self, contents: DiskContents) -> DiskTier:
        assert self.core is not None
        facts, kind = self.core.books.facts, _KeepsRetired if self._bugs.keep_retired else DiskTier
        return kind(facts, contents, self._limits.staged_pages_max(facts))

    def stop(self) -> None:
        if self.core is not None:
            self.preempted_count += self.core.report().preempted_count
            self._saved_tokens = self.saved_tokens
            self._loaded_pages = self.loaded_pages
        self.kill()
        self.core, self._waits = None, False
        self._inbox.clear()
        self._commands.clear()

    def handle(self, event: ev.Event) -> None:
        """Handle ``event`` now, or when it no longer waits."""
        if self._waits:
            self._inbox.append(lambda: self._handle(event))
        else:
            self._handle(event)

    def _handle(self, event: ev.Event) -> None:
        core = self.core
        assert core is not None
        if not isinstance(event, ev.Tick | ev.Recovered):
            self.world.note(self.name, "event", event)
        commands = core.handle(event, int(self.world.now))
        if commands or not isinstance(event, ev.Tick):
            core.check()
        if isinstance(event, ev.Asked) and type(event.message) is self.dies_amid:
            self.dies_soon, self.dies_amid = True, None
        if self.dies_soon and commands:
            self._die_within(commands)
            return
        self._commands.extend(commands)
        self._perform_all()
        if core.is_sweeping and not self._sweeps:
            self._sweeps = True
            self.at(0.2, self._sweep)
        self.world.expect(
            core.books.pool.free == sum(1 for state in self.host.memory.states if state == 0)
            or self._waits
            or isinstance(event, ev.Recovered),
            "free pages differ between ledger and headers",
        )

    def _perform_all(self) -> None:
        memory, disk = self.host.memory, self._disk
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, StorePages) and isinstance(disk, DeviceDiskHands):
                self._wait(partial(disk.take, command))
                return
            self._perform(memory, command)

    def _wait(self, begin: Callable[[Callable[[], None]], None]) -> None:
        """Do nothing else until what ``begin`` starts has ended."""
        self._waits = True
        begin(self._go_on)

    def _go_on(self) -> None:
        self._waits = False
        self._perform_all()
        while self._inbox and not self._waits:
            self._inbox.popleft()()

    def _sweep(self) -> None:
        self._sweeps = False
        self.handle(ev.Sweep())

    def _die_within(self, commands: list[ev.Command]) -> None:
        """Die by SIGKILL between two stores to memory."""
        dice, memory = self.world.random, self.host.memory
        cut = dice.randrange(len(commands))
        for command in commands[:cut]:
            if self._device is None or not isinstance(command, StorePages):
                self._perform(memory, command)
        torn = commands[cut]
        if isinstance(torn, ev.WriteHeaders | ev.SetStates | ev.KeepUntil) and len(torn.pages):
            whole = dice.randrange(len(torn.pages))
            if isinstance(torn, ev.WriteHeaders):
                memory.write_headers(torn, whole_pages=whole)
            elif isinstance(torn, ev.SetStates):
                memory.set_states(torn, whole_pages=whole)
            else:
                memory.keep_until(torn, whole_pages=whole)
        self.world.note(self.name, "dies", f"at {cut} of {len(commands)}: {torn!s:.100}")
        self.host.restart(self)

    def _tick(self) -> None:
        assert self.core is not None
        is_due = self.world.now - self._ticked_ms >= patience_ms(self.core.books)
        if is_due and not self._waits:
            self._ticked_ms = self.world.now
            self.handle(ev.Tick())
        self.at(TICK_MS, self._tick)

    def _received(self, reply: Reply | None, message: Message) -> None:
        if isinstance(message, Admit):
            self.host.note_root(message)
        if self._waits:
            self._inbox.append(lambda: self._received(reply, message))
        elif isinstance(message, OpenSession) and self._must_hand_memory(message.incarnation):
            self._wait(partial(self._hand_memory, reply, message))
        else:
            self.handle(ev.Asked(reply, message))

    def _must_hand_memory(self, incarnation: int) -> bool:
        box = self.host.box(incarnation)
        knows_it = box is not None and box.has(self.host.memory.incarnation)
        return self._device is not None and not (knows_it and self._bugs.forget_movers)

    def _hand_memory(
        self, reply: Reply | None, message: OpenSession, go_on: Callable[[], None]
    ) -> None:
        """Answer only once the worker has the memory and has finished what earlier pagers asked."""
        assert self._device is not None and reply is not None

        def answered(has_it: bool) -> None:
            if has_it:
                self._inbox.appendleft(lambda: self._handle(ev.Asked(reply, message)))
            else:
                reply(Refused(code="Busy", message="the worker does not answer"))
            go_on()

        self._device.hand_over(message.incarnation, answered)

    def _perform(self, memory: PoolMemory, command: ev.Command) -> None:
        if self._disk is not None and self._disk.perform(command):
            return
        match command:
            case ev.Answer():
                self._note_grants(memory, command.message)
                if callable(command.call):
                    command.call(command.message)
            case ev.Notify():
                self.world.note(self.name, "notify", command)
                self._note_grants(memory, command.message)
                self._network.send(self, command.worker, command.message)
            case ev.WriteHeaders():
                memory.write_headers(command)
            case ev.SetStates():
                memory.set_states(command)
            case ev.KeepUntil():
                memory.keep_until(command)
            case ev.SetLeaseWord():
                memory.set_word(command)
            case ev.StoreRoot():
                if command.live or not self._bugs.keep_root_lines:
                    memory.store_root(command)
            case ev.ProbeHolder():
                self._probe(command.incarnation)
            case ev.KillHolder():
                holder = self.host.living(command.incarnation)
                if holder is not None:
                    self.host.restart(holder)
            case ev.RememberHolder():
                memory.holders[command.holder.incarnation] = command.holder
            case ev.ForgetHolder():
                memory.holders.pop(command.incarnation, None)
            case ev.StorePins():
                memory.pins = command.pins
            case ev.PagesStored() | ev.PagesDropped() | RememberRetired():
                pass

    def _note_grants(self, memory: PoolMemory, message: Message) -> None:
        """Record the growth that each granted lease may read: that of its admission, or for a fork
        that of its parent. A lease that is announced again, or has a new holder, keeps its own."""
        if isinstance(message, Forked):
            for child in message.children:
                memory.growths.setdefault(child.lease, memory.growths[message.lease])
        elif isinstance(message, Granted):
            root = self.host.root_of(message.key)
            memory.growths.setdefault(message.lease, self.host.growths.of(root))

    def _probe(self, incarnation: int) -> None:
        def due() -> None:
            if self.host.living(incarnation) is None:
                self.handle(ev.HolderDied(incarnation))

        self.at(0.5, due)
