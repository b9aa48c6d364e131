"""A pager whose folder takes no file any more goes on, and says why no worker may join."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest
from tests.unit.pager.actor_rig import HOST, SPEC, Answers, made_actor

from pagemesh.kernels.native.locks import HolderLock
from pagemesh.pager.actor import PagerActor
from pagemesh.pager.events import Holder
from pagemesh.pager.storage.holders import Holders
from pagemesh.runtime.bus import Bus, Delivery
from pagemesh.wire import codec, subjects
from pagemesh.wire.messages import Message, Refused
from pagemesh.wire.pager_messages import OpenSession, SessionOpened


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
async def actor(tmp_path: Path, answers: Answers) -> AsyncIterator[PagerActor]:
    made = made_actor(tmp_path, answers)
    await made.begin()
    yield made
    await made.end()


def blocked(folder: Path) -> Path:
    """Where the list of holders is written, taken up so that it cannot be."""
    path = folder / f"{HOST}.holders.new"
    path.mkdir()
    return path


async def opened(actor: PagerActor, answers: Answers, number: int, lock_name: str = "") -> Message:
    message = OpenSession(
        worker=f"worker-{number}", incarnation=number, role="decode",
        lock_name=lock_name or f"lock-{number}", pool=SPEC,
    )  # fmt: skip
    delivery = Delivery(
        cast(Bus, answers), subjects.pager(HOST), "answers", codec.encode(message), {}
    )
    await actor.handle(delivery)
    return codec.decode(answers.sent.pop())


async def test_a_session_that_cannot_be_written_down_is_refused_until_it_can(
    tmp_path: Path, actor: PagerActor, answers: Answers
) -> None:
    with HolderLock(tmp_path / "lock-1.lock"), HolderLock(tmp_path / "lock-2.lock"):
        assert isinstance(await opened(actor, answers, 1), SessionOpened)
        block = blocked(tmp_path)
        for _ in range(2):
            refused = await opened(actor, answers, 2)
            assert isinstance(refused, Refused)
            assert refused.code == "Busy" and "PAGEMESH_POOL_DIR" in refused.message
            assert refused.retry_after_ms
        assert isinstance(await opened(actor, answers, 1), SessionOpened), "it was known before"
        block.rmdir()
        assert isinstance(await opened(actor, answers, 2), SessionOpened)
        with contextlib.closing(Holders(tmp_path, HOST)) as next_pager:
            assert {holder.incarnation for holder in next_pager.living()} == {1, 2}


async def test_a_death_that_cannot_be_written_down_ends_nothing(
    tmp_path: Path, actor: PagerActor, answers: Answers
) -> None:
    with HolderLock(tmp_path / "lock-1.lock"):
        with HolderLock(tmp_path / "lock-2.lock"):
            await opened(actor, answers, 1)
            await opened(actor, answers, 2)
        block = blocked(tmp_path)
        with HolderLock(tmp_path / "lock-2.lock"):  # whoever had it before is dead
            assert isinstance(await opened(actor, answers, 3, "lock-2"), Refused)
        assert isinstance(await opened(actor, answers, 1), SessionOpened)
        block.rmdir()
        with contextlib.closing(Holders(tmp_path, HOST)) as next_pager:
            assert {holder.incarnation for holder in next_pager.living()} == {1}


def test_holders_whose_folder_is_gone_are_forgotten_without_a_word_to_anybody(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "pools"
    folder.mkdir()
    with contextlib.closing(Holders(folder, HOST)) as holders:
        with HolderLock(folder / "lock-1.lock"):
            assert holders.remember(Holder(1, "worker-1", "lock-1")) is None
        shutil.rmtree(folder)
        holders.forget(1)
        assert holders.remember(Holder(2, "worker-2", "lock-2")) is not None
