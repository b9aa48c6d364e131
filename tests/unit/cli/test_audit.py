"""Whom an audit asks, and what it makes of those who do not answer."""

from __future__ import annotations

import json

import msgspec
import pytest
from tests.unit.cli.test_reconcile import line, pager

from pagemesh.cli import audit
from pagemesh.cli.main import run
from pagemesh.cli.operator import Mesh
from pagemesh.cli.reconcile import Look, reconcile
from pagemesh.runtime import rpc
from pagemesh.runtime.bus import Bus, Delivery
from pagemesh.runtime.ids import new_service_name
from pagemesh.wire import codec, subjects
from pagemesh.wire.errors import Absent, DeadlineExceeded, Stale
from pagemesh.wire.pager_reports import InspectPager
from pagemesh.wire.presence import Announce


@pytest.mark.parametrize("frozen", [True, False])
async def test_a_frozen_worker_that_announces_nothing_is_silent_and_one_that_is_gone_is_not(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, frozen: bool
) -> None:
    monkeypatch.setattr(audit, "ASK_TIMEOUT_MS", 300)
    host, name = new_service_name("host"), new_service_name("worker")
    books = pager(line(owner=name), host=host, workers=[name])

    def tell(delivery: Delivery) -> None:
        rpc.answer(delivery, books)

    await bus.subscribe(subjects.pager_report(host), tell)
    if frozen:
        await bus.subscribe(subjects.worker_report(name), lambda _: None)
    look = await audit._look(Mesh(bus, (), ()), host)
    assert look.silent == ({name} if frozen else set())
    texts = [finding.text for finding in reconcile(look, look)]
    assert texts == [] if frozen else "its holder is not there" in texts[0]


async def test_who_was_silent_before_is_asked_again_though_its_pager_forgot_it(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_STILL_SILENT_MS", 200)
    host, name = new_service_name("host"), new_service_name("worker")

    def tell(delivery: Delivery) -> None:
        rpc.answer(delivery, pager(host=host))

    await bus.subscribe(subjects.pager_report(host), tell)
    await bus.subscribe(subjects.worker_report(name), lambda _: None)
    look = await audit._look(Mesh(bus, (), ()), host, frozenset({name}))
    assert look.silent == {name}


async def _serve(bus: Bus, host: str, epochs: tuple[int, ...]) -> None:
    """A pager of 5 leases that tells two at a time, of one epoch after the other."""
    lines, asked = [line(number) for number in (2, 3, 5, 7, 11)], iter(epochs)

    def tell(delivery: Delivery) -> None:
        message = codec.decode_as(delivery.data, InspectPager)
        rest = [one for one in lines if one.lease > message.after]
        part = pager(*rest[:2], host=host, epoch=next(asked), more=len(rest) > 2, lease_count=5)
        rpc.answer(delivery, part)

    await bus.subscribe(subjects.pager_report(host), tell)


async def test_a_long_list_of_leases_is_read_in_parts_each_lease_once(bus: Bus) -> None:
    host = new_service_name("host")
    await _serve(bus, host, (1, 1, 1))
    look = await audit._look(Mesh(bus, (), ()), host)
    assert [one.lease for one in look.pager.leases] == [2, 3, 5, 7, 11]
    assert look.pager.lease_count == 5


async def test_parts_of_two_lives_of_a_pager_are_not_put_together(bus: Bus) -> None:
    host = new_service_name("host")
    await _serve(bus, host, (1, 2))
    with pytest.raises(Stale, match="run the audit again"):
        await audit._look(Mesh(bus, (), ()), host)


def test_what_was_not_counted_is_said() -> None:
    look, whole = Look(pager(are_pins_counted=False), ()), Look(pager(), ())
    assert audit._summary(whole, look).endswith(
        "; pins not counted, too much is in use: look later"
    )
    assert audit._summary(look, whole).endswith("0 workers")


def test_who_was_silent_is_named_though_it_is_gone_by_the_second_look() -> None:
    """As under ``up``, which kills what stands still while the first look waits for it."""
    first, second = Look(pager(), (), silent=frozenset({"decode-1"})), Look(pager(), ())
    assert audit._summary(first, second).endswith("0 workers; no answer from decode-1")
    told = msgspec.json.encode(audit._entries([(first, second)], {}, []))
    assert b'"silent":["decode-1"]' in told


def test_all_adds_up_only_where_everybody_spoke() -> None:
    heard, unheard = Look(pager(), ()), Look(pager(), (), silent=frozenset({"decode-0"}))
    whole, told = "all of it adds up", "what was told adds up"
    assert audit._verdict([(heard, heard)]) == whole
    assert audit._verdict([(heard, heard), (heard, unheard)]) == told
    assert audit._verdict([(unheard, heard)]) == told, "in either look"
    uncounted = Look(pager(are_pins_counted=False), ())
    assert audit._verdict([(heard, uncounted)]) == told
    assert audit._verdict([(uncounted, heard)]) == whole, "pins are judged by the second look"
    assert audit._verdict([(heard, heard)], {"other": Stale("")}) == told, "of another host nothing"


async def test_a_pager_that_does_not_answer_hides_nothing_of_the_others(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is gone, one is frozen, and one begins anew after the first look."""
    monkeypatch.setattr(audit, "ASK_TIMEOUT_MS", 300)
    monkeypatch.setattr(audit, "_BETWEEN_S", 0.0)
    hosts = [new_service_name(what) for what in ("gone", "frozen", "anew", "well")]
    _, frozen, anew, well = hosts
    await bus.subscribe(subjects.pager_report(frozen), lambda _: None)
    await _serve(bus, anew, (1, 1, 1, 1, 2))
    await _serve(bus, well, (1,) * 6)
    there = [
        Announce(role="pager", name=host, incarnation=1, host=host, state="ready") for host in hosts
    ]
    looks, unheard = await audit._looks(Mesh(bus, tuple(there), ()))
    assert [(one.pager.host, two.pager.host) for one, two in looks] == [(well, well)]
    assert {host: type(error) for host, error in unheard.items()} == {
        hosts[0]: Absent, frozen: DeadlineExceeded, anew: Stale
    }  # fmt: skip


def test_a_host_that_is_not_heard_is_told_beside_the_others_and_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks: audit.Looks = [(Look(pager(), ()), Look(pager(), ()))]
    unheard: audit.Unheard = {"other": DeadlineExceeded("no answer in 10 s")}

    async def told(_: object) -> tuple[audit.Looks, audit.Unheard]:
        return looks, unheard

    monkeypatch.setattr(audit, "_look_twice", told)
    assert run(["audit"]) == 1
    shown = capsys.readouterr()
    assert shown.err == "other: no answer in 10 s\n"
    assert shown.out.startswith("h: 16 pages") and shown.out.endswith("what was told adds up\n")
    assert run(["audit", "--json"]) == 1
    hosts = json.loads(capsys.readouterr().out)["hosts"]
    assert [host["host"] for host in hosts] == ["h", "other"]
    assert hosts[1]["error"] == {"code": "DeadlineExceeded", "message": "no answer in 10 s"}
    looks.clear()
    assert run(["audit"]) == 1
    assert capsys.readouterr().out == "", "nothing was told"
    looks.append((Look(pager(), ()), Look(pager(), ())))
    unheard.clear()
    assert run(["audit"]) == 0


async def test_two_pagers_of_a_host_are_a_finding_or_why_nothing_is_known(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever answers first is believed, so that parts of two may not fit together."""
    monkeypatch.setattr(audit, "_BETWEEN_S", 0.0)
    well, torn = (new_service_name(what) for what in ("well", "torn"))
    await _serve(bus, well, (1,) * 6)
    await _serve(bus, torn, (1, 2))
    there = tuple(
        Announce(role="pager", name=name, incarnation=1, host=host, state="ready")
        for host in (well, torn)
        for name in ("one", "other")
    )
    looks, unheard = await audit._looks(Mesh(bus, there, ()))
    [(first, second)] = looks
    found = [one for one in reconcile(first, second) if "pagers" in one.what]
    assert [one.host for one in found] == [well] and "one, other" in found[0].text
    assert "--host" in found[0].next
    assert list(unheard) == [torn] and "one, other; next: stop all but one" in str(unheard[torn])
