"""The disk tier with real processes: pages that were evicted come back, also after the machine
was switched off, and what is damaged is computed again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.integration.mesh import Mesh
from tests.integration.test_pager_service import (
    PAGE_BYTES,
    PAGE_COUNT,
    PAGE_SIZE,
    ROOT,
    Client,
    Pager,
    pool_folder,
)
from tests.integration.tiny_model import write_tiny_llama
from tests.unit.pager.rig import key_of, order_of, table_of

from pagemesh.kernels.native.pool_file import PoolFile
from pagemesh.pager.tiers.damage import DAMAGED_LOADS_MAX
from pagemesh.runtime.bus import Bus
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.runtime.rpc import call
from pagemesh.wire import subjects
from pagemesh.wire.pager_messages import Admit, Granted, Queued
from pagemesh.wire.pager_reports import PagerReport
from pagemesh.wire.tokens import pack

__all__ = ["pool_folder"]
PROMPT = list(range(100, 100 + 4 * PAGE_SIZE + 5))
FULL_PAGES = 4


@pytest.fixture
def disk_folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def blocked_folder(disk_folder: Path) -> Path:
    """Where no folder can be made."""
    disk_folder.write_text("a file is in the way")
    return disk_folder


@pytest.fixture
async def pager(
    shared_nats_server: NatsServer, bus: Bus, pool_folder: Path, disk_folder: Path,
    no_stray_processes: None,
) -> AsyncIterator[Pager]:  # fmt: skip
    made = Pager(shared_nats_server.url, pool_folder, bus)
    made.environ |= {"PAGEMESH_DISK_DIR": str(disk_folder), "PAGEMESH_DISK_BYTES": "1MiB"}
    await made.start()
    yield made
    assert await made.end() == 0


class Reader(Client):
    """A worker that can wait for its pages."""

    async def admit_soon(self, number: int, tokens: list[int]) -> Granted:
        """The grant, asked for until it is there."""
        assert self.opened is not None
        message = Admit(
            key=key_of(number), order=order_of(number), worker=self.name,
            incarnation=self.incarnation, epoch=self.opened.epoch, root=ROOT,
            tokens=pack(tokens), reserve_tokens=len(tokens), deadline_ms=10_000,
        )  # fmt: skip
        async with asyncio.timeout(20):
            while True:
                subject = subjects.pager(self.pager.host)
                answer = await call(
                    self.pager.bus, subject, message, Granted, Queued, timeout_ms=5_000
                )
                if isinstance(answer, Granted):
                    return answer
                await asyncio.sleep(0.02)

    @contextlib.contextmanager
    def rows(self) -> Iterator[np.ndarray]:
        """The pool's pages: uint8 [PAGE_COUNT, PAGE_BYTES]."""
        assert self.opened is not None
        with PoolFile.attach(Path(self.opened.pool_path)) as pool:
            yield pool.pages.reshape(-1, PAGE_BYTES)

    def bytes_of(self, granted: Granted) -> np.ndarray:
        """uint8 [FULL_PAGES, PAGE_BYTES] of its first pages."""
        with self.rows() as rows:
            pages: np.ndarray = rows[table_of(granted)[:FULL_PAGES]]
            return pages.copy()

    async def compute(self, number: int, tokens: list[int]) -> np.ndarray:
        """Fill and cache ``tokens``; what was written into their full pages."""
        granted = await self.admit_soon(number, tokens)
        content = np.random.default_rng(number).integers(0, 256, (FULL_PAGES, PAGE_BYTES), np.uint8)
        with self.rows() as rows:
            rows[table_of(granted)[:FULL_PAGES]] = content
        await self.release(granted, tokens)
        return content

    async def flood(self, number: int) -> None:
        """Want the whole pool for a moment, so that all that is cached is evicted."""
        lease = await self.admit(number, [number], PAGE_COUNT * PAGE_SIZE)
        await self.release(lease, [])


async def reported(pager: Pager, is_so: Callable[[PagerReport], bool]) -> None:
    """Wait until the pager's report says it."""
    async with asyncio.timeout(20):
        while True:
            if is_so(await pager.report()):
                return
            await asyncio.sleep(0.02)


async def disk_pages(pager: Pager, wanted: int) -> None:
    """Wait until the tier is on and has so many pages, and none is being written."""
    await reported(pager, lambda report: bool(report.disk_slots) and report.disk_pages == wanted)


async def goes_on_without_disk(worker: Reader) -> None:
    """The tier is off once something was to be written, and what was is computed again."""
    await worker.compute(1, PROMPT)
    await worker.flood(900)
    await reported(worker.pager, lambda report: not report.disk_slots)
    granted = await worker.admit_soon(2, PROMPT)
    assert granted.cached_tokens == 0
    await worker.release(granted, PROMPT)
    worker.lock.close()


async def computed_and_evicted(pager: Pager) -> np.ndarray:
    worker = Reader(pager, "prefill", 11)
    await worker.open()
    await disk_pages(pager, 0)
    content = await worker.compute(1, PROMPT)
    await worker.flood(900)
    await disk_pages(pager, FULL_PAGES)
    worker.lock.close()
    return content


async def restarted_without_its_pool(pager: Pager, page_count: int = FULL_PAGES) -> Reader:
    """As after a reboot: the process and its shared memory are gone."""
    await pager.end(signal.SIGTERM)
    for path in pager.folder.glob("*.pool"):
        path.unlink()
    await pager.start()
    worker = Reader(pager, "prefill", 12)
    await worker.open()
    await disk_pages(pager, page_count)
    return worker


async def test_what_was_evicted_is_read_back_as_it_was(pager: Pager) -> None:
    content = await computed_and_evicted(pager)
    worker = Reader(pager, "decode", 13)
    await worker.open()
    granted = await worker.admit_soon(2, PROMPT)
    assert granted.cached_tokens == granted.waterfall.fetched_tokens == FULL_PAGES * PAGE_SIZE
    assert np.array_equal(worker.bytes_of(granted), content)
    await worker.release(granted, PROMPT)
    worker.lock.close()


async def test_it_survives_the_process_and_the_pool(pager: Pager) -> None:
    content = await computed_and_evicted(pager)
    worker = await restarted_without_its_pool(pager)
    granted = await worker.admit_soon(2, PROMPT)
    assert granted.cached_tokens == FULL_PAGES * PAGE_SIZE
    assert np.array_equal(worker.bytes_of(granted), content)
    report = await pager.report()
    assert report.held_pages + report.pinned_pages == 5
    await worker.release(granted, PROMPT)
    worker.lock.close()


async def test_what_is_cached_when_a_pager_stops_is_there_for_the_next_though_its_pool_is_gone(
    pager: Pager,
) -> None:
    worker = Reader(pager, "prefill", 11)
    await worker.open()
    await disk_pages(pager, 0)
    content = await worker.compute(1, PROMPT)
    worker.lock.close()
    worker = await restarted_without_its_pool(pager)
    granted = await worker.admit_soon(2, PROMPT)
    assert granted.cached_tokens == FULL_PAGES * PAGE_SIZE
    assert np.array_equal(worker.bytes_of(granted), content)
    await worker.release(granted, PROMPT)
    worker.lock.close()


async def test_a_damaged_page_and_what_follows_it_are_computed_again(
    pager: Pager, disk_folder: Path
) -> None:
    content = await computed_and_evicted(pager)
    await pager.end()
    path = disk_folder / "testhost.disk.pages"
    data = bytearray(path.read_bytes())
    at = bytes(data).index(content[2].tobytes())
    data[at + 17] ^= 1
    path.write_bytes(data)
    worker = await restarted_without_its_pool(pager)
    granted = await worker.admit_soon(2, PROMPT)
    assert granted.cached_tokens == 2 * PAGE_SIZE
    assert np.array_equal(worker.bytes_of(granted)[:2], content[:2])
    await worker.release(granted, PROMPT)
    worker.lock.close()


async def test_a_disk_that_damages_what_it_is_given_is_told_of_and_given_up_and_serving_goes_on(
    pager: Pager, disk_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    worker = Reader(pager, "prefill", 11)
    await worker.open()
    await disk_pages(pager, 0)
    prompts = [[1_000 * number, *PROMPT] for number in range(1, DAMAGED_LOADS_MAX + 3)]
    for number, prompt in enumerate(prompts, start=1):
        await worker.compute(number, prompt)
        await worker.flood(900 + number)
    await disk_pages(pager, FULL_PAGES * len(prompts))
    worker.lock.close()
    await pager.end(signal.SIGTERM)
    path = disk_folder / "testhost.disk.pages"
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    worker = await restarted_without_its_pool(pager, FULL_PAGES * len(prompts))
    for number, prompt in enumerate(prompts, start=100):
        assert (await told(pager, "stats", {}))["disk"]["state"] == (
            "on" if number <= 100 + DAMAGED_LOADS_MAX else "off"
        )
        granted = await worker.admit_soon(number, prompt)
        assert granted.cached_tokens == 0
        await worker.release(granted, [])
    why = (await told(pager, "stats", {}))["disk"]["why_off"]
    assert why.startswith(f"{path}: 9 of the last 9 reads found damaged pages")
    await worker.compute(200, PROMPT)
    granted = await worker.admit_soon(201, PROMPT)
    assert granted.cached_tokens == FULL_PAGES * PAGE_SIZE
    await worker.release(granted, PROMPT)
    worker.lock.close()
    await pager.end()
    log = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line[:1] == "{"]
    [damaged] = [line for line in log if line["event"] == "pager.disk_page_damaged"]
    [off] = [line for line in log if line["event"] == "pager.disk_off"]
    assert damaged["level"] == off["level"] == "error" and damaged["file"] == str(path)


async def test_a_killed_pager_leaves_no_record_that_is_believed_wrongly(pager: Pager) -> None:
    content = await computed_and_evicted(pager)
    await pager.end(signal.SIGKILL)
    for path in pager.folder.glob("*.pool"):
        path.unlink()
    await pager.start()
    worker = Reader(pager, "prefill", 12)
    await worker.open()
    await disk_pages(pager, FULL_PAGES)
    granted = await worker.admit_soon(2, PROMPT)
    pages = granted.cached_tokens // PAGE_SIZE
    assert pages == FULL_PAGES, "all of them were written"
    assert np.array_equal(worker.bytes_of(granted)[:pages], content[:pages])
    await worker.release(granted, PROMPT)
    worker.lock.close()


async def test_a_disk_that_cannot_be_used_switches_the_tier_off_and_serving_goes_on(
    blocked_folder: Path, pager: Pager
) -> None:
    worker = Reader(pager, "prefill", 11)
    await worker.open()
    await goes_on_without_disk(worker)


async def test_a_disk_that_is_full_switches_the_tier_off_and_serving_goes_on(pager: Pager) -> None:
    worker = Reader(pager, "prefill", 11)
    await worker.open()
    await disk_pages(pager, 0)
    # What a process may write into one file: the pool is made before, the pages do not fit.
    resource.prlimit(pager.pid, resource.RLIMIT_FSIZE, (2 * PAGE_BYTES, 2 * PAGE_BYTES))
    await goes_on_without_disk(worker)


async def told(pager: Pager, verb: str, body: object) -> dict[str, Any]:
    """What the pager answers to an operator."""
    subject = subjects.cache_door(verb, pager.host)
    reply = await pager.bus.request(subject, json.dumps(body).encode(), timeout_ms=5_000)
    answer: dict[str, Any] = json.loads(reply.data)
    return answer


def notes(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in folder.glob("*.retired")]


async def test_what_is_invalidated_while_there_is_no_disk_is_not_found_once_it_is_back(
    pager: Pager, disk_folder: Path
) -> None:
    await computed_and_evicted(pager)
    assert (await told(pager, "stats", {}))["disk"]["used_pages"] == FULL_PAGES
    del pager.environ["PAGEMESH_DISK_DIR"]
    await pager.end(signal.SIGKILL)
    await pager.start()
    why = (await told(pager, "stats", {}))["disk"]["why_off"]
    assert why == "PAGEMESH_DISK_DIR names no folder"
    done = await told(pager, "invalidate", {"what": "root", "name": ROOT.hex()})
    assert (done["root_count"], done["goes_on"]) == (1, False)
    assert len(notes(pager.folder, disk_folder)) == 1
    await pager.end(signal.SIGKILL)
    pager.environ["PAGEMESH_DISK_DIR"] = str(disk_folder)
    await pager.start()
    await disk_pages(pager, 0)
    worker = Reader(pager, "decode", 13)
    await worker.open()
    granted = await worker.admit_soon(2, PROMPT)
    assert granted.cached_tokens == 0
    await worker.release(granted, PROMPT)
    worker.lock.close()
    await pager.end(signal.SIGTERM)
    assert not notes(pager.folder, disk_folder), "nothing is left to be forgotten"
    await pager.start()


# A whole mesh


def ask(
    mesh: Mesh, first: int, model: str = "tiny", token_count: int = 600
) -> tuple[int, list[int]]:
    """A prompt of so many tokens and its answer: how many were cached, and the answer."""
    body = {
        "model": model, "prompt": [(first + 7 * at) % 256 for at in range(token_count)],
        "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    answer = httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    cached: int = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached, found["choices"][0]["token_ids"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_prompt_that_left_memory_is_read_from_disk_in_this_mesh_and_in_the_next(
    pool_dir: Path, disk_folder: Path, tiny_model: Path
) -> None:
    flags = ("--disk-dir", str(disk_folder), "--disk-bytes", "64MiB")
    full_tokens = 600 // 16 * 16
    meshes = [
        Mesh(pool_dir, model=tiny_model, deterministic=True, pool_bytes=1 << 20, flags=flags)
        for _ in range(2)
    ]
    with meshes[0] as mesh:
        cached, answer = ask(mesh, 1)
        assert cached == 0
        evict(mesh)
        assert ask(mesh, 1) == (full_tokens, answer)
        evict(mesh)
    assert (disk_folder / "secret").stat().st_mode & 0o777 == 0o600
    with meshes[1] as mesh:
        assert ask(mesh, 1) == (full_tokens, answer), "as after a reboot"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_of_large_pages_all_that_left_memory_in_bursts_is_read_back(
    pool_dir: Path, disk_folder: Path, tmp_path: Path
) -> None:
    """A page takes 4 MiB, a prompt 25 of them, which the next ones drive out at once."""
    model = write_tiny_llama(
        tmp_path / "wide", num_hidden_layers=32, num_attention_heads=8, num_key_value_heads=8,
        head_dim=128,
    )  # fmt: skip
    flags = ("--disk-dir", str(disk_folder), "--disk-bytes", "1GiB")
    with Mesh(pool_dir, model=model, pool_bytes=256 << 20, flags=flags) as mesh:
        answers = [ask(mesh, first, "wide", 401) for first in range(1, 6)]
        assert [cached for cached, _ in answers] == [0] * 5
        again = [ask(mesh, first, "wide", 401) for first in range(1, 6)]
        assert [cached for cached, _ in again] == [400] * 5


def evict(mesh: Mesh) -> None:
    """Ask for other things until the prompt has left the pool and is on disk."""
    written = mesh.report().disk_pages
    for first in range(20, 32):
        ask(mesh, first)
    mesh.wait_for(lambda: mesh.report().disk_pages >= min(written + 37, 37), "pages on disk")
