"""The pager as a process: a real nats-server, a real pool file, a real kill -9."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from tests.unit.pager.rig import fill_of, key_of, order_of, table_of

from pagemesh.kernels.native.locks import HolderLock
from pagemesh.kernels.native.pool_file import PoolFile
from pagemesh.runtime.bus import Bus, Delivery
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.runtime.rpc import call
from pagemesh.wire import codec, subjects
from pagemesh.wire.cache_terms import NO_TERMS, CacheTerms
from pagemesh.wire.errors import Absent, DeadlineExceeded, Denied, Fault, Malformed, Stale
from pagemesh.wire.identity import prefix_keys
from pagemesh.wire.messages import Message, Ok
from pagemesh.wire.pager_messages import (
    AckRevoke,
    Admit,
    Commit,
    Committed,
    Declare,
    Declared,
    Granted,
    HeldLease,
    Offer,
    Offered,
    OpenSession,
    PoolSpec,
    Redeem,
    Release,
    Revoke,
    SessionOpened,
)
from pagemesh.wire.pager_reports import (
    InspectPager,
    PagerReport,
    PagesChanged,
    PagesSnapshot,
    SnapshotWanted,
)
from pagemesh.wire.pool_format import HeaderState
from pagemesh.wire.tokens import pack, pack_extents

SECRET = "test-secret-of-many-characters-73"
T = TypeVar("T", bound=Message)
ROOT = b"r" * 32
PAGE_SIZE, PAGE_BYTES, PAGE_COUNT = 16, 4_096, 32
SPEC = PoolSpec(layout_digest=b"l" * 32, page_size=PAGE_SIZE, page_bytes=PAGE_BYTES)


class Pager:
    """A pager process and a connection to it."""

    def __init__(self, url: str, folder: Path, bus: Bus) -> None:
        self.folder, self.bus, self.host = folder, bus, "testhost"
        self.environ = os.environ | {
            "PAGEMESH_NATS": url,
            "PAGEMESH_HOST": self.host,
            "PAGEMESH_NAME": "pager-test",
            "PAGEMESH_POOL_DIR": str(folder),
            "PAGEMESH_POOL_BYTES": str(PAGE_COUNT * PAGE_BYTES),
            "PAGEMESH_SECRET": SECRET,
            "PAGEMESH_SESSION_TTL_MS": "1500",
        }
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pagemesh.cli", "serve", "pager", env=self.environ
        )
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(Absent, DeadlineExceeded):
                    await self.ask(SnapshotWanted(), PagesSnapshot, timeout_ms=500)
                    return
                await asyncio.sleep(0.05)

    @property
    def pid(self) -> int:
        assert self._process is not None, "the pager does not run"
        return self._process.pid

    async def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(how)
        return await process.wait()

    async def ask(self, message: Message, kind: type[T], timeout_ms: int = 5_000) -> T:
        to = subjects.pager_report if isinstance(message, InspectPager) else subjects.pager
        return await call(self.bus, to(self.host), message, kind, timeout_ms=timeout_ms)

    async def report(self) -> PagerReport:
        report = await self.ask(InspectPager(), PagerReport)
        assert report.total_pages == (
            report.free_pages + report.held_pages + report.pinned_pages
            + report.idle_pages + report.draining_pages
        )  # fmt: skip
        return report


@pytest.fixture
def pool_folder(tmp_path: Path) -> Iterator[Path]:
    base = Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path
    folder = base / f"pagemesh-test-{os.getpid()}-{tmp_path.name}"
    folder.mkdir(mode=0o700)
    yield folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest.fixture
async def pager(
    shared_nats_server: NatsServer, bus: Bus, pool_folder: Path, no_stray_processes: None
) -> AsyncIterator[Pager]:
    made = Pager(shared_nats_server.url, pool_folder, bus)
    await made.start()
    yield made
    assert await made.end() == 0


class Client:
    """One worker incarnation over the bus, with a real lock."""

    def __init__(self, pager: Pager, name: str, incarnation: int) -> None:
        self.pager, self.name, self.incarnation = pager, name, incarnation
        self.lock = HolderLock(pager.folder / f"{name}-{incarnation}.lock")
        self.opened: SessionOpened | None = None

    async def open(self, spec: PoolSpec = SPEC) -> SessionOpened:
        self.opened = await self.pager.ask(
            OpenSession(
                worker=self.name, incarnation=self.incarnation, role="prefill",
                lock_name=f"{self.name}-{self.incarnation}", pool=spec,
            ),
            SessionOpened,
        )  # fmt: skip
        return self.opened

    async def admit(
        self, number: int, tokens: list[int], reserve: int, terms: CacheTerms = NO_TERMS
    ) -> Granted:
        assert self.opened is not None
        return await self.pager.ask(
            Admit(
                key=key_of(number), order=order_of(number), worker=self.name,
                incarnation=self.incarnation, epoch=self.opened.epoch, root=ROOT,
                tokens=pack(tokens), reserve_tokens=reserve, deadline_ms=10_000, terms=terms,
            ),
            Granted,
        )  # fmt: skip

    async def commit(self, lease: Granted, tokens: list[int]) -> int:
        message = Commit(
            key=lease.key, worker=self.name, incarnation=self.incarnation,
            lease=lease.lease, fill=fill_of(tokens),
        )  # fmt: skip
        return (await self.pager.ask(message, Committed)).committed_tokens

    async def release(self, lease: Granted, tokens: list[int]) -> None:
        message = Release(
            key=lease.key, worker=self.name, incarnation=self.incarnation,
            lease=lease.lease, fill=fill_of(tokens),
        )  # fmt: skip
        await self.pager.ask(message, Ok)


TOKENS = list(range(100, 140))


async def test_a_sequence_goes_from_prefill_to_decode_and_leaves_only_cache(pager: Pager) -> None:
    prefill, decode = Client(pager, "prefill", 11), Client(pager, "decode", 12)
    opened = await prefill.open()
    assert opened.page_count == PAGE_COUNT and opened.epoch > 0
    await decode.open()
    lease = await prefill.admit(1, TOKENS, 48)
    assert await prefill.commit(lease, TOKENS) == 32
    offered = await pager.ask(
        Offer(
            key=lease.key, worker="prefill", incarnation=11, epoch=opened.epoch, lease=lease.lease,
            ticket="a" * 32, fill=fill_of(TOKENS), ttl_ms=5_000,
        ),
        Offered,
    )  # fmt: skip
    taken = await pager.ask(
        Redeem(
            key=lease.key, worker="decode", incarnation=12, epoch=opened.epoch,
            ticket="a" * 32, handle=offered.handle, reserve_tokens=64,
        ),
        Granted,
    )  # fmt: skip
    assert taken.lease == lease.lease and taken.cached_tokens == len(TOKENS)
    with PoolFile.attach(Path(opened.pool_path)) as pool:
        table = np.array(table_of(taken), np.uint32)
        assert pool.headers.lease_word(taken.lease_slot) == taken.lease
        assert pool.headers.fresh_count(table, taken.granted_at) == len(table) == 4
        batch = pool.headers.scan().batch
        assert batch.writers[table].tolist() == [11, 11, 12, 12]
        assert batch.tokens[table[:2]].ravel().tolist() == TOKENS[:32]
        await decode.release(taken, [*TOKENS, *range(8)])
        assert pool.headers.lease_word(taken.lease_slot) == 0
        del batch
    report = await pager.report()
    assert report.idle_pages == 3 and report.free_pages == PAGE_COUNT - 3 and not report.leases
    for client in (prefill, decode):
        client.lock.close()


async def test_kill_9_and_restart_keep_the_cache_warm_and_the_leases(pager: Pager) -> None:
    worker = Client(pager, "worker", 21)
    first = await worker.open()
    done = await worker.admit(1, TOKENS, len(TOKENS))
    await worker.release(done, TOKENS)
    lease = await worker.admit(2, [*TOKENS[:32], 7, 8, 9], 48)
    assert lease.cached_tokens == 32
    await pager.end(signal.SIGKILL)
    await pager.start()
    again = await worker.open()
    assert again.pool_incarnation == first.pool_incarnation and again.epoch == first.epoch + 1
    held = HeldLease(
        lease=lease.lease, lease_slot=lease.lease_slot, key=lease.key, order=order_of(2),
        root=ROOT, granted_at=lease.granted_at, extents=pack_extents(table_of(lease)),
        tokens=pack([*TOKENS[:32], 7]),
    )  # fmt: skip
    declared = await pager.ask(
        Declare(worker="worker", incarnation=21, epoch=again.epoch, number=1, leases=[held]),
        Declared,
    )
    assert declared.lost == []
    report = await pager.report()
    assert [line.lease for line in report.leases] == [lease.lease]
    assert report.pinned_pages == 2 and report.draining_pages == 0
    await worker.release(lease, [*TOKENS[:32], 7, 8, 9])
    warm = await worker.admit(3, [*TOKENS, 1], 48)
    assert warm.cached_tokens == 32 and warm.granted_at > lease.granted_at
    await worker.release(warm, [])
    worker.lock.close()


async def test_a_pool_that_somebody_removed_is_made_anew_and_those_who_had_it_open_again(
    pager: Pager,
) -> None:
    here, later = Client(pager, "here", 61), Client(pager, "later", 62)
    first = await here.open()
    lease = await here.admit(1, TOKENS, 48)
    os.unlink(first.pool_path)
    assert await here.commit(lease, TOKENS) == 32, "who has it goes on"
    opened = await later.open()
    assert opened.pool_incarnation != first.pool_incarnation
    with PoolFile.attach(Path(opened.pool_path)) as pool:
        assert pool.superblock.incarnation == opened.pool_incarnation
    with pytest.raises(Stale):
        await here.commit(lease, TOKENS)
    assert (await here.open()).pool_incarnation == opened.pool_incarnation
    for client in (here, later):
        warm = await client.admit(client.incarnation, TOKENS, 48)
        await client.release(warm, TOKENS)
        client.lock.close()
    assert not (await pager.report()).leases


async def test_kill_9_keeps_what_has_a_time_to_live_until_that_is_over(pager: Pager) -> None:
    worker = Client(pager, "worker", 25)
    await worker.open()
    for number, ttl_s in ((1, 600), (2, 1)):
        tokens = [number, *TOKENS]
        await worker.release(
            await worker.admit(number, tokens, 48, CacheTerms(ttl_s=ttl_s)), tokens
        )
    await pager.end(signal.SIGKILL)
    await asyncio.sleep(1)  # nobody sees that the second is over
    await pager.start()
    again = await worker.open()
    await pager.ask(
        Declare(worker="worker", incarnation=25, epoch=again.epoch, number=1, leases=[]), Declared
    )
    for number, cached_tokens in ((1, 32), (2, 0)):
        lease = await worker.admit(10 + number, [number, *TOKENS], 48, CacheTerms(ttl_s=1))
        assert lease.cached_tokens == cached_tokens
        await worker.release(lease, [])
    worker.lock.close()


async def test_a_dead_worker_frees_its_pages_and_a_silent_one_is_revoked(pager: Pager) -> None:
    dead, silent = Client(pager, "dead", 31), Client(pager, "silent", 32)
    heard: asyncio.Queue[Message] = asyncio.Queue()

    def listen(delivery: Delivery) -> None:
        heard.put_nowait(codec.decode(delivery.data))

    subscription = await pager.bus.subscribe(subjects.worker("silent"), listen)
    await dead.open()
    await silent.open()
    await dead.admit(1, TOKENS, 48)
    lease = await silent.admit(2, TOKENS[::-1], 48)
    dead.lock.close()
    revoke = await asyncio.wait_for(heard.get(), 10)
    for _ in range(100):
        report = await pager.report()
        if report.draining_pages == 3:
            break
        await asyncio.sleep(0.05)
    assert report.held_pages == 0 and report.free_pages == PAGE_COUNT - 3
    assert isinstance(revoke, Revoke) and revoke.reason == "session_expired"
    with PoolFile.attach(pager.folder / "testhost.pool") as pool:
        assert pool.headers.lease_word(lease.lease_slot) == 0
        states = pool.headers.scan().batch.states
        assert [states[page] for page in table_of(lease)] == [HeaderState.DRAINING] * 3
        del states
    await pager.ask(AckRevoke(worker="silent", incarnation=32, leases=[lease.lease]), Ok)
    assert (await pager.report()).free_pages == PAGE_COUNT
    await pager.bus.unsubscribe(subscription)
    silent.lock.close()


async def test_cached_prefixes_are_told_under_keys_that_need_the_secret(pager: Pager) -> None:
    heard: asyncio.Queue[Message] = asyncio.Queue()

    def listen(delivery: Delivery) -> None:
        heard.put_nowait(codec.decode(delivery.data))

    subscription = await pager.bus.subscribe(subjects.pages("testhost"), listen)
    worker = Client(pager, "worker", 41)
    await worker.open()
    lease = await worker.admit(1, TOKENS, 48)
    await worker.release(lease, TOKENS)
    wanted = prefix_keys(SECRET.encode(), ROOT, np.array(TOKENS, np.uint32), PAGE_SIZE)
    listing = await pager.ask(SnapshotWanted(), PagesSnapshot)
    assert sorted(np.frombuffer(listing.keys, "<u8").tolist()) == sorted(wanted.tolist())
    event = await asyncio.wait_for(heard.get(), 5)
    assert isinstance(event, PagesChanged) and event.sequence == listing.sequence == 1
    assert event.stored == wanted.astype("<u8").tobytes() and event.removed == b""
    await pager.bus.unsubscribe(subscription)
    worker.lock.close()


async def test_who_may_not_have_a_session_is_told_why(pager: Pager) -> None:
    with pytest.raises(Stale, match="no pool yet"):
        await pager.report()
    worker = Client(pager, "worker", 51)
    worker.lock.close()
    with pytest.raises(Denied, match="worker-51 is not held"):
        await worker.open()
    worker.lock = HolderLock(pager.folder / "worker-51.lock")
    await worker.open()
    other = PoolSpec(layout_digest=b"m" * 32, page_size=PAGE_SIZE, page_bytes=PAGE_BYTES)
    with pytest.raises(Fault, match=f"{SPEC.layout_digest.hex()}.*{other.layout_digest.hex()}"):
        await worker.open(other)
    worker.lock.close()


async def test_a_second_pager_of_the_host_ends_and_names_the_first(
    pager: Pager, tmp_path: Path
) -> None:
    environ = pager.environ | {"PAGEMESH_POOL_DIR": str(tmp_path), "PAGEMESH_NAME": "another"}
    second = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pagemesh.cli", "serve", "pager", env=environ,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, said = await asyncio.wait_for(second.communicate(), 20)
    lines = said.decode().splitlines()
    assert second.returncode == 2 and len(lines) == 1
    assert lines[0].startswith("pagemesh pager: pager pager-test serves host testhost at ")
    assert lines[0].endswith("(--host)")


async def test_who_may_only_look_cannot_ask_for_anything_else(pager: Pager) -> None:
    looks, works = subjects.pager_report(pager.host), subjects.pager(pager.host)
    for subject, message in ((looks, SnapshotWanted()), (works, InspectPager())):
        with pytest.raises(Malformed, match="report subject"):
            await call(pager.bus, subject, message, PagesSnapshot, timeout_ms=5_000)
