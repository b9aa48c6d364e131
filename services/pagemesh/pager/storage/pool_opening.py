"""The pool for a life of the pager: the one that an earlier life left, or a new one.

Either may have to wait for the disk or, where pages are on a device, for a worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np

from pagemesh.kernels.native.headers import HeaderScan
from pagemesh.kernels.native.pool_file import PoolClosedToUs
from pagemesh.pager.board import PagerSettings
from pagemesh.pager.events import Command, Recovered
from pagemesh.pager.leases.lease import Session
from pagemesh.pager.limits import PoolFacts
from pagemesh.pager.measures import damaged_headers
from pagemesh.pager.state import PagerCore
from pagemesh.pager.storage.disk_file import DiskPlace
from pagemesh.pager.storage.holders import Holders
from pagemesh.pager.storage.pool_memory import PoolMemory
from pagemesh.pager.storage.pool_store import PoolStore
from pagemesh.runtime.logs import get_logger
from pagemesh.runtime.sizes import shown_binary
from pagemesh.wire.errors import ConfigError, Fault, NoCapacity
from pagemesh.wire.pager_messages import OpenSession, PoolSpec
from pagemesh.wire.pool_format import IN_FILE, HeaderState

_log = get_logger(__name__)


async def adopt_pool(
    settings: PagerSettings, memory: PoolMemory, holders: Holders
) -> PoolStore | None:
    """The existing pool, if it is intact with its list of holders and its memory on a device. One
    that is not is removed, and None returned: workers that still write to it write to memory that
    nobody else is given. Raises ``PoolClosedToUs`` if another pager serves it or it cannot be
    opened."""
    path = PoolStore.path_of(settings.folder, settings.host)
    if not path.exists():
        return None
    try:
        store = PoolStore.adopt(settings.folder, settings.host)
    except PoolClosedToUs:
        raise
    except ConfigError as error:
        _log.error("pager.pool_damaged", path=str(path), error=error)
        path.unlink(missing_ok=True)
        return None
    if not holders.load():  # again, since until now another pager might have served it
        _log.error(
            "pager.pool_damaged", path=str(path),
            error=f"{holders.path} is damaged or missing: workers may still write to the pool, "
            "and it is unknown which",
            next="a new pool is made, and the cached pages are lost; do not touch the files in "
            "PAGEMESH_POOL_DIR",
        )  # fmt: skip
        store.file.remove()
        return None
    if store.facts.place != IN_FILE:
        locks = [holder.lock_name for holder in holders.living()]
        for name in locks:  # an earlier pager handed them the memory
            memory.watch(name, holders.owner(name))
        if not await asyncio.to_thread(memory.find, store.facts, locks):
            _log.warning("pager.pool_memory_lost", path=str(path), place=store.facts.place)
            store.file.remove()
            return None
    _tell_kept(settings, store.facts, holders)
    return store


def _tell_kept(settings: PagerSettings, facts: PoolFacts, holders: Holders) -> None:
    """Warn if the pool has another size than is asked for: while workers use it, it stays."""
    wanted = settings.pool_bytes // facts.page_bytes
    if facts.page_count == wanted or not (users := holders.living()):
        return
    _log.warning(
        "pager.pool_kept", path=facts.path, pages=facts.page_count, wanted_pages=wanted,
        kept=shown_binary(facts.page_count * facts.page_bytes),
        wanted=shown_binary(settings.pool_bytes), workers=sorted(one.worker for one in users),
        next="PAGEMESH_POOL_BYTES takes effect once all workers of this host have been stopped: "
        "the first to start after that gets a pool of the new size, and the cached pages are lost",
    )  # fmt: skip


async def take_over(
    core: PagerCore, store: PoolStore, holders: Holders, now_ms: int
) -> list[Command]:
    """Have ``core`` rebuild what the pool holds. Returns the commands to perform. With a million
    pages that takes a second, so it is done off the event loop: requests for other things than
    pages are answered meanwhile."""
    scan = await asyncio.to_thread(store.scan)
    found = store.recovered(scan, holders.living())
    commands = await asyncio.to_thread(core.handle, found, now_ms)
    if scan.torn.any():
        _tell_damaged(core, store, scan, found)
    lost = [pin.name for pin in found.pins if pin.name not in core.books.pins]
    if lost:
        _log.warning(
            "pager.pins_lost", pins=lost,
            next="some of their pages are gone; send the prefix again, then pin it",
        )  # fmt: skip
    return commands


def _tell_damaged(core: PagerCore, store: PoolStore, scan: HeaderScan, found: Recovered) -> None:
    """Report damaged headers, and pages that cannot be found without them: otherwise a pool that
    lost its contents would look like one that was empty."""
    headers, pool = found.headers, core.books.pool
    damaged = headers.states == HeaderState.INVALID
    count = int(np.count_nonzero(damaged))
    half_written = damaged & (scan.batch.states == HeaderState.INVALID)
    live = [root.index for root in found.roots if root.live]
    whole = (headers.states == HeaderState.COMMITTED) & np.isin(headers.roots, live)
    damaged_headers.inc(count)
    _log.warning(
        "pager.headers_damaged", path=store.facts.path, pages=count, of=pool.total,
        half_written=int(np.count_nonzero(half_written)),
        behind=int(np.count_nonzero(whole)) - pool.idle - pool.pinned,
        next="these pages and those behind them are freed, and their content is computed anew; "
        "a killed pager usually leaves one half-written, more of them point to bad memory or to "
        "something else that writes to PAGEMESH_POOL_DIR",
    )  # fmt: skip


async def make_pool(
    settings: PagerSettings, memory: PoolMemory, holders: Holders, message: OpenSession
) -> PoolStore:
    """Make the pool that the session asks for, after the list of holders; any earlier pool is over.
    Raises ``NoCapacity`` if there is no room for it, ``Busy`` if there is none for the list, or
    what ``PoolMemory.make`` raises."""
    spec = message.pool
    if spec.place == IN_FILE and settings.disk is not None:
        _check_memory(settings.disk)
    unwritten = holders.write()
    if unwritten is not None:
        raise unwritten
    try:
        store = await asyncio.to_thread(
            PoolStore.create, settings.folder, settings.host, spec, settings.pool_bytes
        )
    except ConfigError as error:
        raise NoCapacity(str(error)) from None
    if spec.place == IN_FILE:
        await asyncio.to_thread(memory.drop)
    else:
        try:
            others = [holder.lock_name for holder in holders.living()]
            await asyncio.to_thread(memory.make, store.facts, message.lock_name, others)
        except Fault:
            store.file.remove()
            raise
    return store


def is_over(
    settings: PagerSettings, store: PoolStore, spec: PoolSpec, sessions: Mapping[int, Session]
) -> bool:
    """Whether another pool is to be made for a worker that wants ``spec``: because somebody has
    removed this one, or because it is not what would be made now and no session uses it."""
    if _is_removed(store):
        return True
    if sessions or _suits(settings, store.facts, spec):
        return False
    _log.info("pager.pool_replaced", path=store.facts.path)
    return True


def _suits(settings: PagerSettings, facts: PoolFacts, spec: PoolSpec) -> bool:
    """Whether a pool is what would be made now from ``spec`` and our settings."""
    pages = settings.pool_bytes // spec.page_bytes
    return (facts.layout_digest, facts.place, facts.page_count) == (
        spec.layout_digest, spec.place, pages,
    )  # fmt: skip


def _is_removed(store: PoolStore) -> bool:
    """Whether somebody has removed the pool under us, so that no worker could attach to it. Workers
    that have it mapped then open new sessions, and all continue in another pool."""
    if store.file.is_in_place:
        return False
    _log.error(
        "pager.pool_removed", path=store.facts.path,
        next="a new pool is made, and the cached pages are lost; do not touch the files in "
        "PAGEMESH_POOL_DIR",
    )  # fmt: skip
    return True


def _check_memory(disk: DiskPlace) -> None:
    if disk.medium == "memory" or disk.memory_bytes:
        raise NoCapacity(
            "PAGEMESH_HOST_BYTES (--host-bytes): pages are in the host's memory already; leave "
            "it out, or raise PAGEMESH_POOL_BYTES"
        )
