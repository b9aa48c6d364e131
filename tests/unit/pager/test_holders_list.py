"""No pool is taken over by a pager that cannot tell who may still write to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.unit.pager.rig import LAYOUT

from pagemesh.kernels.native.locks import HolderLock, unlock
from pagemesh.kernels.native.pool_file import PoolFile
from pagemesh.pager.board import PagerSettings
from pagemesh.pager.events import Holder
from pagemesh.pager.limits import PagerLimits
from pagemesh.pager.storage.holders import Holders
from pagemesh.pager.storage.pool_memory import PoolMemory
from pagemesh.pager.storage.pool_opening import adopt_pool, make_pool
from pagemesh.pager.storage.pool_store import PoolStore
from pagemesh.wire.errors import Busy, ConfigError
from pagemesh.wire.pager_messages import OpenSession, PoolSpec

SPEC = PoolSpec(layout_digest=LAYOUT, page_size=4, page_bytes=4_096)
WRITER = Holder(7, "writer", "worker-a")
OPEN = OpenSession(worker="late", incarnation=8, role="decode", lock_name="worker-b", pool=SPEC)
LATE = Holder(OPEN.incarnation, OPEN.worker, OPEN.lock_name)


class Pager:
    """What one life does with the files in ``folder``, as far as they say who lives."""

    def __init__(self, folder: Path) -> None:
        self.settings = PagerSettings(
            "host", "pager", 1, folder, 8 * SPEC.page_bytes, b"secret", PagerLimits(), False, "lru"
        )
        self.memory, self.store = PoolMemory(folder), None
        self.holders = Holders(folder, "host")

    store: PoolStore | None

    def adopt(self) -> int | None:
        """The incarnation of the pool that is taken over, if one is."""
        self.store = asyncio.run(adopt_pool(self.settings, self.memory, self.holders))
        return None if self.store is None else self.store.facts.incarnation

    def make(self) -> int:
        """The incarnation of a new pool."""
        self.store = asyncio.run(make_pool(self.settings, self.memory, self.holders, OPEN))
        return self.store.facts.incarnation

    def close(self) -> None:
        self.holders.close()
        self.memory.close()
        if self.store is not None:
            self.store.close()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[PoolFile]:
    """The pool of an earlier pager, as a worker has it that lives and may write to it."""
    with HolderLock(tmp_path / f"{WRITER.lock_name}.lock"):
        with contextlib.closing(Pager(tmp_path)) as earlier:
            earlier.make()
            assert earlier.holders.remember(WRITER) is None
        with PoolFile.attach(tmp_path / "host.pool") as pool:
            yield pool


def of_before(_whole: bytes) -> bytes:
    """As pagers wrote it that put no checksum before it."""
    return json.dumps([[WRITER.incarnation, WRITER.worker, WRITER.lock_name]]).encode()


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda _whole: None,
    "empty": lambda _whole: b"",
    "cut": lambda whole: whole[:-3],
    "zeros": lambda whole: bytes(len(whole)),
    "a bit": lambda whole: whole.replace(b'"incarnation":7', b'"incarnation":6'),
    "of before": of_before,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_without_a_whole_list_what_a_living_worker_writes_to_is_nobody_elses(
    tmp_path: Path, writer: PoolFile, damage: str
) -> None:
    path = tmp_path / "host.holders"
    left = DAMAGE[damage](path.read_bytes())
    if left is None:
        path.unlink()
    else:
        assert left != path.read_bytes()
        path.write_bytes(left)
    with contextlib.closing(Pager(tmp_path)) as pager, capture_logs() as logs:
        assert pager.adopt() is None
        assert not writer.is_in_place
        told: list[Any] = [one for one in logs if one["event"] == "pager.pool_damaged"]
        assert len(told) == 1 and str(path) in told[0]["error"] and told[0]["next"]
        made = pager.make()
        assert made != writer.superblock.incarnation and not writer.is_in_place
    with contextlib.closing(Pager(tmp_path)) as following:
        assert following.adopt() == made, "its list was there before it"


def test_a_pool_whose_pager_died_before_any_worker_came_is_taken_over(tmp_path: Path) -> None:
    with contextlib.closing(Pager(tmp_path)) as earlier:
        made = earlier.make()
    with contextlib.closing(Pager(tmp_path)) as pager:
        assert pager.adopt() == made and not pager.holders.living()


def test_a_pool_is_not_made_while_its_list_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "host.holders.new").mkdir()
    with contextlib.closing(Pager(tmp_path)) as pager:
        with pytest.raises(Busy, match="PAGEMESH_POOL_DIR"):
            pager.make()
        assert not (tmp_path / "host.pool").exists()


def test_whom_another_pager_let_in_while_this_one_began_is_known(
    tmp_path: Path, writer: PoolFile
) -> None:
    with (
        HolderLock(tmp_path / f"{LATE.lock_name}.lock"),
        contextlib.closing(Pager(tmp_path)) as pager,
    ):
        with contextlib.closing(Pager(tmp_path)) as other:
            assert other.adopt() and other.holders.remember(LATE) is None
        assert pager.adopt() == writer.superblock.incarnation
        assert set(pager.holders.living()) == {WRITER, LATE}


# A pager that dies

STEPS_MAX = 9
"""More than a life has."""


class Died(BaseException):
    """kill -9."""


class Death:
    """Ends a life before its ``steps_left``-th change of a name or a file; a write is half done."""

    def __init__(self, patch: pytest.MonkeyPatch, steps_left: int) -> None:
        self.steps_left = steps_left
        for verb in ("rename", "replace", "unlink"):
            patch.setattr(Path, verb, self._due_before(getattr(Path, verb)))
        write = Path.write_bytes

        def write_half(path: Path, data: bytes) -> int:
            if self.steps_left == 0:
                write(path, data[: len(data) // 2])
            return int(self._due_before(write)(path, data))

        patch.setattr(Path, "write_bytes", write_half)

    def _due_before(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def do(*args: Any, **more: Any) -> Any:
            self.steps_left -= 1
            if self.steps_left < 0:
                raise Died
            return step(*args, **more)

        return do

    def free_locks(self, folder: Path) -> None:
        """What the kernel does for the dead."""
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                path = Path(os.readlink(f"/proc/self/fd/{name}"))
                if path.parent == folder and path.suffix != ".lock":
                    unlock(int(name))


@pytest.mark.parametrize("left", ["nothing", "a pool", "a pool without its list", "a torn list"])
@pytest.mark.parametrize("steps", range(STEPS_MAX))
def test_whenever_a_pager_dies_the_next_one_knows_whom_to_fear_or_takes_no_pool_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str, steps: int
) -> None:
    """It replaces the pool that it may have found, and lets a worker in."""
    lives = {}  # who may write to which pool
    with contextlib.ExitStack() as stack:
        for one in (WRITER, LATE):
            stack.enter_context(HolderLock(tmp_path / f"{one.lock_name}.lock"))
        if left != "nothing":
            with contextlib.closing(Pager(tmp_path)) as earlier:
                lives[earlier.make()] = {WRITER}
                assert earlier.holders.remember(WRITER) is None
        path = tmp_path / "host.holders"
        if left == "a pool without its list":
            path.unlink()
        elif left == "a torn list":
            path.write_bytes(path.read_bytes()[:-3])
        old = set(lives)
        pager = stack.enter_context(contextlib.closing(Pager(tmp_path)))
        with monkeypatch.context() as patch, contextlib.suppress(Died):
            death = Death(patch, steps)
            pager.adopt()
            if pager.store is not None:
                pager.store.close()
            made = pager.make()
            assert pager.holders.remember(LATE) is None
            lives[made] = {LATE}
        assert steps < STEPS_MAX - 1 or death.steps_left > 0, "there are more steps to die at"
        death.free_locks(tmp_path)
        there = None
        with contextlib.suppress(ConfigError), PoolFile.attach(tmp_path / "host.pool") as pool:
            there = pool.superblock.incarnation
        following = stack.enter_context(contextlib.closing(Pager(tmp_path)))
        is_known = there not in old or left == "a pool"
        assert following.adopt() == (there if is_known else None)
        if is_known and there is not None:
            assert lives.get(there, set()) <= set(following.holders.living())
