"""The faults of a run, which are injected for a while and then cease."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from tests.sim import model
from tests.sim.clients import STORM_MS, Clients
from tests.sim.disk import DiskMemory
from tests.sim.mesh import Mesh
from tests.sim.pager_node import PagerNode
from tests.sim.worker_node import WorkerNode
from tests.sim.world import Process, Weather, World


def storm(world: World, mesh: Mesh) -> None:
    dice, network = world.random, mesh.network
    if dice.random() < 0.7:
        network.weather = Weather(
            loss=dice.choice([0.0, 0.01, 0.05, 0.15]),
            repeat=dice.choice([0.0, 0.02, 0.2]),
            late=dice.choice([0.0, 0.05, 0.2]),
            late_ms_max=dice.choice([20.0, 200.0, 600.0]),
        )
    for _ in range(dice.randrange(0, 10)):
        world.at(dice.random() * STORM_MS * 0.95, _fault(world, mesh))


def rollouts(world: World, mesh: Mesh) -> None:
    """Replace the workers one after the other by ones with other weights, and perhaps back."""
    dice = Random(f"rollouts {world.seed}")

    def begin() -> None:
        for host in mesh.hosts:
            host.weights = 1 - host.weights
        mesh.was_rolled = True
        world.note("fault", "rollout", mesh.hosts[0].weights)
        at_ms, pause_ms = 0.0, dice.choice([10.0, 200.0, 700.0])
        for worker in dice.sample(mesh.workers, len(mesh.workers)):
            world.at(at_ms, partial(replace, worker, dice.random() < 0.6))
            at_ms += pause_ms * dice.random()

    def replace(worker: WorkerNode, is_killed: bool) -> None:
        if is_killed or worker.core is None or worker.frozen:
            mesh.restart(worker)
        else:
            worker.drain(300)

    if world.seed % 3 == 2:
        for _ in range(dice.choice([1, 1, 2, 3])):
            world.at(STORM_MS * dice.random() * 0.9, begin)


def late_grants(world: World, mesh: Mesh, clients: Clients) -> None:
    """Submits to a worker, and grants that gateways asked for in its name, arrive only after the
    pager or the worker itself has been replaced. If another worker of the host is frozen meanwhile,
    the new pager does not know for long what the last one granted."""
    dice = Random(f"late grants {world.seed}")

    def begin() -> None:
        worker, span_ms = dice.choice(mesh.workers), 450.0 + 700.0 * dice.random()
        world.note("fault", "late", f"{worker.name} {span_ms}")
        mesh.network.hold(worker.name)
        for _ in range(dice.randrange(3, 8)):
            clients.ask(*clients.fresh(dice), 10.0 * dice.random())
        world.at(span_ms, partial(mesh.network.let_go, worker.name))
        world.at(20.0 * (1.0 + dice.random()), partial(strike, worker, span_ms))

    def strike(worker: WorkerNode, span_ms: float) -> None:
        if dice.random() < 0.3:
            mesh.restart(worker)
            return
        for other in mesh.workers:
            if other.host is worker.host and other is not worker:
                _freeze(world, other, span_ms + 200.0)
        mesh.restart(next(one for one in mesh.pagers if one.host is worker.host))

    if dice.random() < 0.3:
        for _ in range(dice.choice([1, 1, 2])):
            world.at(STORM_MS * (0.1 + 0.7 * dice.random()), begin)


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


def disk_storm(world: World, mesh: Mesh) -> None:
    """Disks are damaged, slow or full, for a while or from some time on."""
    for disk in [host.disk for host in mesh.hosts if host.disk is not None]:
        dice = disk.dice
        for _ in range(dice.choice([0, 2, 4, 8])):
            start_ms, kind = dice.random() * STORM_MS, dice.choice(_DISK_FAULTS)
            world.at(start_ms, partial(_strike_disk, disk, kind))


def _strike_disk(disk: DiskMemory, kind: str) -> None:
    match kind:
        case "damage":
            disk.damage()
        case "slow":
            disk.slowness = disk.dice.choice([20.0, 500.0])
        case _:
            disk.refuses = True


def device_storm(world: World, mesh: Mesh, clients: Clients) -> None:
    """Devices fail or hang; workers that move pages, and pagers that wait for them, freeze or die;
    and pages evicted from a device are requested again."""
    for host in mesh.hosts:
        device = host.device
        if device is None:
            continue
        dice = device.dice
        device.refuses = dice.choice([0.0, 0.0, 0.05, 0.3])
        device.stalls = dice.choice([0.0, 0.05, 0.2])
        pager = next(one for one in mesh.pagers if one.host is host)
        device.on_move = partial(_strike_mover, world, mesh, pager, dice.choice([0.0, 0.3, 0.6]))
        for _ in range(dice.choice([1, 2, 4])):
            at_ms = dice.random() * STORM_MS * 0.9
            world.at(at_ms, partial(_drive_out, clients, dice))
            for _ in range(dice.randrange(2, 6)):
                world.at(at_ms + 400.0 * dice.random(), partial(_want_again, clients, dice))


def _drive_out(clients: Clients, dice: Random) -> None:
    """Send long new requests, which evict what is cached."""
    for _ in range(dice.randrange(1, 3)):
        prompt = tuple(dice.randrange(model.VOCAB_TOKENS) for _ in range(dice.randrange(30, 55)))
        clients.ask(dice.choice(clients.roots), prompt, 40.0 * dice.random())


def _want_again(clients: Clients, dice: Random) -> None:
    """Repeat an earlier request, whose pages may be anywhere by now."""
    root, prompt = clients.asked(dice)
    clients.ask(root, prompt, 0.0)


def _strike_mover(
    world: World, mesh: Mesh, pager: PagerNode, share: float, mover: Process, is_filling: bool
) -> None:
    """``mover`` has just been asked to move pages: perhaps strike it, its pager, or both."""
    device = pager.host.device
    assert device is not None
    dice = device.dice
    if dice.random() >= (share if is_filling else share / 8):
        return
    choices: list[list[Process]] = [[mover], [pager], [pager], [pager, mover]]
    victims = dice.choice(choices)
    after_ms, span_ms = 8.0 * dice.random(), dice.choice([15.0, 80.0, 300.0, 1_200.0])
    for victim in victims:
        world.note("fault", "mover", f"{victim.name} {after_ms} {span_ms}")
        if victim is mover and dice.random() < 0.7:
            world.at(after_ms, partial(_freeze, world, victim, span_ms))
        else:
            world.at(after_ms, partial(mesh.restart, victim))


def _lose_pool(mesh: Mesh, host_name: str) -> None:
    """The pager dies, and its pool file is lost."""
    for pager in mesh.pagers:
        if pager.host.name == host_name and pager.alive:
            mesh.restart(pager)
            pager.host.new_pool(mesh.world.random.randrange(1 << 15))


def peace(mesh: Mesh) -> None:
    mesh.network.calm()
    for host in mesh.hosts:
        if host.disk is not None:
            host.disk.slowness = 1.0
        if host.device is not None:
            host.device.refuses = host.device.stalls = 0.0
            host.device.on_move = None
    for process in mesh.processes:
        process.thaw()
        process.slowness = 1.0
