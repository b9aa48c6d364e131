"""Workers that only admit and release: the load of ``bench_pager_bus``.

Each worker has a connection, a lock and a session of its own, and several sequences in flight.
A sequence admits a prompt whose first three quarters are shared with others, and releases it as
filled, so that the rest is committed. Its messages are exactly those of a worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from ops.bench.cpu import cpu_s

from pagemesh.kernels.native.locks import HolderLock
from pagemesh.runtime.bus import Bus
from pagemesh.runtime.ids import new_incarnation
from pagemesh.runtime.rpc import call
from pagemesh.runtime.settings import BusConfig
from pagemesh.wire import subjects
from pagemesh.wire.messages import Ok, Order, SequenceKey
from pagemesh.wire.pager_messages import (
    Admit,
    Fill,
    Granted,
    OpenSession,
    PoolSpec,
    Release,
    SessionOpened,
)

HOST = "bench"
ROOT = bytes(range(32))
SPEC = PoolSpec(layout_digest=ROOT, page_size=16, page_bytes=64)
PREFIX_COUNT = 16
TIMEOUT_MS = 20_000


@dataclass(frozen=True, slots=True)
class Load:
    """``worker_count`` workers, each with ``in_flight`` sequences of ``prompt_tokens``."""

    prompt_tokens: int
    worker_count: int = 8
    in_flight: int = 16

    @property
    def shared_tokens(self) -> int:
        return self.prompt_tokens * 3 // 4

    def prompts(self, seed: int) -> Iterator[bytes]:
        """An endless stream of packed prompts; all seeds share the prefixes."""
        prefixes = np.random.default_rng(7).integers(
            0, 1 << 16, (PREFIX_COUNT, self.shared_tokens), np.uint32
        )
        draw = np.random.default_rng(seed)
        while True:
            rest = draw.integers(0, 1 << 16, self.prompt_tokens - self.shared_tokens, np.uint32)
            yield prefixes[draw.integers(PREFIX_COUNT)].tobytes() + rest.tobytes()


@dataclass(slots=True)
class Seen:
    """What the workers measured in some time."""

    admitted: int = 0
    cached_tokens: int = 0
    admit_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)
    """CPU seconds, by process."""

    @property
    def per_second(self) -> float:
        return self.admitted / self.seconds


class LoadWorker:
    """One worker, by name."""

    def __init__(self, bus: Bus, folder: Path, name: str) -> None:
        self._bus, self._name, self._incarnation = bus, name, new_incarnation()
        self._lock_name = f"{name}-{self._incarnation:x}"
        self.lock = HolderLock(folder / f"{self._lock_name}.lock")
        self._epoch = self._number = 0

    async def open(self) -> None:
        message = OpenSession(
            worker=self._name, incarnation=self._incarnation, role="prefill",
            lock_name=self._lock_name, pool=SPEC,
        )  # fmt: skip
        to = subjects.pager(HOST)
        opened = await call(self._bus, to, message, SessionOpened, timeout_ms=TIMEOUT_MS)
        self._epoch = opened.epoch

    async def serve(self, prompts: Iterator[bytes], until_s: float, seen: Seen) -> None:
        """Admit and release one prompt after the other."""
        while time.perf_counter() < until_s:
            await self.once(next(prompts), seen)

    async def once(self, tokens: bytes, seen: Seen) -> None:
        self._number += 1
        request = f"{self._incarnation:016x}{self._number:016x}"
        key, count = SequenceKey(request=request, attempt=1, choice=0), len(tokens) // 4
        arrival_us = time.monotonic_ns() // 1_000
        admit = Admit(
            key=key, order=Order(priority=0, arrival_us=arrival_us, request=request, choice=0),
            worker=self._name, incarnation=self._incarnation, epoch=self._epoch, root=ROOT,
            tokens=tokens, reserve_tokens=count, deadline_ms=TIMEOUT_MS,
        )  # fmt: skip
        started_s, to = time.perf_counter(), subjects.pager(HOST)
        granted = await call(self._bus, to, admit, Granted, timeout_ms=TIMEOUT_MS)
        seen.admit_ms.append(1e3 * (time.perf_counter() - started_s))
        seen.admitted += 1
        seen.cached_tokens += granted.cached_tokens
        release = Release(
            key=key, worker=self._name, incarnation=self._incarnation, lease=granted.lease,
            fill=Fill(filled_tokens=count, first_token=count),
        )  # fmt: skip
        await call(self._bus, to, release, Ok, timeout_ms=TIMEOUT_MS)


async def drive(
    url: str, folder: Path, load: Load, seconds: float, pids: Mapping[str, int]
) -> Seen:
    """Run all workers of ``load`` for ``seconds``, once the shared prefixes are cached; ``pids``
    are the processes whose CPU time is measured."""
    async with AsyncExitStack() as stack:
        workers = []
        for number in range(load.worker_count):
            name = f"bench-{number}"
            bus = await stack.enter_async_context(
                Bus.connect(BusConfig(url=url), role="prefill", name=name, gathers=True)
            )
            workers.append(LoadWorker(bus, folder, name))
            stack.callback(workers[-1].lock.close)
            await workers[-1].open()
        warm, seen = Seen(), Seen()
        first = load.prompts(0)
        for _ in range(8 * PREFIX_COUNT):
            await workers[0].once(next(first), warm)
        before_s, started_s = cpu_s(pids), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number, worker in enumerate(workers):
                prompts = load.prompts(1 + number)
                for _ in range(load.in_flight):
                    group.create_task(worker.serve(prompts, started_s + seconds, seen))
        seen.seconds = time.perf_counter() - started_s
        seen.cpu_s = {name: after_s - before_s[name] for name, after_s in cpu_s(pids).items()}
    return seen
