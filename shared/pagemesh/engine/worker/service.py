"""A worker process from start to end: bus, model, lock, actor, presence, drain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pagemesh.engine.executor import ModelExecutor
from pagemesh.engine.files import ensure_folder
from pagemesh.engine.forward import Decoder
from pagemesh.engine.loading import LoadedModel, load_model
from pagemesh.engine.worker.actor import Input, Surroundings, WorkerBehaviour
from pagemesh.engine.worker.core import WorkerCore
from pagemesh.engine.worker.events import (
    Drain,
    GatewayLost,
    PagerChanged,
    PagerLost,
    Tick,
    WorkerLost,
)
from pagemesh.engine.worker.settings import RoleSettings, WorkerIdentity, WorkerLimits
from pagemesh.engine.worker.spans import SequenceSpans
from pagemesh.engine.worker.stepper import bounded_threads
from pagemesh.kernels.native.locks import HolderLock
from pagemesh.runtime.actor import Actor
from pagemesh.runtime.bus import Bus
from pagemesh.runtime.clock import MonotonicClock
from pagemesh.runtime.directory import Change, Changed, Joined, Lost
from pagemesh.runtime.ids import new_incarnation, new_ticket_id
from pagemesh.runtime.logs import get_logger
from pagemesh.runtime.metrics import serve_metrics
from pagemesh.runtime.presence import Presence
from pagemesh.runtime.service import Stop
from pagemesh.runtime.service_config import ServiceConfig
from pagemesh.runtime.settings import WorkerConfig
from pagemesh.runtime.supervise import CrashLimit, every
from pagemesh.wire import subjects
from pagemesh.wire.errors import ConfigError
from pagemesh.wire.pool_format import LOCK_SUFFIX
from pagemesh.wire.presence import Announce, ModelFacts, State

DELIVERY_COUNT_MAX = 4_096
DRAIN_GRACE_MS = 20_000
DRAIN_MARGIN_MS = 5_000
"""After the grace: for pages to be given back to a pager that may be gone."""
_PROGRESS_PERIOD_MS = 500
_ONE_LIFE = CrashLimit(crash_count_max=1)
_log = get_logger(__name__)


async def run_worker(config: ServiceConfig, stop: Stop, role: RoleSettings) -> None:
    """Serve until ``stop``, then drain. Raises ``ConfigError`` for what no restart mends."""
    _check_supported(config.worker)
    name, incarnation = config.host.name, new_incarnation()
    async with AsyncExitStack() as stack:
        stack.enter_context(serve_metrics(config.telemetry))
        bus = await stack.enter_async_context(
            Bus.connect(config.bus, role=role.role, name=name)
        )
        worker = Worker(config, role, bus, incarnation)
        await stack.enter_async_context(_presence(worker))
        model = await asyncio.to_thread(_load, config.worker)
        ensure_folder(config.host.pool_dir)
        lock_name = f"worker-{incarnation:016x}"
        lock = HolderLock(config.host.pool_dir / f"{lock_name}{LOCK_SUFFIX}")
        stack.callback(lock.close)
        await worker.serve(model, lock_name, stop)


@dataclass(slots=True)
class _Known:
    """What presence tells of this worker, as far as it is known."""

    state: State = "starting"
    model: LoadedModel | None = None
    pool_pages: int = 0


class Worker:
    """The parts of one worker, joined."""

    def __init__(
        self, config: ServiceConfig, role: RoleSettings, bus: Bus, incarnation: int
    ) -> None:
        self._config = config
        self._role = role
        self._bus = bus
        self._incarnation = incarnation
        self._clock = MonotonicClock()
        self._known = _Known()
        self._core: WorkerCore | None = None
        self._actor: Actor[Input] | None = None
        self._drained = asyncio.Event()
        self._pager_epoch: int | None = None
        self.presence = Presence(bus, self._clock, self._describe, self._heard)

    async def serve(self, model: LoadedModel, lock_name: str, stop: Stop) -> None:
        """Take work until ``stop``; then finish or give back what there is."""
        self._known.model = model
        core = self._core = self._make_core(model, lock_name)
        actor = self._actor = self._make_actor(core, model)
        # What was heard while the model loaded: the pager, above all.
        for announce in self.presence.directory.of_role("pager"):
            self._heard(Joined(announce))
        async with asyncio.TaskGroup() as group:
            group.create_task(actor.run(), name="worker-actor")
            ticks = group.create_task(
                every(WorkerLimits.tick_ms, self._tick), name="worker-ticks"
            )
            subscription = await self._bus.subscribe(
                subjects.worker(self._config.host.name), self._admit_delivery
            )
            await stop.wait()
            self._known.state = "draining"
            self.presence.announce_soon()
            actor.admit(Drain(DRAIN_GRACE_MS))
            try:
                async with asyncio.timeout((DRAIN_GRACE_MS + DRAIN_MARGIN_MS) / 1_000):
                    await self._drained.wait()
            except TimeoutError:
                _log.warning("worker.not_drained", reason="the pager does not answer")
            await self._bus.unsubscribe(subscription)
            ticks.cancel()
            actor.stop()

    # Parts ----------------------------------------------------------------------------------

    def _make_core(self, model: LoadedModel, lock_name: str) -> WorkerCore:
        worker = self._config.worker
        identity = WorkerIdentity(
            self._config.host.name, self._incarnation, lock_name, model.pool_spec
        )
        limits = WorkerLimits(
            context_tokens_max=model.config.context_tokens_max,
            sequences_max=worker.sequence_count_max + worker.waiting_count_max,
            step_rows_max=worker.sequence_count_max,
        )
        return WorkerCore(identity, self._role, limits, new_ticket_id)

    def _make_actor(self, core: WorkerCore, model: LoadedModel) -> Actor[Input]:
        worker, host = self._config.worker, self._config.host
        sequences_max = worker.sequence_count_max + worker.waiting_count_max
        decoder = Decoder(
            model.config, model.weights, deterministic=self._config.worker.deterministic
        )
        around = Surroundings(
            bus=self._bus,
            clock=self._clock,
            role=self._role.role,
            name=host.name,
            host=host.host,
            vocab_tokens=model.config.vocab_tokens,
            thread_count=bounded_threads(worker.thread_count),
            admit=lambda event: actor.admit(event),
            on_pool=self._on_pool,
            on_state=self._on_state,
            on_drained=self._drained.set,
        )
        spans = SequenceSpans(self._role.role, host.name, life_count_max=sequences_max)
        # Deliveries are refused far earlier, so that answers always find room.
        actor: Actor[Input] = Actor(
            f"worker {host.name}",
            lambda: WorkerBehaviour(around, core, ModelExecutor(decoder, model.layout), spans),
            inbox_count_max=DELIVERY_COUNT_MAX + 16 * sequences_max,
            limit=_ONE_LIFE,
        )
        return actor
