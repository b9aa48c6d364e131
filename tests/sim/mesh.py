"""A whole mesh in one process: hosts with pagers and workers, gateways, what they know of each
other, and faults. Everything follows from the seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.sim import model
from tests.sim.box import Device
from tests.sim.bugs import Bugs
from tests.sim.device import PLACE
from tests.sim.disk import DiskMemory
from tests.sim.gateway_node import GatewayNode
from tests.sim.host import Host
from tests.sim.pager_node import PagerNode
from tests.sim.worker_node import WorkerNode
from tests.sim.world import Network, Process, World

from pagemesh.engine.worker.events import GatewayLost, PagerChanged, PagerLost, WorkerLost
from pagemesh.engine.worker.settings import RoleSettings, WorkerLimits
from pagemesh.gateway.calls.events import ChooseRoute, PagesFrom, Route, Worker
from pagemesh.gateway.calls.spec import RequestLimits
from pagemesh.pager.limits import PagerLimits
from pagemesh.wire.pager_messages import PoolSpec
from pagemesh.wire.pool_format import IN_FILE

_PRESENCE_MS = 200.0
_LOST_MS = 900.0
_LAYOUT = bytes(range(32))

PAGER_LIMITS = PagerLimits(
    session_ttl_ms=1_500,
    heartbeat_ms=300,
    ask_again_ms=300,
    revoke_again_ms=150,
    probe_again_ms=150,
    drain_late_ms=300,
    drain_ms_max=1_500,
    step_ms_max=1_500,
    declare_grace_ms=600,
    lease_count_max=256,
    in_flight_stall_ms_max=600,
    ticket_ttl_ms_max=2_000,
    mover_rest_ms=300,
    mover_slow_ms=150,
)
WORKER_LIMITS = WorkerLimits(
    sequences_max=24,
    growth_pages=1,
    commit_pages=1,
    declare_bytes_max=1_500,
    ticket_ttl_ms=1_500,
    pager_away_ms=200,
    pager_wait_ms_max=500,
    call_ms=400,
    retry_ms=10,
    retry_ms_max=300,
    retain_ms=3_000,
    beat_ms=150,
    beats_max=5,
    tick_ms=40,
)
GATEWAY_LIMITS = RequestLimits(
    failures_max=12,
    submit_timeout_ms=600,
    resend_timeout_ms=500,
    silence_ms_max=700,
    gap_patience_ms=150,
    resends_max=20,
    worker_wait_ms_max=3_000,
    recovery_wait_ms_max=6_000,
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a mesh."""

    hosts_count: int
    prefill_count: int
    decode_count: int
    gateway_count: int
    page_count: int
    page_size: int
    step_tokens_max: int
    chunk_tokens_max: int
    step_ms: float
    """Maximum duration of a step on a fast worker."""
    disk_slots: int = 0
    """Pages that the disk of a host holds; 0: no disk tier."""
    on_device: bool = False
    """Whether the pages of a pool are on a device."""


@dataclass(slots=True)
class _View:
    """What one process knows about another."""

    life: int = 0
    heard_ms: float = 0.0
    present: bool = False
    facts: int = 0
    """Its incarnation or epoch in that life."""
    weights: int = 0
    """The weights that a worker serves in that life."""


@dataclass(slots=True)
class Mesh:
    world: World
    network: Network
    shape: Shape
    bugs: Bugs
    hosts: list[Host] = field(default_factory=list)
    pagers: list[PagerNode] = field(default_factory=list)
    workers: list[WorkerNode] = field(default_factory=list)
    gateways: list[GatewayNode] = field(default_factory=list)
    was_rolled: bool = False
    """Whether workers were replaced by ones with other weights."""
    _views: dict[tuple[str, str], _View] = field(default_factory=dict)
    _restarting: set[str] = field(default_factory=set)

    @classmethod
    def build(cls, world: World, shape: Shape, bugs: Bugs) -> Mesh:
        mesh = cls(world, Network(world), shape, bugs)
        spec = PoolSpec(
            layout_digest=_LAYOUT, page_size=shape.page_size, page_bytes=64,
            place=PLACE if shape.on_device else IN_FILE,
        )  # fmt: skip
        for number in range(shape.hosts_count):
            host = Host(f"h{number}", shape.page_count, shape.page_size)
            host.restart = mesh.restart
            if shape.disk_slots:
                dice = random.Random(world.seed * 97 + number)
                host.disk = DiskMemory(shape.disk_slots, dice)
            if shape.on_device:
                host.device = Device(random.Random(f"device {world.seed} {number}"))
            mesh.hosts.append(host)
            mesh.pagers.append(PagerNode(world, mesh.network, host, PAGER_LIMITS, spec, bugs))
            for role, count in (("prefill", shape.prefill_count), ("decode", shape.decode_count)):
                for index in range(count):
                    mesh._add_worker(host, f"{role}-h{number}-{index}", spec, role == "prefill")
        for number in range(shape.gateway_count):
            mesh._add_gateway(f"gateway-{number}")
        for process in mesh.processes:
            process.start()
        mesh._presence()
        return mesh

    @property
    def processes(self) -> list[PagerNode | WorkerNode | GatewayNode]:
        return [*self.pagers, *self.workers, *self.gateways]

    def _add_worker(self, host: Host, name: str, spec: PoolSpec, prefills: bool) -> None:
        role = RoleSettings(
            role="prefill" if prefills else "decode",
            hand_over=prefills,
            step_tokens_max=self.shape.step_tokens_max,
            chunk_tokens_max=self.shape.chunk_tokens_max,
        )
        node = WorkerNode(
            self.world, self.network, host, name, role, WORKER_LIMITS, spec, self.bugs
        )
        node.step_ms = self.shape.step_ms
        self.workers.append(node)

    def _add_gateway(self, name: str) -> None:
        def choose(command: ChooseRoute, root: bytes) -> Route | None:
            return self._route(name, command, root)

        self.gateways.append(GatewayNode(self.world, self.network, name, GATEWAY_LIMITS, choose))

    # Life and death -------------------------------------------------------------------------

    def restart(self, process: Process) -> None:
        """Kill a process; it is started again a little later, as by a supervisor."""
        assert isinstance(process, PagerNode | WorkerNode | GatewayNode)
        if not process.alive or process.name in self._restarting:
            return
        process.stop()
        self._restarting.add(process.name)

        def again() -> None:
            self._restarting.discard(process.name)
            process.start()

        self.world.at(50.0 + 400.0 * self.world.random.random(), again)

    # Presence -------------------------------------------------------------------------------

    def _presence(self) -> None:
        """All processes announce themselves to all others, and notice who is silent."""
        now = self.world.now
        watchers: list[WorkerNode | GatewayNode] = [*self.workers, *self.gateways]
        for watcher in watchers:
            if watcher.alive and not watcher.frozen:
                for other in self.processes:
                    if other is not watcher:
                        self._look(watcher, other, now)
        self.world.at(_PRESENCE_MS, self._presence)

    def _look(
        self,
        watcher: WorkerNode | GatewayNode,
        other: PagerNode | WorkerNode | GatewayNode,
        now: float,
    ) -> None:
        if isinstance(other, PagerNode) and isinstance(watcher, WorkerNode):
            if watcher.host is not other.host:
                return
        if isinstance(watcher, GatewayNode) and isinstance(other, GatewayNode):
            return
        view = self._views.setdefault((f"{watcher.name}/{watcher.life}", other.name), _View())
        heard = other.alive and not other.frozen
        heard = heard and self.network.reaches(watcher.name, other.name)
        if heard and self.world.random.random() >= self.network.weather.loss:
            if view.present and view.life != other.life:
                self._lost(watcher, other, view)
            fresh = not view.present
            view.life, view.heard_ms, view.present = other.life, now, True
            view.facts = other.epoch if isinstance(other, PagerNode) else other.incarnation
            view.weights = other.weights if isinstance(other, WorkerNode) else 0
            if fresh and isinstance(watcher, WorkerNode) and isinstance(other, PagerNode):
                watcher.handle(PagerChanged(other.epoch))
        elif view.present and now - view.heard_ms > _LOST_MS:
            view.present = False
            self._lost(watcher, other, view)

    def _lost(
        self,
        watcher: WorkerNode | GatewayNode,
        other: PagerNode | WorkerNode | GatewayNode,
        view: _View,
    ) -> None:
        view.present = False
        if isinstance(watcher, GatewayNode):
            if not isinstance(other, PagerNode):  # it needs pagers only to ask them
                watcher.worker_lost(Worker(other.name, view.facts))
        elif isinstance(other, PagerNode):
            watcher.handle(PagerLost())
        elif isinstance(other, GatewayNode):
            watcher.handle(GatewayLost(other.name, view.facts))
        else:
            watcher.handle(WorkerLost(other.name, view.facts))

    def _route(self, gateway: str, command: ChooseRoute, root: bytes) -> Route | None:
        """A random worker that the gateway knows; choosing well is the real router's job."""
        dice = self.world.random
        watcher = next(it for it in self.gateways if it.name == gateway)
        known: list[tuple[WorkerNode, Worker]] = []
        served: dict[str, int] = {}
        for one in self.workers:
            view = self._views.get((f"{gateway}/{watcher.life}", one.name))
            if view is None or not view.present:
                continue
            if command.model_root in (None, model.model_root(view.weights)):
                known.append((one, Worker(one.name, view.facts)))
                served[one.name] = view.weights
        wanted = [pair for pair in known if pair[1] not in command.avoid] or known
        if not wanted:
            return None
        prefills = [pair for pair in wanted if pair[0].role.hand_over]
        node, worker = dice.choice(prefills if prefills and dice.random() < 0.8 else wanted)
        weights = served[worker.name]
        decodes = [
            other
            for peer, other in known
            if not peer.role.hand_over and peer.host is node.host and other != worker
            if served[other.name] == weights
        ]
        decode = dice.choice(decodes) if decodes and dice.random() < 0.9 else None
        pages = self._pages_from(f"{gateway}/{watcher.life}", node)
        root = model.tree_root(root, weights)
        return Route(worker, decode, model.model_root(weights), root, 0, pages=pages)

    def _pages_from(self, watcher: str, node: WorkerNode) -> PagesFrom | None:
        """The pager, as far as ``watcher`` knows, to ask for pages in the name of ``node``; now and
        then None."""
        pager = next(one for one in self.pagers if one.host is node.host)
        view = self._views.get((watcher, pager.name))
        if view is None or node.core is None or self.world.random.random() < 0.2:
            return None
        return PagesFrom(pager.name, view.facts, node.core.needs)

    # The end --------------------------------------------------------------------------------

    def quiet(self) -> bool:
        """Whether everything that was held has been released."""
        for worker in self.workers:
            if worker.core is None or not worker.core.idle:
                return False
        for pager in self.pagers:
            if pager.core is None:
                return False
            report = pager.core.report()
            pages = report.held_pages + report.pinned_pages + report.draining_pages
            if pages or report.leases or report.ticket_count or report.waiter_count:
                return False
            if pager.core.books.forest.retired or pager.core.is_sweeping:
                return False
        return True

    def unquiet(self) -> str:
        """What is still held, as text for a failure."""
        lines = [
            f"{worker.name}: {worker.core.load}"
            for worker in self.workers
            if worker.core is not None and not worker.core.idle
        ]
        living = [pager for pager in self.pagers if pager.core is not None]
        lines += [f"{pager.name}: {pager.core and pager.core.report()}" for pager in living]
        return "\n".join(lines)
