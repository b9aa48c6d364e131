"""A pool for a life of the pager: what an earlier one left, or a new one.

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
from pagemesh.wire.errors import ConfigError, Fault, NoCapacity
from pagemesh.wire.pager_messages import OpenSession, PoolSpec
from pagemesh.wire.pool_format import IN_FILE, HeaderState

_log = get_logger(__name__)


async def adopt_pool(
    settings: PagerSettings, memory: PoolMemory, holders: Holders
) -> PoolStore | None:
    """What is there and whole, the list of holders and memory on a device included; what is there
    and is not is removed: who still writes there writes to what nobody else is given. Raises
    ``PoolClosedToUs`` when another pager serves it, or it cannot be opened."""
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
            error=f"{holders.path} is damaged or not there: nobody knows who may still write to it",
            next="another is made, and what was cached is lost; leave PAGEMESH_POOL_DIR alone",
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
    return store


async def take_over(
    core: PagerCore, store: PoolStore, holders: Holders, now_ms: int
) -> list[Command]:
    """Have ``core`` rebuild what the pool holds. Returns what it wants done. That takes a second
    with a million pages, so it is done beside the event loop: whoever asks for other things than
    pages has an answer meanwhile."""
    scan = await asyncio.to_thread(store.scan)
    found = store.recovered(scan, holders.living())
    commands = await asyncio.to_thread(core.handle, found, now_ms)
    if scan.torn.any():
        _tell_damaged(core, store, scan, found)
    lost = [pin.name for pin in found.pins if pin.name not in core.books.pins]
    if lost:
        _log.warning(
            "pager.pins_lost", pins=lost,
            next="not all pages are there any more; send the prefix again, then pin it",
        )  # fmt: skip
    return commands


def _tell_damaged(core: PagerCore, store: PoolStore, scan: HeaderScan, found: Recovered) -> None:
    """Of headers that nobody can believe, and of what is found no more without them: else a pool
    that lost what it had looks like one that had nothing."""
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
        next="these pages and those behind them become free, and what they held is computed anew; "
        "a pager that is killed leaves one half-written as a rule, of more the cause is memory, or "
        "somebody else who writes to PAGEMESH_POOL_DIR",
    )  # fmt: skip


async def make_pool(
    settings: PagerSettings, memory: PoolMemory, holders: Holders, message: OpenSession
) -> PoolStore:
    """The pool that the session asks for, once the list of holders is there; any before it is over.
    Raises ``NoCapacity`` where there is no room for it, ``Busy`` where there is none for the list,
    or what ``PoolMemory.make`` raises."""
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
    """Whether another pool is to be made for a worker that wants ``spec``: somebody has removed
    this one, or it is not what would be made now, and nobody else is known to use it."""
    if _is_removed(store):
        return True
    if sessions or _suits(settings, store.facts, spec):
        return False
    _log.info("pager.pool_replaced", path=store.facts.path)
    return True


def _suits(settings: PagerSettings, facts: PoolFacts, spec: PoolSpec) -> bool:
    """Whether a pool is what ``spec`` and our settings would make anew."""
    pages = settings.pool_bytes // spec.page_bytes
    return (facts.layout_digest, facts.place, facts.page_count) == (
        spec.layout_digest, spec.place, pages,
    )  # fmt: skip


def _is_removed(store: PoolStore) -> bool:
    """Whether somebody has removed the pool under us, so that no worker could attach to it. Those
    that have it mapped open again, and all go on in another."""
    if store.file.is_in_place:
        return False
    _log.error(
        "pager.pool_removed", path=store.facts.path,
        next="another is made, and what was cached is lost; leave PAGEMESH_POOL_DIR alone",
    )  # fmt: skip
    return True


def _check_memory(disk: DiskPlace) -> None:
    if disk.medium == "memory" or disk.memory_bytes:
        raise NoCapacity(
            "PAGEMESH_HOST_BYTES (--host-bytes): pages are in the host's memory already; leave it "
            "out, or give PAGEMESH_POOL_BYTES more"
        )
