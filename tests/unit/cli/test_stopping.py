"""People who stop a mesh are told what it waits for, and may stop waiting."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import time

import pytest
from rich.console import Console
from tests.unit.cli.test_children import SLEEP, Witness, program

from pagemesh.cli.mesh import stopping
from pagemesh.cli.mesh.screen import Screen
from pagemesh.cli.mesh.stopping import drain, stop_signals

BUSY = (
    "import signal, time\n"
    "def finish(*_): time.sleep(1.5); raise SystemExit\n"
    "signal.signal(signal.SIGTERM, finish); "
) + SLEEP


def recorded() -> tuple[Screen, io.StringIO]:
    shown = io.StringIO()
    return Screen(Console(file=shown, width=200)), shown


def forget_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().remove_signal_handler(number)


async def test_an_idle_mesh_stops_without_a_word_about_waiting() -> None:
    screen, shown = recorded()
    witness = Witness()
    async with witness.watch(program("gateway", SLEEP)) as mesh:
        await witness.until(lambda: len(witness.lines) == 1)
        await drain(mesh, screen, drain_ms=30_000)
    assert shown.getvalue() == "stopping\n"


async def test_who_takes_long_is_named_with_the_time_it_has_and_the_way_out() -> None:
    screen, shown = recorded()
    witness = Witness()
    gateway, pager = program("gateway", BUSY, stage=1), program("pager", SLEEP)
    async with witness.watch(gateway, pager) as mesh:
        await witness.until(lambda: len(witness.lines) == 2)
        await drain(mesh, screen, drain_ms=30_000)
    assert shown.getvalue().splitlines() == [
        "stopping",
        "waiting for gateway to end, up to 30 s; Ctrl-C again stops at once",
    ]


async def test_nothing_is_said_of_waiting_when_it_was_cut_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stopping, "_PATIENCE_S", 0.0)
    screen, shown = recorded()
    witness = Witness()
    async with witness.watch(program("gateway", BUSY)) as mesh:
        await witness.until(lambda: len(witness.lines) == 1)
        mesh.kill()
        await drain(mesh, screen, drain_ms=30_000)
    assert shown.getvalue() == "stopping\n"


async def test_the_second_signal_waits_for_nobody() -> None:
    screen, shown = recorded()
    witness = Witness()
    async with witness.watch(program("gateway", BUSY), program("pager", BUSY)) as mesh:
        await witness.until(lambda: len(witness.lines) == 2)
        stop = stop_signals(mesh, screen)
        os.kill(os.getpid(), signal.SIGINT)
        await stop.wait()
        stops = asyncio.create_task(drain(mesh, screen, drain_ms=30_000))
        await asyncio.sleep(0.1)
        started = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)
        await stops
        assert time.monotonic() - started < 1.0
    forget_signals()
    assert shown.getvalue().splitlines()[-1].startswith("stopping at once")


async def test_a_mesh_under_nohup_outlives_its_terminal() -> None:
    screen, _ = recorded()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    async with Witness().watch(program("gateway", SLEEP)) as mesh:
        stop = stop_signals(mesh, screen)
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.1)
        assert not stop.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
    forget_signals()
    signal.signal(signal.SIGHUP, before)
