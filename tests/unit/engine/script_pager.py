"""A minimal pager: real pages and headers, but no cache and no pressure. Just enough to test a
worker without the pager's own code."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from pagemesh.kernels.native.header_writer import HeaderWriter
from pagemesh.kernels.native.pool_file import PoolFile
from pagemesh.kernels.native.superblock import Superblock
from pagemesh.runtime import rpc
from pagemesh.runtime.bus import Bus, Delivery
from pagemesh.wire import codec, subjects
from pagemesh.wire import pager_messages as pm
from pagemesh.wire.messages import Message, Ok, SequenceKey
from pagemesh.wire.pool_format import HeaderState, PoolFormat
from pagemesh.wire.presence import Announce
from pagemesh.wire.tokens import U32, pack_extents, unpack

PAGE_COUNT = 128


class ScriptPager:
    """Use ``async with ScriptPager.serving(...)``. ``held`` are its leases, ``asked`` the names of
    the messages it got, in order. When it ``queues``, a grant is announced by a notice, and given
    when it is asked for again."""

    def __init__(self, bus: Bus, folder: Path, host: str) -> None:
        self._bus, self._folder, self.host = bus, folder, host
        self.held: dict[int, U32] = {}
        self.asked: list[str] = []
        self.queues = False
        self._queued: dict[SequenceKey, pm.Granted] = {}
        self.tickets: dict[str, int] = {}
        self._free = list(range(PAGE_COUNT))
        self._next_lease = 1
        self._sequence = 0
        self.file: PoolFile | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def serving(cls, bus: Bus, folder: Path, host: str) -> AsyncIterator[ScriptPager]:
        pager = cls(bus, folder, host)
        subscription = await bus.subscribe(subjects.pager(host), pager._admit)
        announce = Announce(
            role="pager", name=f"pager-{host}", incarnation=7, host=host, state="ready", epoch=1
        )
        rpc.send(bus, subjects.PRESENCE, announce)
        beat = asyncio.create_task(pager._announce(announce))
        try:
            yield pager
        finally:
            beat.cancel()
            await bus.unsubscribe(subscription)
            if pager.file is not None:
                pager.file.remove()

    def revoke(self, worker: str, lease: int, key: SequenceKey) -> None:
        """Revoke a lease: clear its word, then tell the worker."""
        assert self.file is not None
        self.file.headers.set_lease_word(lease, 0)
        rpc.send(
            self._bus, subjects.worker(worker), pm.Revoke(key=key, lease=lease, reason="preempted")
        )

    async def _announce(self, announce: Announce) -> None:
        while True:
            await asyncio.sleep(0.3)
            rpc.send(self._bus, subjects.PRESENCE, announce)

    def _admit(self, delivery: Delivery) -> None:
        rpc.answer(delivery, self._answer(codec.decode(delivery.data)))

    def _answer(self, message: Message) -> Message:
        self.asked.append(type(message).__name__)
        match message:
            case pm.OpenSession():
                return self._open(message)
            case pm.Admit() if message.key in self._queued:
                return self._queued.pop(message.key)
            case pm.Admit():
                lease, self._next_lease = self._next_lease, self._next_lease + 1
                self.held[lease] = self._take(message.reserve_tokens)
                granted = self._granted(message.key, lease, 0)
                return self._queue(message.worker, granted) if self.queues else granted
            case pm.Extend():
                table = self.held[message.lease]
                more = self._take((message.page_count - len(table)) * self._page_size)
                self.held[message.lease] = np.append(table, more).astype(np.uint32)
                return pm.Extended(
                    key=message.key, lease=message.lease, granted_at=self._sequence,
                    first_index=len(table), extents=pack_extents(more),
                )  # fmt: skip
            case pm.Commit():
                known = message.fill.first_token + len(unpack(message.fill.tokens))
                return pm.Committed(lease=message.lease, committed_tokens=0, known_tokens=known)
            case pm.Offer():
                return self._offered(message)
            case pm.Redeem():
                lease = self.tickets.pop(message.ticket)
                return self._granted(message.key, lease, message.handle.token_count)
            case pm.Release() if message.lease in self.held:
                self._free += self.held.pop(message.lease).tolist()
        return Ok()

    def _queue(self, worker: str, granted: pm.Granted) -> pm.Queued:
        self._queued[granted.key] = granted
        rpc.send(self._bus, subjects.worker(worker), granted)
        return pm.Queued(key=granted.key, ahead_count=0, ask_again_ms=100)

    def _open(self, message: pm.OpenSession) -> Message:
        self._page_size = message.pool.page_size
        if self.file is None:
            form = PoolFormat(PAGE_COUNT, message.pool.page_size, message.pool.page_bytes)
            block = Superblock(form, incarnation=3, layout_digest=message.pool.layout_digest)
            self.file = PoolFile.create(self._folder / "script.pool", block)
        return pm.SessionOpened(
            host=self.host, epoch=1, pool_incarnation=3, pool=0, page_count=PAGE_COUNT,
            pool_path=str(self.file.path), session_ttl_ms=3_000, heartbeat_ms=500,
        )  # fmt: skip

    def _take(self, token_count: int) -> U32:
        """Take pages for ``token_count`` tokens, and write their headers with a new sequence."""
        assert self.file is not None
        count = -(-token_count // self._page_size)
        # From both ends in turn, so that page tables are not contiguous.
        taken = [self._free.pop(-1 if index % 2 else 0) for index in range(count)]
        pages = np.array(taken, np.uint32)
        self._sequence += 1
        HeaderWriter(self.file.headers).write(
            pack_extents(pages), HeaderState.HELD,
            np.full(count, self._sequence, np.uint64).tobytes(), writer=0, root=0,
        )  # fmt: skip
        return pages

    def _granted(self, key: SequenceKey, lease: int, cached_tokens: int) -> pm.Granted:
        assert self.file is not None
        self.file.headers.set_lease_word(lease, lease)
        return pm.Granted(
            key=key, lease=lease, lease_slot=lease, granted_at=self._sequence,
            extents=pack_extents(self.held[lease]), cached_tokens=cached_tokens,
            waterfall=pm.Waterfall(available_tokens=3, selected_tokens=2, lost={"last_token": 1}),
        )  # fmt: skip

    def _offered(self, message: pm.Offer) -> pm.Offered:
        self.tickets[message.ticket] = message.lease
        handle = pm.Handle(
            host=self.host, pool_incarnation=3, pool=0, group=0, layout_digest=b"\x01" * 32,
            lease=message.lease, granted_at=self._sequence, ttl_ms=message.ttl_ms,
            extents=pack_extents(self.held[message.lease]),
            token_count=message.fill.filled_tokens,
        )  # fmt: skip
        return pm.Offered(ticket=message.ticket, handle=handle)
