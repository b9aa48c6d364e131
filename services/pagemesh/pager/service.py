"""``pagemesh serve pager``: the page manager of one host."""

from __future__ import annotations

import asyncio
import contextlib

from pagemesh.pager.actor import PagerActor, PagerEvent
from pagemesh.pager.board import PagerBoard, PagerSettings
from pagemesh.pager.cache_door import CacheDoor
from pagemesh.pager.due import Due, PutAwayDue, TickDue
from pagemesh.pager.host_claim import HostClaim
from pagemesh.pager.limits import PagerLimits
from pagemesh.pager.storage.disk import remove_unused
from pagemesh.pager.storage.disk_file import DiskPlace
from pagemesh.pager.storage.pool_memory import PoolMemory
from pagemesh.runtime.actor import Actor
from pagemesh.runtime.bus import Delivery
from pagemesh.runtime.clock import MonotonicClock
from pagemesh.runtime.garbage import spare_loaded
from pagemesh.runtime.ids import new_incarnation
from pagemesh.runtime.logs import get_logger
from pagemesh.runtime.presence import Presence
from pagemesh.runtime.service import Stop
from pagemesh.runtime.service_bus import service_bus
from pagemesh.runtime.service_config import ServiceConfig, tier_without_place
from pagemesh.runtime.supervise import Ticks
from pagemesh.runtime.user_paths import ensure_folder
from pagemesh.wire import subjects

_log = get_logger(__name__)


def settings_of(config: ServiceConfig) -> PagerSettings:
    """What the pager needs of ``config``. Raises ``ConfigError`` without a secret."""
    return PagerSettings(
        host=config.host.host,
        name=config.host.name,
        incarnation=new_incarnation(),
        folder=config.host.pool_dir,
        pool_bytes=config.pager.pool_bytes,
        secret=config.host.required_secret(),
        limits=PagerLimits(
            session_ttl_ms=config.pager.session_ttl_ms,
            heartbeat_ms=config.pager.heartbeat_ms,
            pin_share_max=config.pager.pin_share_max,
            staged_bytes_max=config.pager.disk_staging_bytes,
            step_ms_max=config.host.step_ms_max,
        ),
        kill_holders=config.pager.kill_holders,
        eviction=config.pager.eviction,
        disk=_disk_place(config),
    )


def _disk_place(config: ServiceConfig) -> DiskPlace | None:
    pager, host, secret = config.pager, config.host.host, config.host.required_secret()
    if why := tier_without_place(pager):  # no error: the tier may be off for a while
        _log.warning("pager.no_disk_folder", why=why)
    if folder := pager.disk_folder:
        return DiskPlace(folder, host, pager.disk_bytes, secret, memory_bytes=pager.host_bytes)
    if pager.host_bytes:
        return DiskPlace(config.host.pool_dir, host, pager.host_bytes, secret, "memory")
    return None


def remove_unused_tier(settings: PagerSettings) -> None:
    """Remove pages that an earlier pager kept in the host's memory, if this one keeps none."""
    if settings.disk is None or settings.disk.medium == "disk":
        remove_unused(DiskPlace(settings.folder, settings.host, 0, b"", "memory"))


async def run(config: ServiceConfig, stop: Stop) -> None:
    """Serve until ``stop`` is set, then answer what is queued and let go of the pool, which
    stays for the next pager. Raises ``ConfigError``, also if another pager serves the host."""
    settings = settings_of(config)
    ensure_folder(settings.folder, "PAGEMESH_POOL_DIR")
    remove_unused_tier(settings)
    with contextlib.closing(PoolMemory(settings.folder)) as memory:
        await _serve(config, settings, memory, stop)


async def _serve(
    config: ServiceConfig, settings: PagerSettings, memory: PoolMemory, stop: Stop
) -> None:
    clock = MonotonicClock()
    board = PagerBoard(settings)
    async with service_bus(config.bus, role="pager", name=settings.name, gathers=True) as bus:

        def wake(due: Due) -> bool:
            return actor.try_admit(due)

        actor: Actor[PagerEvent] = Actor(
            "pager",
            lambda: PagerActor(settings, bus, clock, board, wake, memory),
            inbox_count_max=config.pager.inbox_count_max,
        )
        presence = Presence(bus, clock, board.announce)
        board.on_epoch(presence.announce_soon)

        def admit(delivery: Delivery) -> None:
            actor.admit(delivery)

        def tick() -> None:
            actor.try_admit(TickDue())

        ticks = Ticks(lambda: board.patience_ms, tick)
        board.on_patience(ticks.stir)
        door = CacheDoor(bus, settings.host, admit)
        board.on_cache_call(door.record)
        claim = HostClaim(bus, settings.host, settings.incarnation)
        async with asyncio.TaskGroup() as group, contextlib.AsyncExitStack() as opened:
            serving = group.create_task(actor.run(), name="pager-actor")
            ticks.start()  # whether or not there is a NATS server
            opened.callback(ticks.stop)
            await claim.make(stop)
            await opened.enter_async_context(door.open())
            subscriptions = [  # reports first: who is answered by the pager may ask for one at once
                await bus.subscribe(subject(settings.host), admit)
                for subject in (subjects.pager_report, subjects.pager)
            ]
            announcing = group.create_task(presence.run(), name="pager-presence")
            claiming = group.create_task(claim.keep(stop), name="pager-claim")
            spare_loaded()
            await stop.wait()
            board.draining = True
            presence.announce_soon()
            for subscription in subscriptions:
                await bus.unsubscribe(subscription)
            actor.stop(PutAwayDue() if settings.disk is not None else None)
            await serving
            for task in (announcing, claiming):
                task.cancel()
        claim.check()
