"""What does the pager cost per request, and does it grow with the size of the cache?

    python -m ops.bench.bench_pager [--out ops/bench/results/pager.json]
    python -m ops.bench.bench_pager --memory [--out PATH]

Drives the production core through ``pager_adapter``, on one thread. The first three quarters of
each prompt are cached and the rest is new; each is admitted, extended by a page, committed and,
16 requests later, released. Times are those of all four calls, including making the messages, in
microseconds: of the core alone, of the core with LRU instead of the default eviction policy, and
with every header and lease word written to a pool file:

    small       75,000 cached pages, nothing is evicted
    large       1,000,000 cached pages, nothing is evicted
    evicting    a pool of 75,000 pages that is always full
    parting     1,000,000 cached pages; each request diverges in the middle of an edge that no
                request has split before
    short       1,024-token prompts, 768 of them cached, in the small pool

``evict 128`` times only the admission of 128 new pages to a pool full of 800,000 cached ones.

Memory is the growth of a separate process that fills a pool, without the prompts that the benchmark
keeps to send again, and without the headers, which are in the pool file (``header_bytes`` a page).
Part of it is the same for every pool and part is per edge, so small pools and short prompts take
most per page. ``brief`` is filled with prompts of 512 tokens, and is not timed. ``evicting`` and
``brief`` are measured again after 20,000 requests with evictions (``worn``): by then all records of
past pages and leases have reached their limits, and further requests add next to nothing. In a pool
of 75,000 pages these take about 2 MB: 0.3 for marks (``departed``), up to 0.5 in a larger pool; 0.5
for the records of the default policy (``ghosts``), up to 2 with many short edges; 0.1 for ended
leases; the rest is memory that the allocator keeps.

Tokens are generated anew before each request, as if they came off the wire, which leaves the
processor's caches as cold as those of a service. On a machine with other load, the fifth percentile
says more about the code than the median; the cost of an empty Python call, measured in the same
turns, shows how slow the machine was (25 ns when it is quiet).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import resource
import statistics
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ops.bench.aims import of_aim
from ops.bench.hardware import describe
from ops.bench.pager_adapter import LruPagerAdapter, PagerAdapter, PublishingPagerAdapter, Request

from pagemesh.pager import IS_COMPILED
from pagemesh.wire.pool_format import PoolFormat

PAGE_SIZE = 16
LONG_TOKENS, SHORT_TOKENS = 8_192, 1_024
WINDOW_REQUESTS = 16
HOT_PREFIXES = 60
TURNS, TURN_REQUESTS = 12, HOT_PREFIXES * 2
EVICTIONS, CALLS = 300, 2_000
AIMS_US = {"core": 60.0, "lru": 60.0, "published": 100.0}
AIM_RATIO, AIM_BYTES = 1.5, 120.0
HEADER_BYTES = PoolFormat(1, PAGE_SIZE, 64).header_bytes


@dataclass(frozen=True, slots=True)
class Load:
    """A pool of ``pool_pages`` that holds ``cached_pages`` before anything is timed."""

    name: str
    pool_pages: int
    cached_pages: int
    prompt_tokens: int = LONG_TOKENS
    prefix_count: int = HOT_PREFIXES
    """Number of cached prompts whose prefixes are requested in turn."""


KINDS = {"core": PagerAdapter, "lru": LruPagerAdapter, "published": PublishingPagerAdapter}
LOADS = (
    Load("large", 1_200_000, 1_000_000),
    Load("small", 275_000, 75_000),
    Load("evicting", 75_000, 75_000),
    Load("parting", 1_200_000, 1_000_000, prefix_count=TURNS * TURN_REQUESTS),
    Load("short", 275_000, 75_000, SHORT_TOKENS),
)
FILLED = tuple(load for load in LOADS if load.name != "parting")
BRIEF = Load("brief", 275_000, 75_000, 512)
WORN = (Load("evicting", 75_000, 75_000), Load("brief", 75_000, 75_000, 512))
WORN_REQUESTS = 20_000


class Driver:
    """Generates prompts and runs requests through an adapter."""

    def __init__(self, adapter: PagerAdapter, dice: np.random.Generator) -> None:
        self._adapter = adapter
        self._dice = dice
        self._open: deque[Request] = deque()

    def tokens(self, count: int) -> bytes:
        return _draw(self._dice, count)

    def fill(self, page_count: int, prompt_tokens: int) -> None:
        """Cache prompts that are never requested again until ``page_count`` pages are cached."""
        while (short := page_count - self._adapter.cached_pages()) > 0:
            self.request(self.tokens(min(PAGE_SIZE * short, prompt_tokens)))
        self.drain()

    def request(self, tokens: bytes) -> tuple[int, float]:
        """Run one request and the release that is due; returns its cached pages and the
        microseconds of both."""
        adapter, clock = self._adapter, time.perf_counter_ns
        start = clock()
        request = adapter.prepare(tokens)
        cached_pages = adapter.match(request)
        adapter.alloc(request)
        adapter.commit(request)
        self._open.append(request)
        if len(self._open) > WINDOW_REQUESTS:
            adapter.release(self._open.popleft())
        return cached_pages, (clock() - start) / 1e3

    def drain(self) -> None:
        while self._open:
            self._adapter.release(self._open.popleft())


class Subject:
    """An adapter with a pool filled according to ``load``, and the times of its requests."""

    def __init__(self, kind: type[PagerAdapter], load: Load) -> None:
        self._load = load
        self._prefix_tokens = load.prompt_tokens * 3 // 4
        self._suffix_tokens = load.prompt_tokens - self._prefix_tokens
        dice = np.random.default_rng(11)
        self._prefixes = [_draw(dice, self._prefix_tokens) for _ in range(load.prefix_count)]
        self._turns = itertools.cycle(self._prefixes)
        gc.collect()
        self._before_bytes = _resident_bytes()
        self._adapter = kind(load.pool_pages, PAGE_SIZE)
        self._driver = driver = Driver(self._adapter, dice)
        hot_pages = load.prefix_count * load.prompt_tokens // PAGE_SIZE
        driver.fill(load.cached_pages - hot_pages, load.prompt_tokens)
        for prefix in self._prefixes:
            driver.request(prefix + driver.tokens(self._suffix_tokens))
        driver.drain()
        self._times_us: list[float] = []

    def bytes_a_page(self) -> float:
        """Memory per cached page now. Only meaningful in a process that had no other subject."""
        self._driver.drain()
        gc.collect()
        return (_resident_bytes() - self._before_bytes) / self._adapter.cached_pages()

    def turn(self, request_count: int) -> None:
        """Time ``request_count`` more requests, each of which hits its prefix."""
        for prefix in itertools.islice(self._turns, request_count):
            tokens = prefix + self._driver.tokens(self._suffix_tokens)
            cached_pages, spent_us = self._driver.request(tokens)
            self._times_us.append(spent_us)
            assert cached_pages == self._prefix_tokens // PAGE_SIZE, f"{self._load.name} missed"

    def forget_times(self) -> None:
        """Drop the times of the turns so far."""
        self._times_us.clear()

    def result(self) -> dict[str, float]:
        self._driver.drain()
        assert self._adapter.free_pages() == self._load.pool_pages, "pages leaked"
        return {
            "p5_us": float(np.percentile(self._times_us, 5)),
            "p50_us": statistics.median(self._times_us),
            "p99_us": float(np.percentile(self._times_us, 99)),
        }


def measure(kind: type[PagerAdapter]) -> dict[str, dict[str, float]]:
    """Percentiles of each load. Loads take turns, so that a busy machine slows all alike."""
    subjects = {load.name: Subject(kind, load) for load in LOADS}
    gc.freeze()
    calls_ns: list[float] = []
    for _ in range(TURNS):
        for subject in subjects.values():
            subject.turn(TURN_REQUESTS)
            calls_ns.append(_call_ns())
    gc.unfreeze()
    found = {name: subject.result() for name, subject in subjects.items()}
    return {**found, "machine": {"python_call_ns": statistics.median(calls_ns)}}


def measure_bytes(load: Load, request_count: int = 0) -> float:
    """Bytes per cached page of the core alone, in this process, after ``request_count`` more
    requests."""
    # What is imported, loaded and made once, also by first requests, is not the index's memory.
    driver = Driver(PagerAdapter(64, PAGE_SIZE), np.random.default_rng(11))
    for _ in range(1_000):
        driver.request(driver.tokens(PAGE_SIZE))
    driver.drain()
    subject = Subject(PagerAdapter, load)
    for _ in range(request_count // TURN_REQUESTS):
        subject.turn(TURN_REQUESTS)
        subject.forget_times()
    return subject.bytes_a_page()


def measure_memory() -> dict[str, float]:
    """Bytes per cached page in each load. Each runs in a process of its own: memory that one gave
    back to the allocator would hide what the next takes."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:
        filled = {load.name: fresh.apply(measure_bytes, (load,)) for load in (*FILLED, BRIEF)}
        worn = {
            f"{load.name}, worn": fresh.apply(measure_bytes, (load, WORN_REQUESTS)) for load in WORN
        }
    return filled | worn


def measure_eviction(page_count: int = 800_000) -> float:
    """Median microseconds of an admission of 128 pages to a pool that the cache fills."""
    adapter = PagerAdapter(page_count, PAGE_SIZE)
    driver = Driver(adapter, np.random.default_rng(11))
    driver.fill(page_count - LONG_TOKENS // PAGE_SIZE, LONG_TOKENS)
    times: list[float] = []
    while len(times) < EVICTIONS:
        request = adapter.prepare(driver.tokens(128 * PAGE_SIZE))
        evicted_pages = adapter.core.books.pool.evicted
        start = time.perf_counter_ns()
        adapter.match(request)
        spent_us = (time.perf_counter_ns() - start) / 1e3
        adapter.commit(request)
        adapter.release(request)
        if adapter.core.books.pool.evicted > evicted_pages:
            times.append(spent_us)
    return statistics.median(times)


def _call_ns() -> float:
    """Nanoseconds of an empty Python call, which show how slow the machine is now."""
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        _nothing()
    return (time.perf_counter_ns() - start) / CALLS


def _nothing() -> None:
    pass


def _draw(dice: np.random.Generator, count: int) -> bytes:
    """``count`` random packed tokens."""
    return dice.integers(0, 150_000, count, np.uint32).tobytes()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", action="store_true", help="measure nothing else")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    memory = measure_memory()
    tell_memory(memory)
    report: dict[str, object] = {
        "machine": describe(),
        "is_compiled": IS_COMPILED,
        "index_bytes_a_cached_page": memory,
    }
    report |= {"header_bytes": HEADER_BYTES} if options.memory else measure_times()
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def tell_memory(memory: dict[str, float]) -> None:
    """Print the bytes per cached page, and the aim."""
    index_bytes = max(memory.values())
    by_load = ", ".join(f"{name}: {value:.0f}" for name, value in memory.items())
    print(
        f"index: at most {index_bytes:.0f} bytes a cached page, {of_aim(index_bytes, AIM_BYTES)} "
        f"({by_load}); headers {HEADER_BYTES} beside it"
    )


def measure_times() -> dict[str, object]:
    """Measure every kind, load by load; prints results as they come."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, kind in KINDS.items():
        found = results[name] = measure(kind)
        call_ns = found["machine"]["python_call_ns"]
        print(f"{name:10} an empty Python call took {call_ns:.0f} ns meanwhile")
        for load, values in [(load.name, found[load.name]) for load in LOADS]:
            p50_us = values["p50_us"]
            print(
                f"{name:10} {load:9} p5 {values['p5_us']:7.1f} us, p50 {p50_us:7.1f}, "
                f"p99 {values['p99_us']:7.1f}",
                end="\n" if load == "short" else "; ",
            )
            if load == "short":
                continue  # the aims are of 8,192 tokens
            over = p50_us / found["small"]["p50_us"]
            aims = f"({of_aim(over, AIM_RATIO)}), {of_aim(p50_us, AIMS_US[name])}"
            print(f"{over:.2f} of small {aims} for 8,192 tokens")
    evict_us = measure_eviction()
    print(f"evict 128 of 800,000 and admit: {evict_us:.1f} us")
    return {
        "aims": {"p50_us": AIMS_US, "ratio": AIM_RATIO, "bytes_a_cached_page": AIM_BYTES},
        "results": results,
        "evict_128_us": evict_us,
        "header_bytes": HEADER_BYTES,
    }


if __name__ == "__main__":
    main()
