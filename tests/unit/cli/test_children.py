"""Child processes are kept alive, read, and stopped in order. Real processes, tiny programs."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.unit.gateway.support import eventually

from pagemesh.cli.mesh import children as children_module
from pagemesh.cli.mesh.children import Child, ChildLimits, ChildLost, ChildSpec
from pagemesh.cli.mesh.restarts import RestartLimits
from pagemesh.cli.mesh.supervisor import Supervisor, supervised
from pagemesh.cli.mesh.watch import WatchLimits
from pagemesh.runtime.clock import MonotonicClock
from pagemesh.runtime.ports import free_port
from pagemesh.wire.errors import ConfigError, PagemeshError

LIMITS = ChildLimits(
    RestartLimits(exit_count_max=4, pause_ms_first=10, pause_ms_max=20),
    WatchLimits(silence_ms_max=1_000, first_ms_max=20_000, look_ms=50),
)
SLEEP = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
BEATING = (
    "import os, sys, time\n"
    "os.write(int(sys.argv[2]), b'.'); print('up', flush=True)\n"
    "while True: time.sleep(0.05); os.write(int(sys.argv[2]), b'.')"
)
GREETING = (
    "import socket, sys\n"
    "door = socket.create_server(('127.0.0.1', {port}))\n"
    "def greet(): peer, _ = door.accept(); peer.send(b'INFO '); peer.close()\n"
    "greet(); print('up', flush=True)\n"
    "while True: greet()"
)


def program(name: str, code: str, *, stage: int = 0) -> ChildSpec:
    return ChildSpec(name, name, stage, (sys.executable, "-c", code), dict(os.environ))


class Witness:
    """What the supervisor told, and a way to wait for what it will tell."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.changes: list[tuple[str, str]] = []
        self._news = asyncio.Event()

    def watch(
        self, *specs: ChildSpec, grace_ms: int = 3_000, limits: ChildLimits = LIMITS
    ) -> AbstractAsyncContextManager[Supervisor]:
        return supervised(
            specs, limits=limits, grace_ms=grace_ms, on_line=self._line, on_change=self._change
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._news.clear()
            await self._news.wait()

    async def pids(self, mesh: Supervisor) -> list[int]:
        await self.until(lambda: all(child.pid is not None for child in mesh.children))
        return [child.pid for child in mesh.children if child.pid is not None]

    def _line(self, _name: str, line: str) -> None:
        self.lines.append(line)
        self._news.set()

    def _change(self, name: str, state: str) -> None:
        self.changes.append((name, state))
        self._news.set()


def freeze(pid: int) -> None:
    """Return when it stands still: a SIGTERM that came before would still be taken."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline, "SIGSTOP did nothing"
        time.sleep(0.01)


async def test_nothing_is_left_running_after_the_context() -> None:
    witness = Witness()
    async with witness.watch(program("a", SLEEP), program("b", SLEEP)) as mesh:
        started = await witness.pids(mesh)
    assert not any(psutil.pid_exists(pid) for pid in started)


async def test_a_killed_child_is_started_again() -> None:
    witness = Witness()
    async with witness.watch(program("a", SLEEP)) as mesh:
        [first] = await witness.pids(mesh)
        await witness.until(lambda: len(witness.lines) == 1)
        os.kill(first, signal.SIGKILL)
        await witness.until(lambda: len(witness.lines) == 2)
        assert await witness.pids(mesh) != [first]
    assert ("a", "died (SIGKILL)") in witness.changes


async def test_a_child_finds_the_files_it_needs_though_somebody_removed_their_folder(
    tmp_path: Path,
) -> None:
    conf, left = tmp_path / "run" / "conf", tmp_path / "left"
    left.write_text("as it was")
    spec = program("a", f"print(open({str(conf)!r}).read(), oct(os.stat({str(conf)!r}).st_mode))")
    code = f"import os; {spec.command[-1]}; {SLEEP}"
    spec = replace(spec, command=(*spec.command[:-1], code), files={conf: "word", left: "new"})
    witness = Witness()
    async with witness.watch(spec) as mesh:
        for _ in range(2):
            await witness.until(lambda: "up" in witness.lines)
            assert witness.lines == ["word 0o100600", "up"]
            shutil.rmtree(conf.parent)
            witness.lines.clear()
            os.kill((await witness.pids(mesh))[0], signal.SIGKILL)
        await witness.until(lambda: "up" in witness.lines)
    assert left.read_text() == "as it was"


async def test_exit_code_two_is_relayed_as_the_config_error_it_reported() -> None:
    code = "import sys; print('loading'); print('error: pool too small', flush=True); sys.exit(2)"
    witness = Witness()
    async with witness.watch(program("pager", code), program("other", SLEEP)) as mesh:
        failure = await mesh.failed()
    assert isinstance(failure, ConfigError)
    assert str(failure) == "pager: pool too small"


async def test_what_is_wrong_only_later_may_become_right_again(tmp_path: Path) -> None:
    """As when others fill a disk: the mesh goes on without the child until it is mended, however
    often that was tried."""
    broken = tmp_path / "broken"
    code = (
        "import os, sys\n"
        f"if os.path.exists({str(broken)!r}): print('error: no room'); sys.exit(2)\n"
    )
    witness = Witness()
    restarts = RestartLimits(exit_count_max=3, pause_ms_first=1, pause_ms_max=1)
    limits = ChildLimits(restarts, WatchLimits())
    async with witness.watch(program("a", code + SLEEP), limits=limits) as mesh:
        await witness.until(lambda: "up" in witness.lines)
        witness.lines.clear()
        broken.touch()
        os.kill((await witness.pids(mesh))[0], signal.SIGKILL)
        await witness.until(lambda: witness.changes.count(("a", "died (no room)")) > 3)
        broken.unlink()
        await witness.until(lambda: "up" in witness.lines)


async def test_the_error_that_ends_a_mesh_comes_out_as_itself() -> None:
    witness = Witness()
    with pytest.raises(ConfigError, match="pool too small"):
        async with witness.watch(program("a", SLEEP)) as mesh:
            started = await witness.pids(mesh)
            raise ConfigError("pool too small")
    assert not any(psutil.pid_exists(pid) for pid in started)


async def test_a_child_that_keeps_dying_is_given_up_with_its_last_words() -> None:
    witness = Witness()
    async with witness.watch(program("a", "print('boom', flush=True); exit(1)")) as mesh:
        failure = await mesh.failed()
    assert isinstance(failure, ChildLost)
    assert "a died 4 times" in str(failure) and "boom" in str(failure)


async def test_that_a_child_is_given_up_is_said_before_the_others_are_stopped() -> None:
    witness = Witness()
    said: list[bool] = []
    async with witness.watch(program("a", "exit(1)"), program("b", SLEEP)) as mesh:
        await mesh.failed()
        said += [("a", "given up after 4 deaths in 0 s; the mesh stops") in witness.changes]
        assert mesh.children[1].pid is not None
    assert said == [True]


async def test_a_child_that_lives_long_in_between_is_started_again_for_ever() -> None:
    witness = Witness()
    restarts = RestartLimits(exit_count_max=2, life_ms_min=1, pause_ms_first=1, pause_ms_max=1)
    limits = ChildLimits(restarts, WatchLimits())
    died = ("a", "died (exit code 1)")
    async with witness.watch(program("a", "exit(1)"), limits=limits):
        await witness.until(lambda: witness.changes.count(died) == 3)


async def test_what_an_earlier_life_said_is_not_taken_for_the_last_words(tmp_path: Path) -> None:
    code = (
        "import os, pathlib\n"
        f"flag = pathlib.Path({str(tmp_path / 'second')!r})\n"
        "if flag.exists(): os._exit(2)\n"
        "flag.touch(); print('boom', flush=True); os._exit(1)"
    )
    witness = Witness()

    def deaths() -> list[str]:
        return [state for _, state in witness.changes if state.startswith("died")]

    async with witness.watch(program("a", code)):
        await witness.until(lambda: len(deaths()) >= 2)
    assert deaths()[:2] == ["died (exit code 1)", "died (stopped without a word)"]


async def test_a_machine_that_is_short_of_processes_for_a_while_costs_a_child_no_more_than_a_death(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, short = asyncio.create_subprocess_exec, True

    async def fork(*command: str, **options: Any) -> asyncio.subprocess.Process:
        if short:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return await start(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fork)
    witness = Witness()
    why = "could not be started: resource temporarily unavailable"
    async with witness.watch(program("a", SLEEP)) as mesh:
        await witness.until(lambda: ("a", f"died ({why})") in witness.changes)
        short = False
        await witness.until(lambda: "up" in witness.lines)
        short = True
        os.kill((await witness.pids(mesh))[0], signal.SIGKILL)
        failure = await mesh.failed()
    assert isinstance(failure, ChildLost)
    assert str(failure).endswith(f"its last words: {why}")


async def test_children_stop_in_the_reverse_order_of_their_stages(tmp_path: Path) -> None:
    log = tmp_path / "stopped"
    code = (
        "import signal, sys, time\n"
        f"def stop(*_): open({str(log)!r}, 'a').write(sys.argv[1] + ' '); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop); print('up', flush=True); time.sleep(600)"
    )
    specs = [
        ChildSpec(name, name, stage, (sys.executable, "-c", code, name), dict(os.environ))
        for stage, name in enumerate(("nats", "pager", "decode", "gateway"))
    ]
    witness = Witness()
    async with witness.watch(*specs):
        await witness.until(lambda: len(witness.lines) == 4)
    assert log.read_text().split() == ["gateway", "decode", "pager", "nats"]


async def test_a_child_that_is_asked_to_stop_while_it_is_being_started_stops() -> None:
    failures: list[PagemeshError] = []
    child = Child(
        program("a", SLEEP), MonotonicClock(), LIMITS, on_line=lambda *_: None,
        on_change=lambda *_: None, on_failure=failures.append,
    )  # fmt: skip
    tending = asyncio.create_task(child.tend())
    await asyncio.sleep(0)
    assert child.pid is None, "it is being started"
    await child.stop(1_000)
    try:
        async with asyncio.timeout(10):
            await asyncio.shield(tending)
    finally:
        child.kill()
        await tending
    assert not failures


async def test_a_child_that_ignores_the_request_to_stop_is_killed_after_its_grace() -> None:
    witness = Witness()
    async with witness.watch(program("a", STUBBORN), grace_ms=100) as mesh:
        started = await witness.pids(mesh)
        await witness.until(lambda: len(witness.lines) == 1)
    assert not any(psutil.pid_exists(pid) for pid in started)
    assert ("a", "did not stop in 100 ms; killed") in witness.changes


async def test_a_child_that_does_not_even_die_is_left_behind_with_a_line_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that waits for a disk that hangs."""
    signal_it = Child._signal

    def undying(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
        if number != signal.SIGKILL:
            signal_it(process, number)

    monkeypatch.setattr(Child, "_signal", staticmethod(undying))
    monkeypatch.setattr(children_module, "_KILL_WAIT_S", 0.1)
    witness = Witness()
    low, high = program("nats", SLEEP), program("pager", STUBBORN, stage=1)
    pids: list[int] = []
    try:
        async with witness.watch(low, high, grace_ms=1_000) as mesh:
            pids += await witness.pids(mesh)
            await witness.until(lambda: len(witness.lines) == 2)
            await mesh.stop(100)
            assert mesh.stopping_names == []
        assert not psutil.pid_exists(pids[0]) and psutil.pid_exists(pids[1])
    finally:
        os.kill(pids[1], signal.SIGKILL)
        await eventually(lambda: not psutil.pid_exists(pids[1]))  # or closing the loop fails
    assert witness.changes[-2:] == [
        ("pager", "did not stop in 100 ms; killed"),
        ("pager", "killed, and does not end: see the disk or device it uses"),
    ]


async def test_a_child_that_does_not_stop_is_asked_once_more_before_it_is_killed() -> None:
    """As a service is that drains for longer: it cuts off then, and tells its clients."""
    code = (
        "import signal, time\n"
        "def told(*_):\n"
        "    print('asked', flush=True)\n"
        "    signal.signal(signal.SIGTERM, lambda *_: print('last words', flush=True) or exit())\n"
        "signal.signal(signal.SIGTERM, told); print('up', flush=True); time.sleep(600)"
    )
    witness = Witness()
    async with witness.watch(program("a", code), grace_ms=3_000):
        await witness.until(lambda: len(witness.lines) == 1)
    assert witness.lines == ["up", "asked", "last words"]
    assert witness.changes == [("a", "started")]


async def test_a_line_beyond_the_limit_does_not_stop_the_reading() -> None:
    witness = Witness()
    code = "print('x' * 300_000); print('after', flush=True); import time; time.sleep(600)"
    async with witness.watch(program("a", code)):
        await witness.until(lambda: "after" in witness.lines)
    assert max(len(line) for line in witness.lines) <= 1 << 16


async def test_a_frozen_child_is_killed_before_it_is_started_again() -> None:
    witness = Witness()
    async with witness.watch(replace(program("a", BEATING), pulse_flag="--pulse-fd")) as mesh:
        [first] = await witness.pids(mesh)
        await witness.until(lambda: len(witness.lines) == 1)
        freeze(first)
        await witness.until(lambda: len(witness.lines) == 2)
        assert not psutil.pid_exists(first)
        assert await witness.pids(mesh) != [first]
    assert witness.changes[:4] == [
        ("a", "started"),
        ("a", "no sign of life for 1 s; killed"),
        ("a", "died (SIGKILL)"),
        ("a", "started"),
    ]


async def test_a_frozen_server_that_greets_no_more_is_killed_too() -> None:
    port = free_port()
    witness = Witness()
    spec = program("nats", GREETING.format(port=port))
    async with witness.watch(replace(spec, greets_at=("127.0.0.1", port))) as mesh:
        [first] = await witness.pids(mesh)
        await witness.until(lambda: len(witness.lines) == 1)
        freeze(first)
        await witness.until(lambda: len(witness.lines) == 2)
    assert ("nats", "no sign of life for 1 s; killed") in witness.changes


async def test_stopping_does_not_wait_for_a_frozen_child() -> None:
    witness = Witness()
    spec = replace(program("a", BEATING), pulse_flag="--pulse-fd")
    async with witness.watch(spec, grace_ms=60_000) as mesh:
        [first] = await witness.pids(mesh)
        await witness.until(lambda: len(witness.lines) == 1)
        freeze(first)
    assert ("a", "no sign of life for 1 s; killed") in witness.changes


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_leashed_child_dies_with_a_parent_that_was_killed() -> None:
    parent = (
        "import os, subprocess, sys, time\n"
        "command = [sys.executable, '-m', 'pagemesh.cli.mesh.leash', str(os.getpid()),\n"
        "           sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "child = subprocess.Popen(command)\n"
        "time.sleep(0.5)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.kill()
    deadline = time.monotonic() + 5
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.02)
