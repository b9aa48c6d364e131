"""Whom an audit asks, and what it makes of those who do not answer."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.cli.test_reconcile import line, pager

from pagemesh.cli import audit
from pagemesh.cli.operator import Mesh
from pagemesh.cli.reconcile import reconcile
from pagemesh.runtime import rpc
from pagemesh.runtime.bus import Bus, Delivery
from pagemesh.runtime.ids import new_service_name
from pagemesh.wire import subjects


@pytest.mark.parametrize("frozen", [True, False])
async def test_a_frozen_worker_that_announces_nothing_is_silent_and_one_that_is_gone_is_not(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, frozen: bool
) -> None:
    monkeypatch.setattr(audit, "ASK_TIMEOUT_MS", 300)
    host, name = new_service_name("host"), new_service_name("worker")
    books = pager(line(owner=name), host=host, workers=[name])
    answers: list[asyncio.Task[bool]] = []

    def tell(delivery: Delivery) -> None:
        answers.append(asyncio.create_task(rpc.answer(delivery, books)))

    await bus.subscribe(subjects.pager_report(host), tell)
    if frozen:
        await bus.subscribe(subjects.worker_report(name), lambda _: None)
    look = await audit._look(Mesh(bus, (), ()), host)
    assert look.silent == ({name} if frozen else set())
    texts = [finding.text for finding in reconcile(look, look)]
    assert texts == [] if frozen else "its holder is not there" in texts[0]
