"""A worker process from start to end: bus, model, lock, actor, presence, drain."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

from pagemesh.engine.executor import ModelExecutor
from pagemesh.engine.grammars import Grammars
from pagemesh.engine.loading import ServedModel
from pagemesh.engine.memory_box import MemoryBox
from pagemesh.engine.opening import Engine
from pagemesh.engine.worker.actor import Input, PoolDiscarded, Surroundings, WorkerBehaviour
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
from pagemesh.engine.worker.start import load, turns_of
from pagemesh.engine.worker.stepper import Stepper
from pagemesh.engine.worker.turns import Turns
from pagemesh.kernels.native.locks import HolderLock
from pagemesh.runtime.actor import Actor
from pagemesh.runtime.bus import Bus, Delivery
from pagemesh.runtime.clock import MonotonicClock
from pagemesh.runtime.directory import Change, Changed, Joined, Lost
from pagemesh.runtime.garbage import spare_loaded
from pagemesh.runtime.ids import new_incarnation, new_ticket_id
from pagemesh.runtime.logs import get_logger
from pagemesh.runtime.presence import Presence
from pagemesh.runtime.rpc import call
from pagemesh.runtime.service import EXIT_CRASHED, EXIT_OK, Stop
from pagemesh.runtime.service_bus import service_bus
from pagemesh.runtime.service_config import ServiceConfig
from pagemesh.runtime.supervise import CrashLimit, Ticks
from pagemesh.runtime.user_paths import ensure_folder
from pagemesh.wire import subjects
from pagemesh.wire.errors import Absent, Busy, Fault
from pagemesh.wire.messages import Ok
from pagemesh.wire.pool_format import LOCK_PREFIX, LOCK_SUFFIX, MEMORY_SUFFIX
from pagemesh.wire.pool_memory import Leave
from pagemesh.wire.presence import Announce, Load, State

DELIVERY_COUNT_MAX = 4_096
_DRAIN_SHARE = 2 / 3
"""Share of the time to stop in which sequences may finish. They are then given up, and half of
the rest is for giving pages back to a pager that may be gone."""
_LEAVE_MS_MAX = 5_500
"""How long the pager may take to have the pages moved that it wants to keep."""
_END_MS = 500
"""Part of the time to stop that is kept for everything after that."""
_BUSY_MS = 50
_ONE_LIFE = CrashLimit(crash_count_max=1)
_log = get_logger(__name__)


async def run_worker(config: ServiceConfig, stop: Stop, role: RoleSettings) -> None:
    """Serve until ``stop``, then drain. Raises ``ConfigError`` for what a restart cannot fix. If
    the model is still being loaded at ``stop``, the process ends without waiting for it."""
    if not await _serve(config, stop, role):
        _log.info("service.stopped", why="stopped before its model was loaded")
        os._exit(EXIT_OK)  # Python would wait for the loading thread


async def _serve(config: ServiceConfig, stop: Stop, role: RoleSettings) -> bool:
    """False: it was stopped before the model was loaded."""
    config.worker.check_supported()
    name, incarnation = config.host.name, new_incarnation()
    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(service_bus(config.bus, role=role.role, name=name))
        worker = Worker(config, role, bus, incarnation)
        await stack.enter_async_context(_announced(worker.presence))
        loading = asyncio.ensure_future(asyncio.to_thread(load, config.worker))
        if not await _ended_before(loading, stop):
            return False
        engine = await loading
        spare_loaded()
        ensure_folder(config.host.pool_dir, "PAGEMESH_POOL_DIR")
        lock_name = f"{LOCK_PREFIX}{incarnation:016x}"
        held = stack.enter_context(contextlib.ExitStack())
        lock = HolderLock(config.host.pool_dir / f"{lock_name}{LOCK_SUFFIX}")
        held.callback(lock.close)
        box = None
        if engine.maker is not None:
            path = config.host.pool_dir / f"{lock_name}{MEMORY_SUFFIX}"
            box = MemoryBox(engine.maker, path, worker.pool_discarded)
            held.enter_context(contextlib.closing(box))
        try:
            await worker.serve(engine, box, lock, turns_of(config.worker, lock.path), stop)
        finally:
            if worker.computes:
                held.pop_all()  # keep lock and memory: the step may write until the process ends
                stop.end_hard()
    return True


class Worker:
    """Puts the parts of one worker together."""

    def __init__(
        self, config: ServiceConfig, role: RoleSettings, bus: Bus, incarnation: int
    ) -> None:
        self._config = config
        self._role = role
        self._bus = bus
        self._incarnation = incarnation
        self._clock = MonotonicClock()
        self._loop = asyncio.get_running_loop()
        self._model: ServedModel | None = None
        self._lock: HolderLock | None = None
        self._cores = b""
        self._core: WorkerCore | None = None
        self._actor: Actor[Input] | None = None
        self._stepper: Stepper | None = None
        self._pool_pages = 0
        self._pager_epoch: int | None = None
        self._draining, self._drain_s = False, 0.0
        self._drained = asyncio.Event()
        self._ticks = Ticks(self._patience_ms, self._tick)
        self.presence = Presence(bus, self._clock, self._describe, self._heard)

    @property
    def computes(self) -> bool:
        """Whether a step still runs after ``serve`` raised; it may run until the process ends."""
        return self._stepper is not None and not self._stepper.is_closed

    async def serve(
        self,
        engine: Engine,
        box: MemoryBox | None,
        lock: HolderLock,
        turns: Turns,
        stop: Stop,
    ) -> None:
        """Take work until ``stop``; then finish or give back what there is."""
        self._model, self._lock, self._cores = engine.model, lock, turns.cores
        self._core = self._make_core(engine.model, lock.path.stem)
        actor = self._actor = self._make_actor(self._core, engine, box, turns)
        # The pager may have announced itself while the model was loading.
        for announce in self.presence.directory.of_role("pager"):
            self._heard(Joined(announce))
        assert self._stepper is not None
        try:
            await self._work(actor, stop)
            await self._stepper.close()
        except BaseException:  # crashed or cancelled
            self._ticks.stop()
            await self._stepper.abandon()
            raise
        if box is not None:
            await self._leave()

    async def _work(self, actor: Actor[Input], stop: Stop) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(actor.run(), name="worker-actor")
            self._ticks.start()
            name = self._config.host.name
            subscriptions = [
                await self._bus.subscribe(subject, self._admit_delivery)
                for subject in (subjects.worker(name), subjects.worker_report(name))
            ]
            await stop.wait()
            await self._drain()
            for subscription in subscriptions:
                await self._bus.unsubscribe(subscription)
            self._ticks.stop()
            actor.stop()

    async def _drain(self) -> None:
        self._draining, self._drain_s = True, time.monotonic()
        self.presence.announce_soon()
        drain_ms = self._config.host.drain_ms
        grace_ms = int(drain_ms * _DRAIN_SHARE)
        self._tell(Drain(grace_ms))
        try:
            async with asyncio.timeout((grace_ms + (drain_ms - grace_ms) / 2) / 1_000):
                await self._drained.wait()
        except TimeoutError:
            _log.warning("worker.not_drained", reason="the pager does not answer")

    async def _leave(self) -> None:
        """Let the pager have pages moved that it wants to keep, while this process can do so."""
        host = self._config.host
        message = Leave(worker=host.name, incarnation=self._incarnation)
        gone_ms = int(1_000 * (time.monotonic() - self._drain_s))
        timeout_ms = min(_LEAVE_MS_MAX, host.drain_ms - gone_ms - _END_MS)
        if timeout_ms > 0:
            with contextlib.suppress(Fault):
                await call(self._bus, subjects.pager(host.host), message, Ok, timeout_ms=timeout_ms)

    # Parts ----------------------------------------------------------------------------------

    def _make_core(self, model: ServedModel, lock_name: str) -> WorkerCore:
        worker, name = self._config.worker, self._config.host.name
        limits = WorkerLimits(
            context_tokens_max=model.config.context_tokens_max,
            sequences_max=worker.sequence_count_max + worker.waiting_count_max,
            step_rows_max=worker.sequence_count_max,
            itl_target_ms=worker.itl_target_ms,
            stream_ms=worker.stream_ms,
        )
        who = WorkerIdentity(
            name, self._incarnation, lock_name, model.pool_spec, model.root, model.name
        )
        return WorkerCore(who, self._role, limits, new_ticket_id)

    def _make_actor(
        self, core: WorkerCore, engine: Engine, box: MemoryBox | None, turns: Turns
    ) -> Actor[Input]:
        worker, host = self._config.worker, self._config.host
        model = engine.model
        grammars = Grammars(Path(worker.model), model.config.vocab_tokens)
        sequences_max = worker.sequence_count_max + worker.waiting_count_max
        around = Surroundings(
            bus=self._bus,
            clock=self._clock,
            role=self._role.role,
            name=host.name,
            host=host.host,
            grammars=grammars,
            turns=turns,
            step_us_max=1_000 * host.step_ms_max,
            stream_ms=worker.stream_ms,
            admit=self._tell,
            on_pool=self._on_pool,
            on_state=self.presence.announce_soon,
            on_drained=self._drained.set,
            on_patience=self._ticks.stir,
            on_hung=_end_hung,
        )
        spans = SequenceSpans(self._role.role, host.name, life_count_max=sequences_max)
        executor = ModelExecutor(
            engine.decoder, model.layout, engine.device, box,
            draft_tokens_max=worker.draft_tokens_max, prepare=engine.prepare, grammars=grammars,
        )  # fmt: skip
        behaviour = WorkerBehaviour(around, core, executor, spans)
        self._stepper = behaviour.stepper
        # Deliveries are refused long before the inbox is full, so answers always find room.
        return Actor(
            f"worker {host.name}",
            lambda: behaviour,
            inbox_count_max=DELIVERY_COUNT_MAX + 16 * sequences_max,
            limit=_ONE_LIFE,
        )

    # What comes in --------------------------------------------------------------------------

    def _tell(self, event: Input) -> None:
        """Put ``event`` into the inbox, unless the worker is leaving. Raises ``Busy`` only by a
        bug: there is room for every answer that can come."""
        if self._actor is not None:
            with contextlib.suppress(Absent):
                self._actor.admit(event)

    def pool_discarded(self) -> None:
        """Called on the thread of the ``MemoryBox``."""
        self._loop.call_soon_threadsafe(self._tell, PoolDiscarded())

    def _admit_delivery(self, delivery: Delivery) -> None:
        """Called by the bus, which answers with what this raises."""
        assert self._actor is not None
        if self._actor.statistics().queued_count >= DELIVERY_COUNT_MAX:
            raise Busy(f"{DELIVERY_COUNT_MAX} messages are waiting", retry_after_ms=_BUSY_MS)
        self._actor.admit(delivery)

    def _tick(self) -> None:
        if self._lock is not None and self._lock.was_removed:
            _end_process("worker.lock_removed", "do not touch the files in PAGEMESH_POOL_DIR")
        if self._actor is not None and self._actor.statistics().queued_count < DELIVERY_COUNT_MAX:
            self._tell(Tick())

    def _patience_ms(self) -> float:
        return self._core.patience_ms if self._core is not None else 0.0

    def _on_pool(self, page_count: int) -> None:
        self._pool_pages = page_count
        self.presence.announce_soon()

    def _heard(self, change: Change) -> None:
        """Pass on changes that concern the core; those of a ready pager only with a new epoch."""
        match change:
            case Joined(announce) | Changed(announce) if self._is_our_pager(announce):
                again = isinstance(change, Changed) and announce.epoch == self._pager_epoch
                if announce.state == "ready" and not again:
                    self._pager_epoch = announce.epoch
                    self._tell(PagerChanged(announce.epoch))
            case Lost(announce) if self._is_our_pager(announce):
                self._tell(PagerLost())
            case Lost(announce) if announce.role == "gateway":
                self._tell(GatewayLost(announce.name, announce.incarnation))
            case Lost(announce) if announce.role in ("prefill", "decode"):
                self._tell(WorkerLost(announce.name, announce.incarnation))
            case _:
                pass

    def _is_our_pager(self, announce: Announce) -> bool:
        return announce.role == "pager" and announce.host == self._config.host.host

    # What others hear -----------------------------------------------------------------------

    def _describe(self) -> Announce:
        core, facts = self._core, None
        if self._model is not None:
            facts = self._model.facts(
                pool_pages=self._pool_pages, deterministic=self._config.worker.deterministic
            )
        return Announce(
            role=self._role.role,
            name=self._config.host.name,
            incarnation=self._incarnation,
            host=self._config.host.host,
            state=self._state(),
            load=core.load if core is not None else Load(),
            model=facts,
            cores=self._cores,
            needs=core.needs if core is not None else None,
        )

    def _state(self) -> State:
        if self._draining:
            return "draining"
        # A device may take a while to prepare a pool, and steps would wait for that.
        is_ready = self._core is not None and self._core.ready and self._pool_pages > 0
        return "ready" if is_ready else "starting"


async def _ended_before(loading: asyncio.Future[Engine], stop: Stop) -> bool:
    """Whether loading ended, successfully or not, before ``stop``."""
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
    return loading.done()


def _end_hung() -> None:
    _end_process("worker.step_hung", "--step-ms-max is the time limit of a step")


def _end_process(why: str, advice: str) -> None:
    """End at once: an orderly end would wait for the step. This frees the process's lock, and its
    requests go on elsewhere, or here after a restart."""
    _log.critical(why, next=f"the process exits so that it can be restarted; {advice}")
    os._exit(EXIT_CRASHED)


@contextlib.asynccontextmanager
async def _announced(presence: Presence) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(presence.run(), name="worker-presence")
        try:
            yield
        finally:
            task.cancel()
