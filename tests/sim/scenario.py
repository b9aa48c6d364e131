"""One run from one seed: a mesh, clients, faults for a while, then peace and a last count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from tests.sim import model
from tests.sim.bugs import NONE, Bugs
from tests.sim.disk import DiskMemory
from tests.sim.gateway_node import Ask, Client
from tests.sim.mesh import Mesh, Shape
from tests.sim.pager_node import PagerNode
from tests.sim.world import Process, Weather, World

from pagemesh.gateway.events import Completed, Failed
from pagemesh.pager.events import Asked
from pagemesh.wire.cache_messages import PinPrefix, UnpinPrefix
from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.messages import Message
from pagemesh.wire.work_messages import Beams, Sampling

_STORM_MS = 4_000.0
_PATIENCE_MS = 20_000
_QUIET_MS_MAX = 12_000.0
_EVENTS_MAX = 400_000


@dataclass(frozen=True, slots=True)
class Outcome:
    seed: int
    events_count: int
    completed_count: int
    failed_count: int
    cancelled_count: int
    orphaned_count: int
    attempts_count: int
    preempted_count: int
    tokens_count: int
    saved_count: int
    """Tokens that were waited for, since others were computing them, and so not computed."""
    loaded_count: int
    """Pages that were read from disk."""
    failures: tuple[str, ...]


def run(seed: int, bugs: Bugs = NONE, *, world: World | None = None) -> Outcome:
    """Play ``seed`` to its end. Raises ``AssertionError`` when an invariant breaks."""
    world = world or World(seed)
    dice = world.random
    shape = _shape(world)
    mesh = Mesh.build(world, shape, bugs)
    clients = _Clients(world, mesh)
    if dice.random() < 0.85:
        _storm(world, mesh)
        _disk_storm(world, mesh)
    _operators(world, mesh, clients)
    world.at(_STORM_MS, lambda: _peace(mesh))
    clients.begin()
    limit = _STORM_MS + _PATIENCE_MS + _QUIET_MS_MAX

    def settled() -> bool:
        world.expect(world.events_count < _EVENTS_MAX, "the mesh never comes to rest")
        return (
            world.now > _STORM_MS
            and clients.over
            and world.events_count % 16 == 0
            and (mesh.quiet())
        )

    world.run(limit, stop=settled)
    world.expect(clients.over, "a client waits for ever")
    world.expect(mesh.quiet(), f"something is still held:\n{mesh.unquiet()}")
    return _outcome(world, mesh, clients)


def _shape(world: World) -> Shape:
    dice = world.random
    page_size = dice.choice([2, 4, 4, 4, 8])
    # The longest sequence has 102 tokens: a tiny pool holds hardly more than one of them.
    tiny = dice.random() < 0.6
    tokens = dice.randrange(112, 170) if tiny else dice.randrange(300, 700)
    chunk = dice.choice([3, 8, 16, 64])
    disk = Random(world.seed)  # of its own: what happens without a disk stays as it was
    return Shape(
        hosts_count=1 if dice.random() < 0.8 else 2,
        prefill_count=dice.choice([1, 1, 2]),
        decode_count=dice.choice([0, 1, 1, 2]),
        gateway_count=dice.choice([1, 1, 2]),
        page_count=tokens // page_size,
        page_size=page_size,
        step_tokens_max=max(chunk, dice.choice([16, 64])),
        chunk_tokens_max=chunk,
        step_ms=dice.choice([1.0, 4.0, 4.0, 25.0]),
        disk_slots=disk.randrange(4, 3 * tokens // page_size) if disk.random() < 0.6 else 0,
    )


class _Clients:
    """Who asks what: shared prefixes, crowds, chats that go on, several choices, quitters."""

    def __init__(self, world: World, mesh: Mesh) -> None:
        self._world = world
        self._mesh = mesh
        self._pending = 0
        self._made = 0
        dice = world.random
        self._roots = [bytes([65 + index]) * 32 for index in range(dice.choice([1, 1, 2]))]
        self._terms_dice = Random(f"terms {world.seed}")
        self._beams_dice = Random(f"beams {world.seed}")
        self._ttls_s = self._terms_dice.choice([[0], [0, 1, 2], [1, 3]])
        self._quota_pages = -(-112 // mesh.hosts[0].memory.page_size)
        self._prefixes = [self._words(dice.randrange(4, 30)) for _ in range(3)]

    @property
    def all(self) -> list[Client]:
        return [client for gateway in self._mesh.gateways for client in gateway.clients]

    @property
    def over(self) -> bool:
        return not self._pending and all(client.over for client in self.all)

    def asked(self, dice: Random) -> tuple[bytes, tuple[int, ...]]:
        """Something that was asked, or may be."""
        if asks := [client.ask for client in self.all]:
            ask = dice.choice(asks)
            return ask.root, ask.prompt
        return self._roots[0], self._prefixes[0]

    def begin(self) -> None:
        dice = self._world.random
        bursts = [dice.random() * _STORM_MS * 0.8 for _ in range(dice.randrange(1, 8))]
        for _ in range(dice.randrange(6, 16)):
            root = dice.choice(self._roots)
            prompt = dice.choice(self._prefixes) + self._words(dice.randrange(1, 24))
            start_ms = dice.choice(bursts) + 60.0 * dice.random()
            self._ask_at(start_ms, root, prompt, dice.randrange(3))
        for _ in range(dice.choice([0, 0, 1, 2])):
            self._crowd()

    def _crowd(self) -> None:
        """Many ask the same, or almost, at once: most of them can wait for one to compute it."""
        dice = self._world.random
        root, prompt = dice.choice(self._roots), self._words(dice.randrange(8, 50))
        start_ms = dice.random() * _STORM_MS * 0.8
        for _ in range(dice.randrange(3, 9)):
            own = self._words(dice.choice([0, 0, 1, 6]))
            self._ask_at(start_ms + 5.0 * dice.random(), root, prompt + own, 0)

    def _words(self, count: int) -> tuple[int, ...]:
        dice = self._world.random
        return tuple(dice.randrange(model.VOCAB_TOKENS) for _ in range(count))

    def _ask_at(self, delay_ms: float, root: bytes, prompt: tuple[int, ...], turns: int) -> None:
        self._pending += 1

        def due() -> None:
            self._pending -= 1
            dice = self._world.random
            open_ones = [one for one in self._mesh.gateways if one.alive]
            if not open_ones:
                self._ask_at(200.0, root, prompt, turns)
                return
            ask = self._ask(root, prompt)
            for host in self._mesh.hosts:
                host.roots[ask.request] = root
            dice.choice(open_ones).take(ask)
            if turns:
                self._next_turn(ask, turns - 1)

        self._world.at(delay_ms, due)

    def _next_turn(self, ask: Ask, turns: int) -> None:
        """The same chat goes on with the answer, if it came soon enough."""
        self._pending += 1

        def due() -> None:
            self._pending -= 1
            client = next(one for one in self.all if one.ask is ask)
            answer = tuple(client.delivered.get(0, ()))
            if 0 in client.ended_choices and len(ask.prompt) + len(answer) < 60:
                self._ask_at(1.0, ask.root, ask.prompt + answer + self._words(3), turns)

        self._world.at(100.0 + 300.0 * self._world.random.random(), due)

    def _ask(self, root: bytes, prompt: tuple[int, ...]) -> Ask:
        dice = self._world.random
        self._made += 1
        several = dice.random() < 0.25
        beams, limit = self._beams(prompt), dice.choice([1, 2, 5, 12, 24, 40])
        leaves = dice.random() < 0.12
        return Ask(
            request=f"{self._world.seed & 0xFFFF:016x}{self._made:016x}",
            root=root,
            prompt=prompt,
            choice_count=beams.keep if beams else dice.randrange(2, 5) if several else 1,
            sampling=Sampling(
                seed=dice.randrange(1 << 30),
                max_tokens=limit if beams is None else min(limit, 12),
                beams=beams,
                stop_tokens=[model.STOP_TOKEN] if dice.random() < 0.7 else [],
                logprobs=0 if dice.random() < 0.3 else None,
            ),
            start_ms=self._world.now,
            patience_ms=_PATIENCE_MS if dice.random() < 0.9 else dice.randrange(50, 1_500),
            leaves_ms=dice.random() * 300.0 if leaves else None,
            prompt_logprobs=dice.random() < 0.1 and beams is None,
            terms=self._terms(root),
        )

    def _terms(self, root: bytes) -> CacheTerms:
        """In some worlds much is cached for a short time only; the second tenant has a quota,
        which holds little more than one of its sequences."""
        quota_pages = self._quota_pages if root != self._roots[0] else 0
        ttl_s = self._terms_dice.choice(self._ttls_s)
        return CacheTerms(tenant=root[:1].decode(), pages_max=quota_pages, ttl_s=ttl_s)

    def _beams(self, prompt: tuple[int, ...]) -> Beams | None:
        """A search, now and then, that fits even a tiny pool."""
        dice = self._beams_dice
        if dice.random() > 0.12 or len(prompt) > 50:
            return None
        width = dice.choice([1, 2, 3])
        return Beams(width=width, keep=dice.randrange(1, width + 1), early_stopping=True)


def _operators(world: World, mesh: Mesh, clients: _Clients) -> None:
    """Somebody pins beginnings of prompts now and then; in the end nothing is pinned."""
    dice = Random(f"operators {world.seed}")

    def tell(pager: PagerNode, message: Message) -> None:
        if pager.alive and not pager.frozen and pager.core is not None:
            pager.handle(Asked(None, message))

    def pin() -> None:
        root, prompt = clients.asked(dice)
        ttl_s = dice.choice([None, None, 1])
        tell(dice.choice(mesh.pagers), PinPrefix(root=root.hex(), tokens=list(prompt), ttl_s=ttl_s))

    def unpin() -> None:
        for pager in mesh.pagers:
            tell(pager, UnpinPrefix(pin=None))
        if not clients.over or any(one.core is None for one in mesh.pagers):
            world.at(200.0, unpin)

    if dice.random() < 0.4:
        for _ in range(dice.randrange(1, 12)):
            world.at(dice.random() * _STORM_MS, pin)
        world.at(_STORM_MS + 1.0, unpin)


# What goes wrong ----------------------------------------------------------------------------


def _storm(world: World, mesh: Mesh) -> None:
    dice, network = world.random, mesh.network
    if dice.random() < 0.7:
        network.weather = Weather(
            loss=dice.choice([0.0, 0.01, 0.05, 0.15]),
            repeat=dice.choice([0.0, 0.02, 0.2]),
            late=dice.choice([0.0, 0.05, 0.2]),
            late_ms_max=dice.choice([20.0, 200.0, 600.0]),
        )
    for _ in range(dice.randrange(0, 10)):
        world.at(dice.random() * _STORM_MS * 0.95, _fault(world, mesh))


def _fault(world: World, mesh: Mesh) -> Callable[[], None]:
    dice = world.random
    kinds = ["worker", "worker", "pager", "pager", "pager torn", "pager torn", "pool", "gateway",
             "freeze", "freeze", "freeze pager", "part", "slow", "drain"]  # fmt: skip
    kind = dice.choice(kinds)
    worker, pager = dice.choice(mesh.workers), dice.choice(mesh.pagers)
    gateway = dice.choice(mesh.gateways)
    span_ms = dice.choice([30.0, 300.0, 1_000.0, 2_500.0])

    def strike() -> None:
        world.note("fault", kind, f"{worker.name} {pager.name} {gateway.name} {span_ms}")
        match kind:
            case "worker":
                mesh.restart(worker)
            case "pager":
                mesh.restart(pager)
            case "pager torn":
                if pager.alive:
                    pager.dies_soon = True
            case "pool":
                _lose_pool(mesh, pager.host.name)
            case "gateway":
                mesh.restart(gateway)
            case "freeze":
                _freeze(world, worker, span_ms)
            case "freeze pager":
                # A frozen pager is killed before it is replaced.
                pager.freeze()
                world.at(span_ms, pager.thaw if span_ms < 400 else lambda: mesh.restart(pager))
            case "drain":
                if worker.core is not None and not worker.frozen:
                    worker.drain(int(span_ms))
            case "part":
                one, other = dice.sample(mesh.processes, 2)
                mesh.network.part(one.name, other.name)
                world.at(span_ms, lambda: mesh.network.join(one.name, other.name))
            case _:
                worker.slowness = dice.choice([5.0, 40.0])

    return strike


def _freeze(world: World, worker: Process, span_ms: float) -> None:
    worker.freeze()
    world.at(span_ms, worker.thaw)


_DISK_FAULTS = ("damage", "damage", "damage", "damage", "damage", "slow", "full")


def _disk_storm(world: World, mesh: Mesh) -> None:
    """The disk is damaged, slow or full for a while, or from some moment on."""
    for disk in [host.disk for host in mesh.hosts if host.disk is not None]:
        dice = disk.dice
        for _ in range(dice.choice([0, 2, 4, 8])):
            start_ms, kind = dice.random() * _STORM_MS, dice.choice(_DISK_FAULTS)
            world.at(start_ms, partial(_strike_disk, disk, kind))


def _strike_disk(disk: DiskMemory, kind: str) -> None:
    match kind:
        case "damage":
            disk.damage()
        case "slow":
            disk.slowness = disk.dice.choice([20.0, 500.0])
        case _:
            disk.refuses = True


def _lose_pool(mesh: Mesh, host_name: str) -> None:
    """The pager dies and its pool file goes with it."""
    for pager in mesh.pagers:
        if pager.host.name == host_name and pager.alive:
            mesh.restart(pager)
            pager.host.new_pool(mesh.world.random.randrange(1 << 15))


def _peace(mesh: Mesh) -> None:
    mesh.network.calm()
    for host in mesh.hosts:
        if host.disk is not None:
            host.disk.slowness = 1.0
    for process in mesh.processes:
        process.thaw()
        process.slowness = 1.0


def _outcome(world: World, mesh: Mesh, clients: _Clients) -> Outcome:
    everyone = clients.all
    failures = [
        f"{client.ask.request}: {type(client.outcome.fault).__name__} {client.outcome.fault}"
        for client in everyone
        if isinstance(client.outcome, Failed)
    ]
    # The storm leaves a patient client most of its time: then nothing excuses a failure.
    for client in everyone:
        patient = client.ask.patience_ms == _PATIENCE_MS
        failed = isinstance(client.outcome, Failed)
        world.expect(not (patient and failed), f"{client.ask.request}: {client.outcome}")
    completed = sum(isinstance(client.outcome, Completed) for client in everyone)
    orphaned = sum(client.orphaned for client in everyone)
    return Outcome(
        seed=world.seed,
        events_count=world.events_count,
        completed_count=completed,
        failed_count=len(failures),
        cancelled_count=len(everyone) - completed - len(failures) - orphaned,
        orphaned_count=orphaned,
        attempts_count=sum(gateway.attempts_count for gateway in mesh.gateways),
        preempted_count=sum(worker.preempted_count for worker in mesh.workers),
        loaded_count=sum(pager.loaded_pages for pager in mesh.pagers),
        saved_count=sum(pager.saved_tokens for pager in mesh.pagers),
        tokens_count=sum(len(t) for client in everyone for t in client.delivered.values()),
        failures=tuple(failures),
    )
