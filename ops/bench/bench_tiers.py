"""What does a disk tier cost a request that does not need it, and how fast does it return pages?

    python -m ops.bench.bench_tiers [--folder DIR] [--out ops/bench/results/tiers.json]

    core       microseconds of a whole request in the pager's core (as in ``bench_pager``): 8,192
               tokens, 6,144 of them cached, with and without a tier; without eviction (``miss``:
               each searches the disk in vain for what follows its match) and under constant
               eviction (``evict``: each request stores 128 pages; the disk answers at once)
    bursts     8 prompts of 62 pages evict one another from a pool of 160 pages: the share that is
               found again, in the pool or on disk, by the number of pages that may wait to be
               written; ``default``: the pager's limit for pages of 4 MiB
    bytes      GB/s of writing and reading pages of three sizes through ``disk_file``, checksums and
               seals included, in a folder on the disk in question; ``cold`` after the system was
               asked to drop the file from its page cache, ``memory`` if all pages are kept in the
               pager's memory, too; ``moves``: milliseconds in which a worker copies that many pages
               out of the pool of a device, or into it (``page_moves``)
    restart    seconds until 100,000 records are listed and can be found

``break_even`` is the prefill speed, in tokens a second, below which reading a page of that size is
faster than computing it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from ops.bench.bench_pager import HOT_PREFIXES, PAGE_SIZE, Load, Subject
from ops.bench.hardware import describe
from ops.bench.page_moves import time_moves
from ops.bench.pager_adapter import EPOCH, INCARNATION, PAGE_BYTES, WORKER, PagerAdapter
from ops.bench.pager_adapter import ROOT as CORE_ROOT

from pagemesh.pager.events import Answer, Asked
from pagemesh.pager.limits import PagerLimits, PoolFacts
from pagemesh.pager.pages.runs import Run
from pagemesh.pager.storage.disk_file import DiskFile, DiskPlace
from pagemesh.pager.storage.page_bytes import MappedPages
from pagemesh.pager.tiers.chain_keys import chain_keys, root_chain
from pagemesh.pager.tiers.disk_tier import DiskTier
from pagemesh.pager.tiers.tier_events import (
    DiskContents,
    DiskFound,
    FoundRecords,
    LoadPages,
    PagesWritten,
    StorePages,
)
from pagemesh.wire.messages import Message
from pagemesh.wire.pager_messages import Admit

ROOT, LAYOUT, SECRET, CHAIN_KEY = b"r" * 32, b"l" * 32, b"secret" * 8, b"chains" * 5
TURNS, TURN_REQUESTS = 24, HOT_PREFIXES
LOADS = (Load("miss", 275_000, 40_000), Load("evict", 75_000, 75_000))
SLOTS = 200_000
IO_BYTES = 256 << 20
IO_PAGE_BYTES = (64 << 10, 720 << 10, 4 << 20)
BURST_PAGE_BYTES, BURST_POOL_PAGES, BURST_PROMPT_PAGES, BURST_PROMPTS = 4 << 20, 160, 62, 8
BURST_STAGED_PAGES = (16, 64, 128)
RESTART_RECORDS = 100_000
BATCH_PAGES = 64


class DiskPagerAdapter(PagerAdapter):
    """The core with a disk that performs commands at once."""

    name = "pagemesh, with a disk tier"

    def __init__(self, page_count: int, page_size: int) -> None:
        super().__init__(page_count, page_size)
        nothing = FoundRecords(
            np.empty(0, np.uint32),
            np.empty(0, np.uint64),
            np.empty(0, np.uint64),
            np.empty(0, np.intp),
            (),
        )
        facts, contents = self.core.books.facts, DiskContents(SLOTS, nothing, 0, CHAIN_KEY)
        tier = DiskTier(facts, contents, self.limits.staged_pages_max(facts))
        self.core.handle(DiskFound(tier, 0), 1_000)

    def ask(self, message: Message) -> Message:
        answer: Message | None = None
        stored: list[StorePages] = []
        for command in self.core.handle(Asked(None, message), 1_000):
            if type(command) is Answer:
                answer = command.message
            elif type(command) is StorePages:
                stored.append(command)
        for store in stored:
            self.core.handle(PagesWritten(store.slots), 1_000)
        assert answer is not None
        return answer


def time_core() -> dict[str, dict[str, float]]:
    """Time the core; subjects take turns, so that a busy machine slows all alike."""
    kinds = {"off": PagerAdapter, "on": DiskPagerAdapter}
    subjects = {
        (load.name, name): Subject(kind, load) for load in LOADS for name, kind in kinds.items()
    }
    for _ in range(TURNS):
        for subject in subjects.values():
            subject.turn(TURN_REQUESTS)
    found: dict[str, dict[str, float]] = {load.name: {} for load in LOADS}
    for (load, name), subject in subjects.items():
        found[load][f"{name}_us"] = round(subject.result()["p50_us"], 1)
    for times in found.values():
        times["ratio"] = round(times["on_us"] / times["off_us"], 3)
    return found


class BurstPagerAdapter(DiskPagerAdapter):
    """The core with a disk, to which up to ``staged_pages`` may wait to be written."""

    def __init__(self, staged_pages: int) -> None:
        self.limits = PagerLimits(staged_bytes_max=staged_pages * PAGE_BYTES)
        super().__init__(BURST_POOL_PAGES, PAGE_SIZE)

    def found_pages(self, tokens: bytes) -> int:
        """How many pages of ``tokens`` are found, in the pool and after these on disk."""
        forest, request = self.core.books.forest, self.prepare(tokens)
        message = Admit(
            key=request.key, order=request.order, worker=WORKER, incarnation=INCARNATION,
            epoch=EPOCH, root=CORE_ROOT, tokens=tokens, reserve_tokens=request.token_count,
            deadline_ms=60_000,
        )  # fmt: skip
        root = forest.trees[CORE_ROOT].root
        match = forest.match(root, tokens, (request.token_count - 1) // PAGE_SIZE)
        on_disk = self.core.tiers.find(match, message)
        return match.pages + (0 if on_disk is None else len(on_disk.records))


def find_again(staged_pages: int) -> dict[str, float]:
    """Admit prompts one after the other; returns how much of them is found afterwards."""
    dice, adapter = np.random.default_rng(7), BurstPagerAdapter(staged_pages)
    count = BURST_PROMPT_PAGES * PAGE_SIZE + 1
    prompts = [dice.integers(0, 1 << 17, count, np.uint32).tobytes() for _ in range(BURST_PROMPTS)]
    for prompt in prompts:
        request = adapter.prepare(prompt)
        adapter.match(request)
        adapter.commit(request)
        adapter.release(request)
    disk = adapter.core.books.disk
    assert disk is not None
    found = sum(map(adapter.found_pages, prompts))
    return {
        "staged_pages": disk.staged_pages_max,
        "stored": disk.counts.stored,
        "not_stored": disk.counts.not_stored,
        "found_share": round(found / (BURST_PROMPTS * BURST_PROMPT_PAGES), 3),
    }


def time_bursts() -> dict[str, dict[str, float]]:
    """The shares found again, by the number of pages that may wait."""
    facts = replace(_facts(BURST_PAGE_BYTES), page_count=BURST_POOL_PAGES)
    found = {f"{pages}": find_again(pages) for pages in BURST_STAGED_PAGES}
    return found | {"default": find_again(PagerLimits().staged_pages_max(facts))}


def _facts(page_bytes: int) -> PoolFacts:
    return PoolFacts("bench", 1, 1, BATCH_PAGES, PAGE_SIZE, page_bytes, LAYOUT, "/nowhere")


def _stores(count: int, dice: np.random.Generator) -> list[StorePages]:
    """Prompts of ``BATCH_PAGES`` pages, ``count`` pages in all."""
    stores = []
    for first in range(0, count, BATCH_PAGES):
        tokens = dice.integers(0, 1 << 17, BATCH_PAGES * PAGE_SIZE, np.uint32).tobytes()
        chains = chain_keys(root_chain(CHAIN_KEY, ROOT), tokens, 0, len(tokens), 4 * PAGE_SIZE)
        pages = Run(0, BATCH_PAGES)
        slots = tuple(range(first, first + BATCH_PAGES))
        stores.append(StorePages(pages, slots, tuple(pages), tuple(chains), ROOT, tokens))
    return stores


def time_bytes(folder: Path, page_bytes: int) -> dict[str, Any]:
    """GB/s of writing and reading, and the prefill speeds that these are worth."""
    dice = np.random.default_rng(5)
    facts = _facts(page_bytes)
    place = DiskPlace(folder, f"io-{page_bytes}", 2 * IO_BYTES, SECRET)
    file, _ = DiskFile.open(place, facts)
    kept, _ = DiskFile.open(replace(place, host="kept", memory_bytes=2 * IO_BYTES), facts)
    stores = _stores(IO_BYTES // page_bytes, dice)
    pages = dice.integers(0, 256, (BATCH_PAGES, page_bytes), np.uint8)
    total = len(stores) * BATCH_PAGES * page_bytes

    def write() -> None:
        for store in stores:
            file.store(store, pages)

    write_s = _seconds(write)
    loads = [LoadPages(1, store.pages, store.slots, ROOT, store.tokens, 0, 0) for store in stores]
    target = MappedPages(facts, np.zeros_like(pages))

    def read(file: DiskFile, memory_count: int = 0) -> None:
        for load in loads:
            row = target.filling(load.pages).row
            assert file.load(load, row, lambda: False)[:3] == (BATCH_PAGES, None, memory_count)

    warm_s = _seconds(lambda: read(file))
    for store in stores:
        kept.store(store, pages)
    memory_s = _seconds(lambda: read(kept, BATCH_PAGES))
    kept.close()
    descriptor = os.open(folder / f"io-{page_bytes}.disk.pages", os.O_RDWR)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    cold_s = _seconds(lambda: read(file))
    os.close(descriptor)
    file.close()
    return {
        "page_bytes": page_bytes,
        "write_gb_s": round(total / write_s / 1e9, 2),
        "read_warm_gb_s": round(total / warm_s / 1e9, 2),
        "read_cold_gb_s": round(total / cold_s / 1e9, 2),
        "read_memory_gb_s": round(total / memory_s / 1e9, 2),
        "moves": time_moves(facts),
        "break_even_tokens_s": round(total / cold_s / page_bytes * PAGE_SIZE),
    }


def time_restart(folder: Path) -> dict[str, float]:
    """Reopen a tier of many small pages."""
    dice = np.random.default_rng(6)
    facts = _facts(64)
    place = DiskPlace(folder, "restart", RESTART_RECORDS * (64 + 128), SECRET)
    file, _ = DiskFile.open(place, facts)
    pages = np.zeros((BATCH_PAGES, 64), np.uint8)
    for store in _stores(RESTART_RECORDS // BATCH_PAGES * BATCH_PAGES, dice):
        file.store(store, pages)
    file.close()
    began = time.perf_counter()
    file, found = DiskFile.open(place, facts)
    scanned = time.perf_counter()
    tier = DiskTier(facts, found, 1)
    built = time.perf_counter()
    file.close()
    return {
        "records": tier.page_count,
        "scan_s": round(scanned - began, 2),
        "index_s": round(built - scanned, 2),
    }


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--folder", type=Path, default=Path("/var/tmp"),  # /tmp is memory on some systems
        help="where to write, on a disk; default: /var/tmp",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="write JSON there")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        result = {
            "hardware": describe(),
            "core": time_core(),
            "bursts": time_bursts(),
            "bytes": [time_bytes(folder, page_bytes) for page_bytes in IO_PAGE_BYTES],
            "restart": time_restart(folder),
        }
    text = json.dumps(result, indent=1)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
