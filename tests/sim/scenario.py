"""One run from one seed: a mesh, clients, faults for a while, then calm and a final check."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from tests.sim.bugs import NONE, Bugs
from tests.sim.clients import PATIENCE_MS, STORM_MS, Clients
from tests.sim.faults import device_storm, disk_storm, late_grants, peace, rollouts, storm
from tests.sim.mesh import Mesh, Shape
from tests.sim.operators import Invalidations, operate, torn_declarations
from tests.sim.world import World

from pagemesh.gateway.calls.events import Completed, Failed

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
    """Tokens that sequences did not compute because others were computing them."""
    loaded_count: int
    """Pages that were read from disk."""
    invalidated_count: int
    """Roots that operators were told are no longer served."""
    failures: tuple[str, ...]


def run(
    seed: int, bugs: Bugs = NONE, *, world: World | None = None, on_device: bool = False
) -> Outcome:
    """Play ``seed`` to its end; ``on_device``: with pages on a device and with a disk, whatever the
    seed says. Raises ``AssertionError`` when an invariant breaks."""
    world = world or World(seed)
    dice = world.random
    shape = _shape(world)
    if on_device:
        slots = max(shape.disk_slots, 2 * shape.page_count)
        shape = replace(shape, on_device=True, disk_slots=slots)
    mesh = Mesh.build(world, shape, bugs)
    clients = Clients(world, mesh)
    is_stormy = dice.random() < 0.85
    if is_stormy:
        storm(world, mesh)
        disk_storm(world, mesh)
        device_storm(world, mesh, clients)
        late_grants(world, mesh, clients)
        rollouts(world, mesh)
        torn_declarations(world, mesh, clients)
    operate(world, mesh, clients)
    Invalidations(world, mesh, clients).begin(with_faults=is_stormy)
    world.at(STORM_MS, lambda: peace(mesh))
    clients.begin()
    return play_out(world, mesh, clients, STORM_MS)


def play_out(world: World, mesh: Mesh, clients: Clients, storm_ms: float) -> Outcome:
    """Run to the end. From ``storm_ms`` on there are no more faults, so all requests get an answer
    and everything is released. Raises ``AssertionError`` when an invariant breaks."""
    limit = storm_ms + PATIENCE_MS + _QUIET_MS_MAX

    def settled() -> bool:
        world.expect(world.events_count < _EVENTS_MAX, "the mesh never comes to rest")
        return (
            world.now > storm_ms
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
    # The longest sequence has 102 tokens: a tiny pool holds hardly more than one of those.
    tiny = dice.random() < 0.6
    tokens = dice.randrange(112, 170) if tiny else dice.randrange(300, 700)
    chunk = dice.choice([3, 8, 16, 64])
    disk = Random(world.seed)  # separate, so that runs without a disk did not change
    device = Random(f"is there a device {world.seed}")
    disk_slots = disk.randrange(4, 3 * tokens // page_size) if disk.random() < 0.6 else 0
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
        disk_slots=disk_slots,
        on_device=device.random() < (0.4 if disk_slots else 0.1),
    )


def _outcome(world: World, mesh: Mesh, clients: Clients) -> Outcome:
    everyone = clients.all
    failures = [
        f"{client.ask.request}: {type(client.outcome.fault).__name__} {client.outcome.fault}"
        for client in everyone
        if isinstance(client.outcome, Failed)
    ]
    # A patient client has most of its time left after the storm, so nothing excuses a failure.
    for client in everyone:
        patient = client.ask.patience_ms == PATIENCE_MS
        failed = isinstance(client.outcome, Failed)
        # An answer begun with weights that nobody serves any more cannot be finished.
        unfinished = mesh.was_rolled and bool(client.delivered)
        excused = not patient or unfinished
        world.expect(excused or not failed, f"{client.ask.request}: {client.outcome}")
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
        invalidated_count=sum(host.invalidated_count for host in mesh.hosts),
        tokens_count=sum(len(t) for client in everyone for t in client.delivered.values()),
        failures=tuple(failures),
    )
