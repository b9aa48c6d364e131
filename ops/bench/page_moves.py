"""How long a worker takes to copy pages for the pager: one process asks, another copies.

Host memory stands for a device's, so these are the costs of asking, of waking a thread of another
process and of copying twice through staging memory; the transfer over a GPU's bus comes on top.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from pagemesh.engine.cuda.device import INTERPRETER, SharedMaker
from pagemesh.engine.memory_box import MemoryBox
from pagemesh.kernels.native.locks import HolderLock
from pagemesh.pager.events import Holder
from pagemesh.pager.limits import PoolFacts
from pagemesh.pager.pages.runs import Run
from pagemesh.pager.storage.device_pages import DevicePages
from pagemesh.pager.storage.holders import Holders
from pagemesh.pager.storage.pool_memory import PoolMemory
from pagemesh.wire.pool_format import LOCK_SUFFIX, MEMORY_SUFFIX

NAME = "worker"
POOL_PAGES = 256
PAGE_COUNTS = (1, 8, 64)
TURNS = 40


def serve(folder: Path) -> None:
    """Act as the worker until standard input ends."""
    lock = HolderLock(folder / f"{NAME}{LOCK_SUFFIX}")
    with contextlib.closing(MemoryBox(SharedMaker(), folder / f"{NAME}{MEMORY_SUFFIX}")):
        print("ready", flush=True)
        sys.stdin.read()
    lock.close()


@contextlib.contextmanager
def _worker(folder: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "ops.bench.page_moves", str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        yield
        process.stdin.close()


def _median_ms(work: Callable[[], object]) -> float:
    times = []
    for _ in range(TURNS):
        began = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - began))
    return round(statistics.median(times), 2)


def time_moves(facts: PoolFacts) -> list[dict[str, float]]:
    """Milliseconds of copying pages of the size in ``facts`` out, and back in."""
    facts = replace(facts, page_count=POOL_PAGES, place=INTERPRETER)
    with tempfile.TemporaryDirectory() as name, _worker(Path(name)):
        holders = Holders(Path(name), "bench")
        holders.remember(Holder(1, NAME, NAME))
        with contextlib.closing(PoolMemory(Path(name))) as memory, asyncio.Runner() as runner:
            memory.make(facts, NAME)
            pages = DevicePages(facts, memory, holders)
            page = np.ones(facts.page_bytes, np.uint8)

            def fill(count: int) -> None:
                filling = pages.filling(Run(0, count), 1)
                for at in range(count):
                    filling.row(at)[:] = page.data
                filling.settle(count)

            found = [
                {
                    "pages": count,
                    "out_ms": _median_ms(lambda n=count: runner.run(pages.take(Run(0, n)))),  # type: ignore[misc]
                    "in_ms": _median_ms(lambda n=count: fill(n)),  # type: ignore[misc]
                }
                for count in PAGE_COUNTS
            ]
            pages.close()
        holders.close()
    return found


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
