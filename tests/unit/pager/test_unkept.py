"""What an operator decides and the pager cannot write down is done, and not confirmed as kept."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs
from tests.unit.pager.actor_rig import HOST, POOL_BYTES, SPEC, Answers, made_actor
from tests.unit.pager.disk_rig import PROMPT
from tests.unit.pager.rig import ROOT, Rig, Worker
from tests.unit.pager.steps import cache
from tests.unit.pager.test_actor_turns import Asking, core_of
from tests.unit.pager.test_kept_pins import PINS
from tests.unit.pager.test_retired_notes import ALL, ONE, TWO, notes

from pagemesh.pager.actor import PagerActor
from pagemesh.pager.due import TickDue
from pagemesh.pager.storage.disk_file import DiskPlace
from pagemesh.pager.storage.kept_file import PinFile
from pagemesh.pager.storage.pool_store import PoolStore
from pagemesh.pager.storage.retired_notes import RetiredNotes
from pagemesh.pager.tiers.tier_events import RememberRetired
from pagemesh.runtime.bus import Bus, Delivery
from pagemesh.wire import subjects

PIN = {"root": ROOT.hex(), "tokens": list(PROMPT)}


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
async def actor(tmp_path: Path, answers: Answers) -> AsyncIterator[PagerActor]:
    """With ``PROMPT`` cached."""
    made = made_actor(tmp_path, answers)
    store = PoolStore.create(tmp_path, HOST, SPEC, POOL_BYTES)
    await made._start(store, adopted=False)
    cache(Worker(cast(Rig, Asking(core_of(made))), "worker", 1), 1, PROMPT)
    yield made
    await made.end()


async def ask(actor: PagerActor, answers: Answers, verb: str, **what: Any) -> dict[str, Any]:
    subject, body = subjects.cache_door(verb, "host"), json.dumps(what).encode()
    await actor.handle(Delivery(cast(Bus, answers), subject, "answers", body, {}))
    told: dict[str, Any] = json.loads(answers.sent.pop())
    return told


def blocked(folder: Path, suffix: str) -> Path:
    """Where the next file of that kind is written, taken up so that it cannot be."""
    path = folder / f"host.{suffix}.new"
    path.mkdir()
    return path


def kept_pins(folder: Path, actor: PagerActor) -> list[str]:
    """What the next pager would pin again."""
    assert actor._life is not None
    incarnation = actor._life.store.facts.incarnation
    return [pin.name for pin in PinFile(folder / "host.pool", incarnation).read()]


async def test_a_pin_that_is_not_written_down_is_said_to_end_with_the_pager_until_it_is(
    tmp_path: Path, actor: PagerActor, answers: Answers
) -> None:
    block = blocked(tmp_path, "pins")
    error = (await ask(actor, answers, "pin", **PIN))["error"]
    assert error["code"] == "Busy"
    assert error["message"].startswith("done, but a pager that is restarted does not know of it: ")
    assert f"{tmp_path}/host.pins: " in error["message"] and "make room" in error["message"]
    [pin] = (await ask(actor, answers, "stats"))["pins"]
    assert pin["pages"] == 4, "it stands"
    block.rmdir()
    await actor.handle(TickDue())
    assert kept_pins(tmp_path, actor) == [pin["pin"]]
    assert (await ask(actor, answers, "pin", **PIN))["pin"] == pin["pin"]


async def test_a_pin_that_is_ended_and_still_written_down_is_said_to_come_back(
    tmp_path: Path, actor: PagerActor, answers: Answers
) -> None:
    name = (await ask(actor, answers, "pin", **PIN))["pin"]
    block = blocked(tmp_path, "pins")
    assert "done, but" in (await ask(actor, answers, "unpin", pin=name))["error"]["message"]
    assert (await ask(actor, answers, "stats"))["pins"] == [] and kept_pins(tmp_path, actor)
    block.rmdir()
    await actor.handle(TickDue())
    assert not kept_pins(tmp_path, actor)


async def test_what_is_invalidated_and_not_written_down_is_not_found_and_said_to_come_back(
    tmp_path: Path, actor: PagerActor, answers: Answers
) -> None:
    block = blocked(tmp_path, "retired")
    error = (await ask(actor, answers, "invalidate", what="root", name=ROOT.hex()))["error"]
    assert error["code"] == "Busy" and f"{tmp_path}/host.retired: " in error["message"]
    assert (await ask(actor, answers, "stats"))["root_count"] == 0
    block.rmdir()
    await actor.handle(TickDue())
    assert RetiredNotes.beside(tmp_path, "host", None).read() == ONE
    told = await ask(actor, answers, "invalidate", what="idle")
    assert told["host"] == "host", "it is confirmed as ever"
    assert RetiredNotes.beside(tmp_path, "host", None).read() == ALL


async def test_what_cannot_be_written_is_in_the_log_once_until_it_can(
    tmp_path: Path, actor: PagerActor, answers: Answers
) -> None:
    for _ in range(2):
        block = blocked(tmp_path, "retired")
        with capture_logs() as logs:
            await ask(actor, answers, "invalidate", what="idle")
            for _ in range(3):
                await actor.handle(TickDue())
        [line] = [one for one in logs if one["event"] == "pager.file_not_written"]
        assert line["path"].endswith("host.retired") and line["why"] and "make room" in line["next"]
        block.rmdir()
        await actor.handle(TickDue())


async def test_a_root_that_the_disk_has_no_note_of_is_not_confirmed_until_it_has(
    tmp_path: Path, actor: PagerActor, answers: Answers
) -> None:
    """The note beside the pool is gone after a reboot; what is on disk is not."""
    actor._retired = notes(tmp_path)
    block = tmp_path / "disk" / "host.disk.retired.new"
    block.mkdir()
    error = (await ask(actor, answers, "invalidate", what="root", name=ROOT.hex()))["error"]
    assert error["code"] == "Busy" and error["message"].startswith("done, but")
    assert f"{tmp_path}/disk/host.disk.retired: " in error["message"]
    block.rmdir()
    await actor.handle(TickDue())
    (tmp_path / "host.retired").unlink()
    assert notes(tmp_path).read() == ONE
    assert (await ask(actor, answers, "invalidate", what="idle"))["host"] == "host"


async def test_a_root_that_only_the_disk_has_a_note_of_is_kept_and_written_beside_the_pool_later(
    tmp_path: Path,
) -> None:
    some, block = notes(tmp_path), blocked(tmp_path, "retired")
    some.add(RememberRetired(1, ONE))
    assert some.unkept is None
    await some.mend()
    block.rmdir()
    await some.mend()
    assert RetiredNotes.beside(tmp_path, "host", None).read() == ONE


async def test_the_note_of_a_disk_that_comes_late_is_not_lost_to_one_that_was_owed(
    tmp_path: Path,
) -> None:
    """An earlier pager left it there, and this one could not see it."""
    notes(tmp_path).add(RememberRetired(1, ONE))
    (tmp_path / "host.retired").unlink()
    away = (tmp_path / "disk").rename(tmp_path / "away")
    some = RetiredNotes.beside(tmp_path, "host", DiskPlace(tmp_path / "disk", "host", 1, b""))
    some.add(RememberRetired(1, TWO))
    away.rename(tmp_path / "disk")
    await some.mend()
    (tmp_path / "host.retired").unlink()
    assert some.unkept is None and notes(tmp_path).read() == ONE | TWO


async def test_what_is_forgotten_meanwhile_does_not_come_back_with_what_is_owed(
    tmp_path: Path,
) -> None:
    some = notes(tmp_path)
    some.add(RememberRetired(1, ALL))
    block = blocked(tmp_path / "disk", "disk.retired")
    some.add(RememberRetired(2, TWO))
    some.forget(1)
    block.rmdir()
    await some.mend()
    assert some.unkept is None and notes(tmp_path).read() == TWO


async def test_a_torn_note_that_cannot_be_replaced_is_in_the_log_once(tmp_path: Path) -> None:
    torn = tmp_path / "disk" / "host.disk.retired"
    notes(tmp_path).add(RememberRetired(1, ONE))
    blocked(tmp_path / "disk", "disk.retired")
    torn.write_bytes(torn.read_bytes()[:-3])
    some = notes(tmp_path)
    with capture_logs() as logs:
        some.add(RememberRetired(2, TWO))
        for _ in range(3):
            await some.mend()
    assert [line["event"] for line in logs] == ["pager.file_damaged", "pager.file_not_written"]
    assert some.unkept is not None and some.read() == ALL


async def test_a_root_that_neither_file_has_is_owed_until_it_is_forgotten(tmp_path: Path) -> None:
    some = notes(tmp_path)
    blocks = [tmp_path / "host.retired.new", tmp_path / "disk" / "host.disk.retired.new"]
    for block in blocks:
        block.mkdir()
    some.add(RememberRetired(1, ONE))
    assert some.unkept is not None
    await some.mend()
    assert some.unkept is not None and not notes(tmp_path).read()
    some.forget(1)
    assert some.unkept is None
    for block in blocks:
        block.rmdir()
    await some.mend()
    assert not notes(tmp_path).read(), "nothing is owed any more"


def test_a_pin_that_is_written_late_has_the_time_that_it_had(tmp_path: Path) -> None:
    now_ms = 1_000_000
    file = PinFile(tmp_path / "host.pool", 7, lambda: now_ms)
    block = blocked(tmp_path, "pins")
    file.write(PINS)
    block.rmdir()
    now_ms += 4_000
    file.mend()
    assert [pin.expires_in_ms for pin in file.read()] == [None, 1_000]
